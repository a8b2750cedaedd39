"""Compares kernels that prepare a step on a GPU with the host's way: rows of `gpu_parity`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from disagg.kernels.gpu.attention_work import (
    KEY_TILE,
    MAX_SHORT_QUERIES,
    MAX_SHORT_ROWS,
    AttentionWork,
    attention_work,
)
from disagg.kernels.gpu.step_arrays import StepArrays

NUM_SLOTS, NUM_SEQS, NUM_UNREAD, MAX_NUM_BLOCKS = 40, 24, 10, 200
GROUP, NUM_PROGRAMS = 4, 49  # of Llama-3-8B, on an H200


def check_step_arrays(device: torch.device) -> dict[str, int]:
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
    arrays = StepArrays.empty(NUM_SLOTS, 256, device)
    on_device = tables.to(device, copy=True)
    arrays.fill(
        torch.cat((slots, *per_token, known, cells, blocks)).to(device),
        on_device,
        chosen.to(device),
        num_seqs=NUM_SEQS,
        num_tokens=NUM_SEQS,
        num_unread=NUM_UNREAD,
        num_changes=len(cells),
        num_logits=NUM_SEQS,
        are_decodes=True,
    )
    tables.view(-1)[cells] = blocks.int()
    counted = torch.arange(NUM_SEQS)
    idle = NUM_SLOTS - NUM_SEQS
    pairs = {
        "tables": (on_device, tables),
        "token_ids": (arrays.token_ids[:NUM_SEQS], torch.cat((chosen[slots[:NUM_UNREAD]], known))),
        "positions": (arrays.positions[:NUM_SEQS], per_token[0]),
        "slots": (arrays.slots[:NUM_SEQS], per_token[1]),
        "context_lens": (arrays.context_lens[:NUM_SEQS], per_token[2].int()),
        "table_rows": (arrays.table_rows[:NUM_SEQS], slots),
        "query_start": (arrays.query_start[: NUM_SEQS + 1], torch.arange(NUM_SEQS + 1).int()),
        "logits_rows": (arrays.logits_rows[:NUM_SEQS], counted),
        "idle slots": (arrays.slots[NUM_SEQS:], torch.full((256 - NUM_SEQS,), -1)),
        "idle contexts": (arrays.context_lens[NUM_SEQS:], torch.zeros(idle + 1).int()),
        "idle queries": (arrays.query_start[NUM_SEQS + 1 :], torch.full((idle + 1,), 256).int()),
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
        ArithmeticError: a key is seen twice or by no piece.
    """
    contexts = [97 * row % 4001 for row in range(70)] + [254, 255, 256, 8191, 0, 63]
    decodes = [(1, cached) for cached in contexts]
    mixed = [(n, 700 * i) for i, n in enumerate([1, 5, 60, 8, 9, 100, 1, 2])] + [(16, 30_000)]
    found = {}
    for window in (None, 1000):
        for name, lens in (("decodes", decodes), ("mixed", mixed)):
            are_decodes = name == "decodes"
            work = check_cut(lens, 4, GROUP, window, NUM_PROGRAMS, device, are_decodes=are_decodes)
            num_pieces = sum(int(launch.counts[:2].sum()) for launch in work.launches)
            found[f"{name}, window {window}"] = num_pieces
    return found


def check_cut(
    lens: Sequence[tuple[int, int]],
    num_idle: int,
    group: int,
    window: int | None,
    num_programs: int,
    device: torch.device,
    *,
    are_decodes: bool = False,
) -> AttentionWork:
    """Cut a step as a graph does, after another one in the same buffers, and look at the pieces.

    Args:
        lens: of each sequence, its tokens in the step, and those with KV before.
        num_idle: tokens of no sequence.

    Raises:
        ArithmeticError: a query does not see each of its keys once.
    """
    query_lens = [num_new for num_new, _ in lens]
    num_tokens, num_rows = sum(query_lens) + num_idle, len(lens) + 3
    short_queries = 1 if are_decodes else min(MAX_SHORT_QUERIES, MAX_SHORT_ROWS // group)
    work = attention_work(
        num_rows,
        num_tokens,
        group,
        window,
        num_programs,
        device,
        short_queries=short_queries,
        has_long=not are_decodes,
    )
    before = [0, num_tokens, *[num_tokens] * (num_rows - 1)]
    work.cut(_ints(before, device), _ints([9999] * num_rows, device), num_tokens)
    starts = [*accumulate(query_lens, initial=0), *[num_tokens + 99] * 3]
    contexts = [new + cached for new, cached in lens] + [0] * 3
    work.cut(_ints(starts, device), _ints(contexts, device), num_tokens)

    wanted = {
        (sequence, query): cached + query + 1
        for sequence, (new, cached) in enumerate(lens)
        for query in range(new)
    }
    wanted |= {(len(lens), query): 0 for query in range(num_idle)}  # zeros
    for launch in work.launches:
        num_first, num_last, num_reductions, num_partials = launch.counts.tolist()
        if num_partials > launch.num_partials or num_first > num_programs:
            raise ArithmeticError(f"too many pieces: {launch.counts.tolist()}")
        pieces = launch.pieces.tolist()
        pieces = pieces[:num_first] + pieces[len(pieces) - num_last :]
        merges = {tuple(each[:3]): each[3:] for each in launch.reductions.tolist()[:num_reductions]}
        tiles: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
        for *queries, start, end, partial in pieces:
            tiles.setdefault(tuple(queries), []).append((start, end, partial))
        for (sequence, first, num), cuts in tiles.items():
            cuts.sort()
            context = contexts[sequence] if sequence < len(contexts) else 0
            position = context - query_lens[sequence] + first if context else 0
            oldest = 0 if window is None else max(position - window + 1, 0)
            first_partial, count = merges.pop((sequence, first, num), (-1, 1))
            partials = [first_partial + i if count > 1 else -1 for i in range(count)]
            is_right = (
                num * group <= launch.rows
                and cuts[0][0] <= oldest < max(cuts[0][0] + KEY_TILE, 1)
                and cuts[-1][1] == (position + num if context else 0)
                and all(left[1] == right[0] for left, right in pairwise(cuts))
                and all(start % KEY_TILE == 0 for start, *_ in cuts)
                and [partial for *_, partial in cuts] == partials
            )
            if not is_right:
                raise ArithmeticError(f"pieces of tile {sequence, first, num}: {cuts}")
            for query in range(first, first + num):
                if wanted.pop((sequence, query), None) is None:
                    raise ArithmeticError(f"query {query} of sequence {sequence} is in two tiles")
        if merges:
            raise ArithmeticError(f"reductions of no tile: {merges}")
    if wanted:
        raise ArithmeticError(f"queries in no tile: {[*wanted]}")
    return work


def _ints(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
