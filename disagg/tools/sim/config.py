"""The configuration of a simulation: fleet, load and SLOs. It is checked when it is made."""

from __future__ import annotations

import math

import msgspec

from disagg.config import AutoscalingConfig, PoolConfig, TierConfig
from disagg.errors import RequestError
from disagg.messages import Role
from disagg.time_model import StepTimeModel
from disagg.tools.sim.baselines import OURS, POLICIES
from disagg.tools.sim.scaling import check_slos
from disagg.tools.sim.simulated_worker import WorkerSpec
from disagg.tools.sim.steps import StepTimes
from disagg.tools.sim.trace import TRACE_BLOCK_TOKENS

MODEL = "simulated"

# A model of 8 billion parameters on one H100, at half of its FLOP/s (989 TFLOP/s) and 70 % of its
# memory bandwidth (3.35 TB/s). The coefficients are: reading the weights; 16 GFLOP per prompt
# token; 4 x 32 layers x 4,096 FLOP for each earlier token to which it attends; the arithmetic of a
# decoding sequence; and reading 128 KiB of KV for each token of context.
H100_8B = StepTimeModel(6.8e-3, 3.2e-5, 1.06e-9, 3.2e-5, 5.6e-8, 0.0)
# The same model on one L40S: half of 362 TFLOP/s, and 70 % of 864 GB/s.
L40S_8B = StepTimeModel(2.65e-2, 8.8e-5, 2.9e-9, 8.8e-5, 2.17e-7, 0.0)
H100_8B_KV_NBYTES = 128 << 10  # of one token


class Fault(msgspec.Struct, frozen=True):
    """A fault: a worker dies, and a new one with an empty cache replaces it."""

    worker_id: str
    at_s: float
    for_s: float


class SimConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet and its load. What stands below a setting is its help in `disagg sim`."""

    num_prefill: int = 4
    """number of prefill workers"""
    num_decode: int = 4
    """number of decode workers; with 0, each prefill worker decodes its own requests"""
    num_blocks: int = 1024
    """number of KV blocks per worker"""
    decode_num_blocks: int | None = None
    """number of KV blocks per decode worker (default: num_blocks)"""
    block_size: int = TRACE_BLOCK_TOKENS
    """number of tokens in a KV block"""
    max_num_seqs: int = 64
    """largest number of sequences in one step"""
    max_num_batched_tokens: int = 1024
    """largest number of tokens in one step"""
    decode_max_num_batched_tokens: int | None = None
    """the same on decode workers (default: max_num_batched_tokens)"""
    times: StepTimeModel = H100_8B
    """coefficients of the step time, in seconds: per step, per prompt token, per pair of a prompt
    token and a token that it attends to, per decoding sequence, per token of its context, and per
    step with prompt tokens (0 if left out; default: predicted for a model of 8 billion parameters
    on one H100)"""
    decode_times: StepTimeModel | None = None
    """the same for decode workers (default: times)"""
    steps: StepTimes | None = None
    """true step times, if they are not linear; `times` is then the prior of
    workers until they have measured (default: `times` is true)"""
    decode_steps: StepTimes | None = None
    """the same for decode workers (default: steps)"""
    kv_nbytes: int = H100_8B_KV_NBYTES
    """bytes of KV per token"""
    bytes_per_s: float = 25e9
    """bandwidth of KV transfers per worker: of its network card in each direction"""
    latency_s: float = 1e-3
    """seconds of a transfer between two workers before its first byte"""
    speed: float = 1.0
    """factor on the request rate"""
    policy: str = OURS
    """routing policy"""
    faults: tuple[Fault, ...] = ()
    """the worker dies at SECOND and is replaced SECONDS later, for example decode-0@120+30; may be
    repeated"""
    fair_queue: bool = False
    """whether the ingress has its admission queue, as in production, which refuses requests that
    would wait longer than the TTFT SLO; without it, only the effects of policies are compared"""
    ttft_slo_s: float = math.inf
    """TTFT SLO in seconds, by which pools are scaled (default: none)"""
    tpot_slo_s: float = math.inf
    """TPOT SLO in seconds, by which pools are scaled (default: none)"""
    scale_prefill: AutoscalingConfig | None = None
    """scales the prefill pool, which begins with num_prefill workers"""
    scale_decode: AutoscalingConfig | None = None
    """scales the decode pool, which begins with num_decode workers"""
    max_num_workers: int | None = None
    """largest number of workers in all autoscaled pools together"""
    num_ingress: int = 1
    """number of ingresses, which get requests in turn; several have views of their own, to which
    workers report as rarely as in a real fleet of that size"""
    num_retries: int = 0
    """how often a client sends a refused request again, each time after `Retry-After` and after a
    second at least; its TTFT counts from its first arrival"""
    seed: int = 0
    """random seed"""

    def __post_init__(self) -> None:
        for name, least in (
            ("num_prefill", 1),
            ("num_decode", 0),
            ("num_blocks", 1),
            ("decode_num_blocks", 1),
            ("decode_max_num_batched_tokens", 1),
            ("max_num_seqs", 1),
            ("kv_nbytes", 1),
            ("latency_s", 0),
            ("num_ingress", 1),
            ("num_retries", 0),
        ):
            number = getattr(self, name)
            if number is not None and not least <= number < math.inf:
                raise RequestError(
                    f"{name} must be finite and at least {least}, but is {number:g}.", param=name
                )
        if self.block_size < 1 or TRACE_BLOCK_TOKENS % self.block_size:
            raise RequestError(
                f"block_size is {self.block_size}, but must divide {TRACE_BLOCK_TOKENS}, because"
                f" traces have hashes of blocks of {TRACE_BLOCK_TOKENS} tokens.",
                param="block_size",
            )
        for name, what in (
            ("speed", "The speed"),
            ("bytes_per_s", "The bandwidth of a link"),
            ("ttft_slo_s", "The TTFT SLO"),
            ("tpot_slo_s", "The TPOT SLO"),
        ):
            value = getattr(self, name)
            is_finite = math.isfinite(value) or (name.endswith("slo_s") and value == math.inf)
            if value <= 0.0 or not is_finite:  # an infinite SLO means that there is none
                raise RequestError(
                    f"{what} must be finite and greater than 0, but is {value:g}.", param=name
                )
        if self.policy not in POLICIES:
            known = ", ".join(POLICIES)
            raise RequestError(
                f"There is no policy {self.policy!r}; choose one of {known}.", param="policy"
            )
        if self.num_ingress > 1 and (self.scale_prefill or self.scale_decode):
            raise RequestError(
                "A simulation can autoscale pools only with one ingress; leave num_ingress at 1, or"
                " set fixed numbers of workers.",
                param="num_ingress",
            )
        if self.scale_prefill is not None or self.scale_decode is not None:
            check_slos(self.tier, self.times_of("prefill"), self.times_of("decode"))

    @property
    def tier(self) -> TierConfig:
        """The configuration of the model, as the real parts get it."""
        return TierConfig(
            model=MODEL,
            prefill=PoolConfig(num_replicas=self.num_prefill, autoscaling=self.scale_prefill),
            decode=PoolConfig(num_replicas=self.num_decode, autoscaling=self.scale_decode),
            ttft_slo_s=self.ttft_slo_s,
            tpot_slo_s=self.tpot_slo_s,
        )

    def times_of(self, role: Role) -> StepTimeModel:
        return (self.decode_times if role == "decode" else None) or self.times

    def worker(self, role: Role, number: int, max_model_len: int) -> WorkerSpec:
        """The specification of a pool's worker with this number."""
        num_blocks, steps, chunk = self.num_blocks, self.steps, self.max_num_batched_tokens
        if role == "decode":
            num_blocks, steps = self.decode_num_blocks or num_blocks, self.decode_steps or steps
            chunk = self.decode_max_num_batched_tokens or chunk
        times = self.times_of(role)
        return WorkerSpec(
            worker_id=f"{role}-{number}",
            role=role,
            model=MODEL,
            num_blocks=num_blocks,
            block_size=self.block_size,
            block_nbytes=self.block_size * self.kv_nbytes,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=chunk,
            max_model_len=max_model_len,
            times=times,
            steps=steps or times,
        )
