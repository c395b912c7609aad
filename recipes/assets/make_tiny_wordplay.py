"""Writes tiny_wordplay.jsonl: chats about digits and letters that a tiny model can learn.

    python recipes/assets/make_tiny_wordplay.py

Three small tasks with one right answer each: sort digits, turn a word around, count a letter.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

NUM_ROWS = 4000
LETTERS = "adeinors"


def sort_digits(rng: random.Random) -> tuple[str, str]:
    digits = "".join(rng.choices("0123456789", k=rng.randint(3, 5)))
    return f"sort {digits}", "".join(sorted(digits))


def turn_around(rng: random.Random) -> tuple[str, str]:
    word = "".join(rng.choices(LETTERS, k=rng.randint(2, 4)))
    return f"turn around {word}", word[::-1]


def count_letter(rng: random.Random) -> tuple[str, str]:
    letter = rng.choice(LETTERS)
    word = "".join(rng.choices(LETTERS[:4] + letter * 2, k=rng.randint(3, 5)))
    return f"how many {letter} in {word}", str(word.count(letter))


def main() -> None:
    rng = random.Random(0)
    rows = []
    for _ in range(NUM_ROWS):
        question, answer = rng.choice((sort_digits, turn_around, count_letter))(rng)
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
        rows.append(json.dumps({"messages": messages}))
    target = Path(__file__).parent / "tiny_wordplay.jsonl"
    target.write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
