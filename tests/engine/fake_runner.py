"""A runner whose KV can be checked: it notices wrong, stale, foreign and missing blocks.

The KV of a token is 8 bytes: a digest of the token and of the KV of the token before it, *as read
from memory*. The next token is a digest of all KV that the sequence's blocks hold, again as read.
So one wrong byte in one block of one sequence changes its tokens, and `expected_tokens` says, with
no blocks at all, what they should have been. With groups of layers each has KV of its own, and of
one with a window the next token sees as much. A recurrent state is the digest of the last token
that was computed in a row, at the beginning of the row's block.

The slab is real memory (`FakeKV.base_address`, `FakeKV.block_nbytes`), so that a transport can copy
blocks of it between engines in the disaggregation tests.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

from disagg.engine.sched.block_pool import require
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step import Choose, Results, Sampled, SampledToken, StepPlan
from disagg.kv_groups import NO_BLOCK, STATE, KVGroups, Window

SLOT_NBYTES = 8
VOCAB_SIZE = 211
_NO_KV = bytes(SLOT_NBYTES)


def slot_digest(before: bytes, token_id: int, group: int = 0) -> bytes:
    """KV of a token whose predecessor has KV `before` (zeros for the first)."""
    number = token_id + (group << 24)
    return hashlib.blake2b(before + number.to_bytes(4, "little"), digest_size=8).digest()


def next_token(kv: bytes, seed: int) -> int:
    digest = hashlib.blake2b(kv + seed.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") % VOCAB_SIZE


def expected_tokens(
    prompt: SequenceOf[int],
    max_tokens: int,
    stop_ids: frozenset[int] = frozenset(),
    seed: int = 0,
    windows: SequenceOf[Window] = (None,),
) -> list[int]:
    """The output that any engine must give for `prompt`, whatever its blocks went through."""
    kv = [bytearray() for _ in windows]
    output: list[int] = []
    pending = list(prompt)
    while len(output) < max_tokens:
        for token_id in pending:
            for group, own in enumerate(kv):
                own += slot_digest(bytes(own[-SLOT_NBYTES:]) or _NO_KV, token_id, group)
        seen = (
            own if window is None else own[-(window or 1) * SLOT_NBYTES :]
            for own, window in zip(kv, windows, strict=True)
        )
        output.append(next_token(b"".join(seen), seed))
        if output[-1] in stop_ids:
            break
        pending = output[-1:]
    return output


def draft_of(
    prompt: SequenceOf[int],
    num_right: int,
    num_wrong: int,
    seed: int = 0,
    windows: SequenceOf[Window] = (None,),
) -> tuple[int, ...]:
    """A proposed continuation that any engine agrees with for `num_right` tokens and no longer.

    It goes on after tokens that end an answer.
    """
    right = expected_tokens(prompt, num_right + num_wrong, frozenset(), seed, windows)
    return tuple(
        token if place < num_right else (token + 1) % VOCAB_SIZE
        for place, token in enumerate(right)
    )


class Work(NamedTuple):
    sequence: Sequence
    num_tokens: int


def work_of(plan: StepPlan) -> list[Work]:
    return [*map(Work, plan.sequences, plan.query_lens)]


class FakeKV:
    """A slab of `num_blocks` blocks in host memory, filled with rubbish to begin with."""

    def __init__(
        self, num_blocks: int, block_size: int, windows: tuple[Window, ...] = (None,)
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.windows = windows
        self.block_nbytes = block_size * SLOT_NBYTES
        self.layout = f"fake:{block_size}:{windows}"
        self._memory = (ctypes.c_ubyte * (num_blocks * self.block_nbytes))()
        self.bytes = memoryview(self._memory).cast("B")
        self.bytes[:] = b"\xee" * len(self.bytes)

    @property
    def base_address(self) -> int:
        return ctypes.addressof(self._memory)

    def read_block(self, block_id: int) -> bytes:
        start = block_id * self.block_nbytes
        return bytes(self.bytes[start : start + self.block_nbytes])

    def read_blocks(self, block_ids: SequenceOf[int]) -> list[bytes]:
        return [self.read_block(block_id) for block_id in block_ids]

    def write_block(self, block_id: int, raw: bytes) -> None:
        start = block_id * self.block_nbytes
        self.bytes[start : start + self.block_nbytes] = raw

    def read(self, table: SequenceOf[int], num_tokens: int) -> bytes:
        """All KV that the token at position `num_tokens` - 1 sees, of a sequence with this block
        table."""
        return b"".join(
            self._read(
                table,
                group,
                0 if window is None else max(0, num_tokens - (window or 1)),
                num_tokens,
            )
            for group, window in enumerate(self.windows)
        )

    def _read(self, table: SequenceOf[int], group: int, first: int, end: int) -> bytes:
        """A group's KV of positions [first, end)."""
        size, rows = self.block_size, table[group :: len(self.windows)]
        held = rows[first // size : -(-end // size)]
        require(NO_BLOCK not in held, "a block that a token sees is gone")
        raw = b"".join(map(self.read_block, held))
        if self.windows[group] == STATE:
            return raw[:SLOT_NBYTES]
        skipped = first // size * size
        return raw[(first - skipped) * SLOT_NBYTES : (end - skipped) * SLOT_NBYTES]

    def _write(self, table: SequenceOf[int], group: int, position: int, digest: bytes) -> None:
        block_id = table[position // self.block_size * len(self.windows) + group]
        require(block_id != NO_BLOCK, "a token has no block for its KV")
        start = block_id * self.block_nbytes
        if self.windows[group] != STATE:
            start += position % self.block_size * SLOT_NBYTES
        self.bytes[start : start + SLOT_NBYTES] = digest

    def compute(self, sequence: Sequence, first: int, end: int) -> None:
        """Fill in the KV of positions [first, end), reading that of position first - 1."""
        tokens = [*sequence.tokens, *sequence.draft]
        self.fill(sequence.block_ids, first, tokens[first:end])

    def fill(self, block_ids: SequenceOf[int], first: int, tokens: SequenceOf[int]) -> None:
        """The same for `tokens`, which begin at position `first`."""
        for group in range(len(self.windows)):
            before = self._read(block_ids, group, first - 1, first) if first else _NO_KV
            for position, token_id in enumerate(tokens, first):
                before = slot_digest(before, token_id, group)
                is_last = position == first + len(tokens) - 1
                if is_last or self.windows[group] != STATE:
                    self._write(block_ids, group, position, before)

    def copy_computed(
        self, tokens: SequenceOf[int], groups: KVGroups, block_ids: SequenceOf[int]
    ) -> None:
        """Write the KV of a prompt, computed elsewhere, to the blocks that are needed of it."""
        num_blocks = groups.num_rows(len(tokens)) * groups.num_groups
        elsewhere = FakeKV(num_blocks, self.block_size, self.windows)
        elsewhere.fill(range(num_blocks), 0, tokens)
        for index, block_id in zip(groups.needed(len(tokens)), block_ids, strict=True):
            self.write_block(block_id, elsewhere.read_block(index))


class FakeRunner:
    """Computes plans in `kv`. Items run last to first, so none can lean on its neighbours."""

    def __init__(self, kv: FakeKV) -> None:
        self.kv = kv
        self.num_computed = 0  # tokens, ever

    def run(self, plan: StepPlan) -> list[Sampled]:
        sampled = [
            self._advance(work.sequence, work.num_tokens) for work in reversed(work_of(plan))
        ]
        return sampled[::-1]

    def _advance(self, sequence: Sequence, num_tokens: int) -> Sampled:
        first = sequence.num_computed
        end = first + num_tokens
        self.num_computed += num_tokens
        self.kv.compute(sequence, first, end)
        num_known = len(sequence.tokens)
        if end < num_known:
            return None
        if end == num_known:
            return self._next(sequence, end).token_id
        return tuple(self._next(sequence, position) for position in range(num_known, end + 1))

    def _next(self, sequence: Sequence, position: int) -> SampledToken:
        kv = self.kv.read(sequence.block_ids, position)
        return SampledToken(next_token(kv, self.seed_of(sequence)))

    def seed_of(self, sequence: Sequence) -> int:
        return sequence.sampling.seed


class FakeDevice(FakeRunner):
    """Computes what was launched only when somebody waits for it, which is as late as can be.

    So whatever the host does too early with blocks or tokens of a step shows.
    """

    def __init__(self, kv: FakeKV) -> None:
        super().__init__(kv)
        self.log: list[str] = []  # numbers of steps, launched and read
        self._num_launched = 0
        self._chosen: dict[str, SampledToken] = {}  # by the step launched last, once it has run

    def launch(self, plan: StepPlan) -> Choose:
        before, chosen = self._chosen, dict[str, SampledToken]()
        self._chosen = chosen
        self._num_launched = number = self._num_launched + 1
        self.log.append(f"launch {number}")
        firsts = plan.first_positions()
        rows = [self._row(plan, i, firsts[i]) for i in range(len(plan.sequences))]

        def choose() -> Results:
            for sequence, row in zip(plan.sequences, rows, strict=True):
                if sequence.needs_host:
                    self.log.append(f"choose {number}")
                    row.is_late = len(sequence.tokens) < row.num_known
            return read

        def read() -> list[Sampled]:
            self.log.append(f"read {number}")
            sampled = [self._computed(row, before, chosen) for row in reversed(rows)]
            return sampled[::-1]

        return choose

    def _computed(
        self, row: _Row, before: dict[str, SampledToken], chosen: dict[str, SampledToken]
    ) -> Sampled:
        tokens = row.tokens or [before[row.request_id].token_id]
        end = row.first + len(tokens)
        self.kv.fill(row.block_ids, row.first, tokens)
        sampled = []
        for position in range(row.num_known, end + 1):
            token_id = next_token(self.kv.read(row.block_ids, position), row.seed)
            sampled.append(SampledToken((token_id + row.is_late) % VOCAB_SIZE))
        if len(sampled) > 1:
            return tuple(sampled)
        if not sampled:
            return None
        chosen[row.request_id] = sampled[0]
        return sampled[0].token_id

    def _row(self, plan: StepPlan, i: int, first: int) -> _Row:
        """What a device is told of a sequence, as it is now. Its next token may not be known."""
        sequence = plan.sequences[i]
        end = first + plan.query_lens[i]
        return _Row(
            sequence.request_id,
            [*sequence.block_ids],
            first,
            [*sequence.tokens, *sequence.draft][first:end] if i >= plan.num_unread else [],
            max(len(sequence.tokens), first + 1 if i < plan.num_decodes else 0),
            self.seed_of(sequence),
        )


@dataclass
class _Row:
    """One sequence of a launched step.

    tokens: what is computed from position `first` on; empty: the token of the step before.
    num_known: tokens of the sequence without a draft.
    is_late: whether the host needed a token that it did not know when the next one was chosen. The
        token is wrong then.
    """

    request_id: str
    block_ids: list[int]
    first: int
    tokens: list[int]
    num_known: int
    seed: int
    is_late: bool = False
