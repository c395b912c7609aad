"""Rows of two-term sums from reasoning-gym: `python recipes/assets/make_chain_sum.py`.

Writes chain_sum_sft.jsonl (messages), chain_sum_prompts.jsonl and chain_sum_eval.jsonl (prompt,
answer). No question is in two of them. Needs the extra `tasks`; the rows are kept so that machines
without it can train on them.
"""

from __future__ import annotations

import json
from pathlib import Path

import reasoning_gym

FOLDER = Path(__file__).resolve().parent
INSTRUCTION = "Answer with the number alone."
SIZES = {"sft": 256, "prompts": 2048, "eval": 256}


def main() -> None:
    total = sum(SIZES.values())
    task = reasoning_gym.create_dataset(
        "chain_sum", size=4 * total, seed=7, min_terms=2, max_terms=2, min_digits=1, max_digits=2
    )
    answers = {entry["question"]: entry["answer"] for entry in task}
    assert len(answers) >= total, f"{len(answers)} distinct questions, {total} wanted"
    rows = [
        {"prompt": f"{question}\n{INSTRUCTION}", "answer": answer}
        for question, answer in list(answers.items())[:total]
    ]
    for name, size in SIZES.items():
        part, rows = rows[:size], rows[size:]
        if name == "sft":
            part = [{"messages": _turns(row)} for row in part]
        text = "".join(json.dumps(row) + "\n" for row in part)
        (FOLDER / f"chain_sum_{name}.jsonl").write_text(text, encoding="utf-8")


def _turns(row: dict[str, str]) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": row["prompt"]},
        {"role": "assistant", "content": row["answer"]},
    ]


if __name__ == "__main__":
    main()
