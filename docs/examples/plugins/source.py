"""A source of prompts: digits to sort, generated from a seed."""

import random

from homeostat import plugins


class Digits(plugins.Prompts):
    """Digits to sort; the column `answer` holds the sorted digits."""

    count: int = plugins.key(64, ge=1, help="Number of prompts.")
    seed: int = plugins.key(0, ge=0, help="Seed of the digits.")

    def rows(self) -> list[dict[str, str]]:
        rng = random.Random(self.seed)
        texts = ["".join(rng.choices("0123456789", k=4)) for _ in range(self.count)]
        return [{"prompt": f"{text}>", "answer": "".join(sorted(text))} for text in texts]
