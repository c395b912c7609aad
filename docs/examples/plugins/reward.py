"""A reward: the share of the answer's characters that the completion has at the right place."""

from typing import Any

from homeostat import plugins


class Places(plugins.Reward):
    """Reward the share of the expected answer's characters that are at the right place."""

    extra: float = plugins.key(0.1, ge=0, help="Penalty for each character beyond the answer.")

    # Arguments are columns of the row, by name: `check` refuses rows without the column `answer`.
    def score(self, completions: list[Any], answer: list[str]) -> list[float]:
        return [self._one(text, right) for text, right in zip(completions, answer, strict=True)]

    def _one(self, text: str, right: str) -> float:
        hits = sum(a == b for a, b in zip(text, right, strict=False))
        return hits / len(right) - self.extra * max(0, len(text) - len(right))
