"""The format and the number of an engine's KV blocks. Must not know where their memory is.

Loads torch only to ask a GPU for its compute capability.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from disagg.config import EngineConfig
from disagg.engine.device.choices import DeviceType
from disagg.errors import NotEnoughMemory, StartupError
from disagg.host import read_memory
from disagg.kernels.kv_pages import FORMATS, SCALE_NBYTES, KVFormat
from disagg.kernels.recurrent_state import StateShape
from disagg.kv_groups import MAX_GROUPS, STATE, KVGroups, LayerGroups, group_with_states, one_group
from disagg.kvtransfer.slab import BlockPart
from disagg.models.model_config import ModelConfig
from disagg.models.share import WHOLE, Share

LAYOUT_VERSION = 2
CPU_CACHE_NBYTES = 512 << 20  # default: enough to try a model, and small enough for a laptop
CPU_MEMORY_SHARE = 8  # one full-length sequence may use 1 / 8 of the host's memory


@dataclass(frozen=True, slots=True)
class KVShape:
    """The format of a block: everything that must match for its bytes to be interchangeable.

    num_layers: layers of a block.
    num_kv_heads: number of the model's KV heads.
    layers: the groups of the model's layers; None: one group with full attention.
    num_vectors: vectors per token, layer and KV head: 2 (a key and a value), or 1 (a latent).
    states: the recurrent state of a sequence, in blocks as large; None: it has none.
    share: the part of the heads that the rank has.
    """

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    format: KVFormat
    fingerprint: str  # the model's
    share: Share = WHOLE
    num_vectors: int = 2
    layers: LayerGroups | None = None
    states: StateShape | None = None

    @classmethod
    def from_model(
        cls,
        model: ModelConfig,
        fingerprint: str,
        block_size: int,
        format: KVFormat,
        share: Share = WHOLE,
        layers: LayerGroups | None = None,
    ) -> KVShape:
        layers = layers or (one_group(model.kv_sources) if model.num_shared_layers else None)
        shape = cls(
            num_layers=model.num_kv_layers if layers is None else layers.num_layers,
            num_kv_heads=model.num_kv_heads,
            share=share,
            block_size=block_size,
            head_dim=model.head_dim,
            format=format,
            fingerprint=fingerprint,
            num_vectors=model.num_vectors,
            layers=layers,
            states=model.states,
        )
        return shape if model.states is None else shape._with_states(model, model.states)

    def _with_states(self, model: ModelConfig, states: StateShape) -> KVShape:
        """The shape with groups of layers, as many for states as a state has blocks.

        Raises:
            StartupError: there are too many, because blocks are small.
        """
        held = states.heads_in(self.block_nbytes)
        num_blocks = states.num_blocks(self.block_nbytes) if held else MAX_GROUPS
        if num_blocks >= MAX_GROUPS:
            nbytes = max(states.heads.state_nbytes, -(-states.nbytes // (MAX_GROUPS // 2)))
            least = -(-nbytes * self.block_size // self.block_nbytes)
            raise StartupError(
                f"block_size = {self.block_size} is too small for this model: the recurrent state"
                f" of a sequence ({states.nbytes} bytes) lies in blocks of KV, which have"
                f" {self.block_nbytes} bytes, and may have {MAX_GROUPS - 1} of them, each for whole"
                f" heads of {states.heads.state_nbytes} bytes. Set block_size ="
                f" {1 << (least - 1).bit_length()}.",
                param="block_size",
            )
        layers = group_with_states(model.num_layers, model.delta_layers, num_blocks)
        return replace(self, layers=layers)

    @property
    def groups(self) -> KVGroups:
        windows = (None,) if self.layers is None else self.layers.windows
        return KVGroups(windows, self.block_size)

    @property
    def own_heads(self) -> range:
        """The model's KV heads that the rank has."""
        return range(*self.share.kv_heads(self.num_kv_heads))

    @property
    def num_own_heads(self) -> int:
        return len(self.own_heads)

    @property
    def block_nbytes(self) -> int:
        """Bytes of a block with the rank's heads."""
        return self.num_own_heads * self._head_nbytes

    @property
    def part(self) -> BlockPart | None:
        """The part of a whole block that the rank has; None: all of it."""
        if self.share.num_ranks == 1:
            return None
        num_copies = max(1, self.share.num_ranks // self.num_kv_heads)
        return BlockPart(
            begin=self.own_heads.start * self._head_nbytes,
            whole_nbytes=self.num_kv_heads * self._head_nbytes,
            copy=self.share.rank % num_copies,
        )

    @property
    def _head_nbytes(self) -> int:
        """Bytes of a head in a block. Its layers are contiguous (see `kernels.kv_pages`)."""
        page_nbytes = self.format.page_nbytes(self.block_size, self.head_dim)
        return self.num_vectors * self.num_layers * page_nbytes

    @property
    def layout(self) -> str:
        """The fingerprint of whole blocks, which is the same on all ranks."""
        sizes = self.num_kv_heads, self.num_layers, self.num_vectors, self.block_size, self.head_dim
        shape = "x".join(map(str, sizes))
        format = self.format.name
        if self.format.has_scales:
            format += f"+scale{8 * SCALE_NBYTES}"  # scales follow the values of each page
        if self.groups.num_partial:
            names = {None: "all", STATE: "state"}
            shape += "".join(f"+{names.get(window, window)}" for window in self.groups.windows)
        return f"disagg-kv-{LAYOUT_VERSION}:{self.fingerprint}:{format}:{shape}"


def choose_format(
    config: EngineConfig, dtype: str, device: DeviceType, *, is_latent: bool = False
) -> KVFormat:
    """The requested KV format; by default the dtype in which the model computes.

    Args:
        dtype: the dtype in which the model computes.
        is_latent: whether the cache keeps latents (`ModelConfig.latent`).

    Raises:
        StartupError: this dtype or device does not support the format; lists the possible formats.
    """
    own = FORMATS[dtype]
    if config.kv_cache_dtype in ("auto", own.name):
        return own
    if is_latent:
        raise StartupError(
            f"kv_cache_dtype = {config.kv_cache_dtype!r} is not supported for multi-head latent"
            f" attention, whose cache is small already. Possible here: auto, {own.name}.",
            param="kv_cache_dtype",
        )
    reason = f"a model in {own.name} stores its KV in that dtype, or quantised with scales"
    asked = FORMATS[config.kv_cache_dtype]
    capability = _capability() if device == "cuda" else None
    scaled = [each for each in FORMATS.values() if each.has_scales]
    possible = [each.name for each in scaled if capability is None or capability >= each.capability]
    possible.insert(0, own.name)
    if capability is not None and capability < asked.capability:
        (major, minor), least = capability, "{}{}".format(*asked.capability)
        reason = f"this GPU is sm_{major}{minor}, and {asked.name} needs sm_{least} or later"
    if asked.name not in possible:
        raise StartupError(
            f"kv_cache_dtype = {config.kv_cache_dtype!r} is not possible with dtype = {own.name!r}"
            f" on {device}: {reason}. Possible here: auto, {', '.join(possible)}.",
            param="kv_cache_dtype",
        )
    return asked


def choose_num_blocks(
    config: EngineConfig,
    shape: KVShape,
    max_model_len: int,
    room_nbytes: int | None,
    max_num_seqs: int,
) -> int:
    """How many blocks the cache has.

    Args:
        room_nbytes: GPU memory for KV; None on a CPU.
        max_num_seqs: most sequences that run at the same time.

    Raises:
        NotEnoughMemory: one sequence of `max_model_len` tokens does not fit.
    """
    num_needed = shape.groups.num_at_most(max_model_len)
    full_nbytes = num_needed * shape.block_nbytes
    if config.num_gpu_blocks_override is not None:
        num_blocks = config.num_gpu_blocks_override
        source = f"num_gpu_blocks_override = {num_blocks}"
    elif config.kv_cache_memory_bytes is not None:
        num_blocks = config.kv_cache_memory_bytes // shape.block_nbytes
        source = f"kv_cache_memory_bytes = {config.kv_cache_memory_bytes}"
    elif room_nbytes is not None:
        num_blocks = max(0, room_nbytes) // shape.block_nbytes
        source = (
            f"the {max(0, room_nbytes)} bytes that gpu_memory_utilization ="
            f" {config.gpu_memory_utilization:g} leaves beside the weights and the largest step"
        )
    else:
        allowed = read_memory()[0] // CPU_MEMORY_SHARE
        nbytes = max(CPU_CACHE_NBYTES, full_nbytes if full_nbytes <= allowed else 0)
        num_blocks = min(nbytes // shape.block_nbytes, max_num_seqs * num_needed)
        source = f"the {CPU_CACHE_NBYTES} bytes that a cache on a CPU has by default"
    if num_blocks < num_needed:
        flag = _flag(config, on_gpu=room_nbytes is not None)
        raise NotEnoughMemory(
            f"One sequence of max_model_len = {max_model_len} tokens needs {num_needed} KV blocks"
            f" of {shape.block_size} tokens and {shape.block_nbytes} bytes ({shape.format.name}),"
            f" {full_nbytes} bytes in all; {source} give {num_blocks} blocks. Lower max_model_len"
            f" to {shape.groups.longest(num_blocks)} or less, or raise {flag}"
            f"{_smaller_format(shape)}.",
            param=flag,
        )
    return num_blocks


def _flag(config: EngineConfig, on_gpu: bool) -> str:
    if config.num_gpu_blocks_override is not None:
        return "num_gpu_blocks_override"
    if config.kv_cache_memory_bytes is None and on_gpu:
        return "gpu_memory_utilization"
    return "kv_cache_memory_bytes"


def _smaller_format(shape: KVShape) -> str:
    smaller = replace(shape, format=FORMATS["int8"])
    if shape.format.has_scales or shape.num_vectors == 1:
        return ""
    return f", or set kv_cache_dtype = int8 ({smaller.block_nbytes} bytes a block)"


def _capability() -> tuple[int, int]:
    """The GPU's compute capability."""
    import torch

    return torch.cuda.get_device_capability()
