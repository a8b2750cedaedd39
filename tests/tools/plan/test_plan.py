"""`disagg plan` prints the textbooks' tables and one JSON object, and refuses in sentences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from disagg.capacity.advice import advise
from disagg.capacity.gpus import GPUS, LINKS
from disagg.capacity.roofline import Placement
from disagg.capacity.shapes import SHAPES
from disagg.capacity.sizing import Goal
from disagg.capacity.workload import Slo, Workload
from disagg.cli.main import main
from disagg.time_model import StepTimeFit, StepTimeModel
from disagg.tools.plan import play as plan_play
from disagg.tools.plan.play import play
from disagg.tools.sim.config import SimConfig
from disagg.tools.sim.loads import make_load
from disagg.tools.sim.report import SimReport
from disagg.tools.sim.simulation import simulate
from disagg.tools.sim.trace import TraceRequest

DEMO = str(Path(__file__).parents[3] / "disagg/assets/demo-small")


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Without a play, which takes seconds, unless the words ask for one."""
    assert main(["plan", "--no-play", *words]) == 0
    return capsys.readouterr().out


def report(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(printed(capsys, *words, "--json"))
    return parsed


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert "Traceback" not in streams.err
    return streams.err


def row(text: str, *start: str) -> list[str]:
    """The words of the first line that begins with `start`, after it."""
    for line in text.splitlines():
        words = line.split()
        if words[: len(start)] == list(start):
            return words[len(start) :]
    raise AssertionError(f"no line begins with {start}")


def test_lengths_may_have_the_suffixes_of_serve(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ("--input-tokens", "1k", "--output-tokens", "1K")
    written_out = ("--input-tokens", "1000", "--output-tokens", "1024")
    assert report(capsys, DEMO, *lengths) == report(capsys, DEMO, *written_out)


def test_help_lists_what_a_flag_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert "--kv-cache-dtype {bf16,fp8,int8,int4}" in capsys.readouterr().out


def test_experts_of_4_bits_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "13.8 GB in bf16, experts in MXFP4;" in printed(capsys, "gpt-oss-20b")


def test_memory_that_weights_nearly_fill_is_said_to_be_the_limit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    on_one = ("qwen3-32b", "--gpu", "a100-80gb")
    text = printed(capsys, *on_one)
    assert "leave 6.5 GB of each GPU to KV with 1 x a100-80gb." in text  # 72 - 65.5
    assert "1.3 to 1.5 times their published speed" in text
    assert "to KV with 2 x" not in text
    assert "of each GPU to KV" not in printed(capsys, *on_one, "--weights", "bf16",
                                              "--tensor-parallel-size", "2")  # fmt: skip


def test_textbook_tables_of_llama_3_70b(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "llama-3-70b", "--requests-per-s", "1000")
    assert "KV 320 KiB per token in bf16" in text
    assert "141.1 GB in bf16" in text
    assert "predictions from datasheets, not measurements" in text
    kv_tokens, intensity, break_even, *_ = row(text, "2", "x", "h100")
    assert (kv_tokens, intensity, break_even) == ("8,835", "295", "295")
    assert row(text, "prefill:decode") == ["134:30", "106"]
    assert row(text, "GPUs", "268") == ["+", "120", "424"]
    assert "Disaggregate: separate pools cost $1,164.00 an hour" in text
    assert "Default prices: 2026-05" in text


def test_13b_on_one_h100_is_near_8_ms_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "llama-2-13b", "--gpu", "h100", "--input-tokens", "1024")
    assert "KV 800 KiB per token" in text
    assert float(row(text, "1", "x", "h100")[-1]) == pytest.approx(8.0, rel=0.02)
    assert "Fleets" not in text  # nobody gave a load


def test_a_format_of_kv_has_the_name_that_serving_gives_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    usual = report(capsys, "llama-3-70b")
    assert report(capsys, "llama-3-70b", "--kv-cache-dtype", "bfloat16") == usual
    smaller = report(capsys, "llama-3-70b", "--kv-cache-dtype", "int8")
    smallest = report(capsys, "llama-3-70b", "--kv-cache-dtype", "int4")
    sizes = [plan["kv_nbytes_per_token"] for plan in (smallest, smaller, usual)]
    assert sizes == sorted({*sizes})


def test_machines_get_the_same_figures_and_priors(capsys: pytest.CaptureFixture[str]) -> None:
    plan = report(capsys, "llama-3-70b", "--requests-per-s", "1000")
    assert plan["kind"] == "predictions from datasheets, not measurements"
    assert plan["kv_nbytes_per_token"] == 320 * 1024
    assert plan["disaggregate"] and plan["reason"].startswith("Disaggregate: ")
    prefill, decode = plan["apart"]["pools"]
    assert (prefill["role"], decode["role"]) == ("prefill", "decode")
    assert (prefill["num_workers"], decode["num_workers"]) == (134, 30)
    assert plan["apart"]["num_gpus"] == prefill["num_gpus"] + decode["num_gpus"]
    hour = plan["apart"]["usd_per_hour"]
    assert hour == 3.0 * plan["apart"]["num_gpus"]
    per_million = plan["apart"]["usd_per_million_tokens"]
    assert per_million["output"] == pytest.approx(hour / (1000 * 3600 * 256 / 1e6))
    assert per_million["input_and_output"] == pytest.approx(per_million["output"] / 5)
    for pool in (*plan["apart"]["pools"], *plan["together"]["pools"], *plan["workers"]):
        StepTimeFit(StepTimeModel.of(pool["time_model"]))  # a fit can begin with it


def test_a_directory_can_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    plan = report(capsys, DEMO, "--gpu", "l4", "--input-tokens", "100", "--output-tokens", "20")
    assert plan["model"] == "demo-small"
    assert plan["workers"][0]["num_kv_tokens"] > 1_000_000
    assert "apart" not in plan


def test_the_cheaper_of_several_gpus_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["llama-3-8b", "--gpu", "h100", "--gpu", "h200", "--requests-per-s", "50"]
    for cheap, dear in (("h100", "h200"), ("h200", "h100")):
        plan = report(capsys, *words, "--price", f"{cheap}=0.1", "--price", f"{dear}=9")
        for fleet in (plan["apart"], plan["together"]):
            assert {pool["gpu"] for pool in fleet["pools"]} == {cheap}
            assert {pool["usd_per_gpu_hour"] for pool in fleet["pools"]} == {0.1}


def test_a_gpu_that_is_too_small_is_left_out_with_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["llama-3.1-405b", "--gpu", "h100", "--gpu", "mi300x"]
    text = printed(capsys, *words)
    assert "x h100" not in text.split("Left out")[0]
    assert "Left out: llama-3.1-405b in bf16 has 811.7 GB of weights" in text
    plan = report(capsys, *words)
    assert any(note.startswith("Left out: llama-3.1-405b") for note in plan["notes"])
    assert {worker["gpu"] for worker in plan["workers"]} == {"mi300x"}


def test_a_worker_of_one_gpu_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["llama-3-8b", "--requests-per-s", "20", "--ttft", "0.2"]
    plan = report(capsys, *words)
    assert any("measured on CPUs only" in note for note in plan["notes"])
    plan = report(capsys, *words, "--tensor-parallel-size", "1")
    not_played, note = plan["notes"]
    assert "not simulated: --play simulates 1,300 requests in about 8 s." in not_played
    assert (
        "planned at 0.66 of its peak FLOP/s, which is an assumption. Published"
        " benchmarks reached 0.31 with" in note
    )
    assert {worker["tensor_parallel"] for worker in plan["workers"]} == {1}
    assert {pool["tensor_parallel"] for pool in plan["apart"]["pools"]} == {1}


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def test_a_trace_gives_lengths_and_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """100 requests in 10 s, half of them 500 tokens and half 3,500; and Mooncake's of the same."""
    azure, mooncake = tmp_path / "trace.csv", tmp_path / "trace.jsonl"
    lines, objects = [], []
    for i in range(101):
        length = 500 if i % 2 else 3500
        lines.append(f"2023-11-16 18:17:{i // 10:02}.{i % 10}000000,{length},100")
        seen = {"timestamp": i * 100, "input_length": length, "output_length": 100, "hash_ids": []}
        objects.append(json.dumps(seen))
    azure.write_text(AZURE + "\n".join(lines))
    mooncake.write_text("\n".join(objects))
    plan = report(capsys, "llama-3-8b", "--trace", str(azure))
    assert plan["workers"][0]["prompt_tokens"] == round((51 * 3500 + 50 * 500) / 101)
    assert "101 requests in 10 s, 10 of them in its busiest second. The plan assumes 10.10" in str(
        plan
    )
    same = report(capsys, "llama-3-8b", "--trace", str(mooncake))
    assert (same["apart"], same["together"]) == (plan["apart"], plan["together"])
    more = report(capsys, "llama-3-8b", "--trace", str(azure), "--requests-per-s", "1000")
    assert more["apart"]["num_gpus"] > plan["apart"]["num_gpus"]


def test_a_made_up_load_is_planned_by_its_lengths_and_played_as_it_arrives(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played: list[list[TraceRequest]] = []

    def few(config: SimConfig, requests: list[TraceRequest]) -> SimReport:
        played.append(requests)
        return simulate(config, requests[:20])

    monkeypatch.setattr(plan_play, "simulate", few)
    plan = report(capsys, "llama-3-8b", "--load", "completions", "--requests-per-s", "20", "--play")
    expected = make_load("completions", 20.0, len(played[0]), seed=0)
    assert plan["apart"]["played"] and played == [expected, expected]
    lengths = [each.num_prompt_tokens for each in make_load("completions", 20.0, 2000, seed=1)]
    assert plan["workers"][0]["prompt_tokens"] == round(sum(lengths) / 2000)
    for others in ([], ["--requests-per-s", "20", "--trace", "trace.csv"]):
        assert main(["plan", "llama-3-8b", "--load", "completions", *others]) == 2
        assert "--load needs --requests-per-s" in capsys.readouterr().err


def test_a_broken_trace_is_refused_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(AZURE + "2023-11-16 18:17:03.9,100,5\n2023-11-16 18:17:04.9,many,5\n")
    assert "line 3: " in refused(capsys, "llama-3-8b", "--trace", str(trace))
    trace.write_text(AZURE + "2023-11-16 18:17:03.9,100,5\n")
    assert "give a rate with --requests-per-s" in refused(
        capsys, "llama-3-8b", "--trace", str(trace)
    )
    assert "Cannot read" in refused(capsys, "llama-3-8b", "--trace", str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["gpt-5"],
            "gpt-5 is neither a model directory, nor a GGUF file, nor a model of Hugging Face",
        ),
        (["llama-3-8b", "--gpu", "h300"], "'h300' is not a known GPU; known are h100, h100-pcie"),
        (["llama-3.1-405b"], "576 GB. It would fit on 8 GPUs of 113 GB each"),
        (["llama-3-8b", "--gpu", "a100-80gb", "--weights", "fp8"], "has no FP8 matrix units"),
        (["llama-3-8b", "--input-tokens", "9000"], "longer than the 8,192 tokens that llama-3-8b"),
        (["llama-3-8b", "--input-tokens", "0"], "needs a prompt and an output of at least 1 token"),
        (["llama-3-70b", "--tensor-parallel-size", "1"], "2 x h100, 4 x h100, 8 x h100."),
        (
            ["llama-3-8b", "--tensor-parallel-size", "3"],
            "has 32 heads and 8 KV heads, which 3 GPUs",
        ),
        (["llama-3-8b", "--enable-expert-parallel"], "is not a mixture of experts;"),
        (["llama-3-8b", "--tensor-parallel-size", "16"], "16 GPUs are more than the 8 of one node"),
        (["llama-3-8b", "--tensor-parallel-size", "0"], "A worker needs at least 1 GPU, not 0"),
        (
            ["llama-3-8b", "--requests-per-s", "1", "--ttft", "-1"],
            "must be a number of seconds > 0",
        ),
        (["llama-3-8b", "--ttft", "-1"], "must be a number of seconds > 0, but is -1.0. (--ttft)"),
        (["llama-3-8b", "--gpu", "h100", "--weights", "fp4"], "has no FP4 matrix units; plan it"),
        (["llama-3-8b", "--gpu", "cpu", "--weights", "fp8"], "cpu has no FP8 matrix units"),
        (["llama-3-8b", "--engine", "sglang"], "No published run of sglang is known with bf16"),
        (["llama-3-8b", "--requests-per-s", "1", "--price", "h100=-1"], "'h100=-1' is not a price"),
        (["llama-3-8b", "--requests-per-s", "0"], "load must be > 0"),
        (["llama-3-8b", "--requests-per-s", "1", "--ttft", "0.001"], "takes 7.92 ms alone on 8 x"),
        (["llama-3-8b", "--requests-per-s", "1", "--tpot", "-1"], "a number of seconds > 0"),
        (["llama-3-8b", "--requests-per-s", "1", "--link", "x"], "not a known link; known are nvl"),
        (["llama-3-8b", "--requests-per-s", "1", "--price", "free"], "'free' is not a price like"),
        (["llama-3-8b", "--requests-per-s", "1", "--price", "x=1"], "'x' is not a known GPU"),
        (["llama-3-8b", "--requests-per-s", "1", "--gpu", "l4"], "No price is known for l4"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    assert sentence in refused(capsys, *words)


def test_fleets_are_played_where_that_takes_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[SimConfig, list[TraceRequest], SimReport]] = []

    def once(config: SimConfig, requests: list[TraceRequest]) -> SimReport:
        for report in (report for *asked, report in done if asked == [config, requests]):
            return report
        done.append((config, requests, simulate(config, requests)))
        return done[-1][-1]

    monkeypatch.setattr(plan_play, "simulate", once)
    lengths = ("--input-tokens", "512", "--output-tokens", "16")
    words = ("llama-3-8b", "--requests-per-s", "20", *lengths, "--tensor-parallel-size", "1")
    assert main(["plan", *words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    for kind in ("apart", "together"):
        played = plan[kind]["played"]
        assert played["num_requests"] == 1000
        assert played["in_time_percent"] >= 95.0
        assert 0 < played["ttft_p95_s"] <= 1.0 and 0 < played["tpot_p95_s"] <= 0.05
    assert "In the simulation, " in plan["reason"]
    assert "played" not in report(capsys, *words)["apart"]
    assert row(printed(capsys, *words, "--play"), "simulated:", "in", "time", "%")


def test_why_fleets_are_not_played_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    def not_played(*words: str) -> str:
        assert main(["plan", "llama-3-8b", "--requests-per-s", *words]) == 0
        text = capsys.readouterr().out
        (note,) = (line for line in text.splitlines() if "not known" in line)
        assert "In the simulation" not in text
        return note

    assert "not simulated: --play simulates 6,900 requests in about 45 s." in not_played("100")
    assert "not simulated: 69,000 requests would take too long." in not_played("1000")
    long_answers = not_played("0.1", "--output-tokens", "7000")
    assert "not simulated: --play simulates 1,000 requests in about 87 s." in long_answers
    assert "give --requests-per-s or --trace" in refused(capsys, "llama-3-8b", "--play")
    assert "Simulate a part of the load" in refused(
        capsys, "llama-3-8b", "--requests-per-s", "9000", "--play"
    )


def test_workers_are_played_with_the_steps_that_they_will_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As large as on the slower of the pools' GPUs, and as long as each pool's roofline says. Each
    pool has its own room for KV: prefill workers may need many GPUs less than decode workers."""
    fast, slow = (Placement(SHAPES["llama-3-8b"], GPUS[name]) for name in ("h100", "l40s"))
    load, slo, link = Workload(20.0, [(256, 16)]), Slo(0.5, 0.05), LINKS["400g"]
    planned = advise(Goal(load, slo, link, lambda _: 3.0), [fast])
    assert planned.apart is not None
    pools = [
        msgspec.structs.replace(pool, placement=placement)
        for pool, placement in zip(planned.apart.pools, (fast, slow), strict=True)
    ]
    apart = msgspec.structs.replace(planned.apart, pools=tuple(pools))
    played: list[SimConfig] = []

    def few(config: SimConfig, requests: list[TraceRequest]) -> SimReport:
        played.append(config)
        return simulate(config, requests[:20])

    monkeypatch.setattr(plan_play, "simulate", few)
    advice = msgspec.structs.replace(planned, disaggregate=True, apart=apart, together=None)
    plan_play.play(advice, load, slo, link)
    (config,) = played
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (256, 4096)
    assert (config.steps, config.decode_steps) == (fast, slow)
    assert config.num_blocks == fast.num_kv_tokens // plan_play.BLOCK_TOKENS
    assert config.decode_num_blocks == slow.num_kv_tokens // plan_play.BLOCK_TOKENS
    assert config.num_blocks > 2 * config.decode_num_blocks


def test_a_fleet_that_misses_its_slos_when_played_is_not_advised() -> None:
    worker = Placement(SHAPES["llama-3-8b"], GPUS["h100"])
    load, slo, link = Workload(150.0, [(1024, 16)]), Slo(0.3, 0.02), LINKS["400g"]
    planned = advise(Goal(load, slo, link, lambda _: 3.0), [worker])
    assert planned.apart is not None and planned.together is not None
    few = [msgspec.structs.replace(pool, num_workers=1) for pool in planned.apart.pools]
    apart = msgspec.structs.replace(planned.apart, pools=tuple(few))
    wrong = msgspec.structs.replace(planned, disaggregate=True, apart=apart)
    advice, played = play(wrong, load, slo, link)
    assert played.apart is not None and played.apart.in_time_percent < 95.0
    assert not advice.disaggregate
    assert advice.reason.startswith("Do not disaggregate: in the simulation, the cheaper fleet")
    small = msgspec.structs.replace(planned, disaggregate=True, apart=apart, together=None)
    advice, played = play(small, load, slo, link)
    assert advice.disaggregate and played.together is None
    assert "less than 95 %: add a worker" in advice.reason


def test_formats_and_engines_differ_in_speed(capsys: pytest.CaptureFixture[str]) -> None:
    def prefill_s(*words: str) -> float:
        plan = report(capsys, *words, "--tensor-parallel-size", "1")
        seconds: float = plan["workers"][0]["prefill_s"]
        return seconds

    on_hopper = ("qwen3-14b", "--gpu", "h100", "--input-tokens", "4000")
    good, vllm = prefill_s(*on_hopper), prefill_s(*on_hopper, "--engine", "vllm")
    assert good < vllm
    blocks = prefill_s(*on_hopper, "--weights", "fp8-block", "--engine", "sglang")
    assert 0.5 * vllm < blocks < vllm  # twice as many FLOP/s, of which less is reached
    on_blackwell = ("llama-3.1-70b", "--gpu", "b200", "--input-tokens", "4000", "--weights")
    assert prefill_s(*on_blackwell, "fp4") < prefill_s(*on_blackwell, "fp8")


def test_what_serve_cannot_do_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    def notes(*words: str) -> str:
        return " ".join(report(capsys, *words)["notes"])

    assert "multiplies fp8 weights in 16 bits" in notes("llama-3-8b", "--weights", "fp8")
    latent = ("deepseek-r1", "--gpu", "h200", "--weights", "fp8-block")
    assert "latents" not in notes(*latent)
    assert "supports only a 16-bit KV cache for deepseek-r1" in notes(
        *latent, "--kv-cache-dtype", "fp8"
    )
    heads = printed(capsys, *latent)
    assert "68.625 KiB per token in bf16 (61 layers, a latent vector of 576 values)" in heads
    four = notes("qwen3-30b-a3b", "--gpu", "gb200", "--weights", "fp4")
    assert "refuses NVFP4 checkpoints" in four
    assert "disagg serve` " not in notes("qwen3-30b-a3b", "--tensor-parallel-size", "1")


def test_a_refusal_names_only_flags_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--model" not in refused(capsys, "gpt-5")
    assert "(--gpu)" in refused(capsys, "llama-3-8b", "--gpu", "h300")
