"""Plans for a model and a load: the workers it may have, what they do, and the advised fleet.

`disagg plan` prints it, the page at `/ui` draws it. Everything is a prediction from datasheets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from disagg.capacity.advice import Advice, advise
from disagg.capacity.efficiency import DATASHEET, MATMUL, PLANNED
from disagg.capacity.gpus import PRICES_AS_OF, USD_PER_GPU_HOUR, gpu_of, link_of
from disagg.capacity.roofline import MEMORY_SHARE, Placement, placements
from disagg.capacity.shapes import ModelShape
from disagg.capacity.sizing import FleetPlan, Goal, Pool
from disagg.capacity.workload import Slo, Workload
from disagg.errors import NotEnoughMemory, StartupError
from disagg.time_model import CHUNK_TOKENS, StepFeatures

PREDICTED = "predictions from datasheets, not measurements"
NOT_RUN_YET = (
    "Workers with several GPUs split the model by tensor parallelism (`disagg serve"
    " --tensor-parallel-size`). This has been measured on CPUs only; its times on GPUs are"
    " computed. Use --tensor-parallel-size 1 to plan without it."
)


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan is asked for besides model and load. These are the flags of `disagg plan`."""

    gpu: tuple[str, ...] = ("h100",)
    """GPUs of the workers, of which the best is chosen"""
    weights: str = "bf16"
    """data type of the weights"""
    kv: str = "bf16"
    """data type of the KV cache"""
    engine: str = ""
    """plan with the share of the GPU's peak that published benchmarks of this engine reached
    (default: assumptions of docs/planning.md)"""
    tensor_parallel_size: int | None = None
    """number of GPUs per worker (default: the best)"""
    enable_expert_parallel: bool = False
    """use expert parallelism in workers with several GPUs, as in `disagg serve`"""
    ttft: float = 1.0
    """TTFT SLO in seconds, for 95 % of the requests"""
    tpot: float = 0.05
    """TPOT SLO in seconds, for 95 % of the requests"""
    link: str = "400g"
    """network per GPU"""
    price: dict[str, float] = {}
    """price of one GPU per hour in US dollars, by its name; others have list prices"""

    @property
    def slo(self) -> Slo:
        return Slo(self.ttft, self.tpot)


class Plan(msgspec.Struct, frozen=True):
    """
    workers: every way to place the model on the GPUs that may be used.
    advice: None if no fleet was asked for.
    """

    shape: ModelShape
    load: Workload
    workers: list[Placement]
    advice: Advice | None
    notes: list[str]


def make_plan(shape: ModelShape, load: Workload, wishes: Wishes, *, with_fleet: bool) -> Plan:
    """Plan workers, and the cheapest fleets for the load.

    Raises:
        DisaggError: an unknown name, a model that does not fit, an SLO that no fleet meets.
    """
    slo, link = wishes.slo, link_of(wishes.link)
    load.check_fits(shape)
    every, notes = _placements(wishes, shape, load)
    advice = None
    if with_fleet:
        usd = _prices(wishes.price, {each.gpu.name for each in every})
        advice = advise(Goal(load, slo, link, lambda each: usd[each.gpu.name]), every)
    if shape.quantized:
        notes += dict.fromkeys(map(_how_quantized, every))
    if not wishes.engine:
        notes += _assumed(shape, every)
    notes += [_nearly_full(each) for each in every if each.is_nearly_full]
    if max(each.num_gpus for each in every) > 1:
        notes.append(NOT_RUN_YET)
    return Plan(shape, load, every, advice, notes)


def report(plan: Plan) -> dict[str, Any]:
    """The plan as plain data, in the JSON of `disagg plan --json`."""
    every, advice, load = plan.workers, plan.advice, plan.load
    said: dict[str, Any] = {
        "kind": PREDICTED,
        "model": plan.shape.name,
        "source": plan.shape.source,
        "num_params": plan.shape.num_params,
        "kv_nbytes_per_token": every[0].kv_nbytes_per_token,
        "workers": [_worker_report(each, load) for each in every],
        "notes": plan.notes,
    }
    if advice is not None:
        said["disaggregate"] = advice.disaggregate
        said["reason"] = advice.reason
        said["apart"] = advice.apart and _fleet_report(advice.apart, load)
        said["together"] = advice.together and _fleet_report(advice.together, load)
        said["prices_as_of"] = PRICES_AS_OF
    return said


