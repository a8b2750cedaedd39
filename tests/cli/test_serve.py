"""Flags and files of `disagg serve` as configurations."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

import msgspec
import pytest

from disagg.cli import serve, serve_arguments, serve_config, server_process
from disagg.cli.main import main
from disagg.cli.server_process import pool_sizes
from disagg.cli.start_checks import check_models
from disagg.config import CascadeConfig, ServeConfig, SpeculativeConfig
from disagg.errors import StartupError
from tests.tiny_model import write_tiny_model


def config_of(*words: str) -> ServeConfig:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return serve_config.layers_of(parser.parse_args(words)).config()


def test_every_start_has_a_cluster_key_of_its_own() -> None:
    keys = {config_of("demo-small").cluster_key for _ in range(3)}
    assert len(keys) == 3 and all(len(key) == 64 for key in keys)


@pytest.mark.parametrize(
    ("line", "is_drawn"), [("", True), ("cluster_key: ''", True), ("cluster_key: mine", False)]
)
def test_a_file_need_not_name_a_cluster_key(tmp_path: Path, line: str, is_drawn: bool) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"tiers: [{{model: demo-small}}]\n{line}\n")
    key = config_of("--config", str(file)).cluster_key
    assert len(key) == 64 if is_drawn else key == "mine"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("tiers: [{model: demo-small, decode: {}, 'decode': {num_replicas: 2}}]", "decode"),
        ("tiers: [{model: demo-small}]\nhttp: {}\ntiers: []", "tiers"),
    ],
)
def test_a_key_that_is_there_twice_is_refused(tmp_path: Path, text: str, key: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(StartupError, match=f"the key '{key}' is there twice") as refused:
        config_of("--config", str(file))
    assert "line " in refused.value.message


def test_a_key_that_replaces_a_merged_one_is_not(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    pools = "prefill: &one {num_replicas: 1}, decode: {<<: *one, num_replicas: 2}"
    file.write_text(f"tiers: [{{model: demo-small, {pools}}}]")
    assert config_of("--config", str(file)).tiers[0].decode.num_replicas == 2


def test_a_cascade_is_a_flag_with_or_without_a_file(tmp_path: Path) -> None:
    models = ("demo-small", "demo-large")
    assert config_of(*models).cascade is None
    bundled = config_of(*models, "--cascade").cascade
    assert bundled is not None and bundled.leads and bundled.prompt_judges
    assert bundled.thresholds == CascadeConfig().thresholds
    others = config_of("demo-small", "/some/model", "--cascade").cascade
    assert others == CascadeConfig(), "what was learned of the bundled models is for them alone"
    (threshold,) = CascadeConfig().thresholds
    of_three = config_of(*models, "/some/model", "--cascade").cascade
    assert of_three is not None and of_three.thresholds == (threshold, threshold)
    everything = tmp_path / "serve.yaml"
    tiers = ", ".join(f"{{model: {each}}}" for each in (*models, "/some/model"))
    everything.write_text(f"{{tiers: [{tiers}], cascade: {{}}}}")
    assert config_of("--config", str(everything)).cascade == of_three
    file = tmp_path / "cascade.yaml"
    file.write_text("cascade: {signal: mean, num_judged_tokens: 4, thresholds: [-0.2]}\n")
    asked = config_of(*models, "--cascade", str(file)).cascade
    assert asked == CascadeConfig(signal="mean", num_judged_tokens=4, thresholds=(-0.2,))
    file.write_text("signal: mean\n")
    with pytest.raises(StartupError, match="a cascade section and nothing else"):
        config_of(*models, "--cascade", str(file))
    with pytest.raises(StartupError, match="at least two models"):
        config_of("demo-small", "--cascade")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--cascade demo-small demo-large", "no file demo-small. The word after --cascade"),
        ("--served-model-name foo demo-small", "is 1 model, and the flag got 2 served names: foo,"),
        ("a b --revision main", "are 2 models, and the flag got 1 revisions: main"),
    ],
)
def test_a_flag_that_took_the_models_says_so(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = next(word for word in words.split() if word.startswith("--"))
    assert main(["serve", *words.split()]) == 2
    output = capsys.readouterr().err
    assert sentence in output and output.endswith(f" ({flag})\n")
    assert "put the models before this flag" in output


@pytest.mark.parametrize(
    ("written", "origins"),
    [
        ('["http://localhost:3000", "https://ui.example"]', None),
        ("http://localhost:3000,https://ui.example", None),
        ("*", ("*",)),
        ('["*"]', ("*",)),
    ],
)
def test_origins_are_a_list_as_in_vllm(written: str, origins: tuple[str, ...] | None) -> None:
    config = config_of("--allowed-origins", written, "demo-small")
    assert config.http.allowed_origins == (
        origins or ("http://localhost:3000", "https://ui.example")
    )
    assert config_of("demo-small").http.allowed_origins == ()


@pytest.mark.parametrize("written", ["http://localhost:3000/", "localhost:3000", "https://*.a", ""])
def test_what_is_not_an_origin_is_refused(written: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "demo-small", "--allowed-origins", written]) == 2
    output = capsys.readouterr().err
    assert "is not an origin. Write scheme" in output and output.endswith(" (--allowed-origins)\n")


def test_the_command_prints_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"disagg {version('disagg')}\n"


@pytest.mark.parametrize(
    "flag",
    [
        *("--num-threads", "--tensor-parallel-size", "--decode-tensor-parallel-size"),
        *("--ttft-slo-s", "--max-model-len", "--port", "--ingress", "--max-workers"),
    ],
)
def test_a_number_that_is_not_valid_is_reported_with_its_flag(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    value = "-1" if flag == "--port" else "0"
    assert main(["serve", "demo-small", f"{flag}={value}"]) == 2
    output = capsys.readouterr().err
    assert "is not valid: Expected " in output and output.endswith(f" ({flag})\n")


def test_no_request_is_late_without_a_ttft_slo(capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of("demo-small", "--ttft-slo-s", "none")
    sent = msgspec.json.decode(msgspec.json.encode(config), type=ServeConfig)  # to the server
    (tier,) = sent.tiers
    assert (tier.ttft_slo_s, tier.ttft_limit_s, tier.ttft_goal_s) == (None, math.inf, 30.0)
    (tier,) = config_of("demo-small").tiers
    assert (tier.ttft_slo_s, tier.ttft_limit_s, tier.ttft_goal_s) == (30.0, 30.0, 30.0)
    with pytest.raises(SystemExit):
        config_of("demo-small", "--ttft-slo-s", "never")
    assert "'never' is neither a number" in capsys.readouterr().err


def test_tenants_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("api_keys: {a: key-a, b: key-b}\ntenants: {b: {weight: 3}}\n")
    config = config_of("demo-small", "--tenants", str(file), "--api-key", "house")
    assert (config.http.api_key, config.http.api_keys) == ("house", {"a": "key-a", "b": "key-b"})
    assert config.tenant("b").weight == 3.0
    for wrong in ("tenants: {b: {weight: 3}}", "api_keys: {}\nkeys: {}", "- a"):
        file.write_text(wrong)
        with pytest.raises(StartupError):
            config_of("demo-small", "--tenants", str(file))


def test_models_of_two_families_are_refused_before_any_process_starts(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    config = config_of("demo-small", str(model), "--cascade", "--num-gpu-blocks-override", "128")
    with pytest.raises(StartupError, match="cannot form a cascade: their tokenizers differ"):
        check_models(config)


def test_pools_without_workers_are_not_waited_for() -> None:
    config = config_of("demo-small", "demo-large", "--prefill", "0", "--decode", "2")
    assert pool_sizes(config) == {"demo-small-decode": 2, "demo-large-decode": 2}


def test_a_pool_between_two_numbers_follows_the_load() -> None:
    config = config_of("demo-small", "--prefill", "2", "--decode", "1..4", "--max-workers", "5")
    (tier,) = config.tiers
    assert tier.prefill.autoscaling is None and tier.prefill.num_replicas == 2
    limits = tier.decode.autoscaling
    assert limits is not None and (limits.min_replicas, limits.max_replicas) == (1, 4)
    assert (tier.decode.num_replicas, config.max_num_workers) == (1, 5)


def test_drafts_are_asked_for_as_of_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    (tier,) = config_of("demo-small").tiers
    assert tier.engine.speculative_config is None
    asked = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}'
    (tier,) = config_of("demo-small", "--speculative-config", asked).tiers
    assert tier.engine.speculative_config == SpeculativeConfig(
        method="ngram", num_speculative_tokens=3, prompt_lookup_max=2
    )
    asked = '{"model": "demo-small", "num_speculative_tokens": 5}'  # a draft model
    (tier,) = config_of("demo-large", "--speculative-config", asked).tiers
    assert tier.models == [("demo-large", None), ("demo-small", None)]
    for wrong, reason in [
        ('{"method": "eagle"}', "Supported: draft_model, eagle3, early_exit, medusa, mtp, ngram"),
        ('{"method": "draft_model"}', "needs `model`"),
        ('{"method": "ngram", "model": "demo-small"}', "ngram has no `model`"),
        ('{"method": "ngram", "num_steps": 3}', "num_steps.* There are method, num_spec"),
        ('{"method": "ngram", "deferral": 0.3}', "a deferral only with the method draft_model"),
        ('{"model": "demo-small", "deferral": 1}', "deferral"),
        ("[]", "Expected `object"),
    ]:
        with pytest.raises(StartupError, match=reason):
            config_of("demo-small", "--speculative-config", wrong)
    with pytest.raises(SystemExit):
        config_of("demo-small", "--speculative-config", "ngram")
    assert "is not JSON" in capsys.readouterr().err


def test_whole_experts_are_asked_for_as_in_vllm() -> None:
    (tier,) = config_of(
        "demo-small", "--decode-tensor-parallel-size", "2", "--enable-expert-parallel"
    ).tiers
    assert tier.engine.enable_expert_parallel
    assert not config_of("demo-small").tiers[0].engine.enable_expert_parallel
    with pytest.raises(StartupError, match=r"has enable_expert_parallel, .* have one rank"):
        config_of("demo-small", "--enable-expert-parallel")


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (["--pipeline-parallel-size", "2"], "use --tensor-parallel-size"),
        (["--pipeline-parallel-size=2"], "--nnodes"),
        (["--data-parallel-size", "2"], "--prefill and --decode"),
        (["--model", "demo-large"], "disagg serve MODEL"),
        (["--generation-config", "vllm"], "in each request"),
        (["--swap-space", "4", "--no-redis"], "--kv-offloading-size"),
    ],
)
def test_flags_of_vllm_that_are_missing_are_refused_in_words(
    written: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "demo-small", *written])
    assert ended.value.code == 2
    assert re.fullmatch(
        rf"disagg: {written[0].split('=')[0]} is not supported: .*{words}.*\.\n",
        capsys.readouterr().err,
    )


def test_switches_of_vllm_that_are_not_needed_are_accepted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    switches = list(serve_arguments.NOT_NEEDED)
    assert "--enable-auto-tool-choice" in switches and "--trust-remote-code" in switches
    config = config_of(*switches, "demo-small", "--max-num-seqs", "7")
    assert config.tiers[0].model == "demo-small" and config.tiers[0].engine.max_num_seqs == 7
    output = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in output] == switches
    assert all(" is not needed: " in line for line in output)


def test_an_unknown_flag_is_reported_below_the_usage_of_its_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "demo-small", "--no-such-flag", "3"])
    assert ended.value.code == 2
    output = capsys.readouterr().err
    assert output.startswith("usage: disagg serve ")
    assert output.endswith("disagg serve: error: unrecognized arguments: --no-such-flag 3\n")


@pytest.mark.parametrize(
    ("written", "length"),
    [("8192", 8192), ("8k", 8000), ("8K", 8192), ("1M", 1 << 20), ("1m", 10**6), ("25.6k", 25600)],
)
def test_lengths_may_have_suffixes_as_in_vllm(written: str, length: int) -> None:
    config = config_of("demo-small", "--max-model-len", written)
    assert config.tiers[0].engine.max_model_len == length


@pytest.mark.parametrize("written", ["8x", "k", "1.5M", "1.5", "8 k", ""])
def test_other_suffixes_are_refused(written: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        config_of("demo-small", "--max-model-len", written)
    assert f"{written!r} is not a number such as 8192, 8K" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["4..1", "-1", "1..", "many", "1...4"])
def test_a_pool_size_that_cannot_be_read_is_refused(
    size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        config_of("demo-small", f"--decode={size}")
    assert size in capsys.readouterr().err


def test_the_store_takes_a_share_of_the_memory_that_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A laptop's store of 1 GiB was full within six minutes, and its workers had no room."""
    for available, expected in [(2 << 30, 128 << 20), (100 << 30, 1 << 30), (1 << 20, 32 << 20)]:
        monkeypatch.setattr(
            serve_config, "read_memory", lambda available=available: (1 << 40, available)
        )
        assert config_of("demo-small").cold_tier_nbytes == expected
    assert config_of("--cold-tier-bytes", "5000").cold_tier_nbytes == 5000
    assert config_of("--no-redis").cold_tier_nbytes == 0


