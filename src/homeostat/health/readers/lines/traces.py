"""Find events and samples in the lines of a log.

Updating weights to checkpoint 3      ->  Event("weights_published")
Sleep mode freed 40.1 GiB memory      ->  Event("engine_slept", {"gib": ...})
rollout 3 sample: 'First list ...'    ->  SampleText
"""

from __future__ import annotations

import re

from homeostat.health.readers.lines.rich_tables import RichTables
from homeostat.health.readers.values.literals import plain_value
from homeostat.health.readers.values.numbers import NUMBER, number
from homeostat.health.view import Event, SampleText

MAX_EVENTS = 50_000
MAX_SAMPLES = 2_000
_MAX_TEXT = 20_000

# Event, texts of which its lines have at least one (searched first, because that is fast), and the
# pattern of its lines in lower case.
_EVENTS: tuple[tuple[str, tuple[str, ...], re.Pattern[str]], ...] = tuple(
    (kind, hints, re.compile(pattern))
    for kind, hints, pattern in (
        (
            "engine_slept",
            ("sleep", "release_memory"),
            r"fall asleep|sleep mode freed|/release_memory_occupation|engine sleep",
        ),
        (
            "engine_woke",
            ("wak", "woke", "resume_memory"),
            r"to wake up|/resume_memory_occupation|engine woke|waking up engine",
        ),
        (
            "weights_published",
            ("weight",),
            r"weight (?:update|sync)\w* (?:took|done|complete|finished)|update weights:.{0,300}it/s"
            r"|sync_weights\b.{0,300}\bdone|broadcast weights|updating weights to"
            r"|updated? weights? to|post /update_weights_from|/init_weights_update"
            r"|weights (?:synced|broadcasted|updated)",
        ),
        (
            "step_skipped",
            ("skip",),
            r"skipping (?:batch|step|update|optimizer)|skipped step|overflow!.{0,300}skip",
        ),
        (
            "checkpoint_saved",
            ("checkpoint", "saved "),
            r"(?:saving|saved) (?:model |training |last model |final )?checkpoint|checkpoint saved"
            r"|saved (?:model|state|optimizer) to",
        ),
        (
            "run_resumed",
            ("resum", "continuing"),
            r"resum(?:ing|ed) (?:training )?from|continuing training from checkpoint",
        ),
        ("engine_restarted", ("restart",), r"engine (?:process )?restart"),
    )
)
_SECONDS = re.compile(rf"(?<![\d.])(?<!\d,)({NUMBER})\s*+(?:s|sec|seconds)\b")
_BEFORE_S = re.compile(r"[\d.]\s*+s")
_GIB = re.compile(rf"(?<![\d.])(?<!\d,)({NUMBER})\s*+(?:gib|gb)\b")

_QUOTED = r"'[^'\\]*+(?:\\.[^'\\]*+)*+'|\"[^\"\\]*+(?:\\.[^\"\\]*+)*+\""
_SAMPLE = re.compile(
    r"\b(?:sample|response|completion|output|generated(?: text)?|generation|answer)"
    rf"(?:\s?\[\d++\]|\s?#?\d++)?(?:\]\s*+[:=]?|\s*+[:=])\s*+(?P<text>{_QUOTED})",
    re.IGNORECASE,
)
_PROMPT = re.compile(rf"\b(?:query|prompt|question)\s*+[:=]\s*+(?P<text>{_QUOTED})", re.IGNORECASE)
_FIRST_NUMBER = re.compile(NUMBER)
_REASON = re.compile(r"\b(?:finish|stop)_reason[=:]\s*'?(\w+)")
_REWARD = re.compile(rf"\b(?:reward|score)\s*+[=:]\s*+({NUMBER})")
_TAG = re.compile(
    r"^\[(?P<tag>prompt|response|completion|output|ground_truth|score|reward)\]\s?(?P<text>.*)",
    re.IGNORECASE | re.DOTALL,
)
# The engine's reason why a completion ended -> our stop reason.
_REASONS = {"stop": "stop", "eos": "stop", "length": "length", "max_tokens": "length"}


