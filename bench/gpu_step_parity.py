"""Compares kernels that prepare a step on a GPU with the host's way: rows of `gpu_parity`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from itertools import accumulate

import torch
from torch import Tensor

from disagg.kernels.gpu.attention_work import cut
from disagg.kernels.gpu.decode_inputs import DecodeInputs
from disagg.kernels.gpu.fixed_mixed_work import MAX_SHORT_QUERIES, FixedMixedWork
from disagg.kernels.gpu.fixed_work import FixedWork
from disagg.kernels.gpu.paged_work import KEY_TILE, Launch

NUM_SLOTS, NUM_SEQS, NUM_UNREAD, NUM_COLUMNS, MAX_NUM_BLOCKS = 40, 24, 10, 140, 200
GROUP, NUM_PROGRAMS = 4, 49  # of Llama-3-8B, on an H200


def check_decode_inputs(device: torch.device) -> dict[str, int]:
    """A batch of decodes, and the block tables that change with it.

    Raises:
        ArithmeticError: something else was written.
    """
    generator = torch.Generator().manual_seed(4)

    def draw(most: int, *shape: int) -> Tensor:
        return torch.randint(1, most, shape, generator=generator)

    slots = torch.randperm(NUM_SLOTS, generator=generator)[:NUM_SEQS]
    tables, chosen = draw(9999, NUM_SLOTS, MAX_NUM_BLOCKS).int(), draw(9999, NUM_SLOTS)
    per_token = [draw(9999, NUM_SEQS) for _ in range(3)]  # positions, slots of KV, ends
    known = draw(9999, NUM_SEQS - NUM_UNREAD)
    changed = draw(MAX_NUM_BLOCKS, NUM_SEQS)  # a column of each, and the first one
    cells = torch.cat((slots * MAX_NUM_BLOCKS + changed, slots * MAX_NUM_BLOCKS))
    blocks = draw(9999, len(cells))
    inputs = DecodeInputs.empty(NUM_SLOTS, MAX_NUM_BLOCKS, device)
    on_device = tables.to(device, copy=True)
    inputs.fill(
        torch.cat((slots, *per_token, known, cells, blocks)).to(device),
        on_device,
        chosen.to(device),
        num_seqs=NUM_SEQS,
        num_unread=NUM_UNREAD,
        num_changes=len(cells),
        num_columns=NUM_COLUMNS,
    )
    tables.view(-1)[cells] = blocks.int()
    token_ids, positions, kv_slots, ends, columns = inputs.first(NUM_SEQS)
    pairs = {
        "tables": (on_device, tables),
        "token_ids": (token_ids, torch.cat((chosen[slots[:NUM_UNREAD]], known))),
        "positions": (positions, per_token[0]),
        "slots": (kv_slots, per_token[1]),
        "context_lens": (ends, per_token[2].int()),
        "block_tables": (columns[:, :NUM_COLUMNS], tables[slots, :NUM_COLUMNS]),
        "idle slots": (inputs.slots[NUM_SEQS:], torch.full((NUM_SLOTS - NUM_SEQS,), -1)),
    }
    wrong = [
        name for name, (found, wanted) in pairs.items() if not torch.equal(found.cpu(), wanted)
    ]
    if wrong:
        raise ArithmeticError(f"differs from what torch makes: {', '.join(wrong)}")
    return {"sequences": NUM_SEQS, "changes": len(cells)}


def check_cuts(device: torch.device) -> dict[str, int]:
    """The attention work of captured steps.

    Raises:
        ArithmeticError: a piece or a reduction is another one than the host's.
    """
    contexts = [1 + 97 * row % 4001 for row in range(70)] + [255, 256, 257, 8192, 1, 64]
    found = {}
    for window in (None, 1000):
        fixed = FixedWork(80, GROUP, window, NUM_PROGRAMS, device)
        slots = torch.where(torch.arange(80) < len(contexts), 0, -1)
        fixed.cut(slots.to(device), _ints([*contexts, 9, 9, 9, 9], device))
        rows = [(row, 1, context) for row, context in enumerate(contexts)]
        found[f"decodes, window {window}"] = _compare(fixed.work.launches[0], rows, window)

        query_lens = [1, 5, 60, 8, 9, 100, 1, 2]
        lens = [(n, 700 * i + n) for i, n in enumerate(query_lens)]
        mixed = FixedMixedWork(16, 256, GROUP, window, NUM_PROGRAMS, device)
        starts = [*accumulate(query_lens, initial=0), 256, *[7] * 8]
        num_seqs = len(query_lens)
        context_lens = [*(context for _, context in lens), *[2100] * 8]
        mixed.cut(_ints(starts, device), _ints(context_lens, device), num_seqs)
        short, long = mixed.work.launches
        few = [(i, *pair) for i, pair in enumerate(lens) if pair[0] <= MAX_SHORT_QUERIES]
        many = [(i, *pair) for i, pair in enumerate(lens) if pair[0] > MAX_SHORT_QUERIES]
        found[f"mixed, window {window}"] = _compare(short, few, window)
        pieces, _ = cut(many, window, KEY_TILE, 1, long.rows // GROUP, least_keys=1 << 20)
        wanted = {(p.sequence, p.first_query, p.num_queries, p.start, p.end) for p in pieces}
        is_idle = num_seqs
        made = {tuple(piece[:5]) for piece in long.pieces.tolist() if piece[0] != is_idle}
        if made - {(0, 0, 0, 0, 0)} != wanted:
            raise ArithmeticError(f"long pieces differ with a window of {window}")
    return found


def _compare(launch: Launch, rows: Sequence[tuple[int, int, int]], window: int | None) -> int:
    """Returns the number of pieces."""
    pieces, reductions = cut(rows, window, KEY_TILE, NUM_PROGRAMS, MAX_SHORT_QUERIES)
    wanted = [[p.sequence, 0, p.num_queries, p.start, p.end, p.partial] for p in pieces]
    merged = [list(astuple(reduction)) for reduction in reductions]
    if launch.pieces.tolist()[: len(wanted)] != wanted:
        raise ArithmeticError(f"pieces differ with a window of {window}")
    if launch.reductions.tolist()[: len(merged)] != merged:
        raise ArithmeticError(f"reductions differ with a window of {window}")
    return len(wanted)


def _ints(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
