"""Cases of the keys that say which rows and prompts a step gets: mixing, filters, curricula.

Mixtures and draws are asked directly; a run shows that the loop asks them, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
from tests.support.every_key.rl_workshop import SAMPLED_ONLY, only
from tests.support.every_key.workshop import Case, Run, Workshop, refuses

from homeostat.config import RunConfig
from homeostat.config.data import AnySource, DataConfig
from homeostat.data.inputs import open_draws
from homeostat.data.mixing import Allotment, Mixture
from homeostat.data.prompts import Outcome, PromptSampler

# Every type of source that a recipe may train on.
SOURCES = {
    cls.model_fields["type"].annotation.__args__[0]: cls for cls in get_args(get_args(AnySource)[0])
}
POINTS = "[{step: 1, weight: 1.0}, {step: 3, weight: 3.0}]"
SFT_PAIR = (
    "data.train=[{type: messages, path: rows.jsonl, weight: 1.0},"
    " {type: messages, path: rows.jsonl, weight: 1.0, limit: 8}]",
)


def data_of(kind: str, **second: Any) -> DataConfig:
    """Two sources of a type, of which only names and weights are asked for."""
    made = [
        SOURCES[kind].model_construct(type=kind, path="a.jsonl", task="t", **own)
        for own in ({"weight": 1.0, "name": None}, {"weight": 1.0, "name": None, **second})
    ]
    return DataConfig.model_construct(train=tuple(made))


def counts(data: DataConfig) -> list[int]:
    mixture = Mixture.of(data)
    assert mixture is not None
    return Allotment(mixture).split(8, step=1)


def a_weight_is_a_share(kind: str) -> Case:
    def case(workshop: Workshop) -> None:
        assert counts(data_of(kind)) == [4, 4]
        assert counts(data_of(kind, weight=3.0)) == [2, 6]

    return case


def a_name_is_in_the_metric(kind: str) -> Case:
    def case(workshop: Workshop) -> None:
        assert data_of(kind, name="mine").source_names[1] == "mine"
        assert data_of(kind).source_names[1] != "mine"

    return case


def weights(workshop: Workshop, schedule: str) -> list[float]:
    config = workshop.config(*SFT_PAIR, f"data.train.1.weight={schedule}", "trainer.max_steps=4")
    mixture = Mixture.of(config.data)
    assert mixture is not None
    return [float(mixture.shares(step)[1]) for step in range(1, 5)]


def a_schedule_gives(schedule: str, *expected: float) -> Case:
    def case(workshop: Workshop) -> None:
        assert np.allclose(weights(workshop, schedule), expected)

    return case


def a_run_mixes_its_rows(workshop: Workshop) -> None:
    """The number itself: a real run has the shares that it asks for."""
    run = workshop.run(*SFT_PAIR, "data.train.1.weight=3.0")
    assert run.metric("data/share/rows_2") == [0.75] * 3
    assert workshop.run(*SFT_PAIR).metric("data/share/rows_2") == [0.5] * 3


def of_training_only(name: str, value: str) -> Case:
    held_out = "data.validation=[{type: messages, path: rows.jsonl}]"
    return refuses(
        f"data.validation.0.{name}={value}", "sources of training rows", base=(held_out,)
    )


def mixing_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {
        "data.train[].weight.points[].step": a_schedule_gives(
            "{points: [{step: 2, weight: 1.0}, {step: 4, weight: 3.0}]}", 0.5, 0.5, 2 / 3, 0.75
        ),
        "data.train[].weight.points[].weight": a_schedule_gives(
            f"{{points: {POINTS}}}", 0.5, 2 / 3, 0.75, 0.75
        ),
        "data.train[].weight.between": a_schedule_gives(
            f"{{points: {POINTS}, between: hold}}", 0.5, 0.5, 0.75, 0.75
        ),
    }
    for part in ("points[].step", "points[].weight", "between"):
        schedule = f"{{points: {POINTS}, between: hold}}"
        cases[f"data.validation[].weight.{part}"] = of_training_only("weight", schedule)
    for kind in SOURCES:
        cases[f"data.train[].weight ({kind})"] = a_weight_is_a_share(kind)
        cases[f"data.train[].name ({kind})"] = a_name_is_in_the_metric(kind)
        cases[f"data.validation[].weight ({kind})"] = of_training_only("weight", "1.0")
        cases[f"data.validation[].name ({kind})"] = of_training_only("name", "mine")
    cases["data.train[].weight (messages)"] = a_run_mixes_its_rows
    return cases


FILTERS = """
def drop_low(completions, rewards, above=0.0, **columns):
    return sum(filter(None, rewards)) / len(rewards) > above, "low / mean"

