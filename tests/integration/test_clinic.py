"""The clinic: its catalogue is sound, its faults make runs ill, its verdicts say what was seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from homeostat.clinic import patient
from homeostat.clinic.bodies import write_model
from homeostat.clinic.catalogue import HEALTHY, INJECTORS, MODULES, SHORT
from homeostat.clinic.injector import Cure, Dose, Injector
from homeostat.clinic.job import Job, Kind
from homeostat.clinic.rounds import Report, chosen
from homeostat.clinic.summary import as_json, summarise
from homeostat.clinic.verdict import Verdict, is_about, judge_healthy, judge_ill
from homeostat.clinic.ward import Ended, run_one
from homeostat.config.loading.load import build_config
from homeostat.errors import ConfigError
from homeostat.health.finding import Cause, Confidence, Family, Finding, Level
from homeostat.health.vocabulary import FAMILY_OF

FAULTS = sorted(INJECTORS)


def test_there_are_enough_faults_and_healthy_runs_of_many_kinds() -> None:
    assert len(INJECTORS) >= 110
    assert len(HEALTHY) >= 40
    algorithms = {"sft", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp"}
    algorithms |= {"ppo", "cpgd", "sapo", "gmpo", "ebft", "dpo", "ipo", "kto", "orpo", "simpo"}
    assert {body.algorithm for body in HEALTHY.values()} == algorithms
    assert len({body.game for body in HEALTHY.values()}) >= 6


def test_every_fault_that_is_written_is_in_the_catalogue() -> None:
    written = {
        fault
        for module in MODULES
        for fault in vars(module).values()
        if isinstance(fault, type) and issubclass(fault, Injector) and "name" in vars(fault)
    }
    assert written == set(INJECTORS.values())


def test_a_fault_expects_illnesses_that_the_doctor_knows() -> None:
    for name in FAULTS:
        fault = INJECTORS[name]
        assert fault.expects, name
        assert set(fault.expects) <= set(FAMILY_OF), name
        assert fault.__doc__, name
        assert fault.cure is Cure.NONE or fault.vital or not fault.stays, name


def test_a_dose_is_drawn_from_its_seed_within_bounds() -> None:
    for fault in INJECTORS.values():
        doses = [fault.dosed(seed) for seed in range(20)]
        assert doses == [fault.dosed(seed) for seed in range(20)]
        low, high = fault.onset
        assert all(low <= dose.onset <= high for dose in doses)
        assert all(dose.onset < fault.body.steps for dose in doses)
        weakest, strongest = fault.strength
        assert all(0.999 * weakest <= dose.strength <= 1.001 * strongest for dose in doses)
        assert low == high or len({dose.onset for dose in doses}) > 1


def test_every_recipe_is_one_that_train_accepts(tmp_path: Path) -> None:
    for name, body in HEALTHY.items():
        raw = body.recipe(tmp_path / name, bases=tmp_path / "bases", seed=1)
        assert build_config(raw, [], file=None).trainer.max_steps == body.steps
    for name, fault in INJECTORS.items():
        folder = tmp_path / "ill" / name
        raw = fault.body.recipe(folder, bases=tmp_path / "bases", seed=1)
        if fault.body.base is not None:
            weights = fault.body.base.weights(tmp_path / "bases")
            # Faults share the models that they begin with.
            if not weights.exists():
                write_model(weights)
        fault(fault.dosed(1)).prepare(raw, folder)
        assert build_config(raw, [], file=None).is_rl == fault.body.is_rl


def test_a_name_that_is_neither_fault_nor_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="no run or fault 'reward_flip'"):
        chosen(["reward_flip"], short=False)
    healthy, faults = chosen([], short=True)
    assert set(healthy) | set(faults) == set(SHORT)


def finding(name: str, *, causes: tuple[str, ...] = (), level: Level = Level.WARN) -> Finding:
    found = tuple(Cause(cause, "") for cause in causes)
    return Finding("RWD999", name, Family.REWARD, level, Confidence.MEASURED, "", causes=found)


def test_a_finding_is_about_a_fault_by_its_name_or_first_two_causes() -> None:
    fault = INJECTORS["reward_raises"]
    right, wrong = fault.expects[0], "port-in-use"
    assert is_about(finding(right), fault)
    assert is_about(finding(wrong, causes=(wrong, right)), fault)
    assert not is_about(finding(wrong, causes=(wrong, wrong, right)), fault)


def write_findings(run_dir: Path, *lines: tuple[int, str, Finding]) -> None:
    from homeostat.health.records import Change, State

    run_dir.mkdir(parents=True)
    records = [Change(State(state), step, one).as_record() for step, state, one in lines]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (run_dir / "findings.jsonl").write_text(text)
    (run_dir / "metrics.jsonl").write_text('{"step": 30, "train/loss": 1.0}\n')


def job(folder: Path, name: str, kind: Kind) -> Job:
    return Job(kind, name, 1, str(folder), str(folder / "bases"))


def test_a_verdict_counts_from_the_onset_and_keeps_earlier_alarms_apart(tmp_path: Path) -> None:
    fault = INJECTORS["reward_raises"]
    sick = job(tmp_path, fault.name, Kind.ILL)
    early, right = finding("port-in-use"), finding(fault.expects[0])
    write_findings(
        sick.run_dir,
        (5, "open", early),
        (8, "cleared", early),
        (12, "open", finding("zero-std-groups", level=Level.INFO)),
        (14, "open", right),
    )
    verdict = judge_ill(Ended(sick, 0, 1.0), fault, Dose(1, 11, 1.0))
    assert verdict.noticed
    assert verdict.right_first
    assert verdict.steps_late == 3
    assert verdict.false_alarms == ("RWD999 port-in-use @5",)
    late = judge_ill(Ended(sick, 0, 1.0), fault, Dose(1, 20, 1.0))
    assert not late.noticed
    assert late.steps_late is None
    assert len(late.false_alarms) == 2


def test_a_finding_before_the_onset_is_right_where_the_fault_makes_the_run_go_back(
    tmp_path: Path,
) -> None:
    fault = INJECTORS["corrupt_checkpoint"]
    sick = job(tmp_path / "a", fault.name, Kind.ILL)
    write_findings(sick.run_dir, (10, "open", finding("resumed-from-older")))
    verdict = judge_ill(Ended(sick, 0, 1.0), fault, Dose(1, 24, 1.0))
    assert (verdict.noticed, verdict.steps_late, verdict.false_alarms) == (True, 0, ())


def test_any_finding_above_info_is_an_alarm_in_a_healthy_run(tmp_path: Path) -> None:
    quiet = job(tmp_path / "a", "sft_pairs", Kind.HEALTHY)
    write_findings(quiet.run_dir, (3, "open", finding("port-in-use", level=Level.INFO)))
    assert judge_healthy(Ended(quiet, 0, 1.0)).false_alarms == ()
    loud = job(tmp_path / "b", "sft_pairs", Kind.HEALTHY)
    write_findings(loud.run_dir, (3, "open", finding("port-in-use")))
    assert judge_healthy(Ended(loud, 0, 1.0)).false_alarms == ("RWD999 port-in-use @3",)


def test_shares_and_medians_are_over_what_they_are_about() -> None:
    def one(*, noticed: bool, late: int | None, cure: str = "none", cured: bool | None = None):
        return Verdict(
            name="x", seed=1, ended="finished", seconds=1.0, noticed=noticed, right_first=noticed,
            steps_late=late, cure=cure, cured=cured,
        )  # fmt: skip

    faults = (
        one(noticed=True, late=2, cure="safe", cured=True),
        one(noticed=True, late=6, cure="all", cured=False),
        one(noticed=False, late=None, cure="all", cured=True),
        one(noticed=True, late=1),
    )
    report = Report((Verdict(name="h", seed=1, ended="finished", seconds=1.0),), faults, 9.0)
    figures = summarise(report)
    assert figures["noticed"] == figures["right_first"] == 0.75
    assert figures["median_steps_late"] == 2
    assert (figures["cured_safe"], figures["cured_all"]) == (1.0, 0.5)
    assert figures["healthy_with_alarms"] == 0
    assert json.loads(json.dumps(as_json(report)))["summary"] == figures


def test_a_run_that_hangs_is_ended_by_its_deadline(tmp_path: Path) -> None:
    fault = INJECTORS["frozen_layers"]
    ended = run_one(
        Job(Kind.ILL, fault.name, 1, str(tmp_path / "x"), str(tmp_path), deadline_s=0.2)
    )
    assert ended.how == "deadline"


def test_an_ill_run_is_told_from_a_healthy_one(tmp_path: Path) -> None:
    """The two runs of the short form, in this process: children would import torch three times."""
    healthy = job(tmp_path / "healthy", "sft_pairs", Kind.HEALTHY)
    fault = INJECTORS["frozen_layers"]
    ill = job(tmp_path / "ill", fault.name, Kind.ILL)
    for one in (healthy, ill):
        Path(one.folder).mkdir()
        assert patient.main(one) == 0
    assert judge_healthy(Ended(healthy, 0, 1.0)).false_alarms == ()
    verdict = judge_ill(Ended(ill, 0, 1.0), fault, fault.dosed(ill.seed))
    assert verdict.right_first, verdict


@pytest.mark.slow
def test_the_short_form_notices_its_faults_and_leaves_the_healthy_alone(tmp_path: Path) -> None:
    options = ["--short", "--jobs", "1", "--format", "json", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", "from homeostat.cli.main import main; main()", "clinic", *options],
        capture_output=True, text=True, check=False, timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "report.json").read_text())
    assert {one["name"] for one in report["faults"] + report["healthy"]} == set(SHORT)
    assert not [one for one in report["healthy"] if one["ended"] != "finished"]
    assert not [one for one in report["healthy"] if one["false_alarms"]], report["healthy"]
    missed = [one["name"] for one in report["faults"] if not one["right_first"]]
    assert not missed, report["faults"]