def _worker_report(each: Placement, load: Workload) -> dict[str, Any]:
    num_prompt = max(1, round(load.mean_prompt_tokens))
    return {
        "gpu": each.gpu.name,
        "gpu_source": each.gpu.source,
        "tensor_parallel": each.num_gpus,
        "expert_parallel": each.num_holders > 1,
        "weights_nbytes": each.weights_nbytes,
        "num_kv_tokens": each.num_kv_tokens,
        "flops_per_byte": each.gpu.flops_per_byte(each.products),
        "break_even_batch": each.break_even_batch,
        "prompt_tokens": num_prompt,
        "prefill_s": each.prefill_s(num_prompt),
        "decode_step_s": each.decode_step_s(1, num_prompt),
        "decode_step_floor_s": at_peak(each).decode_step_s(1, num_prompt),
        "time_model": each.time_model().coefficients,
    }


def _fleet_report(fleet: FleetPlan, load: Workload) -> dict[str, Any]:
    roles = ["prefill", "decode"] if len(fleet.pools) == 2 else ["both"]
    return {
        "pools": [
            {
                "role": role,
                "gpu": pool.placement.gpu.name,
                "tensor_parallel": pool.placement.num_gpus,
                "num_workers": pool.num_workers,
                "num_gpus": pool.num_gpus,
                "busy": pool.busy,
                "batch": pool.batch,
                "usd_per_gpu_hour": pool.usd_per_gpu_hour,
                "time_model": pool.placement.time_model(max(1, pool.batch)).coefficients,
                "memory": _memory(pool, load),
                "roofline": _roofline(pool, role, load, fleet.chunk_tokens),
            }
            for role, pool in zip(roles, fleet.pools, strict=True)
        ],
        "num_gpus": fleet.num_gpus,
        "ttft_s": fleet.ttft_s,
        "tpot_s": fleet.tpot_s,
        "transfer_s": fleet.transfer_s,
        "chunk_tokens": fleet.chunk_tokens,
        "usd_per_hour": fleet.usd_per_hour,
        "tokens_per_s_per_gpu": load.tokens_per_s / fleet.num_gpus,
        "usd_per_million_tokens": usd_per_million(fleet, load),
    }


def usd_per_million(fleet: FleetPlan, load: Workload) -> dict[str, float]:
    """US dollars per million tokens: of answers alone, and of prompts and answers together."""
    requests = load.requests_per_s * 3600 / 1e6
    both = load.mean_prompt_tokens + load.mean_output_tokens
    return {
        "output": fleet.usd_per_hour / (requests * load.mean_output_tokens),
        "input_and_output": fleet.usd_per_hour / (requests * both),
    }


def at_peak(each: Placement) -> Placement:
    """The same placement at the datasheet's peak figures, which are a lower bound of times."""
    return msgspec.structs.replace(each, efficiency=DATASHEET)


def _memory(pool: Pool, load: Workload) -> dict[str, float]:
    """Bytes on each GPU: weights, KV of the planned batch, room for more KV, and the rest."""
    each = pool.placement
    kv_nbytes = max(1, pool.batch) * load.decode_tokens * each.kv_nbytes_per_gpu_token
    return {
        "total_nbytes": each.gpu.memory_nbytes,
        "weights_nbytes": each.gpu.memory_nbytes * MEMORY_SHARE - each.kv_room_nbytes,
        "kv_nbytes": min(kv_nbytes, each.kv_room_nbytes),
        "kv_room_nbytes": each.kv_room_nbytes,
        "rest_nbytes": each.gpu.memory_nbytes * (1.0 - MEMORY_SHARE),
    }


def _roofline(pool: Pool, role: str, load: Workload, chunk_tokens: int) -> dict[str, Any]:
    """The roof of a worker's GPUs, and where its steps are beneath it."""
    each, batch = pool.placement, max(1, pool.batch)
    steps = {}
    if role != "decode":
        num_tokens = chunk_tokens or CHUNK_TOKENS
        steps["prefill"] = StepFeatures(num_tokens, num_tokens * load.reach, 0, 0)
    if role != "prefill":
        steps["decode"] = StepFeatures(0, 0.0, batch, int(batch * load.decode_tokens))
    dots = {}
    for name, step in steps.items():
        num_flop, nbytes = each.work(step)
        flops = num_flop / each.step_s(step)
        dots[name] = {"flop_per_byte": num_flop / nbytes, "flops": flops}
    return {
        "peak_flops": each.num_gpus * each.gpu.flops(each.products),
        "bytes_per_s": each.num_gpus * each.gpu.memory_bytes_per_s,
        "steps": dots,
    }