@pytest.mark.parametrize(
    ("words", "is_started"),
    [
        ((), True),
        (("--tensor-parallel-size", "2"), True),
        (("--no-enable-prefix-caching",), False),
    ],
)
def test_no_store_is_started_that_no_worker_would_use(
    words: tuple[str, ...], is_started: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Path] = []

    class FakeRedis:
        url = "redis://fake"

        def __init__(self, directory: Path, max_memory_nbytes: int) -> None:
            self.directory = directory

        def __enter__(self) -> None:
            started.append(self.directory)

        def __exit__(self, *exc: object) -> None: ...

    monkeypatch.setattr(server_process, "EmbeddedRedis", FakeRedis)
    with ExitStack() as cleanup:
        config, redis = server_process._with_store(
            config_of("demo-small", *words), cleanup, tmp_path
        )
    assert (redis is not None, config.redis_url is not None) == (is_started, is_started)
    assert bool(started) == is_started


def test_a_model_by_name_is_fetched_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def is_fetched(name: str, revision: object, say: object, is_stopped: object) -> bool:
        asked.append(name)
        return False  # a signal came meanwhile

    monkeypatch.setattr(serve, "fetch_model", is_fetched)
    monkeypatch.setattr(serve, "Supervisor", None)
    assert main(["serve", "smollm2", "--log-dir", str(tmp_path)]) == 0
    assert asked == ["smollm2"]


def test_the_example_of_a_request_can_be_pasted_into_a_shell() -> None:
    example = server_process.curl_example("http://127.0.0.1:8000", "demo-small", has_key=True)
    done = subprocess.run(
        ["sh", "-c", f"curl() {{ printf '%s\\n' \"$@\"; }}; {example}"],
        env={**os.environ, "DISAGG_API_KEY": "a-key"},
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.splitlines()
    assert "Authorization: Bearer a-key" in words
    assert json.loads(words[-1])["model"] == "demo-small"
