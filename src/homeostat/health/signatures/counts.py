"""Predicates that read numbers in log lines, for what words alone do not decide."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TypedDict

from homeostat.health.log import LogLine
from homeostat.health.series.medians import median
from homeostat.health.view import RunView

# Lines read of one kind; more of them say nothing new.
MAX_LINES = 2000
# Every pattern is bounded or begins with fixed words, so that it reads a line once.
_NUMBER = r"(-?\d{1,12}(?:\.\d{1,9})?)"
_FREED = (re.compile(rf"sleep mode freed {_NUMBER} gib memory, {_NUMBER} gib memory is still"),)
_BEFORE_AFTER = (
    re.compile(rf"before (?:sleep|release|offload)\D{{0,40}}{_NUMBER}"),
    re.compile(rf"after (?:sleep|release|offload)\D{{0,40}}{_NUMBER}"),
)
_CUMULATIVE = (re.compile(r"cumulative_preemption(?:_cnt)?=(\d{1,12})"),)
_SECONDS = re.compile(r"(?<!\d)(\d{1,9}) ?s(?:econds?|ec)?\b")
_RANK = re.compile(r"\[rank ?(\d{1,9})\]")
_WORK = re.compile(r"worknccl\(seqnum=(\d{1,12}), optype=(\w{1,40}), numelin=(\d{1,18})")
_SGLANG = (
    re.compile(r"#running-req: (\d{1,9})"),
    re.compile(rf"token usage: {_NUMBER}"),
    re.compile(r"#queue-req: (\d{1,9})"),
)
_ASKED = (re.compile(r"to allocate (\d{1,9}) tokens"),)
_AVAILABLE = (re.compile(r"ava(?:il|li)able tokens: ?(\d{1,9})"),)
_RETRACT = "retract requests"
_STALLED = re.compile(r"\b0/[1-9]\d{0,12} \[(?:(\d{1,6}):)?(\d{1,6}):\d\d<\?")
_RATE = re.compile(rf"(?:gen throughput \(token/s\)|generation throughput): {_NUMBER}")
_VLLM = (
    re.compile(r"running: (\d{1,9}) reqs, waiting: (\d{1,9}) reqs"),
    re.compile(rf"kv cache usage: {_NUMBER}%"),
)


def lines_of(view: RunView, *patterns: str) -> Iterator[LogLine]:
    """Yield the lines that match one of the patterns, at most MAX_LINES for each."""
    for pattern in patterns:
        for count, line in enumerate(view.log.find(pattern)):
            if count == MAX_LINES:
                break
            yield line


def numbers_of(
    view: RunView, pattern: str, values: tuple[re.Pattern[str], ...]
) -> list[list[float]]:
    """Return the numbers of each line that matches the pattern and all of the values."""
    found = []
    for line in lines_of(view, pattern):
        matches = [one.search(line.text.lower()) for one in values]
        if all(matches):
            found.append([float(part) for match in matches if match for part in match.groups()])
    return found


class Often(TypedDict):
    """The number of lines that must match, and the patterns of which each must match one."""

    times: int
    texts: Sequence[str]


def seen_at_least(view: RunView, often: Often) -> bool:
    """Return whether at least `times` lines match the patterns."""
    return sum(1 for _ in lines_of(view, *often["texts"])) >= often["times"]


def sleep_freed_nothing(view: RunView) -> bool:
    """Return whether the engine freed hardly any memory, each time that it was put to sleep."""
    pairs = numbers_of(view, "before*after", _BEFORE_AFTER)
    shares = [1 - after / before for before, after in pairs if before > 1.0]
    freed = numbers_of(view, "sleep mode freed", _FREED)
    shares += [gone / (gone + kept) for gone, kept in freed if gone + kept > 1.0]
    return bool(shares) and max(shares) < 0.1


def sleep_leaks(view: RunView) -> bool:
    """Return whether the memory that a sleeping engine keeps grows.

    It must grow nearly every time, and by a fifth or more in all.
    """
    kept = [row[1] for row in numbers_of(view, "sleep mode freed", _FREED)]
    kept = kept or [row[1] for row in numbers_of(view, "before*after", _BEFORE_AFTER)]
    steps = list(pairwise(kept))
    growing = sum(b > a for a, b in steps)
    return len(kept) >= 4 and growing >= 0.9 * len(steps) and kept[-1] >= 1.2 * max(kept[0], 0.5)


def pool_had_room(view: RunView) -> bool:
    """Return whether SGLang's newest failed request for cache was for less than there was."""
    asked = numbers_of(view, "to allocate*tokens", _ASKED)
    available = numbers_of(view, "able tokens:", _AVAILABLE)
    return bool(asked) and bool(available) and available[-1][0] >= asked[-1][0]


def is_preempted_often(view: RunView) -> bool:
    """Return whether requests lose their cache again and again, not once at a peak."""
    totals = numbers_of(view, "cumulative_preemption", _CUMULATIVE)
    if max((row[0] for row in totals), default=0.0) >= 50:
        return True
    retracted = sum(1 for _ in lines_of(view, _RETRACT))
    return retracted >= 20 or (retracted >= 5 and _is_pool_full(view))