def drop_all(completions, **columns):
    return False
"""


def filtered(*changes: str) -> Callable[[Workshop], Run]:
    def run(workshop: Workshop) -> Run:
        (workshop.folder / "filters.py").write_text(FILTERS, encoding="utf-8")
        return workshop.run(*SAMPLED_ONLY, *changes, "rollout.max_rounds=2")

    return run


def drops(filters: str, reason: str, *, more: tuple[str, ...] = ()) -> Case:
    """Some groups of a run are dropped, all for this reason."""

    def case(workshop: Workshop) -> None:
        run = filtered(f"rollout.filters=[{filters}]", *more)(workshop)
        assert only(f"filter/{reason}", run) == only("rollout/groups_passed_over", run) > 0

    return case


def rounds_are_bounded(workshop: Workshop) -> None:
    never = "rollout.filters=[{type: reward_mean, low: 9.0}]"
    for rounds in (2, 3):
        run = workshop.run(*SAMPLED_ONLY, never, f"rollout.max_rounds={rounds}")
        assert only("rollout/rounds", run) == rounds
        assert only("rollout/groups_lacking", run) == 4


def options_reach_the_function(workshop: Workshop) -> None:
    one = "{type: function, path: 'filters.py:drop_low', options: {above: %s}}"
    few, all_of_them = (
        filtered(f"rollout.filters=[{one % above}]")(workshop) for above in ("0.0", "9.0")
    )
    assert only("filter/low_mean", few) < only("filter/low_mean", all_of_them) == 8


SOLVABLE = "rewards.functions=[{type: regex_format, pattern: '[0-4].*'}, %s]"
ANY = "{type: regex_format, pattern: '.*', name: any}"


def another_reward_decides(workshop: Workshop) -> None:
    base = (SOLVABLE % ANY, "rollout.filters=[{type: all_failed}]")
    by_first = filtered(*base, "rollout.solved_by=regex_format")(workshop)
    by_any = filtered(*base, "rollout.solved_by=any")(workshop)
    assert only("filter/all_failed", by_any) == 0 < only("filter/all_failed", by_first)


def a_bound_decides(workshop: Workshop) -> None:
    never = filtered("rollout.filters=[{type: all_failed}]", "rollout.solved_at=9.0")(workshop)
    assert only("filter/all_failed", never) == 8


def drawn(
    workshop: Workshop, curriculum: str, *, steps: int = 12, drift: int = 0
) -> list[list[int]]:
    """Draw from the recipe's prompts, of which every third is solved and every third half so.

    With `drift` these are others at each step.
    """
    config: RunConfig = workshop.config(f"rollout.curriculum={curriculum}")
    prompts = workshop.inputs().train
    found = open_draws(config.data, config.rollout.curriculum, prompts, seed=0)
    taken = []
    for step in range(1, steps + 1):
        ids = found.draw(6, step=step, round=0)
        found.learn(step, [Outcome(n, (n + drift * step) % 3 / 2) for n in sorted(ids)])
        taken.append(ids)
    return taken


def alters_draws(before: str, after: str) -> Case:
    def case(workshop: Workshop) -> None:
        assert drawn(workshop, before) != drawn(workshop, after)
        assert drawn(workshop, before) == drawn(workshop, before)

    return case


def an_estimate_remembers(workshop: Workshop) -> None:
    rules = ("{difficulty: {memory: 0.0}}", "{difficulty: {memory: 0.9}}")
    newest, older = (drawn(workshop, rule, steps=20, drift=1) for rule in rules)
    assert newest != older


def share_drawn(taken: list[list[int]], kind: int) -> float:
    late = [n for ids in taken[4:] for n in ids]
    return sum(n % 3 == kind for n in late) / len(late)


def a_band_is_preferred(workshop: Workshop) -> None:
    band = "{difficulty: {explore: 0.01, prefer: {type: band, low: %s, high: %s}}}"
    solved, failed = (drawn(workshop, band % bounds, steps=40) for bounds in ((0.9, 1), (0, 0.1)))
    assert share_drawn(solved, 2) > 0.6 > share_drawn(failed, 2)
    assert share_drawn(failed, 0) > 0.6 > share_drawn(solved, 0)


def a_run_draws_by_its_curriculum(workshop: Workshop) -> None:
    rules = ("rollout.curriculum={difficulty: {}}", "trainer.max_steps=2")
    run, plain = workshop.run(*SAMPLED_ONLY, *rules), workshop.run(*SAMPLED_ONLY, rules[1])
    assert run.metric("curriculum/seen_share")[0] == 4 / 24
    assert plain.metric("curriculum/seen_share") == []
    assert isinstance(
        open_draws(plain.config.data, None, workshop.inputs().train, seed=0), PromptSampler
    )


def replays(rules: str, *, kind: int, most: int) -> Case:
    """What is drawn beyond an epoch's order is of this kind, and no more than so much."""

    def case(workshop: Workshop) -> None:
        taken = [n for ids in drawn(workshop, f"{{replay: {{{rules}}}}}", steps=4) for n in ids]
        again = [n for n in taken if taken.count(n) > 1]
        assert again
        assert {n % 3 for n in again} == {kind}
        assert max(again.count(n) for n in again) <= most

    return case


