"""The usual length of the answers of each model, learned from past ones."""

from __future__ import annotations

# The answer length that is assumed before any answer is known, and the weight of one more answer.
# It ranks decode workers as the true length would, unless nearly all answers are far shorter.
USUAL_OUTPUT_TOKENS = 128
ANSWER_WEIGHT = 0.02


class OutputLengths:
    """Exponentially weighted mean of the tokens per answer."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}

    def usual(self, model: str) -> float:
        return self._means.get(model, USUAL_OUTPUT_TOKENS)

    def observe(self, model: str, num_tokens: int) -> None:
        before = self.usual(model)
        self._means[model] = before + ANSWER_WEIGHT * (num_tokens - before)
