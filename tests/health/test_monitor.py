"""The monitor of a live run: what opens, stays open, clears, is allowed, and survives a resume."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.live.monitor import MAX_TURNS, Monitor
from homeostat.health.live.tails import Tail, Tails
from homeostat.health.records import Change, State, as_json, from_json, still_open
from homeostat.health.registry import RULES
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.view import Event, Kind, RunView
from homeostat.health.watchlist import Allowed, Watchlist


class Limit(RuleOptions):
    limit: float = option(10.0, "Largest value that is sound.")


def too_high(view: RunView, options: Limit) -> Iterator[Sighting]:
    loss = view.series("train/loss")
    assert loss is not None
    if loss.latest > options.limit:
        yield Sighting(
            message=f"the loss is {loss.latest:g}",
            causes=(Cause("lr-too-high", "it may be"),),
            fixes=(Fix("trainer.lr", "lower", "steps are too large", Grade.UNSAFE),),
            first_step=int(loss.steps[-1]),
            value=loss.latest,
            limit=options.limit,
            level=Level.ERROR if loss.latest > 100 else None,
        )


def a_rule(code: str = "LRN901", **changes: Any) -> Rule:
    fields: dict[str, Any] = {
        "code": code,
        "name": "loss-too-high",
        "family": Family.LEARNING,
        "level": Level.WARN,
        "confidence": Confidence.HEURISTIC,
        "check": too_high,
        "needs": ("train/loss",),
        "options": Limit,
    }
    return Rule(**{**fields, **changes})


def monitor(*rules: Rule, **watchlist: Any) -> Monitor:
    return Monitor(
        rules or (a_rule(),),
        kind=Kind.SFT,
        settings={},
        total_steps=100,
        watchlist=Watchlist(**watchlist),
    )


def fed(watch: Monitor, losses: list[float], start: int = 1) -> list[Change]:
    changes: list[Change] = []
    for step, loss in enumerate(losses, start=start):
        changes += watch.observe(step, {"train/loss": loss})
    return changes


def told(changes: list[Change]) -> list[tuple[str, int, str]]:
    return [(str(change.state), change.step, change.finding.code) for change in changes]


def test_a_finding_opens_once_and_is_over_after_quiet_records() -> None:
    watch = monitor(clear_after=2)
    changes = fed(watch, [1.0, 20.0, 21.0, 1.0, 22.0, 1.0, 1.0, 1.0, 30.0])
    assert told(changes) == [
        ("open", 2, "LRN901"),
        ("cleared", 7, "LRN901"),
        ("open", 9, "LRN901"),
    ]
    assert [finding.first_step for finding in watch.open] == [9]


def test_the_beginning_stays_and_the_message_is_the_newest() -> None:
    watch = monitor()
    fed(watch, [20.0, 30.0])
    (finding,) = watch.open
    assert (finding.first_step, finding.value) == (1, 30.0)


def test_one_that_gets_worse_is_told_again() -> None:
    changes = fed(monitor(), [20.0, 200.0, 20.0])
    assert [(c.step, c.finding.level) for c in changes] == [(1, Level.WARN), (2, Level.ERROR)]


def test_levels_and_options_are_those_of_the_run() -> None:
    watch = monitor(levels={"LRN901": "info"}, options={"LRN901": {"limit": 0.5}})
    (change,) = fed(watch, [1.0])
    assert (change.finding.level, change.finding.limit) == (Level.INFO, 0.5)
    assert fed(monitor(levels={"LRN901": "off"}), [50.0]) == []


def test_an_allowance_silences_its_code_until_its_step() -> None:
    allowed = Allowed("LRN901", "warm-up", until_step=3)
    watch = monitor(allow=(allowed, Allowed("LRN902", "never seen")))
    assert told(fed(watch, [20.0] * 5)) == [("open", 4, "LRN901")]
    assert [one.code for one in watch.unused_allowances()] == ["LRN902"]


def test_a_symptom_is_folded_into_what_explains_it() -> None:
    illness = a_rule("LRN900", name="illness", explains=("LRN901",))
    watch = monitor(illness, a_rule())
    assert told(fed(watch, [20.0])) == [("open", 1, "LRN900")]
    assert any("LRN901" in line for line in watch.open[0].evidence)


def test_a_finding_that_another_explains_later_is_not_over() -> None:
    illness = a_rule("LRN900", name="illness", explains=("LRN901",))
    watch = monitor(illness, a_rule(), options={"LRN900": {"limit": 25.0}}, clear_after=2)
    losses = [20.0, 30.0, 30.0, 30.0, 1.0, 1.0]
    assert told(fed(watch, losses)) == [
        ("open", 1, "LRN901"),
        ("open", 2, "LRN900"),
        ("cleared", 6, "LRN901"),
        ("cleared", 6, "LRN900"),
    ]


def test_rules_of_another_kind_of_run_are_not_asked() -> None:
    assert fed(monitor(a_rule(kinds=(Kind.RL,))), [50.0]) == []


def test_a_rule_whose_inputs_did_not_change_is_not_asked_again() -> None:
    asked: list[float] = []

    def counting(view: RunView, _: object) -> Iterator[Sighting]:
        asked.append(view.metrics["eval/loss"].latest)
        yield from ()

    watch = monitor(a_rule(needs=("eval/loss",), check=counting))
    watch.observe(1, {"train/loss": 1.0})
    assert [one.code for one in watch.not_evaluated()] == ["LRN901"]
    watch.observe(2, {"train/loss": 1.0, "eval/loss": 2.0})
    watch.observe(3, {"train/loss": 1.0})
    assert asked == [2.0]


def test_in_a_long_run_rules_take_turns_and_none_is_forgotten() -> None:
    steps: dict[str, list[int]] = {}

    def counting(code: str) -> Any:
        def check(view: RunView, _: object) -> Iterator[Sighting]:
            steps.setdefault(code, []).append(int(view.metrics["train/loss"].steps[-1]))
            yield from ()

        return check

    rules = [a_rule(f"LRN{n}", check=counting(f"LRN{n}")) for n in range(910, 918)]
    fed(monitor(*rules), [1.0] * 600)
    for asked in steps.values():
        assert asked[:31] == list(range(1, 32))
        assert max(np.diff(asked)) < 2 * MAX_TURNS
        assert asked[-1] > 596


def test_a_rule_with_a_mistake_is_left_out_and_the_others_go_on() -> None:
    def broken(view: RunView, _: object) -> Iterator[Sighting]:
        yield Sighting(message=str(1 / 0))

    watch = monitor(a_rule("LRN900", check=broken), a_rule())
    assert told(fed(watch, [1.0, 20.0])) == [("open", 2, "LRN901")]
    assert watch.broken == {"LRN900": "ZeroDivisionError: division by zero"}


LOSSES = st.lists(st.sampled_from([1.0, 20.0, 200.0, float("nan")]), min_size=1, max_size=30)


@given(losses=LOSSES, cut=st.integers(min_value=0, max_value=30))
def test_a_resumed_monitor_goes_on_as_if_nothing_had_happened(
    losses: list[float], cut: int
) -> None:
    cut = min(cut, len(losses))
    whole = monitor()
    changes = fed(whole, losses)
    first = monitor()
    before = fed(first, losses[:cut])
    second = monitor()
    records = [(step, {"train/loss": loss}) for step, loss in enumerate(losses[:cut], start=1)]
    lines = [change.as_record() for change in before]
    second.restore(records, [], still_open(lines), first.state())
    after = fed(second, losses[cut:], start=cut + 1)
    assert told(before + after) == told(changes)
    assert second.state() == whole.state()


def test_a_finding_is_the_same_after_its_line_is_read() -> None:
    (change,) = fed(monitor(), [20.0])
    assert from_json(as_json(change.finding)) == change.finding
    assert change.as_record()["state"] == State.OPEN


@given(
    values=st.lists(st.floats(allow_nan=False), max_size=60),
    keep=st.integers(min_value=1, max_value=9),
)
def test_a_tail_is_the_end_of_what_was_added(values: list[float], keep: int) -> None:
    tail = Tail(keep)
    for step, value in enumerate(values):
        tail.add(step, value)
        series = tail.series()
        first = max(0, step + 1 - keep)
        assert series.values.tolist() == values[first : step + 1]
        assert series.steps.tolist() == list(range(first, step + 1))


def test_frequent_events_do_not_drive_out_rare_ones() -> None:
    tails = Tails()
    tails.add_events([Event("data_prepared", 0)])
    for step in range(500):
        tails.add_events([Event("weights_published", step), Event("oom_retry", step)])
    assert tails.events[0].kind == "data_prepared"
    assert len(tails.events) < 200
    assert tails.events[-1] == Event("oom_retry", 499)


@pytest.mark.parametrize("kind", [Kind.SFT, Kind.RL])
def test_no_rule_breaks_on_records_of_any_values(kind: Kind) -> None:
    """What our own runs log, with values that no run should have."""
    rng = np.random.default_rng(0)
    names = sorted({name for rule in RULES for need in rule.needs for name in need.split("|")})
    names = [name for name in names if ":" not in name and name not in ("log", "events", "samples")]
    watch = Monitor(RULES, kind=kind, settings={}, total_steps=50)
    pool = np.array([0.0, 1.0, -1.0, 1e-9, 1e30, np.nan, np.inf, -np.inf])
    for step in range(1, 30):
        watch.observe(step, dict(zip(names, rng.choice(pool, len(names)).tolist(), strict=True)))
    assert watch.broken == {}
