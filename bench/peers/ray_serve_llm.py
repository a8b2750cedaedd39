"""Ray Serve LLM with vLLM: `python -m bench.peers.ray_serve_llm CHECKPOINT PORT`, until SIGTERM.

Serve's configuration is the default, except for request limits that are too low for 32 at once.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import signal
import sys
import threading

from bench.peers.limits import ENGINE, MODEL


def main() -> None:
    import ray
    from ray import serve
    from ray.serve.llm import LLMConfig, build_openai_app

    checkpoint, port = sys.argv[1:]
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    ray.init("local", include_dashboard=False, num_cpus=8, log_to_driver=True)
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    model = LLMConfig(
        model_loading_config={"model_id": MODEL, "model_source": checkpoint},
        accelerator_config={"kind": "cpu"},
        deployment_config={"num_replicas": 1, "max_ongoing_requests": 1000},
        engine_kwargs=ENGINE,
        log_engine_metrics=False,
    )
    serve.run(build_openai_app({"llm_configs": [model]}))
    stop.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
