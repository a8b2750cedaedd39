"""What requests have of their prompt's last token instead of an answer: see `messages.Pooling`."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor
from torch.nn import functional

from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.speculation import Continued
from disagg.kernels.uploads import upload
from disagg.messages import Pooling


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
    alike: dict[Pooling, list[tuple[int, Sequence]]] = {}  # the host waits once for each kind
    for row, sequence in pooled:
        assert sequence.pooling is not None
        alike.setdefault(sequence.pooling, []).append((row, sequence))
    for pooling, members in alike.items():
        rows = upload([row for row, _ in members], torch.int64, hidden.device)
        if pooling.token_ids:
            columns = upload(pooling.token_ids, torch.int64, logits.device)
            found = logits.index_select(0, rows).index_select(1, columns)
        else:
            found = functional.normalize(hidden.index_select(0, rows).float(), dim=-1)
        for (_, sequence), numbers in zip(members, found.cpu().numpy(), strict=True):
            sequence.pooled = numbers.astype("<f4", copy=False).tobytes()
