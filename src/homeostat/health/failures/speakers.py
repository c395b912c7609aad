"""Split a log line into its speaker, which is the process that printed it, and its text.

    [rank3]: Traceback (most recent call last):          rank 3
    (WorkerDict pid=412, ip=10.0.0.4)   File "x.py" ...  WorkerDict pid=412
    3: KeyError: 'answer'                                srun --label: task 3
    [1,3]<stderr>:KeyError: 'answer'                     mpirun --tag-output: rank 3

Lines of several processes alternate in one log; the lines of a traceback all have the same speaker.
If a logger put the text into JSON or escaped its line breaks, this is undone. All functions are
pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from homeostat.health.log import LogLine
from homeostat.json_text import parse_json

_SPEAKER = re.compile(
    r"(?:> ?)?\s{0,4}(?:\((?P<actor>[^()]{0,80}?pid=\d{1,9})[^()]{0,80}\)"
    r"|\[(?:[Dd]efault|[Rr]ank|RANK)[ _=:]?(?P<rank>\d{1,6})\]:?"
    r"|\[\d{1,4},(?P<tagged>\d{1,6})\]<std(?:err|out)>:"
    r"|(?P<label>\d{1,4}):(?= ))\s?"
)
_RANK = re.compile(r"\b(?:rank|task|[Ll]ocal_rank)[ =](\d{1,6})\b")
_MAX_PREFIXES = 3
# JSON fields in which loggers and container runtimes store the text.
_FIELDS = ("log", "message", "msg", "text", "exc_info", "exception", "stack_trace", "traceback",
           "error", "stack", "event", "line", "textPayload")  # fmt: skip
# Of these, the fields in which a collector of container logs stores one line of the console.
_LINED = ('"log"', '"message"', '"textPayload"')
_MAX_JSON = 40_000
_MAX_PARTS = 400


def speaker_in(text: str) -> tuple[str, str]:
    """Return the speaker ("" if the line has none) and the rest of the line."""
    speaker = ""
    if text[:1] not in "([> 0123456789":
        return speaker, text
    for _ in range(_MAX_PREFIXES):
        found = _SPEAKER.match(text)
        if found is None:
            break
        named = found["actor"] or _number_of(found)
        # An actor may repeat the output of a rank. The speaker then has both names.
        speaker = f"{speaker}, {named}" if speaker else named
        text = text[found.end() :]
    return speaker, text


def _number_of(found: re.Match[str]) -> str:
    if found["label"] is not None:
        return f"task {found['label']}"
    return f"rank {found['rank'] if found['rank'] is not None else found['tagged']}"


def rank_of(speaker: str) -> int | None:
    """Return the speaker's rank; None if the name has none."""
    found = _RANK.search(speaker)
    return int(found[1]) if found else None


def spoken_lines(lines: Sequence[LogLine]) -> Iterator[tuple[LogLine, str, str]]:
    """Yield each line with its speaker and its text; a wrapped text gives several for one line."""
    for line in lines:
        text = line.text
        if not _is_wrapped(text):
            yield (line, *speaker_in(text))
            continue
        for part in _unwrapped(text):
            yield (line, *speaker_in(part))


def _is_wrapped(text: str) -> bool:
    if text[:1] == "{":
        return "Traceback" in text or 'File \\"' in text or any(name in text for name in _LINED)
    return "\\n" in text and "Traceback (most recent call last)" in text


def _unwrapped(text: str) -> list[str]:
    """Return the lines of a text that is inside a JSON record or has escaped line breaks."""
    start = text.find("{")
    if start >= 0 and len(text) <= _MAX_JSON:
        try:
            record = parse_json(text[start:])
        except ValueError:
            record = None
        if isinstance(record, dict):
            inner = [value for value in record.values() if isinstance(value, dict)]
            texts = [text for one in (record, *inner) for text in _texts_of(one)]
            found = [part for one in texts for part in one.splitlines()]
            return found[:_MAX_PARTS] or [text]
    if "\\n" not in text:
        return [text]
    plain = text.replace("\\r", "").replace("\\t", "\t").replace('\\"', '"').replace("\\'", "'")
    return plain.split("\\n")[:_MAX_PARTS]


def _texts_of(record: Mapping[str, object]) -> Iterator[str]:
    """Yield a record's texts. Elastic's names have dots, and some loggers make a list of lines."""
    named = {name.rpartition(".")[2]: value for name, value in record.items()}
    for name in _FIELDS:
        value = named.get(name)
        if isinstance(value, list):
            yield "\n".join(map(str, value))
        elif value is not None:
            yield str(value)
