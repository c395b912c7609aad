"""The doctor's answer for programs: SARIF, workflow commands, Markdown, an issue's text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.health.test_cli_doctor import OOM, WELL, run

from homeostat.health.diagnose import diagnose
from homeostat.health.formats.github import as_github, command
from homeostat.health.formats.issue import as_issue
from homeostat.health.formats.markdown import as_markdown, code, fenced, plain
from homeostat.health.formats.report import Place, Report
from homeostat.health.formats.sarif import as_sarif
from homeostat.health.readers import open_run, read_text
from homeostat.health.registry import RULES

TOKEN = "hf_abcdefghijklmnopqrstuvwxyzABCDEF"
NOT_KNOWN = (
    'Traceback (most recent call last):\n  File "/x/glue.py", line 3, in f\nOddError: flurb\n'
)
ILL_TRL = "".join(
    str({"loss": 2.0, "grad_norm": 0.5 if step < 9 else float("nan"), "learning_rate": 1e-5,
         "reward": 0.5, "reward_std": 0.1, "kl": 0.01, "epoch": step / 40}) + "\n"
    for step in range(1, 15)
)  # fmt: skip


def report_of(text: str, *, path: str = "-", config: dict[str, Any] | None = None) -> Report:
    view = read_text(text, config=config)
    diagnosis = diagnose(view, RULES)
    return Report(path, view, diagnosis, diagnosis.findings)


@pytest.fixture
def oom(tmp_path: Path) -> Report:
    path = tmp_path / "logs" / "my run.log"
    path.parent.mkdir()
    path.write_text(f"HF_TOKEN={TOKEN} torch==2.6.0+cu124, vLLM API server version 0.8.5\n{OOM}")
    view = open_run(path)
    diagnosis = diagnose(view, RULES)
    return Report(str(path), view, diagnosis, diagnosis.findings)


# Required members of the SARIF 2.1.0 schema, by the path to each kind of object.
def test_sarif_has_what_the_schema_requires(oom: Report, tmp_path: Path) -> None:
    log = json.loads(json.dumps(as_sarif([oom, report_of(NOT_KNOWN)], root=tmp_path)))
    assert log["version"] == "2.1.0"
    assert log["$schema"].endswith("sarif-2.1.0.json")
    assert len(log["runs"]) == 2
    for one in log["runs"]:
        driver = one["tool"]["driver"]
        assert driver["name"] == "homeostat"
        ids = [rule["id"] for rule in driver["rules"]]
        assert len(ids) == len(set(ids))
        assert all(rule["shortDescription"]["text"] for rule in driver["rules"])
        assert all(type(x["executionSuccessful"]) is bool for x in one["invocations"])
        assert one["results"], "both logs end in an error"
        for result in one["results"]:
            assert result["message"]["text"]
            assert result["level"] in ("none", "note", "warning", "error")
            assert ids[result["ruleIndex"]] == result["ruleId"]
            for location in result.get("locations", []):
                assert location["physicalLocation"]["artifactLocation"]["uri"]
                assert location["physicalLocation"].get("region", {"startLine": 1})["startLine"] > 0


def test_a_result_names_the_file_below_the_root_and_the_line(oom: Report, tmp_path: Path) -> None:
    first = as_sarif([oom], root=tmp_path)["runs"][0]["results"][0]
    place = first["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "logs/my%20run.log"
    assert place["region"]["startLine"] == 6
    assert TOKEN not in json.dumps(as_sarif([oom], root=tmp_path))
    elsewhere = as_sarif([oom], root=tmp_path / "other")["runs"][0]["results"][0]
    uri = elsewhere["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert uri.startswith("file:///")


def test_an_error_that_no_rule_knows_is_a_result(tmp_path: Path) -> None:
    unknown = Report("-", report_of(NOT_KNOWN).view, diagnose(report_of(NOT_KNOWN).view, ()), ())
    results = as_sarif([unknown], root=tmp_path)["runs"][0]["results"]
    assert [one["ruleId"] for one in results] == ["ERR000"]
    assert "OddError" in as_github([unknown], root=tmp_path)
    assert "OddError" in as_markdown([unknown])


def test_a_workflow_command_is_one_line_whatever_it_holds(tmp_path: Path) -> None:
    text = command(
        "error", "50% of a\r\n::warning::b", title="a:b,c", place=Place("x.log", 3), root=tmp_path
    )
    assert text.endswith(",line=3,title=a%3Ab%2Cc::50%25 of a%0D%0A::warning::b")
    assert "\n" not in text
    evil = report_of(OOM.replace("CUDA out", "::add-mask::x\r::error::CUDA out"))
    lines = as_github([evil], root=tmp_path).split("\n")
    assert all(
        line.startswith(("::error ", "::warning ", "::notice ", "homeostat ")) for line in lines
    )
    assert len(lines) == len(evil.findings) + 1


def test_markdown_shows_log_text_as_text() -> None:
    assert plain("<b>*x*</b> @you #12") == r"&lt;b&gt;\*x\*&lt;/b&gt; @<!-- -->you #<!-- -->12"
    assert code("a`b") == "``a`b``"
    assert fenced(["```", "x"]).startswith("````text\n")


def test_markdown_has_the_verdict_the_evidence_and_the_setting(oom: Report) -> None:
    page = as_markdown([oom])
    assert page.startswith("## The run is ill: ")
    assert "`actor_rollout_ref." in page
    assert "Tried to allocate 2.32 GiB" in page
    assert TOKEN not in page
    assert as_markdown([report_of(WELL)]).startswith("## No illness found: `-`")


def test_an_issue_has_versions_lines_settings_and_what_was_ruled_out(oom: Report) -> None:
    page = as_issue(oom)
    assert re.search(r"^- torch 2\.6\.0\+cu124$", page, re.M)
    assert re.search(r"^- vllm 0\.8\.5$", page, re.M)
    assert "OutOfMemoryError" in page.split("\n")[0]
    assert "actor_rollout_ref.actor.optim.lr=1e-06" in page
    assert TOKEN not in page
    ruled_out = page.partition("## Rules that judged this run and found nothing")[2]
    assert "lr-out-of-band" in ruled_out
    clear = set(oom.diagnosis.clear)
    assert clear.isdisjoint(finding.code for finding in oom.findings)


def test_an_issue_of_trl_has_a_script_that_compiles_and_the_metrics_where_it_began() -> None:
    config = {"learning_rate": 0.5, "num_generations": 8, "output_dir": "private", "beta": 0.0}
    page = as_issue(report_of(ILL_TRL, config=config))
    script = page.partition("```python\n")[2].partition("\n```")[0]
    compile(script, "script", "exec")
    assert "learning_rate=0.5," in script
    assert "private" not in script
    assert "| 9 |" in page.partition("## Metrics where it began")[2]
    silent = as_issue(report_of(WELL))
    assert "The log states no settings" in silent


def test_formats_are_options_of_the_command(
    oom: Report, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code_, out, _ = run(monkeypatch, capsys, "doctor", oom.path, "--format", "sarif")
    assert (code_, json.loads(out)["runs"][0]["properties"]["verdict"]) == (1, "ill")
    code_, out, _ = run(monkeypatch, capsys, "doctor", oom.path, "--format=github")
    assert (code_, out.startswith("::error file=")) == (1, True)
    code_, out, _ = run(monkeypatch, capsys, "doctor", oom.path, "--for-maintainers")
    assert (code_, "## To reproduce" in out) == (1, True)
    code_, _, _ = run(monkeypatch, capsys, "doctor", oom.path, "--for-maintainers", "--format=json")
    assert code_ == 2
