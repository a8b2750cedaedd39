"""Output of `disagg plan`: tables for people, one JSON object for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from disagg.capacity import planner
from disagg.capacity.advice import Advice
from disagg.capacity.gpus import PRICES_AS_OF, PRICES_SOURCE
from disagg.capacity.planner import PREDICTED, Plan, at_peak, usd_per_million
from disagg.capacity.roofline import MEMORY_SHARE, Placement
from disagg.capacity.shapes import ModelShape
from disagg.capacity.workload import Workload
from disagg.tools.plan.play import Played
from disagg.tools.terminal import table

# Tables


def show(console: Console, plan: Plan, played: Played | None) -> None:
    shape, load, every, advice = plan.shape, plan.load, plan.workers, plan.advice
    first = every[0]
    console.print(
        f"{shape.name}: {shape.num_params / 1e9:.2f} billion parameters,"
        f" {first.weights_nbytes / 1e9:.1f} GB in {first.shape.stored_as(first.weights)};"
        f" KV {first.kv_nbytes_per_token / 1024:g} KiB per token in {first.kv}"
        f" ({shape.config.num_layers} layers, {_kv_of(shape)}),"
        f" from {shape.source}.",
        soft_wrap=True,
    )
    console.print(f"All figures below are {PREDICTED}.\n")
    console.print(_worker_table(load, every))
    console.print()
    console.print(_prior_table(every))
    if advice is not None:
        console.print()
        console.print(_fleet_table(advice, load, played))
        console.print()
        console.print(advice.reason, soft_wrap=True)
        console.print(f"Default prices: {PRICES_AS_OF}; {PRICES_SOURCE}.", soft_wrap=True)
    for note in plan.notes:
        console.print(note, soft_wrap=True)


def report(plan: Plan, played: Played | None) -> dict[str, Any]:
    """The plan as plain data, with what the simulator found."""
    said = planner.report(plan)
    if played is not None:
        for kind, result in (("apart", played.apart), ("together", played.together)):
            if result is not None:
                said[kind]["played"] = {
                    "in_time_percent": result.in_time_percent,
                    "num_requests": result.num_requests,
                    "ttft_p95_s": result.ttft_p95_s,
                    "tpot_p95_s": result.tpot_p95_s,
                }
    return said


def _kv_of(shape: ModelShape) -> str:
    if shape.latent_size:
        index = "" if shape.index is None else f", {shape.index.head_dim} of them for an index"
        return f"a latent vector of {shape.latent_size} values{index}"
    return f"{shape.config.num_kv_heads} KV heads of {shape.head_dim}"


def _worker_table(load: Workload, every: Sequence[Placement]) -> Table:
    num_prompt = max(1, round(load.mean_prompt_tokens))
    names = ("KV tokens", "FLOP/byte", "even batch", "prefill ms", "decode ms", "floor ms")
    rows = table(
        "<GPUs",
        *names,
        title=f"One worker (predicted; {MEMORY_SHARE:.0%} of the memory; a prompt of"
        f" {num_prompt:,} tokens)",
    )
    for each in every:
        rows.add_row(
            f"{each.num_gpus} x {each.gpu.name}",
            f"{each.num_kv_tokens:,}",
            f"{each.gpu.flops_per_byte(each.products):.0f}",
            f"{each.break_even_batch:.0f}",
            f"{each.prefill_s(num_prompt) * 1e3:.1f}",
            f"{each.decode_step_s(1, num_prompt) * 1e3:.2f}",
            f"{at_peak(each).decode_step_s(1, num_prompt) * 1e3:.2f}",
        )
    return rows


def _prior_table(every: Sequence[Placement]) -> Table:
    names = ("step", "prompt token", "1,000 attended", "sequence", "1,000 context")
    rows = table("<GPUs", *names, title="Prior of the time model (predicted; microseconds)")
    for each in every:
        times = each.time_model()
        figures = (
            times.per_step_s,
            times.per_token_s,
            times.per_attended_s * 1e3,
            times.per_sequence_s,
            times.per_context_s * 1e3,
        )
        rows.add_row(
            f"{each.num_gpus} x {each.gpu.name}", *(f"{figure * 1e6:,.2f}" for figure in figures)
        )
    return rows


def _fleet_table(advice: Advice, load: Workload, played: Played | None) -> Table:
    mean = f"{load.mean_prompt_tokens:,.0f} + {load.mean_output_tokens:,.0f} tokens"
    title = f"Fleets for {load.requests_per_s:,.2f} requests/s of {mean} (predicted; p95)"
    rows = table("<", "apart", "together", title=title)
    fleets = (advice.apart, advice.together)

    def row(name: str, text: Any, of: Sequence[Any] = fleets) -> None:
        rows.add_row(name, *("-" if each is None else text(each) for each in of))

    row("workers", lambda fleet: " + ".join(map(str, fleet.pools)))
    row("prefill:decode", lambda fleet: ":".join(str(pool.num_workers) for pool in fleet.pools))
    row("GPUs", lambda fleet: " + ".join(str(pool.num_gpus) for pool in fleet.pools))
    row("busy", lambda fleet: ", ".join(f"{pool.busy:.0%}" for pool in fleet.pools))
    row("sequences per worker", lambda fleet: str(fleet.pools[-1].batch))
    row("TTFT ms", lambda fleet: f"{fleet.ttft_s * 1e3:,.0f}")
    row("TPOT ms", lambda fleet: f"{fleet.tpot_s * 1e3:.1f}")
    row("KV transfer ms", lambda fleet: f"{fleet.transfer_s * 1e3:.1f}")
    row("prompt tokens per step", lambda fleet: str(fleet.chunk_tokens or "-"))
    row("$ per hour", lambda fleet: f"{fleet.usd_per_hour:,.2f}")
    for name, key in (("output", "output"), ("all", "input_and_output")):
        row(
            f"$ per million tokens, {name}",
            lambda fleet, key=key: f"{usd_per_million(fleet, load)[key]:.3f}",
        )
    if played is not None:
        of = (played.apart, played.together)
        row("simulated: in time %", lambda each: f"{each.in_time_percent:.1f}", of)
        row("simulated: TTFT ms", lambda each: f"{each.ttft_p95_s * 1e3:,.0f}", of)
        row("simulated: TPOT ms", lambda each: f"{each.tpot_p95_s * 1e3:.1f}", of)
    return rows
