"""Find engines that have running requests but make no tokens, from the lines that they print.

An engine prints its rates every few seconds as long as its front end lives, whatever its workers
do: a row of such lines without a token, while requests run, is a stalled engine.
"""

from __future__ import annotations

import re

from homeostat.health.log import LogLine
from homeostat.health.view import RunView

RATES = "avg generation throughput"
_SPEAKER = re.compile(r"^\s*+(\([^)]{0,80}\))?.{0,120}?(?:Engine (\d{1,6}))?:? ?Avg ")
_PROMPT = re.compile(r"Avg prompt throughput: ([\d.]{1,20})")
_TOKENS = re.compile(r"Avg generation throughput: ([\d.]{1,20})")
_RUNNING = re.compile(r"Running: (\d{1,9})")


def stalled(view: RunView) -> list[LogLine]:
    """Return the newest consecutive lines of one engine that make no token although requests run.

    If there are several engines, those of the engine with the most lines. None if training
    continued in the meantime.
    """
    tails: dict[tuple[str, str], list[LogLine]] = {}
    for line in view.log.find(RATES):
        speaker = _SPEAKER.match(line.text[:400])
        who = (speaker[1] or "", speaker[2] or "") if speaker else ("", "")
        tail = tails.setdefault(who, [])
        if _stands_still(line.text):
            tail.append(line)
        else:
            tail.clear()
    longest = max(tails.values(), key=len, default=[])
    is_trained = view.series("train/loss", "train/policy_loss", "reward") is not None
    if is_trained and longest and longest[0].step != view.last_step:
        return []
    return longest


def _stands_still(text: str) -> bool:
    prompt, tokens, running = (one.search(text) for one in (_PROMPT, _TOKENS, _RUNNING))
    if tokens is None or running is None or int(running[1]) == 0:
        return False
    rates = [tokens[1], *([prompt[1]] if prompt else [])]
    return all(not rate.strip("0.") for rate in rates)
