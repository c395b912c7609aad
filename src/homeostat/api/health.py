"""`homeostat.diagnose`: say what is wrong with a run of any framework. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homeostat.api.recipes import PathLike
from homeostat.health.diagnose import diagnose as diagnose_view
from homeostat.health.finding import Finding, Level
from homeostat.health.formats.as_json import as_json, unknown_error
from homeostat.health.formats.as_text import as_text
from homeostat.health.readers import open_run
from homeostat.health.registry import rules_with
from homeostat.observe.redact import Scrubber, mask_text
from homeostat.user_code import absolute


@dataclass(frozen=True, slots=True)
class Report:
    """The answer of `diagnose`. Printed, it is the page of `homeostat doctor`.

    `findings` are the illnesses, the likeliest first; `is_ill`: one of them is an error, or the run
    ended in an error that no rule recognises. `facts` is what `doctor --format json` prints.
    """

    findings: tuple[Finding, ...]
    is_ill: bool
    facts: Mapping[str, Any]
    text: str

    def __str__(self) -> str:
        return self.text


def diagnose(
    path: PathLike, *, config: PathLike | None = None, rules: Sequence[str] = ()
) -> Report:
    """Say what is wrong with a run of any framework: its folder, log or metrics. Needs no torch.

    `config` is a file with its settings, if they are not beside it. `rules` names further rules
    ("package.module:RULE", "file.py:RULE" or an entry point).
    """
    view = open_run(Path(path), config=None if config is None else Path(config))
    named = [absolute(one, folder=Path()) for one in rules]
    diagnosis = diagnose_view(view, rules_with(named))
    is_ill = any(one.level is Level.ERROR for one in diagnosis.findings)
    return Report(
        findings=diagnosis.findings,
        is_ill=is_ill or bool(unknown_error(diagnosis, view)),
        facts=Scrubber().tree(as_json(diagnosis, view)),
        text=mask_text(as_text(diagnosis, view)).rstrip("\n"),
    )
