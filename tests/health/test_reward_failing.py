"""What RWD011 says of a reward that fails: whole words, and no advice that cannot help."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from homeostat.health.finding import Sighting
from homeostat.health.rules.reward.rwd011_reward_fn_failing import RULE, Options
from homeostat.health.view import Event, Kind, RunView, Series
from homeostat.health.words import shortened

SETTINGS = {"rollout.prompts_per_step": 8, "rollout.samples_per_prompt": 8}


def sighting(failed: float, *events: Event) -> Sighting:
    steps = np.arange(1, 9)
    metrics = {
        "reward": Series(steps, np.full(8, 0.4)),
        "rewards/right/failed": Series(steps, np.full(8, failed)),
        # What a function logs under such a name is none of our business.
        "rewards/right/logged/easy/failed": Series(steps, np.full(8, 1.0)),
    }
    view = RunView(metrics=metrics, kind=Kind.RL, settings=SETTINGS, events=events)
    (found,) = RULE.check(view, Options())
    return found


def trouble(failure: str, message: str, **fields: object) -> Event:
    return Event(
        "reward_trouble", 3, {"reward": "right", "failure": failure, "message": message, **fields}
    )


def test_a_function_that_hangs_is_not_given_more_time() -> None:
    where = 'Thread 0x1:\n  File "judge.py", line 7 in wait\n  File "judge.py", line 9 in score'
    found = sighting(20, trouble("timeout", "no answer", calls_in_a_row=5, traceback=where))
    assert found.causes[0].name == "reward-timeout"
    assert 'File "judge.py", line 7 in wait' in found.causes[0].why
    assert "rewards.timeout_s" not in [fix.setting for fix in found.fixes]


def test_a_function_that_is_slow_now_and_then_is() -> None:
    found = sighting(8, trouble("timeout", "no answer", calls_in_a_row=1))
    assert found.causes[0].name == "reward-slow"
    assert "rewards.timeout_s" in [fix.setting for fix in found.fixes]


def test_an_honest_none_is_no_reason() -> None:
    found = sighting(8, trouble("exception", "ZeroDivisionError: x"), trouble("none", "column"))
    assert [cause.name for cause in found.causes] == ["reward-fn-failing"]
    assert "ZeroDivisionError" in found.causes[0].why


@given(st.lists(st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=30)))
def test_a_quote_has_whole_words(words: list[str]) -> None:
    text = " ".join(words)
    found = shortened(text, 160)
    assert len(found) <= 160
    if found != text:
        assert found.endswith(" ...")
        assert found.removesuffix(" ...").split() == words[: len(found.split()) - 1]


def test_a_word_without_end_is_cut_and_shown() -> None:
    found = shortened("error: " + "x" * 10**6 + " tail", 160)
    assert found.startswith("error: xxxx")
    assert len(found) <= 160
