"""All settings, frozen and checked once. Built from flags (`cli/`) or YAML (`app/build.py`).

Unknown keys are refused. "auto" is resolved where the machine is known: in the worker.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from disagg.api_keys import DEFAULT_TENANT
from disagg.errors import ModelError, StartupError
from disagg.models.fetched import FETCHED, cached_file
from disagg.models.hub import is_repository, snapshot_of
from disagg.models.share import Share

ASSETS = Path(__file__).parent / "assets"

Positive: TypeAlias = Annotated[int, Meta(ge=1)]
Fraction: TypeAlias = Annotated[float, Meta(gt=0.0, le=1.0)]
Port: TypeAlias = Annotated[int, Meta(ge=0, le=65535)]
DType: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDType: TypeAlias = Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8", "int4"]
# Bits of a value of KV and of a vector's scale, in formats with scales (`kernels.kv_pages`).
SCALED_KV_BITS = {"fp8": (8, 32), "int8": (8, 32), "int4": (4, 32)}
Signal: TypeAlias = Literal["minimum", "mean", "margin"]

MAX_PRIORITY = 1000
CPU_MAX_NUM_SEQS, CPU_MAX_NUM_BATCHED_TOKENS = 64, 1024  # of a step on a CPU, unless set
DEFAULT_TTFT_SLO_S, DEFAULT_TPOT_GOAL_S = 30.0, 0.2
AUTO = "auto"  # the model that clients name to have the cascade choose one


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speculative decoding with drafts from the sequence itself. Names follow vLLM's.

    Attributes:
        method: "ngram" (prompt lookup) proposes the tokens that followed the last n-gram before.
        num_speculative_tokens: most tokens of a draft; the kernels' decode steps allow up to 7.
        prompt_lookup_max: length of the n-gram.
    """

    method: Literal["ngram"]
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=7)] = 4
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=64)] = 3


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine, on one device or as many as it has ranks. Names follow vLLM's flags."""

    tensor_parallel_size: Positive = 1  # ranks of a worker, one process and one device each
    nnodes: Positive = 1  # over which the ranks of a worker are divided evenly
    enable_expert_parallel: bool = False  # each rank has whole experts, not a part of every one
    dtype: DType = "auto"
    kv_cache_dtype: KVCacheDType = "auto"  # the model's; fp8, int8 and int4 have scales
    quantization: Literal["int8", "int4", "fp8", "packed"] | None = None  # of weights
    device: Literal["auto", "cpu", "cuda"] = "auto"
    block_size: Annotated[int, Meta(ge=1, le=256)] | None = None  # 16 on a CPU, 64 on a GPU
    max_model_len: Positive | None = None  # the model's own limit
    max_num_seqs: Positive | None = None  # by the device (`engine/device/memory_plan.py`)
    max_num_batched_tokens: Positive | None = None  # by the device
    gpu_memory_utilization: Fraction = 0.9  # of its GPU, or of its share of one
    kv_cache_memory_bytes: Positive | None = None  # of each rank
    kv_offloading_size: Annotated[float, Meta(ge=0.0, le=1e6)] = 0.0  # GiB of host memory a worker
    num_gpu_blocks_override: Positive | None = None
    enable_prefix_caching: bool = True
    enforce_eager: bool = False  # on a GPU: launch each kernel, and capture no CUDA graphs
    # Threads of torch in each worker on a CPU. None: num_cpus of its pool; if that is 0, the cores
    # of a node, divided by its workers.
    num_threads: Positive | None = None
    speculative_config: SpeculativeConfig | None = None  # None: no drafts but a cascade's
    max_requests_nbytes: Positive = 256 << 20  # prompts on one worker, waiting and running

    @property
    def ranks_per_node(self) -> int:
        return self.tensor_parallel_size // self.nnodes

    def share(self, rank: int = 0) -> Share:
        """What a rank of the worker has of the model."""
        return Share(rank, self.tensor_parallel_size, self.enable_expert_parallel)


class AutoscalingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Autoscaling of one pool (`router/autoscale.py`, docs/autoscaling.md)."""

    min_replicas: Annotated[int, Meta(ge=0)] = 1  # 0: scale to zero without requests
    max_replicas: Positive
    slo_fraction: Fraction = 1.0  # pools are sized for this fraction of the SLO; less leaves room
    start_s: Annotated[float, Meta(gt=0)] = 30.0  # until a new worker serves, about
    # 95 % of the requests of so long are to be in time. Bursts that come every few minutes recur
    # within it (docs/notebook/autoscaling.md).
    look_back_s: Annotated[float, Meta(gt=0)] = 900.0
    down_after_s: Annotated[float, Meta(ge=0)] = 60.0  # for so long not needed


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers of one role in one tier."""

    num_replicas: Annotated[int, Meta(ge=0)] = 1
    num_standby: Annotated[int, Meta(ge=0)] = 0  # additional loaded workers, in reserve
    tensor_parallel_size: Positive | None = None  # ranks of each worker; None: the engine's
    nnodes: Positive | None = None  # nodes of each worker; None: the engine's
    autoscaling: AutoscalingConfig | None = None  # None: always num_replicas, the first number else
    num_cpus: Annotated[float, Meta(ge=0)] = 0  # of each worker; of several nodes, on each of them
    # Of each worker: one for each of its ranks, a share of one, or 0. None: one for each rank where
    # there are GPUs, 0 elsewhere.
    num_gpus: Annotated[float, Meta(ge=0)] | None = None
    resources: dict[str, float] = {}  # as num_cpus


class TierConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model with its own prefill and decode pools."""

    # A directory, a GGUF file, or a name: of a bundled model, of `FETCHED`, or on a hub.
    model: str
    revision: str | None = None  # of a model on a hub: a branch, a tag or a commit
    served_model_name: str | None = None  # the name of the directory or the file
    prefill: PoolConfig = PoolConfig()
    decode: PoolConfig = PoolConfig()
    engine: EngineConfig = EngineConfig()
    chat_template: str | None = None  # a path; the model's own when absent
    tool_call_parser: str = ""  # format of tool calls; "": recognised from its chat template
    reasoning_parser: str = ""  # format of reasoning; "": recognised from its chat template
    # Requests that would wait longer are refused. None: no request is refused for this.
    ttft_slo_s: Annotated[float, Meta(gt=0)] | None = DEFAULT_TTFT_SLO_S
    # TPOT. None: requests have no TPOT SLO, unless they set one; roles are then fixed.
    tpot_slo_s: Annotated[float, Meta(gt=0)] | None = None

    @property
    def ttft_limit_s(self) -> float:
        """The TTFT SLO; inf: none."""
        return self.ttft_slo_s or math.inf

    @property
    def ttft_goal_s(self) -> float:
        """The TTFT for sizing pools, and the shortest that requests may ask for: the SLO, or the
        usual one."""
        return self.ttft_slo_s or DEFAULT_TTFT_SLO_S

    @property
    def tpot_goal_s(self) -> float:
        """The TPOT for sizing decode pools and counting goodput: the SLO, or a default."""
        return self.tpot_slo_s or DEFAULT_TPOT_GOAL_S

    @property
    def name(self) -> str:
        last = self.model.rstrip("/").rsplit("/", 1)[-1]
        return self.served_model_name or last.removesuffix(".gguf")

    @property
    def full_name(self) -> str:
        """The name under which vLLM would serve the model, such as Qwen/Qwen3-8B."""
        return self.served_model_name or self.model

    def num_ranks(self, pool: PoolConfig) -> int:
        """Of each worker of one of its pools."""
        return pool.tensor_parallel_size or self.engine.tensor_parallel_size

    def num_nodes(self, pool: PoolConfig) -> int:
        """Of each worker of one of its pools."""
        return pool.nnodes or self.engine.nnodes

    def for_role(self, role: Literal["prefill", "decode"]) -> TierConfig:
        """The engine's settings for a worker of that pool. With a share of a GPU, the worker gets
        the same share of its memory. A worker of one rank has no experts to divide."""
        pool = self.prefill if role == "prefill" else self.decode
        part = self.engine.gpu_memory_utilization * min(pool.num_gpus or 1.0, 1.0)
        engine = msgspec.structs.replace(
            self.engine,
            gpu_memory_utilization=part,
            tensor_parallel_size=self.num_ranks(pool),
            nnodes=self.num_nodes(pool),
            enable_expert_parallel=self.engine.enable_expert_parallel and self.num_ranks(pool) > 1,
        )
        return msgspec.structs.replace(self, engine=engine)

    @property
    def directory(self) -> Path:
        """The path of the model, a directory or a GGUF file. A path takes precedence over a name.

        Raises:
            ModelError: there is neither, or the name's model was not fetched yet.
        """
        for candidate in (Path(self.model), ASSETS / self.model):
            if candidate.exists():
                return candidate
        if self.model in FETCHED:
            file = cached_file(self.model)
            if file.is_file():
                return file
            raise ModelError(
                f"{self.model} is not at {file}: `disagg serve {self.model}` fetches it, on each"
                " machine that needs it.",
                param="model",
            )
        if is_repository(self.model):
            directory = snapshot_of(self.model, self.revision)
            if directory is not None:
                return directory
            raise ModelError(
                f"{self.model} is neither a directory here, nor whole in this machine's cache of"
                f" Hugging Face: `disagg serve {self.model}` fetches it, on each machine that needs"
                " it.",
                param="model",
            )
        if "://" in self.model:
            raise ModelError(
                f"{self.model}: models are not read from {self.model.partition('://')[0]} stores;"
                " mount the store or copy the directory, and give its path.",
                param="model",
            )
        bundled = ", ".join(sorted(each.name for each in ASSETS.iterdir() if each.is_dir()))
        raise ModelError(
            f"There is no model directory {self.model!r}, and the bundled models are {bundled}."
            f" Fetched by name: {', '.join(FETCHED)}, and models of Hugging Face as"
            " organisation/name. Else give the path of a model directory or of a GGUF file.",
            param="model",
        )


class TransferPrior(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The assumed speed of KV transfers before a worker has pulled; `disagg doctor` measures it.

    Attributes:
        latency_s: of a very small transfer.
        bytes_per_s: of a large one.
    """

    latency_s: Annotated[float, Meta(gt=0)]
    bytes_per_s: Annotated[float, Meta(gt=0)]


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: Port = 8000
    ssl_certfile: str | None = None  # HTTPS; both files or none
    ssl_keyfile: str | None = None
    api_key: str | None = None
    # Tenant -> key or keys; `api_key` is the key of the tenant without a name. All may be
    # `sha256:HEX`.
    api_keys: dict[str, str | tuple[str, ...]] = {}
    api_keys_file: str | None = None  # TENANT:KEY a line; read again when it changes
    # Websites whose scripts may call the API from a browser: https://ui.example.com, or * for any.
    allowed_origins: tuple[str, ...] = ()
    metrics_key: str | None = None  # that /metrics asks for, which is open without one
    max_body_nbytes: Positive = 16 << 20
    max_num_requests: Positive = 4096  # in flight in one ingress
    max_requests_nbytes: Positive = 256 << 20  # their bodies
    max_queue_nbytes: Positive = 256 << 20  # waiting requests in one ingress
    default_timeout_s: Annotated[float, Meta(gt=0)] = 600.0

    def named_keys(self) -> Iterator[tuple[str, str]]:
        """Tenants, "" for the default one, and their keys; those of the file are not among them."""
        if self.api_key is not None:
            yield "", self.api_key
        for name, given in self.api_keys.items():
            for key in (given,) if isinstance(given, str) else given:
                yield name or "?", key  # "" is the default one's; "?" cannot be a name

    @property
    def is_open(self) -> bool:
        """Whether no API key is required."""
        return self.api_key is None and not self.api_keys and self.api_keys_file is None


def url_of(http: HttpConfig) -> str:
    """The address of the server on the machine that it runs on."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(http.host, http.host)
    scheme = "http" if http.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{http.port}" if ":" in host else f"{scheme}://{host}:{http.port}"


class TenantConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of one tenant, over all ingresses (docs/admission.md).

    Attributes:
        weight: its share while requests wait: 2 gets twice the service of 1.
        max_num_requests: in flight at once.
        min_priority: the lowest (most urgent) priority that its requests may ask for.
        min_ttft_slo_s, min_tpot_slo_s: the tightest SLOs that its requests may ask for; None: those
            of their model.
    """

    weight: Annotated[float, Meta(gt=0)] = 1.0
    max_num_requests: Positive | None = None
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None  # of prompts and answers
    min_priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    min_ttft_slo_s: Annotated[float, Meta(gt=0)] | None = None
    min_tpot_slo_s: Annotated[float, Meta(gt=0)] | None = None

    @property
    def is_limited(self) -> bool:
        limits = (self.max_num_requests, self.requests_per_minute, self.tokens_per_minute)
        return any(limit is not None for limit in limits)


