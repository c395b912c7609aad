"""The health section of the page: a verdict, every finding with its fixes, and the remedies.

All text from findings and events is escaped here.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from homeostat.observe import ailments
from homeostat.observe.report.elements import heading
from homeostat.observe.report.facts import RunFacts
from homeostat.observe.report.illnesses import Illness, Remedy

_MOODS = {"error": "bad", "warn": "warn", "info": ""}
_HEADS = ("Finding", "Steps", "What was seen", "Likely causes", "What helps")
_GRADES = {
    "safe": "changes neither objective, data order nor sampled distribution",
    "unsafe": "changes how the run learns",
    "advice": "for a person to weigh",
}
MAX_ROWS = 60
MAX_REMEDIES = 12


def health_badge(facts: RunFacts) -> str:
    """Return a badge beside the run's status; nothing if the run was not watched or failed."""
    ill = [one for one in _ill(facts) if one.cleared is None]
    if ill:
        mood = _MOODS[max(ill, key=lambda one: ailments.rank_of(one.finding)).level]
        return _badge(_counted(len(ill), "open finding"), mood)
    is_well = _was_watched(facts) and facts.status[0] != "failed"
    return _badge("healthy", "good") if is_well else ""


def health_section(facts: RunFacts) -> str:
    """Return the section on findings and remedies."""
    if not _was_watched(facts):
        return ""
    ill = sorted(_ill(facts), key=_place)
    notes = [one for one in facts.illnesses if not one.is_ill]
    parts = [heading("Health", _verdict(facts, ill))]
    if ill:
        parts.append(f'<div class="card">{_table(ill)}</div>')
    parts.append(_alone(facts.other_remedies))
    if notes:
        title = f"{_counted(len(notes), 'note')}<small>worth knowing, nothing to do</small>"
        body = f"<summary>{title}</summary>{_table(notes)}"
        parts.append(f'<details class="card">{body}</details>')
    return "".join(parts)


def _was_watched(facts: RunFacts) -> bool:
    return bool(facts.illnesses) or facts.told("rules") is not None


def _ill(facts: RunFacts) -> list[Illness]:
    return [one for one in facts.illnesses if one.is_ill]


def _place(illness: Illness) -> tuple[bool, int, int]:
    """Return the sort key of findings: open ones first, the worst before the rest, then by step."""
    return illness.cleared is not None, -ailments.rank_of(illness.finding), illness.began


def _verdict(facts: RunFacts, ill: list[Illness]) -> str:
    num_open = sum(one.cleared is None for one in ill)
    rules = facts.told("rules")
    watched = f"{rules:,} rules watched the run" if isinstance(rules, int) else ""
    if not ill:
        return ". ".join(part for part in ("nothing was found", watched) if part)
    now = "at the end" if facts.status[0] != "not finished" else "now"
    told = f"{num_open} of {_counted(len(ill), 'finding')} open {now}"
    if not num_open:
        told = f"{_counted(len(ill), 'finding')}, all over {now}"
    return ". ".join(part for part in (told, watched) if part)


def _table(illnesses: list[Illness]) -> str:
    rows = [_row(one) for one in illnesses[:MAX_ROWS]]
    if len(illnesses) > MAX_ROWS:
        more = f"{len(illnesses) - MAX_ROWS:,} more are in findings.jsonl"
        rows.append(f'<tr><td colspan="{len(_HEADS)}" class="apart">{more}</td></tr>')
    heads = "".join(f'<th scope="col">{head}</th>' for head in _HEADS)
    body = f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<table class="findings">{body}</table>'


def _row(illness: Illness) -> str:
    finding = illness.finding
    evidence = finding.get("evidence")
    seen = [escape(ailments.short(one)) for one in evidence] if isinstance(evidence, list) else []
    causes = [_pair(f"<b>{escape(n)}</b>", why) for n, why in ailments.causes_of(finding)]
    fixes = [_fix(one) for one in ailments.listed(finding, "fixes")]
    confidence = escape(ailments.short(finding.get("confidence", "")))
    return (
        f'<tr class="{illness.level}"><td>{_badge(illness.level, _MOODS[illness.level])} '
        f"<b>{escape(ailments.short(finding['code']))}</b>"
        f'<div class="name">{escape(ailments.short(finding["name"]))}</div>'
        f"<small>{confidence}</small></td>"
        f'<td class="steps">{_steps(illness)}</td>'
        f"<td>{escape(ailments.short(finding.get('message', '')))}{_list(seen, 'evidence')}</td>"
        f"<td>{_list(causes)}</td><td>{_list(fixes)}{_done(illness.remedies)}</td></tr>"
    )


def _steps(illness: Illness) -> str:
    if illness.cleared is None:
        return f"{illness.began:,} - <b>open</b>"
    return f"{illness.began:,} - {illness.cleared:,}"


def _fix(fix: ailments.Record) -> str:
    setting, value, why = (ailments.short(fix.get(p) or "") for p in ("setting", "value", "why"))
    grade = ailments.short(fix.get("grade") or "advice")
    what = f"<code>{escape(setting)}</code> {escape(value)}" if setting else escape(value)
    # Advice without a setting may consist of its reason only.
    told = _pair(what, why) if what.strip() else escape(why)
    title = escape(_GRADES.get(grade, ""))
    return f'{told} <span class="grade {escape(grade)}" title="{title}">{escape(grade)}</span>'


def _done(remedies: list[Remedy]) -> str:
    if not remedies:
        return ""
    rows = [_remedy(one) for one in remedies[-MAX_REMEDIES:]]
    hidden = len(remedies) - len(rows)
    if hidden:
        rows.insert(0, f"{_counted(hidden, 'earlier remedy', 'earlier remedies')}: events.jsonl")
    return f'<div class="done">Done{_list(rows)}</div>'


def _remedy(remedy: Remedy) -> str:
    sequel = f'; <span class="kind {remedy.outcome}">{escape(remedy.sequel)}</span>'
    return f"step {remedy.step:,}: {escape(remedy.text)}{sequel if remedy.sequel else ''}"


def _alone(remedies: list[Remedy]) -> str:
    """Return the remedies of findings that are no longer on record."""
    if not remedies:
        return ""
    shown = remedies[-MAX_REMEDIES:]
    rows = [f"{escape(_whom(one))}{_remedy(one)}" for one in shown]
    title = "Done about findings of steps that the run went back from"
    return f'<div class="card done alone"><b>{title}</b>{_list(rows)}</div>'


def _whom(remedy: Remedy) -> str:
    parts = (ailments.short(remedy.applied.get(name) or "") for name in ("code", "cause"))
    whom = " ".join(part for part in parts if part)
    return f"{whom}, " if whom else ""


def _pair(head: str, why: str) -> str:
    """Return HTML, followed by a reason."""
    return f"{head}<small>: {escape(why)}</small>" if why else head


def _list(rows: Iterable[str], kind: str = "") -> str:
    items = "".join(f"<li>{row}</li>" for row in rows if row)
    named = f' class="{kind}"' if kind else ""
    return f"<ul{named}>{items}</ul>" if items else ""


def _badge(text: str, mood: str) -> str:
    return f'<span class="badge {mood}">{escape(text)}</span>'


def _counted(count: int, noun: str, plural: str = "") -> str:
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"
