"""Ray Serve LLM with vLLM, until SIGTERM.

    python -m bench.peers.ray_serve_llm CHECKPOINT PORT [NUM_REPLICAS [ROUTER]]

Serve's configuration is the default, except for request limits that are too low for 32 at once.
ROUTER: a class of `ray.serve.llm.request_router`, in place of the power of two choices.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

from bench.peers.limits import ENGINE, MODEL


def main() -> None:
    import ray
    from ray import serve
    from ray.serve.llm import LLMConfig, build_openai_app

    checkpoint, port, *more = sys.argv[1:]
    deployment: dict[str, Any] = {
        "num_replicas": int(more[0]) if more else 1,
        "max_ongoing_requests": 1000,
    }
    if more[1:]:
        router = f"ray.serve.llm.request_router:{more[1]}"
        deployment["request_router_config"] = {"request_router_class": router}
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    ray.init("local", include_dashboard=False, num_cpus=8, log_to_driver=True)
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    model = LLMConfig(
        model_loading_config={"model_id": MODEL, "model_source": checkpoint},
        accelerator_config={"kind": "cpu"},
        deployment_config=deployment,
        engine_kwargs={**ENGINE, "enable_prompt_tokens_details": True},
        log_engine_metrics=False,
    )
    serve.run(build_openai_app({"llm_configs": [model]}))
    stop.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