def event_in(text: str, step: int | None) -> Event | None:
    """Return the event that a line reports; None if it reports none."""
    low = text[:2_000].lower()
    for kind, hints, pattern in _EVENTS:
        if any(hint in low for hint in hints) and pattern.search(low):
            return Event(kind, step, _said_in(text, low))
    return None


def _said_in(text: str, low: str) -> dict[str, object]:
    """Return the details of an event in a line: its text, seconds, and sizes."""
    fields: dict[str, object] = {"text": text[:300]}
    # Few lines have a unit, and searching for the number before it takes ten times as long.
    seconds = _SECONDS.search(low) if _BEFORE_S.search(low) else None
    if seconds:
        fields["seconds"] = number(seconds[1])
    found = _GIB.findall(low) if "gib" in low or "gb" in low else ()
    sizes = [size for text in found if (size := number(text)) is not None]
    if sizes:
        fields["gib"] = sizes
    return fields


class Samples:
    """Collect completions in a log: in one line, below a [response] tag, or in a drawn table."""

    def __init__(self) -> None:
        self.found: list[SampleText] = []
        self._tables = RichTables()
        self._prompt = ""
        self._tag = ""
        self._lines: list[str] = []
        self._step: int | None = None
        self._reward: float | None = None

    @property
    def is_open(self) -> bool:
        """Return whether the following lines may be part of a completion or a table."""
        return bool(self._tag) or self._tables.is_open

    def feed(self, text: str, step: int | None) -> bool:
        """Read a line without metrics.

        Return True if it is, or may be, part of a completion.
        """
        tag = _TAG.match(text) if text[:1] == "[" else None
        is_used = tag is not None or self.is_open or not text.isascii()
        if tag:
            self._close(tag["tag"].lower(), tag["text"][:_MAX_TEXT], step)
        elif self._tag and len(self._lines) < 200:
            self._lines.append(text[:_MAX_TEXT])
        drawn = self._tables.feed(text, step)
        if drawn is not None:
            self._add(drawn)
        if "'" in text or '"' in text:
            is_used = self._one_line(text, step) or is_used
        return is_used

    def end_of_text(self) -> None:
        """End the text that a tag began, because a row of metrics came."""
        if self._tag or self._lines:
            self._flush()
        self._tag = ""

    def _close(self, tag: str, text: str, step: int | None) -> None:
        if tag in {"prompt", "response", "completion", "output"}:
            self._flush(keep_prompt=tag != "prompt")
            self._tag, self._lines, self._step = tag, [text], step
            return
        if self._tag in {"response", "completion", "output"}:
            score = _FIRST_NUMBER.search(text) if tag in {"score", "reward"} else None
            self._reward = number(score.group()) if score else None
            if tag in {"score", "reward"}:
                self._flush()
                self._tag = ""

    def _flush(self, *, keep_prompt: bool = False) -> None:
        text = "\n".join(self._lines)[:_MAX_TEXT].strip("\n")
        if self._tag == "prompt":
            self._prompt = text
        elif self._tag:
            self._add(SampleText(self._step, text, prompt=self._prompt, reward=self._reward))
        if not keep_prompt and self._tag != "prompt":
            self._prompt = ""
        self._lines, self._reward = [], None

    def _one_line(self, text: str, step: int | None) -> bool:
        low = text[:_MAX_TEXT].lower()
        # Every match of the pattern begins with one of these words.
        if not ("sample" in low or "response" in low or "completion" in low or "output" in low
                or "generat" in low or "answer" in low):  # fmt: skip
            return False
        found = _SAMPLE.search(text[:_MAX_TEXT])
        if not found or text.lstrip().startswith("File "):
            return False
        prompt = _PROMPT.search(text[:_MAX_TEXT])
        reason = _REASON.search(text, found.end())
        reward = _REWARD.search(text, found.end())
        self._add(
            SampleText(
                step,
                str(plain_value(found["text"])),
                prompt=str(plain_value(prompt["text"])) if prompt else "",
                reward=number(reward[1]) if reward else None,
                stop_reason=_REASONS.get(reason[1].lower(), "") if reason else "",
            )
        )
        return True

    def _add(self, sample: SampleText) -> None:
        if len(self.found) < MAX_SAMPLES:
            self.found.append(sample)
