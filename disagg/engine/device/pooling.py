"""What requests have of their prompt's last token instead of an answer: see `messages.Pooling`."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor
from torch.nn import functional

from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.speculation import Continued
from disagg.kernels.uploads import upload


def pooled_rows(sequences: SequenceOf[Continued]) -> list[tuple[int, Sequence]]:
    """The rows of a step's logits that belong to requests without an answer."""
    return [
        (row, each)
        for row, each in enumerate(sequences)
        if isinstance(each, Sequence) and each.pooling is not None
    ]


def keep_pooled(pooled: SequenceOf[tuple[int, Sequence]], hidden: Tensor, logits: Tensor) -> None:
    """Write what each request asks for to `Sequence.pooled`.

    Args:
        hidden: [num_rows, hidden_size], after the last norm.
        logits: float32 [num_rows, vocab_size].
    """
    embedded = []
    for row, sequence in pooled:
        assert sequence.pooling is not None
        token_ids = sequence.pooling.token_ids
        if token_ids:
            columns = upload(token_ids, torch.int64, logits.device)
            sequence.pooled = _to_bytes(logits[row].index_select(0, columns))
        else:
            embedded.append((row, sequence))
    if embedded:
        rows = upload([row for row, _ in embedded], torch.int64, hidden.device)
        vectors = functional.normalize(hidden.index_select(0, rows).float(), dim=-1).cpu()
        for (_, sequence), vector in zip(embedded, vectors, strict=True):
            sequence.pooled = _to_bytes(vector)


def _to_bytes(numbers: Tensor) -> bytes:
    return numbers.cpu().numpy().astype("<f4", copy=False).tobytes()
