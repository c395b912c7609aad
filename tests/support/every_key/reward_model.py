"""Cases of the keys with which a reward model is trained."""

from __future__ import annotations

import json

import numpy as np
from tests.support.every_key.inputs import names_cases
from tests.support.every_key.workshop import Case, Workshop, alters, prepares

# Pairs with a margin, and completions with two columns of scores.
PAIRS = "data.train=[{type: preference, path: judged.jsonl}]"
SCORED = "data.train=[{type: scored, path: judged.jsonl}]"
BASE = ("algorithm={type: reward_model}", PAIRS, "trainer.max_steps=1")
POINTWISE = ("algorithm={type: reward_model, loss: {type: pointwise}}", "trainer.max_steps=1")


def write_judged(workshop: Workshop) -> None:
    """Write the rows once: the files of the workshop, with what a reward model learns from."""
    file = workshop.folder / "judged.jsonl"
    if file.exists():
        return
    rows = [json.loads(line) for line in (workshop.folder / "rows.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        row |= {"chosen": row["completion"], "rejected": f"{row['completion']} no", "by": 2.0}
        row |= {"score": number / len(rows), "mark": 1 - number / len(rows)}
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    few = workshop.folder / "judged_fewer.jsonl"
    few.write_text("\n".join(map(json.dumps, rows[5:35])), encoding="utf-8")


def written_first(case: Case) -> Case:
    def both(workshop: Workshop) -> None:
        write_judged(workshop)
        case(workshop)

    return both


def a_reward_model_is_what_is_trained(workshop: Workshop) -> None:
    write_judged(workshop)
    run = workshop.run(*BASE)
    assert run.metric("reward_model/accuracy")
    assert "score.weight" in run.weights()


def labels(workshop: Workshop, *overrides: str) -> np.ndarray:
    rows = workshop.inputs(*overrides)
    return (rows.evaluation or rows.train).rows.labels_B


def labels_change(group: str, key: str, wanted: float) -> Case:
    """Show the label of the first row that the change gives."""
    kind = "preference" if key.startswith("margin") else "scored"
    base = BASE if kind == "preference" else (*POINTWISE, SCORED)

    def case(workshop: Workshop) -> None:
        write_judged(workshop)
        source = f"data.{group}=[{{type: {kind}, path: judged.jsonl, {key}}}]"
        # Sources of one run have margins, or none of them has.
        both = f"data.train=[{{type: {kind}, path: judged.jsonl, {key}}}]"
        found = labels(workshop, *base, both, source)
        assert found[0] == wanted
        assert labels(workshop, *base)[0] != wanted

    return case


SCORED_CHANGES = {
    "path": "judged_fewer.jsonl",
    "limit": "9",
    "prompt_column": "question",
    "completion_column": "answer",
    "chat": "false",
    "system": "Be brief.",
}


def scored_cases(group: str) -> dict[str, Case]:
    cases: dict[str, Case] = {}
    base = (*POINTWISE, SCORED, f"data.{group}=[{{type: scored, path: judged.jsonl}}]")
    shared = names_cases(
        group, "scored", "{prompt: question}", file="judged.jsonl", base=(*POINTWISE, SCORED)
    )
    cases |= {name: written_first(case) for name, case in shared.items()}
    for name, value in SCORED_CHANGES.items():
        change = prepares(f"data.{group}.0.{name}={value}", group, base=base)
        cases[f"data.{group}[].{name} (scored)"] = written_first(change)
    cases[f"data.{group}[].score_column (scored)"] = labels_change(group, "score_column: mark", 1.0)
    cases[f"data.{group}[].type (scored)"] = labels_change(group, "score_column: mark", 1.0)
    cases[f"data.{group}[].margin_column (preference)"] = labels_change(
        group, "margin_column: by", 2.0
    )
    return cases


CASES: dict[str, Case] = {
    "algorithm.type (reward_model)": a_reward_model_is_what_is_trained,
    "algorithm.loss.type (bradley_terry)": a_reward_model_is_what_is_trained,
    "algorithm.loss.centre (bradley_terry)": written_first(
        alters("algorithm.loss={type: bradley_terry, centre: 5.0}", base=BASE)
    ),
    "algorithm.loss.type (pointwise)": written_first(
        alters("algorithm.loss={type: pointwise, error: bce}", base=(*POINTWISE, SCORED))
    ),
    "algorithm.loss.error (pointwise)": written_first(
        alters("algorithm.loss.error=bce", base=(*POINTWISE, SCORED))
    ),
    **scored_cases("train"),
    **scored_cases("validation"),
}
