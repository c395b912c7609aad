"""Write the issue that a maintainer can work with, as Markdown.

It holds what happened, the versions that the log states, the lines that matter with secrets
removed, the metrics around the step at which it began, settings that start the same run on a small
scale, and which rules found nothing. It is a draft: a person reads it before sending it.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator, Sequence

from homeostat import __version__
from homeostat.health.finding import Finding, Level, quoted_lines
from homeostat.health.formats.markdown import code, fenced, plain, subject
from homeostat.health.formats.report import Report, causes_of, message_of
from homeostat.health.formats.reproduce import reproduction
from homeostat.health.frameworks import HOMEOSTAT, UNKNOWN
from homeostat.health.log import LogLine
from homeostat.health.registry import BY_CODE
from homeostat.health.view import RunView, Series
from homeostat.health.vital_signs.vitals import fatal_traceback, vital_names
from homeostat.health.words import shortened

# Number of lines before and after a quoted one, at the end of the log, and in all.
_AROUND = 2
_LAST = 5
_MOST_LINES = 120
_TRACEBACK_HEAD, _TRACEBACK_TAIL = 12, 45
_MOST_CHARS = 400
# Number of records before and after the step at which the first finding began.
_RECORDS = 5
_MOST_COLUMNS = 6
_PACKAGES = (
    "torch", "transformers", "trl", "vllm", "sglang", "deepspeed", "accelerate", "peft", "ray",
    "flash-attn", "flash_attn", "bitsandbytes", "triton", "datasets", "tokenizers", "verl",
    "axolotl", "llamafactory", "megatron-core", "unsloth", "liger-kernel", "nccl", "cuda", "python",
    "pytorch", "xformers", "transformer-engine", "torchtune", "torchtitan", "openrlhf",
)  # fmt: skip
_STATED = re.compile(
    rf"(?<![\w/.-])({'|'.join(map(re.escape, _PACKAGES))})"
    r"(?:(?: [A-Za-z]{1,20}){0,3}[ _]version)?['\"]?(?:==|[ :=v]{1,4}|\()['\"]?"
    r"(\d{1,4}(?:\.\d{1,6}){1,3}[\w.+-]{0,30})",
    re.IGNORECASE,
)
_MOST_VERSIONS = 24
_SENTENCE_END = re.compile(r"(?<=[.:;]) ")


def as_issue(report: Report) -> str:
    """Return the text of an issue about this run."""
    return "\n".join(line for line in _parts(report)).rstrip("\n")


def _parts(report: Report) -> Iterator[str]:
    yield f"# {_title(report)}"
    yield ""
    yield subject(report)
    yield ""
    for finding in report.findings:
        if finding.level is not Level.INFO:
            yield f"- **{finding.code} {finding.name}**: {plain(message_of(report, finding))}"
    yield ""
    yield from _section("Versions", _versions(report.view))
    yield from _section("The lines that matter", _lines(report))
    yield from _section("Metrics where it began", _metrics(report))
    yield from _section("To reproduce", reproduction(report))
    yield from _section("Likely causes, in order", _causes(report))
    yield from _section("Rules that judged this run and found nothing", _clear(report))
    yield f"Drafted by `homeostat doctor --for-maintainers` (homeostat {__version__})."


def _section(title: str, lines: Sequence[str]) -> Iterator[str]:
    yield from (f"## {title}", "", *lines, "")


def _title(report: Report) -> str:
    view = report.view
    known = f"{view.framework.title}: " if view.framework is not UNKNOWN else ""
    fatal = fatal_traceback(view)
    if fatal is not None:
        return plain(known + shortened(fatal.error, 120))
    if report.unknown is not None:
        return plain(known + shortened(report.unknown.text.strip(), 120))
    if report.findings:
        said = _SENTENCE_END.split(message_of(report, report.findings[0]), maxsplit=1)[0]
        return plain(known + shortened(said.rstrip("."), 120))
    return plain(f"{known}{report.verdict.value.replace('_', ' ')}")


def _versions(view: RunView) -> list[str]:
    """Return the versions that the log and the settings state, or else how to add them."""
    found: dict[str, str] = {}
    for name, value in view.raw_settings.items():
        last = str(name).rpartition(".")[2]
        if last.endswith("_version") and isinstance(value, str) and value[:1].isdigit():
            found.setdefault(last.removesuffix("_version"), value)
    for line in view.log.lines:
        if len(found) >= _MOST_VERSIONS:
            break
        for name, version in _STATED.findall(line.text[:2_000]):
            found.setdefault(name.lower(), version.rstrip(".,)"))
    lines = [f"- {plain(name)} {plain(version)}" for name, version in sorted(found.items())]
    if not lines:
        lines = ["The log states no versions. Add those of the machine that ran it (`pip list`)."]
    here = _installed(view)
    return [*lines, f"- installed where this was written: {here}"] if here else lines


def _installed(view: RunView) -> str:
    """Return the version of the framework in this environment, if it is installed here."""
    if view.framework is HOMEOSTAT:
        return f"homeostat {__version__}"
    try:
        return f"{view.framework.name} {importlib.metadata.version(view.framework.name)}"
    except importlib.metadata.PackageNotFoundError:
        return ""


def _lines(report: Report) -> list[str]:
    numbers = _numbers(report)
    lines = [line for line in report.view.log.lines if line.number in numbers]
    if not lines:
        return ["The run has no console log, or nothing in it matters."]
    return [fenced(_with_gaps(lines))]


def _with_gaps(lines: Sequence[LogLine]) -> Iterator[str]:
    before: int | None = None
    for line in lines:
        if before is not None and line.number > before + 1:
            yield f"... ({line.number - before - 1} lines left out)"
        before = line.number
        yield f"{line.number}: {shortened(line.text.rstrip(), _MOST_CHARS)}"


def _numbers(report: Report) -> set[int]:
    """Return the numbers of the lines to show, the most telling ones first if there are many."""
    log = report.view.log
    groups: list[range] = []
    fatal = fatal_traceback(report.view)
    if fatal is not None:
        start, end = fatal.start.number, fatal.end.number
        if end - start > _TRACEBACK_HEAD + _TRACEBACK_TAIL:
            groups += [range(end - _TRACEBACK_TAIL, end + 1), range(start, start + _TRACEBACK_HEAD)]
        else:
            groups.append(range(start, end + 1))
    quoted = [number for one in report.findings for number in quoted_lines(one)]
    quoted += [report.unknown.number] if report.unknown is not None else []
    groups += [range(number - _AROUND, number + _AROUND + 1) for number in quoted]
    if log.lines:
        last = log.lines[-1].number
        groups.append(range(last - _LAST + 1, last + 1))
    found: set[int] = set()
    for group in groups:
        if len(found) < _MOST_LINES:
            found.update(group)
    return found


def _metrics(report: Report) -> list[str]:
    """Return a table of the metrics that the first finding reads, around its first step."""
    view = report.view
    columns = _columns(view, report.findings[0] if report.findings else None)
    if not columns:
        return ["No metrics were read."]
    steps = sorted({int(step) for series in columns.values() for step in series.steps})
    begun = next((f.first_step for f in report.findings if f.first_step is not None), steps[-1])
    at = next((place for place, step in enumerate(steps) if step >= begun), len(steps) - 1)
    shown = steps[max(0, at - _RECORDS) : at + _RECORDS + 1]
    head = f"| step | {' | '.join(plain(name) for name in columns)} |"
    rows = [
        f"| {step} | {' | '.join(_value(series, step) for series in columns.values())} |"
        for step in shown
    ]
    return [head, "|" + "---|" * (len(columns) + 1), *rows]


def _columns(view: RunView, finding: Finding | None) -> dict[str, Series]:
    needs = BY_CODE[finding.code].needs if finding is not None else ()
    wanted = [name for need in needs for name in need.split("|")] + list(vital_names(view.kind))
    found = {name: series for name in wanted if (series := view.metrics.get(name)) and len(series)}
    return dict(list(found.items())[:_MOST_COLUMNS])


def _value(series: Series, step: int) -> str:
    here = series.since(step).head(1)
    return f"{here.first:.6g}" if len(here) and int(here.steps[0]) == step else ""


def _causes(report: Report) -> list[str]:
    told = [one for one in report.findings if one.level is not Level.INFO]
    lines = [f"1. {plain(text)}" for finding in told[:3] for text in causes_of(report, finding)]
    return lines or ["None is known."]


def _clear(report: Report) -> list[str]:
    """Return the rules that judged this run and found nothing, by family.

    Signatures are left out: that a text is not in the log rules nothing out.
    """
    families: dict[str, list[str]] = {}
    for name in report.diagnosis.clear:
        rule = BY_CODE[name]
        if not name.startswith("ERR"):
            families.setdefault(rule.family.value, []).append(rule.name)
    missing = report.diagnosis.not_evaluated
    lines = [f"- {family}: {', '.join(names)}" for family, names in sorted(families.items())]
    lines = lines or ["Nothing: no rule had what it needs."]
    left = f"{len(missing)} rules could not be evaluated, because the run does not log or state"
    return [*lines, "", f"{left} what they need ({code('homeostat doctor --verbose')} lists them)."]
