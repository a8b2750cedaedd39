"""Files of Ray Serve LLM become configurations of ours, and nothing in them is lost in silence."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from disagg.cli.config_file import read_config_file
from disagg.config import ServeConfig
from disagg.config_checks import parse_config
from disagg.errors import StartupError

LOADING = {"model_id": "qwen", "model_source": "Qwen/Qwen3-8B"}
MODEL: dict[str, Any] = {  # valid for Ray: `tests/vllm/test_contract.py`
    "model_loading_config": LOADING,
    "llm_engine": "vLLM",
    "accelerator_type": "H100",
    "engine_kwargs": {
        "tensor_parallel_size": 2,
        "max_model_len": 4096,
        "max_logprobs": 50,
        "tool_call_parser": "hermes",
    },
    "deployment_config": {
        "autoscaling_config": {
            "min_replicas": 1,
            "max_replicas": 3,
            "target_ongoing_requests": 32,
        },
        "ray_actor_options": {"num_cpus": 2, "resources": {"fast": 1}},
    },
    "lora_config": {"max_num_adapters_per_replica": 8},
}
PULLS = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def read(directory: Path, builder: str = "build_openai_app", **args: Any) -> ServeConfig:
    application = {"import_path": f"ray.serve.llm:{builder}", "args": args, "route_prefix": "/"}
    file = directory / "serve.yaml"
    file.write_text(yaml.safe_dump({"applications": [application]}))
    return parse_config({**read_config_file(str(file)).raw, "cluster_key": "k" * 32})


def test_a_model_becomes_a_tier(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        (tier,) = read(tmp_path, llm_configs=[MODEL]).tiers
    assert (tier.name, tier.model) == ("qwen", "Qwen/Qwen3-8B")
    assert tier.prefill.num_replicas == 0 and tier.decode.num_replicas == 1
    scaling = tier.decode.autoscaling
    assert scaling is not None and (scaling.min_replicas, scaling.max_replicas) == (1, 3)
    assert tier.decode.num_cpus == 2
    assert tier.decode.resources == {"accelerator_type:H100": 0.001, "fast": 1}
    engine = tier.engine
    assert (engine.backend, engine.engine_args) == ("vllm", {"max_logprobs": 50})
    assert (engine.tensor_parallel_size, engine.max_model_len) == (2, 4096)
    assert (engine.enable_lora, engine.max_cpu_loras, engine.max_loras) == (True, 8, 4)
    assert tier.tool_call_parser == "hermes"
    assert "target_ongoing_requests has no effect" in caplog.text


def test_models_may_be_in_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text(yaml.safe_dump({"model_loading_config": LOADING}))
    other = {
        "model_loading_config": {"model_id": "Qwen/Qwen3-4B"},
        "deployment_config": {"num_replicas": 2},
        "accelerator_config": {"kind": "cpu"},
    }
    one, two = read(tmp_path, llm_configs=["one.yaml", other]).tiers
    assert (one.name, two.model, two.decode.num_replicas) == ("qwen", "Qwen/Qwen3-4B", 2)
    assert (one.decode.num_gpus, two.decode.num_gpus) == (None, 0)


def test_prefill_and_decode_become_pools(tmp_path: Path) -> None:
    def side(num_replicas: int, ranks: int, **more: Any) -> dict[str, Any]:
        kwargs = {"tensor_parallel_size": ranks, "kv_transfer_config": PULLS, **more}
        replicas = {"num_replicas": num_replicas}
        return {
            "model_loading_config": LOADING,
            "engine_kwargs": kwargs,
            "deployment_config": replicas,
        }

    app = "build_pd_openai_app"
    (tier,) = read(tmp_path, app, prefill_config=side(2, 1), decode_config=side(3, 4)).tiers
    pools = [(pool.num_replicas, tier.num_ranks(pool)) for pool in (tier.prefill, tier.decode)]
    assert pools == [(2, 1), (3, 4)] and not tier.engine.engine_args
    sides = {"prefill_config": side(2, 1), "decode_config": side(3, 4, max_model_len=99)}
    with pytest.raises(StartupError, match="differ in more"):
        read(tmp_path, app, **sides)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"runtime_env": {"env_vars": {"A": "b"}}}, r"runtime_env\.env_vars\.A"),
        ({"placement_group_config": {"bundles": [{"GPU": 1}]}}, "placement_group_config"),
        ({"llm_engine": "SGLang"}, "llm_engine"),
        ({"accelerator_config": {"kind": "tpu"}}, r"accelerator_config\.kind"),
        ({"deployment_config": {"max_queued_requests": 5}}, "max_queued_requests"),
        ({"model_loading_config": {**LOADING, "tokenizer_source": "x"}}, "tokenizer_source"),
        ({"model_loading_config": {"model_id": "a", "model_source": {"bucket_uri": "s3://a"}}},
         "not a bucket"),
        ({"model_loading_config": {}}, "model_id"),
        ({"accelerator_type": "H100", "deployment_config": {"ray_actor_options": {"resources": 1}}},
         r"got `int` - at `\$\.tiers\[0\]\.decode\.resources"),
        ({"deployment_config": {"num_replicas": "two"}}, "number of replicas is 'two'"),
        ({"deployment_config": {"autoscaling_config": {"min_replicas": None}}}, "is None"),
        ({"lora_config": {"max_num_adapters_per_replica": None}}, "adapters_per_replica is None"),
        ({"lora_config": {}, "engine_kwargs": {"max_loras": None}}, "max_loras is None"),
        ({"lora_config": {"dynamic_lora_loading_path": "s3://a"}}, "not read from buckets"),
    ],
)  # fmt: skip
def test_what_has_no_counterpart_is_refused(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(StartupError, match=words):
        read(tmp_path, llm_configs=[{"model_loading_config": LOADING, **change}])


def test_arguments_of_the_application_are_checked(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="ingress_cls_config"):
        read(tmp_path, llm_configs=[], ingress_cls_config={})
    wrong: tuple[Any, ...] = ([], "one.yaml", None)
    for configs in wrong:
        with pytest.raises(StartupError, match=r"llm_configs in .* is no list of models"):
            read(tmp_path, llm_configs=configs)


def test_what_is_null_is_not_set(tmp_path: Path) -> None:
    nothing = dict.fromkeys(("lora_config", "runtime_env", "accelerator_type", "engine_kwargs"))
    first, second = (
        read(tmp_path, llm_configs=[{"model_loading_config": LOADING, **each}])
        for each in (nothing, {})
    )
    assert first.tiers == second.tiers and not first.tiers[0].engine.enable_lora