class PromptJudge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Predicts from a prompt's tokens how likely a model is unsure (`router/prompt_judge.py`).

    Attributes:
        bias, weights: of a logistic regression; a weight for each token id.
        start_above: log-odds above which a request starts on the next tier. None: none does.
    """

    bias: float
    weights: tuple[tuple[int, float], ...] = ()
    start_above: float | None = None


class CascadeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Small model first: how `model: "auto"` is answered (docs/cascade.md).

    An answer begins on the first tier. Its first `num_judged_tokens` tokens are held back and
    judged by their log-probabilities: if the signal is at the tier's threshold or above, the answer
    stays there; otherwise the request goes to the next tier. `disagg cascade calibrate` finds
    thresholds, and when fewer tokens, or none, are enough.

    Attributes:
        signal: the least or the mean log-probability of a token, or the least margin between it
            and the likeliest other token.
        thresholds: one for each tier but the last, in nats. The default is that of the two
            bundled models, for each.
        leads: one for each tier but the last, in nats of log-odds. An answer is released after k
            tokens if its signal is above the threshold by a k-th of it; empty: never before
            all judged tokens.
        prompt_judges: one for each tier but the last; empty: every answer begins on the first.
        max_shift: the most by which load moves a threshold, up or down; 0: not at all.
    """

    signal: Signal = "minimum"
    num_judged_tokens: Positive = 16
    thresholds: tuple[float, ...] = (-0.1,)
    leads: tuple[Annotated[float, Meta(ge=0.0)], ...] = ()
    prompt_judges: tuple[PromptJudge, ...] = ()
    max_shift: Annotated[float, Meta(ge=0.0)] = 0.0


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole deployment. Tiers are in the order of their models' sizes, smallest first."""

    tiers: Annotated[tuple[TierConfig, ...], Meta(min_length=1)]
    cascade: CascadeConfig | None = None  # over all tiers; None: clients name their model
    http: HttpConfig = HttpConfig()
    tenants: dict[str, TenantConfig] = {}  # of those with a name in `http.api_keys`, or "default"
    num_ingress: Positive = 1
    transport: Literal["nixl", "local"] = "nixl"
    transfer_prior: TransferPrior | None = None  # None: an ordinary network is assumed
    redis_url: str | None = None  # None: no store; the CLI starts an embedded server
    cold_tier_nbytes: Annotated[int, Meta(ge=0)] = 1 << 30  # 0: no cold KV tier
    cluster_key: str = ""  # shared secret of the links, never empty; the CLI draws one
    insecure: bool = False  # True: allow weak secrets, and an endpoint without a key
    link_host: str | None = None  # where workers listen; None: the node's own address
    transfer_interface: str | None = None  # where UCX listens; None: where `link_host` is
    ucx: dict[
        str, str
    ] = {}  # "TLS": "rc,cuda" is UCX_TLS=rc,cuda for the workers (docs/security.md)
    prefix_index_nbytes: Positive = 1 << 30  # of each ingress, at most; it grows with the fleet
    max_num_workers: Positive | None = None  # of all pools together, where some are autoscaled
    drain_s: Annotated[float, Meta(ge=0, le=86_400)] = 60.0  # in which streams may end at a stop

    def tier(self, name: str) -> TierConfig:
        for tier in self.tiers:
            if tier.name == name:
                return tier
        known = ", ".join(tier.name for tier in self.tiers)
        raise StartupError(f"No tier is named {name!r}; configured: {known}.", param="model")

    def tenant(self, name: str) -> TenantConfig:
        return self.tenants.get(name) or self.tenants.get(DEFAULT_TENANT) or TenantConfig()

    def tenant_class(self, name: str) -> str:
        """The tenant's label in metrics. All tenants without settings of their own share one."""
        return name if name in self.tenants else DEFAULT_TENANT