def _is_pool_full(view: RunView) -> bool:
    """Return whether the cache stays full, and more requests wait than at first."""
    rows = numbers_of(view, "#running-req:*#queue-req:", _SGLANG)
    if len(rows) < 5:
        return False
    queues = [queue for _, _, queue in rows]
    full = median([used for _, used, _ in rows[-5:]]) >= 0.95
    return full and median(queues[-3:]) > max(5.0, 2 * median(queues[:3]))


def waited_long(view: RunView) -> bool:
    """Return whether the run waited a minute or more for a placement group."""
    for line in lines_of(view, "waiting for*placement group"):
        if any(int(found) >= 60 for found in _SECONDS.findall(line.text.lower())):
            return True
    return False


def ranks_disagree(view: RunView) -> bool:
    """Return whether ranks that timed out were in different collectives.

    Collectives differ by their kind, size or number.
    """
    works: dict[str, tuple[str, ...]] = {}
    for line in lines_of(view, "worknccl(seqnum="):
        text = line.text.lower()
        rank, work = _RANK.search(text), _WORK.search(text)
        if rank is not None and work is not None:
            works.setdefault(rank[1], work.groups())
    return len(set(works.values())) > 1


def is_stuck_after_update(view: RunView) -> bool:
    """Return whether the run made no progress after the newest weight update.

    Only lines that wait follow it, or those of an engine that does not answer any more.
    """
    update = view.log.last(*UPDATED)
    if update is None:
        return False
    waits = [x for x in lines_of(view, *WAITING) if x.number > update.number]
    silent = [x for x in lines_of(view, *SILENT) if x.number > update.number]
    silent += [x for x in lines_of(view, "| 0/") if x.number > update.number and _stands(x)]
    if len(waits) < 3 and not silent:
        return False
    later = view.log.last(*PROGRESS)
    first = min(line.number for line in (*waits, *silent))
    return (later is None or later.number < first) and not _generates(view, update)


def _stands(line: LogLine) -> bool:
    """Return whether a progress bar has been at 0 for five minutes or more."""
    found = _STALLED.search(line.text)
    return found is not None and 60 * int(found[1] or 0) + int(found[2]) >= 5


def _generates(view: RunView, update: LogLine) -> bool:
    """Return whether the engine wrote tokens, or steps were logged, after an update."""
    last = view.last_step
    if last is not None and update.step is not None and last > update.step + 1:
        return True
    for line in lines_of(view, "gen throughput (token/s)", "generation throughput:"):
        found = _RATE.search(line.text.lower()) if line.number > update.number else None
        if found and float(found[1]) > 0.0:
            return True
    return False


UPDATED = (
    "weight update took",
    "weight update done",
    "weight update finished",
    "weight update complete",
    "weight sync took",
    "weight sync done",
    "weight sync finished",
    "weight sync complete",
    "weights updated",
    "weights synced",
    "updated weights",
    "updated the weights",
    "synced weights",
    "finished syncing weights",
    "update_weights*200 ok",
    "update_weights end",
    "update_weights done",
    "update_weights finished",
)
# Words of an engine that does not answer, or of a client that asked it in vain.
SILENT = (
    "couldn't get a response from detokenizer",
    "Health check failed",
    "Watchdog timeout (self.watchdog_timeout",
    "Watchdog timeout (watchdog_timeout",
    "no response from the engine",
    "no response from the inference server",
    "engine is not responding",
    "inference server is not responding",
    "server is unresponsive",
    "generate && ReadTimeout",
    "generate && timed out",
    "generation && timed out",
    "completions && ReadTimeout",
    "completions && timed out",
)
WAITING = (
    "waiting for rollouts",
    "waiting for the inference",
    "waiting for inference",
    "waiting for generation",
    "still waiting for",
)
PROGRESS = ("success step", "success*| step", "generated*rollouts", "rollout finished")


def stops_at_start(view: RunView) -> bool:
    """Return whether nothing follows the line in which processes begin to find each other."""
    said = [line for line in view.log.lines if line.text.strip()]
    joining = view.log.last(*JOINING)
    if view.metrics or joining is None or joining.number != said[-1].number:
        return False
    return not any(word in joining.text.lower() for word in _COMPLAINS)


_COMPLAINS = ("error", "please", "not ", "must", "failed", "cannot")
JOINING = (
    "initializing process group",
    "to initialize process group",
    "init_process_group",
    "initializing torch distributed",
    "initializing torchbackend in deepspeed",
    "waiting in store based barrier",
)


def is_concurrency_bound(view: RunView) -> bool:
    """Return whether requests queue while most of the engine's cache is empty."""
    rows = numbers_of(view, "#running-req:*#queue-req:", _SGLANG)
    loads = [(run, queue, used) for run, used, queue in rows]
    rows = numbers_of(view, "reqs, waiting:*cache usage", _VLLM)
    loads += [(run, queue, used / 100) for run, queue, used in rows]
    if len(loads) < 5:
        return False
    queued = median([queue - run for run, queue, _ in loads])
    return queued > 0 and median([used for _, _, used in loads]) < 0.3