def _placements(
    wishes: Wishes, shape: ModelShape, load: Workload
) -> tuple[list[Placement], list[str]]:
    """The possible workers on all chosen GPUs, and notes on GPUs that are left out."""
    if wishes.enable_expert_parallel and not shape.num_experts:
        raise StartupError(
            f"{shape.name} is not a mixture of experts; leave out --enable-expert-parallel.",
            param="enable_expert_parallel",
        )
    every: list[Placement] = []
    notes: list[str] = []
    for name in wishes.gpu:
        try:
            like = Placement(
                shape,
                gpu_of(name),
                weights=wishes.weights,
                kv=wishes.kv,
                expert_parallel=wishes.enable_expert_parallel,
                kept_tokens=load.decode_tokens,
            )
            every += placements(like, load.longest_tokens, wishes.engine)
        except NotEnoughMemory as error:
            notes.append(f"Left out: {error.message}")
    if not every:
        raise NotEnoughMemory(" ".join(notes), param="gpu")
    size = wishes.tensor_parallel_size
    if size is None:
        return every, notes
    kept = [each for each in every if each.num_gpus == size]
    if not kept:
        raise StartupError(_why_not_over(size, shape, every), param="tensor_parallel_size")
    return kept, notes


def _why_not_over(size: int, shape: ModelShape, every: Sequence[Placement]) -> str:
    """Why no worker of `size` GPUs is among the possible placements."""
    choices = ", ".join(f"{each.num_gpus} x {each.gpu.name}" for each in every)
    if size < 1:
        return f"A worker needs at least 1 GPU, not {size}; choose from {choices}."
    num_heads, num_kv_heads = shape.config.num_heads, shape.config.num_kv_heads
    if num_heads % size or (num_kv_heads % size and size % num_kv_heads):
        return (
            f"{shape.name} has {num_heads} heads and {num_kv_heads} KV heads, which {size} GPUs"
            f" cannot share evenly; choose from {choices}."
        )
    most = max(each.gpu.gpus_per_node for each in every)
    if size > most:
        return f"{size} GPUs are more than the {most} of one node; choose from {choices}."
    return f"{size} GPUs cannot hold {shape.name} and its longest request; choose from {choices}."


def _prices(given: Mapping[str, float], names: set[str]) -> dict[str, float]:
    """US dollars per hour for each GPU of `names`; a price without a name is of all."""
    usd = {name: USD_PER_GPU_HOUR[name] for name in names if name in USD_PER_GPU_HOUR}
    for name, price in given.items():
        if not 0 < price < float("inf"):
            raise StartupError(f"{price:g} is not a price above 0.", param="price")
        usd.update(dict.fromkeys([gpu_of(name).name] if name else names, price))
    unknown = sorted(names - usd.keys())
    if unknown:
        raise StartupError(
            f"No price is known for {', '.join(unknown)}; give one with --price {unknown[0]}=2.5.",
            param="price",
        )
    return usd


def _assumed(shape: ModelShape, every: Sequence[Placement]) -> list[str]:
    """Notes for GPUs whose prefill speed is assumed, with the speed of published benchmarks."""
    notes = []
    for gpu, products in dict.fromkeys((each.gpu, each.products) for each in every):
        kind = shape.products_in(products)
        shares = {
            engine: share for (engine, *key), share in MATMUL.items() if key == [kind, gpu.family]
        }
        if kind == "bf16" and shares:
            reached = " and ".join(f"{share} with {name}" for name, share in shares.items())
            notes.append(
                f"Prefill on {gpu.name} is planned at {PLANNED.matmul} of its peak FLOP/s, which is"
                f" an assumption. Published benchmarks reached {reached}; --engine plans with that"
                " value."
            )
    return notes


def _nearly_full(each: Placement) -> str:
    return (
        f"The weights leave {each.kv_room_nbytes / 1e9:.1f} GB of each GPU to KV with"
        f" {each.num_gpus} x {each.gpu.name}. This is what limits its throughput, and engines hold"
        " less KV than the datasheet leaves: such workers were predicted at 1.3 to 1.5 times their"
        " published speed."
    )


def _how_quantized(each: Placement) -> str:
    shape, weights = each.shape, each.weights
    begin = f"The weights of this checkpoint are quantised ({shape.quantized})."
    if weights != "bf16":
        return f"{begin} The plan uses their size in {weights} instead (--weights)."
    if not shape.is_packed:
        return f"{begin} They are converted to bf16 when loaded; the plan uses that size."
    but = ", except for experts, which are converted to bf16" if shape.has_widened_experts else ""
    return (
        f"{begin} GPUs keep them so and multiply in {each.products}; the plan uses that size{but}."
    )
