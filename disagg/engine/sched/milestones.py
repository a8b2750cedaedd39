"""When the scheduler must check a decoding sequence after a step, and not only append a token.

A step gives each decoding sequence one token. The token can end the sequence or begin a block only
in two cases: the sequence reaches a length that is known in advance, called its milestone, or the
token is one of its stop tokens. So after a step with many sequences only a few are checked. Makes
no decisions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from disagg.engine.sched.require import require
from disagg.engine.sched.sequence import NO_MILESTONE, Sequence


class Milestones:
    """The next milestone of each decoding sequence, by the number of the step that reaches it.

    A milestone may come too early, which costs a check, but never too late.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._step = 0  # the number of the next step to be applied
        # Step -> the sequences that reach their milestone with it -> number of their tokens then.
        self._reached: dict[int, dict[Sequence, int]] = {}
        self._num_stopping: Counter[int] = Counter()  # token id -> sequences that stop at it

    @property
    def next(self) -> list[Sequence]:
        """The sequences that reach a milestone with the next step, if they decode in it."""
        step = self._step
        return [each for each in self._reached.get(step, ()) if each.milestone == step]

    def pass_step(self, num_steps: int = 1) -> list[Sequence]:
        """Record that the sequences have gained the tokens of `num_steps` steps.

        Returns the sequences that have reached their milestone; each needs a new one.
        """
        ended, self._step = range(self._step, self._step + num_steps), self._step + num_steps
        reached: list[Sequence] = []
        for step in ended:
            for sequence, num_tokens in self._reached.pop(step, {}).items():
                if sequence.milestone != step:
                    continue
                if len(sequence.tokens) >= num_tokens:
                    reached.append(sequence)
                else:  # the sequence was not part of every step
                    self.set(sequence)
        return reached

    def set(self, sequence: Sequence) -> None:
        """Set the milestone of a sequence that decodes from the next step on.

        The KV of all its tokens but the last must be computed.
        """
        num_full = sequence.num_computed // self._block_size
        num_tokens = min((num_full + 1) * self._block_size + 1, sequence.max_num_tokens)
        if sequence.hand_over:
            num_tokens = len(sequence.tokens) + 1
        sequence.milestone = step = self._step + num_tokens - len(sequence.tokens) - 1
        self._reached.setdefault(step, {})[sequence] = num_tokens

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence that does not decode any more."""
        sequence.milestone = NO_MILESTONE

    # Stop tokens.

    def enter(self, sequence: Sequence) -> None:
        self._num_stopping.update(sequence.stop_ids)

    def leave(self, sequence: Sequence) -> None:
        num_stopping = self._num_stopping
        for token_id in sequence.stop_ids:
            num_stopping[token_id] -= 1
            if not num_stopping[token_id]:
                del num_stopping[token_id]
        self.drop(sequence)

    def stopping(
        self, sequences: SequenceOf[Sequence], token_ids: SequenceOf[int]
    ) -> list[Sequence]:
        """The sequences whose new token, `token_ids[i]` for `sequences[i]`, is a stop token."""
        if self._num_stopping.keys().isdisjoint(token_ids):
            return []
        pairs = zip(sequences, token_ids, strict=True)
        return [sequence for sequence, token_id in pairs if token_id in sequence.stop_ids]

    def clear(self) -> None:
        self._reached.clear()
        self._num_stopping.clear()

    def check(self, running: Iterable[Sequence], known: Iterable[Sequence]) -> None:
        """Raise `AssertionError` if a milestone is too late, or a stop token is missing."""
        for sequence in running:
            if sequence.num_uncomputed == 1 and not sequence.draft:
                num_missing = sequence.milestone - self._step + 1
                num_tokens = len(sequence.tokens) + num_missing
                require(num_missing > 0, f"{sequence} has no milestone")
                require(
                    num_tokens <= sequence.max_num_tokens,
                    f"{sequence}: its milestone is after its end",
                )
                block = sequence.num_computed // self._block_size
                is_early = num_tokens - 1 <= (block + 1) * self._block_size
                require(is_early, f"{sequence}: its milestone is after the end of a block")
        stop_ids = Counter(token_id for each in known for token_id in each.stop_ids)
        require(stop_ids == self._num_stopping, "stop tokens are miscounted")
