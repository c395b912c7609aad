"""Cases of the keys of preference training: its sources, algorithms and shared settings."""

from __future__ import annotations

import itertools

from tests.support.every_key.inputs import names_cases
from tests.support.every_key.workshop import (
    Case,
    Workshop,
    all_of,
    alters,
    eval_losses,
    losses,
    prepares,
    shows,
)

SIZE = "trainer.batch_rows=4"


def base_of(algorithm: str, *, group: str = "train", kind: str = "preference") -> tuple[str, ...]:
    """Overrides that make a preference run of the workshop's recipe, with sources of this type."""
    sources = {"train": kind, group: kind}
    return (
        f"algorithm={{type: {algorithm}}}",
        *(f"data.{name}=[{{type: {own}, path: pairs.jsonl}}]" for name, own in sources.items()),
        SIZE,
    )


def a_type_is_an_algorithm(workshop: Workshop) -> None:
    names = ("dpo", "ipo", "kto", "orpo", "simpo")
    found = [losses(workshop.run(*base_of(name))) for name in names]
    for one, other in itertools.combinations(found, 2):
        assert one != other


def source_case(group: str, kind: str, change: str) -> Case:
    """Other rows are prepared. A run over another file shows that they are what it learns from."""
    base, change = base_of("kto", group=group, kind=kind), f"data.{group}.0.{change}"
    rows = prepares(change, group, base=base)
    if not change.endswith("path=fewer_pairs.jsonl"):
        return rows
    return all_of(rows, alters(change, losses if group == "train" else eval_losses, base=base))


COMMON = {"path": "fewer_pairs.jsonl", "limit": "9", "chat": "false", "system": "Be brief."}
# Of each type of source: key -> the change that is seen.
SOURCE_CHANGES = {
    "preference": {
        **COMMON, "prompt_column": "question", "chosen_column": "answer",
        "rejected_column": "answer",
    },
    "unpaired_preference": {
        **COMMON, "prompt_column": "question", "completion_column": "rejected",
        "label_column": "other_label",
    },
}  # fmt: skip


def source_cases(group: str) -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for kind, own in SOURCE_CHANGES.items():
        base = base_of("kto", group=group, kind=kind)
        cases |= names_cases(group, kind, "{prompt: question}", file="pairs.jsonl", base=base)
        for name, value in own.items():
            cases[f"data.{group}[].{name} ({kind})"] = source_case(group, kind, f"{name}={value}")
        (other,) = SOURCE_CHANGES.keys() - {kind}
        cases[f"data.{group}[].type ({kind})"] = source_case(group, other, f"type={kind}")
    return cases


CASES: dict[str, Case] = {
    **source_cases("train"),
    **source_cases("validation"),
    **{
        f"algorithm.type ({name})": a_type_is_an_algorithm
        for name in ("dpo", "ipo", "kto", "orpo", "simpo")
    },
    "algorithm.label_smoothing (dpo)": alters("algorithm.label_smoothing=0.2", base=base_of("dpo")),
    "algorithm.sft_weight (dpo)": alters("algorithm.sft_weight=0.5", base=base_of("dpo")),
    "algorithm.length_normalised (dpo)": alters(
        "algorithm.length_normalised=true", base=base_of("dpo")
    ),
    "algorithm.desirable_weight (kto)": alters(
        "algorithm.desirable_weight=2.0", base=base_of("kto")
    ),
    "algorithm.undesirable_weight (kto)": alters(
        "algorithm.undesirable_weight=2.0", base=base_of("kto")
    ),
    "algorithm.target_margin (simpo)": alters("algorithm.target_margin=0.2", base=base_of("simpo")),
    "algorithm.label_smoothing (simpo)": alters(
        "algorithm.label_smoothing=0.2", base=base_of("simpo")
    ),
    "algorithm.sft_weight (simpo)": alters("algorithm.sft_weight=0.5", base=base_of("simpo")),
    "preference.beta": alters("preference.beta=1.0", base=base_of("dpo")),
    "preference.reference_logps": shows(
        "preference.reference_logps=live",
        lambda run: (run.dir / "reference").is_dir(),
        was=True,
        now=False,
        base=base_of("dpo"),
        same="losses",
    ),
}
