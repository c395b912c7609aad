"""Cases of the keys that say what a completion earns.

What a function gives is judged by the texts it was given; what becomes of it by the saved values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from tests.support.every_key.rl_workshop import SAMPLED_ONLY, SAVED, Samples, only, samples, texts
from tests.support.every_key.workshop import Case, Run, Workshop, all_of, refuses

from homeostat.observe.completions import read_completions

# One of each type, with settings under which some completions earn something and some do not.
FUNCTIONS = {
    "exact_match": "column: first, extract: '[0-9]'",
    "regex_format": "pattern: '[0-2].*'",
    "math_verify": "column: first",
    "length": "free_tokens: 2, max_tokens: 6",
    "reasoning_gym": "extract: '[0-9]+'",
    "function": "path: 'rewards.py:starts_low'",
}
GYM = (
    "data.train=[{type: reasoning_gym, task: chain_sum, size: 8, seed: 0, chat: false,"
    " options: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}}]",
    "data.max_length=80",
)
LABELS = {"function": "starts_low"}
# Short answers, so that a few of them are right.
SIZES = ("rollout.max_new_tokens=2", "rollout.samples_per_prompt=16")


def label(kind: str) -> str:
    return LABELS.get(kind, kind)


def scored(workshop: Workshop, kind: str, *changes: str) -> Run:
    """Sampled and scored by one function."""
    return workshop.run(*SAMPLED_ONLY, *recipe_of(kind), *changes)


def recipe_of(kind: str) -> tuple[str, ...]:
    """The prompts, sizes and function that a kind of reward is tried with."""
    source = GYM if kind == "reasoning_gym" else ()
    size = SIZES if kind in ("math_verify", "reasoning_gym") else ()
    return (*source, *size, f"rewards.functions=[{{type: {kind}, {FUNCTIONS[kind]}}}]")


def given(run: Run, name: str) -> np.ndarray:
    """Return what the function of this name gave to the samples of step 1."""
    rows = read_completions(run.dir / "completions", 1)
    return np.array([row[f"reward/{name}"] for row in rows], dtype=float)


def column(run: Run, name: str) -> list[str]:
    rows = read_completions(run.dir / "completions", 1)
    return [str(json.loads(row["columns"])[name]) for row in rows]


# What each type must give to a sample, by other means than the code that is judged.


def last_digit_is(run: Run, found: Samples, name: str) -> list[float]:
    pairs = zip(found.texts, column(run, name), strict=True)
    return [float(re.sub("[^0-9]", "", text)[-1:] == wanted) for text, wanted in pairs]


def number_is(run: Run, found: Samples) -> list[float]:
    pairs = zip(found.texts, column(run, "first"), strict=True)
    # A number, perhaps with a sign after it that means nothing.
    numbers = [(re.fullmatch("([0-9]+)>*", text), int(wanted)) for text, wanted in pairs]
    return [float(match is not None and int(match[1]) == wanted) for match, wanted in numbers]


EXPECTED: dict[str, Callable[[Run, Samples], list[float]]] = {
    "exact_match": partial(last_digit_is, name="first"),
    "regex_format": lambda run, found: [float(text[:1] in tuple("012")) for text in found.texts],
    "math_verify": number_is,
    "length": lambda run, found: [-max(0, n - 2) / 4 for n in found.length_S],
    "function": lambda run, found: [float(text[:1] in "012") for text in found.texts],
}


def a_type_is_what_is_scored(workshop: Workshop, kind: str) -> None:
    run = scored(workshop, kind)
    values = given(run, label(kind))
    assert len(set(values)) > 1, "all samples earn the same"
    if kind == "reasoning_gym":
        is_right = np.array(last_number(run)) == np.array(column(run, "answer"))
        assert ((values == 1) == is_right).all()
    else:
        assert values == pytest.approx(EXPECTED[kind](run, samples(run)))
    assert samples(run).reward_S == pytest.approx(values)


def last_number(run: Run) -> list[str]:
    return [(re.findall("[0-9]+", text) or [""])[-1] for text in texts(run)]


def a_name_is_that_of_the_metric(workshop: Workshop, kind: str) -> None:
    plain, named = scored(workshop, kind), scored(workshop, kind, "rewards.functions.0.name=own")
    name = f"rewards/{label(kind)}/mean"
    assert only("rewards/own/mean", named) == only(name, plain)
    assert named.metric(name) == []


def a_weight_is_multiplied(workshop: Workshop, kind: str) -> None:
    rollouts = f"debug.rollouts=runs/{scored(workshop, kind).config.name}"
    base = (*SAVED, rollouts, *recipe_of(kind))
    plain, heavy = (workshop.run(*base, *m) for m in ((), ("rewards.functions.0.weight=-2.5",)))
    assert samples(plain).reward_S.any()
    assert samples(heavy).reward_S == pytest.approx(-2.5 * samples(plain).reward_S)
    name = f"rewards/{label(kind)}/mean"
    assert only(name, plain) == only(name, heavy)


def differs(kind: str, change: str) -> Case:
    """The same completions earn something else."""

    def case(workshop: Workshop) -> None:
        plain, changed = (
            scored(workshop, kind),
            scored(workshop, kind, f"rewards.functions.0.{change}"),
        )
        assert texts(plain) == texts(changed)
        assert samples(plain).reward_S.tolist() != samples(changed).reward_S.tolist()

    return case


def a_column_holds_the_answer(workshop: Workshop) -> None:
    run = scored(workshop, "exact_match", "rewards.functions.0.column=n")
    assert given(run, "exact_match") == pytest.approx(last_digit_is(run, samples(run), "n"))
    differs("exact_match", "column=n")(workshop)


def case_can_be_ignored(workshop: Workshop) -> None:
    """Use a model that writes letters; both cases are seen in the texts."""
    letters = ("model.path=letters", "data.train.0.path=asked.jsonl")
    base = (*SAMPLED_ONLY, *letters, "rewards.functions=[{type: exact_match, column: letter,"
            " extract: '[aA]'}]")  # fmt: skip
    for more, wanted in (((), "A"), (("rewards.functions.0.ignore_case=true",), "aA")):
        run = workshop.run(*base, *more)
        found = [(re.findall("[aA]", text) or [" "])[-1] for text in texts(run)]
        assert {"a", "A"} <= set(found)
        assert given(run, "exact_match") == pytest.approx([float(one in wanted) for one in found])


def an_extract_finds_the_answer(workshop: Workshop) -> None:
    """Nothing is found: nothing is earned, also where the task gives something for trying."""
    run = scored(workshop, "reasoning_gym", "rewards.functions.0.extract=never")
    assert samples(run).reward_S.tolist() == [0.0] * len(texts(run))
    assert samples(scored(workshop, "reasoning_gym")).reward_S.any()


def options_are_arguments(workshop: Workshop) -> None:
    plain = scored(workshop, "function")
    more = scored(workshop, "function", "rewards.functions.0.options={bonus: 0.5}")
    assert samples(more).reward_S == pytest.approx(samples(plain).reward_S + 0.5)


def one_function(name: str) -> str:
    return f"rewards.functions=[{{type: function, path: 'rewards.py:{name}'}}]"


def a_slow_function_has_a_limit(workshop: Workshop) -> None:
    base = (*SAMPLED_ONLY, "rollout.prompts_per_step=1", one_function("slow"))
    patient, hasty = (workshop.run(*base, *m) for m in ((), ("rewards.timeout_s=0.05",)))
    assert [only("rewards/slow/failed", run) for run in (patient, hasty)] == [0, 4]
    assert samples(patient).reward_S.tolist() == [1.0] * 4
    assert np.isnan(samples(hasty).reward_S).all()


def rewards_are_computed_by_as_many_processes(workshop: Workshop) -> None:
    base = (*SAMPLED_ONLY, one_function("process"))
    one, three = (workshop.run(*base, *more) for more in ((), ("rewards.workers=3",)))
    assert [len(set(samples(run).reward_S)) for run in (one, three)] == [1, 3]


def rewards_are_normalised(workshop: Workshop) -> None:
    plain, scaled, standard = (
        samples(workshop.run(*SAVED, f"rewards.normalise={how}")).reward_S
        for how in ("none", "scale", "standardise")
    )
    assert scaled == pytest.approx(plain / plain.std(ddof=1))
    assert standard == pytest.approx((plain - plain.mean()) / plain.std(ddof=1))


def rewards_are_clipped(workshop: Workshop) -> None:
    plain, held = (
        samples(workshop.run(*SAVED, "rewards.normalise=standardise", *more)).reward_S
        for more in ((), ("rewards.clip=0.75",))
    )
    assert np.abs(plain).max() > 0.75
    assert held == pytest.approx(plain.clip(-0.75, 0.75))


TYPED: dict[str, Callable[[Workshop, str], None]] = {
    "type": a_type_is_what_is_scored,
    "name": a_name_is_that_of_the_metric,
    "weight": a_weight_is_multiplied,
}

CASES: dict[str, Case] = {
    **{
        f"rewards.functions[].{key} ({kind})": partial(check, kind=kind)
        for key, check in TYPED.items()
        for kind in FUNCTIONS
    },
    "rewards.functions[].column (exact_match)": a_column_holds_the_answer,
    "rewards.functions[].extract (exact_match)": differs("exact_match", "extract='^[0-9]'"),
    "rewards.functions[].ignore_case (exact_match)": case_can_be_ignored,
    "rewards.functions[].pattern (regex_format)": differs("regex_format", "pattern='[0-4].*'"),
    "rewards.functions[].column (math_verify)": differs("math_verify", "column=answer"),
    "rewards.functions[].free_tokens (length)": differs("length", "free_tokens=4"),
    "rewards.functions[].max_tokens (length)": differs("length", "max_tokens=10"),
    "rewards.functions[].extract (reasoning_gym)": an_extract_finds_the_answer,
    "rewards.functions[].path (function)": all_of(
        differs("function", "path=rewards.py:starts_high"),
        differs("function", "path=rewards:starts_high"),
    ),
    "rewards.functions[].options (function)": options_are_arguments,
    "rewards.timeout_s": a_slow_function_has_a_limit,
    "rewards.workers": rewards_are_computed_by_as_many_processes,
    "rewards.normalise": rewards_are_normalised,
    "rewards.clip": all_of(rewards_are_clipped, refuses("rewards.clip=0.0", r"rewards\.clip")),
}