def of_difficulty(name: str, low: str, high: str) -> Case:
    return alters_draws(f"{{difficulty: {{{name}: {low}}}}}", f"{{difficulty: {{{name}: {high}}}}}")


def of_replay(rules: str, other: str) -> Case:
    return alters_draws(f"{{replay: {{{rules}}}}}", f"{{replay: {{{other}}}}}")


PREFER = "rollout.curriculum.difficulty.prefer"
REPLAY = "rollout.curriculum.replay"
SFT_CASES: dict[str, Case] = mixing_cases()
CASES: dict[str, Case] = {
    "rollout.filters[].type (zero_spread)": drops("{type: zero_spread}", "all_same_reward"),
    "rollout.filters[].type (reward_mean)": drops("{type: reward_mean, low: 0.3}", "reward_low"),
    "rollout.filters[].low (reward_mean)": drops("{type: reward_mean, low: 9.0}", "reward_low"),
    "rollout.filters[].high (reward_mean)": drops("{type: reward_mean, high: 0.1}", "reward_high"),
    "rollout.filters[].type (truncated)": drops("{type: truncated}", "too_long"),
    "rollout.filters[].max_share (truncated)": drops(
        "{type: truncated, max_share: 0.0}", "too_long"
    ),
    "rollout.filters[].type (all_failed)": drops("{type: all_failed}", "all_failed"),
    "rollout.filters[].type (function)": drops(
        "{type: function, path: 'filters.py:drop_low'}", "low_mean"
    ),
    "rollout.filters[].path (function)": drops(
        "{type: function, path: 'filters.py:drop_all'}", "drop_all"
    ),
    "rollout.filters[].options (function)": options_reach_the_function,
    "rollout.max_rounds": rounds_are_bounded,
    "rollout.solved_by": another_reward_decides,
    "rollout.solved_at": a_bound_decides,
    f"{PREFER}.type (variance)": a_run_draws_by_its_curriculum,
    f"{PREFER}.type (band)": a_band_is_preferred,
    f"{PREFER}.low (band)": a_band_is_preferred,
    f"{PREFER}.high (band)": a_band_is_preferred,
    "rollout.curriculum.difficulty.explore": of_difficulty("explore", "0.01", "1.0"),
    "rollout.curriculum.difficulty.memory": an_estimate_remembers,
    "rollout.curriculum.difficulty.prior": of_difficulty("prior", "0.0", "0.5"),
    f"{REPLAY}.of": replays("of: solved, share: 0.5", kind=2, most=4),
    f"{REPLAY}.share": of_replay("share: 0.2", "share: 0.5"),
    f"{REPLAY}.max_times": replays("max_times: 1, share: 0.5", kind=0, most=2),
    f"{REPLAY}.max_age_steps": of_replay("max_age_steps: 1, share: 0.5", "share: 0.5"),
}
