"""How findings are put together: what folds into what, and in which order."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from homeostat.health.diagnose import (
    EXPECTED,
    TURNED_OFF,
    Diagnosis,
    diagnose,
    folded,
    named,
)
from homeostat.health.finding import Finding, Level, Sighting
from homeostat.health.readers import open_run, read_text
from homeostat.health.registry import BY_CODE, RULES
from homeostat.health.view import RunView
from homeostat.health.vital_signs.ending import ending_of


def finding(code: str, **fields: object) -> Finding:
    return named(BY_CODE[code], Sighting(message=code, **fields), RunView())  # type: ignore[arg-type]


def test_what_is_only_worth_a_note_hides_no_illness() -> None:
    alike = finding("RWD001")
    assert [f.code for f in folded([finding("GEN001"), alike], RULES)] == ["GEN001"]
    note = finding("GEN001", level=Level.INFO)
    assert [f.code for f in folded([note, alike], RULES)] == ["RWD001", "GEN001"]


def test_a_benign_explanation_still_takes_the_alarm_away() -> None:
    benign = [rule for rule in RULES if rule.level is Level.INFO and rule.explains]
    assert benign
    rule = benign[0]
    both = [finding(rule.code), finding(rule.explains[0])]
    assert [f.code for f in folded(both, RULES)] == [rule.code]


def test_a_reward_that_is_none_for_all_explains_that_the_mean_is_no_number() -> None:
    for code in ("RWD011", "RWD012"):
        both = [finding("VIT004"), finding(code)]
        assert [f.code for f in folded(both, RULES)] == [code]


def test_an_exception_of_the_users_code_takes_the_texts_of_its_own_place_alone() -> None:
    failed = finding("VIT001", evidence=("line 10: Traceback", "line 20: KeyError: 'x'"))
    inside = finding("ERR140", evidence=("line 15: x",))
    [kept] = folded([failed, inside], RULES)
    assert kept.code == "VIT001"
    other = next(r.code for r in RULES if r.code.startswith("ERR1") and r.code not in (
        *BY_CODE["VIT001"].explains,) and r.level is Level.ERROR)  # fmt: skip
    outside = finding(other, evidence=("line 300: x",))
    assert {f.code for f in folded([failed, outside], RULES)} == {"VIT001", other}
    within = finding(other, evidence=("line 12: x",))
    assert [f.code for f in folded([failed, within], RULES)] == ["VIT001"]


def test_the_order_in_which_rules_are_asked_does_not_matter() -> None:
    codes = ["GEN001", "RWD001", "POL013", "RWD006", "POL015", "GEN003"]
    expected = folded([finding(code) for code in codes], RULES)
    for seed in range(5):
        mixed = random.Random(seed).sample(codes, len(codes))
        found = folded([finding(code) for code in mixed], RULES)
        assert [f.code for f in found] == [f.code for f in expected]


def test_a_reward_that_was_over_optimised_goes_before_what_is_left_of_the_policy() -> None:
    texts = [finding("GEN001"), finding("POL001"), finding("POL015")]
    [kept] = folded([*texts, finding("RWD016")], RULES)
    assert kept.code == "RWD016"
    assert len(kept.evidence) == len(texts)


def test_rules_that_name_the_same_illness_are_one_finding() -> None:
    one, other = finding("ERR493"), finding("ERR484")
    assert one.name == other.name
    (kept,) = folded([other, one], RULES)
    assert kept.code in ("ERR484", "ERR493")
    assert any(line.startswith(("ERR484", "ERR493")) for line in kept.evidence)


def test_one_rule_keeps_a_finding_for_each_subject() -> None:
    both = [finding("RWD001", subject="format"), finding("RWD001", subject="length")]
    assert [f.subject for f in folded(both, RULES)] == ["format", "length"]


def said_of(log: str) -> list[str]:
    view = read_text(log, config=None)
    return [found.code for found in diagnose(view, RULES).findings]


def test_known_words_below_the_class_of_an_exception_are_about_that_exception() -> None:
    log = (
        "OSError: You are trying to access a gated repo.\n"
        "Make sure to have access to it at https://huggingface.co/some/model.\n"
        "401 Client Error. (Request ID: Root=1-69cf8f08)\n\n"
        "Cannot access gated repo for url https://huggingface.co/some/model/config.json.\n"
        "Access to model some/model is restricted. Please log in.\n"
    )
    assert said_of(log) == ["ERR350"]


def test_words_quoted_from_an_earlier_line_are_known_in_the_exception_as_well() -> None:
    log = (
        "A module that was compiled using NumPy 1.x cannot be run in\n"
        "NumPy 2.0.0 as it may crash. To support both 1.x and 2.x\n\n"
        "warming up\nready\nreading rows\nstarting\n"
        "Traceback (most recent call last):\n"
        '  File "/srv/infer.py", line 5, in <module>\n    main()\n'
        '  File "/env/lib/python3.10/site-packages/torch/utils/data.py", line 1, in rows\n'
        "    values.numpy()\nRuntimeError: Numpy is not available\n"
    )
    assert said_of(log) == ["ERR318"]
    other = log.replace("Numpy is not available", "the stove is out")
    assert "VIT002" in said_of(other)


def test_a_cpu_build_of_torch_explains_that_bitsandbytes_has_no_gpu() -> None:
    log = (
        "The installed version of bitsandbytes was compiled without GPU support.\n"
        "AssertionError: Torch not compiled with CUDA enabled\n"
    )
    assert said_of(log) == ["ERR312"]


def our_run(folder: Path, **health: Any) -> Path:
    """Return a folder of a run of ours in which half of the groups teach nothing."""
    folder.mkdir()
    config = {
        "algorithm": {"type": "grpo"}, "runs_dir": "runs", "trainer": {"lr": 1e-6},
        "rollout": {"samples_per_prompt": 8}, "health": health,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, 41):
            record = {"step": step, "reward": 0.5, "reward_std": 0.1, "frac_reward_zero_std": 1.0}
            file.write(json.dumps(record) + "\n")
    return folder


def judged(folder: Path) -> Diagnosis:
    return diagnose(open_run(folder), RULES)


def test_a_run_of_ours_is_judged_with_its_own_levels_options_and_allowances(tmp_path: Path) -> None:
    plain = judged(our_run(tmp_path / "plain"))
    (found,) = [one for one in plain.findings if one.code == "RWD001"]
    assert found.level is not Level.INFO

    lowered = judged(our_run(tmp_path / "lowered", levels={"RWD001": "info"}))
    assert {f.code: f.level for f in lowered.findings}["RWD001"] is Level.INFO

    lax = judged(
        our_run(tmp_path / "lax", options={"RWD001": {"fire": 100, "window": 100, "fire_all": 100}})
    )
    assert "RWD001" in lax.clear

    off = judged(our_run(tmp_path / "off", levels={"RWD001": "off"}))
    assert {one.code: one.why for one in off.not_evaluated}["RWD001"] == TURNED_OFF

    solved = {"code": "RWD001", "reason": "the last prompts are solved"}
    allowed = judged(our_run(tmp_path / "allowed", allow=[solved]))
    assert "RWD001" not in {one.code for one in allowed.findings}
    why = {one.code: one.why for one in allowed.not_evaluated}["RWD001"]
    assert why == f"{EXPECTED}: the last prompts are solved"

    over = judged(our_run(tmp_path / "over", allow=[{**solved, "until_step": 39}]))
    assert "RWD001" in {one.code for one in over.findings}


def test_settings_of_health_that_no_rule_can_use_do_not_end_the_doctor(tmp_path: Path) -> None:
    plain = judged(our_run(tmp_path / "plain"))
    damaged = our_run(
        tmp_path / "damaged",
        levels={"RWD001": "grave", "XYZ999": "off"},
        options={"RWD001": {"fire_all": "many", "gone": 1}, "XYZ999": {"a": 1}},
        allow=["RWD001", {"reason": "no code"}, {"code": 7}],
    )
    assert judged(damaged).findings == plain.findings
    odd = our_run(tmp_path / "odd", levels="off", options=3, allow=True)
    assert judged(odd).findings == plain.findings


_LIBRARY = "/env/lib/python3.11/site-packages"
# An exception that no signature knows, read from its words.
_UNREAD_BY_RULES = (
    "[rank0]: Traceback (most recent call last):\n"
    '[rank0]:   File "/srv/train.py", line 9, in <module>\n[rank0]:     trainer.train()\n'
    f'[rank0]:   File "{_LIBRARY}/accelerate/accelerator.py", line 300, in __init__\n'
    "[rank0]:     self.state = State(brew=3)\n"
    "[rank0]: TypeError: State.__init__() got an unexpected keyword argument 'brew'\n"
)
_TIMED_OUT = (
    "[rank3]:[E1 10:00:00 ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=41, OpType=ALLREDUCE) ran for 600012 milliseconds\n"
    "(raylet) A worker died or was killed while executing a task by an unexpected system error.\n"
)
_WARNED = (
    "/env/lib/python3.11/site-packages/torch/utils/checkpoint.py:87: UserWarning: None of the "
    "inputs have requires_grad=True. Gradients will be None\n"
    "WARNING 06-11 09:12:31 [interface.py:219] Failed to import from vllm._C with "
    "ModuleNotFoundError(\"No module named 'vllm._C'\")\n"
)


def alarms_of(log: str) -> list[str]:
    found = diagnose(read_text(log, config=None), RULES).findings
    return [one.code for one in found if one.level is not Level.INFO]


def test_what_ranks_say_after_the_first_one_raised_is_evidence_of_that_exception() -> None:
    assert alarms_of(_TIMED_OUT)[0] == "ERR100"
    assert alarms_of(_UNREAD_BY_RULES) == ["VIT002"]
    assert alarms_of(_UNREAD_BY_RULES + _TIMED_OUT) == ["VIT002"]
    # It is as severe as what it explains.
    (first, *_) = diagnose(read_text(_UNREAD_BY_RULES + _TIMED_OUT, config=None), RULES).findings
    assert first.level is Level.ERROR
    assert any(line.startswith("ERR100") for line in first.evidence)
    assert "nccl-timeout" not in {cause.name for cause in first.causes}


def test_an_exception_below_a_timeout_does_not_explain_it() -> None:
    assert alarms_of(_TIMED_OUT + _UNREAD_BY_RULES)[0] == "ERR100"


def test_an_exception_that_nobody_reads_explains_only_what_other_processes_say() -> None:
    unread = _UNREAD_BY_RULES.replace("TypeError: State.__init__() got an unexpected keyword "
                                      "argument 'brew'", "KettleError: 418")  # fmt: skip
    assert alarms_of(unread + _TIMED_OUT) == ["VIT002"]
    same = _TIMED_OUT.replace("rank3", "rank0").splitlines(keepends=True)[0]
    assert alarms_of(unread + same)[0] == "ERR100"


def test_an_error_without_a_traceback_explains_the_watchdog_that_aborts_the_others() -> None:
    lone = "TypeError: type NoneType doesn't define __brew__ method\n"
    aborted = f"{_TIMED_OUT}Fatal Python error: Aborted\n"
    assert alarms_of(aborted)[0] == "ERR100"
    assert alarms_of(lone + aborted)[0] == "VIT002"
    assert ending_of(read_text(lone + aborted, config=None)).traceback.start.number == 1
    # The error of a process that lost another one is no reason, and what comes later is none.
    lost = "torch.distributed.DistNetworkError: failed to recv, got 0 bytes\n"
    assert alarms_of(lost + aborted)[0] == "ERR100"
    assert alarms_of(aborted + lone)[0] == "ERR100"


def test_the_exception_that_ended_the_run_goes_before_warnings_above_it() -> None:
    found = alarms_of(_WARNED + _UNREAD_BY_RULES)
    assert found[0] == "VIT002"
    assert "ERR394" in found[1:]
    # Alone, the warning is all that is known.
    assert alarms_of(_WARNED)[0] in ("ERR394", "ERR666")


def test_a_warning_does_not_hide_what_the_last_exception_says() -> None:
    log = _WARNED + (
        "Traceback (most recent call last):\n"
        '  File "/srv/train.py", line 9, in <module>\n    from vllm import Kettle\n'
        "ImportError: cannot import name 'Kettle' from 'vllm' (/env/vllm/__init__.py)\n"
    )
    without = alarms_of(log.removeprefix(_WARNED))
    assert without[0] != "ERR394"
    assert alarms_of(log)[0] == without[0]


def test_a_scheduler_that_ended_says_less_than_its_exception() -> None:
    log = _UNREAD_BY_RULES.replace("[rank0]: ", "")
    log = f"[2026-02-20 04:27:00 TP5] Scheduler hit an exception: {log}"
    (first, *_) = diagnose(read_text(log, config=None), RULES).findings
    assert first.code == "VIT002"
    assert first.causes[0].name == "library-version-mismatch"


def test_what_is_only_warned_of_hides_no_error() -> None:
    error = finding("ERR320")
    assert [f.code for f in folded([finding("ERR394"), error], RULES)] == ["ERR394"]
    warned = finding("ERR394", level=Level.WARN)
    assert [f.code for f in folded([warned, error], RULES)] == ["ERR320", "ERR394"]


OWN_MISTAKE = """step 1
step 2
step 3
Traceback (most recent call last):
  File "/app/train.py", line 55, in <module>
    rate = settings["lr"]
KeyError: 'lr'
"""


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("wandb: ERROR Error while calling W&B API: internal database error", "ERR356"),
        ("AttributeError: 'MessageFactory' object has no attribute 'GetPrototype'", "ERR319"),
        ("AttributeError: _ARRAY_API not found", "ERR318"),
        ("bitsandbytes was compiled without GPU support. 8-bit optimizers are not", "ERR357"),
        ("/bin/sh: 1: gcc: not found", "ERR341"),
    ],
)
def test_what_a_program_continues_after_does_not_hide_the_exception_that_ended_it(
    line: str, code: str
) -> None:
    findings = diagnose(read_text(f"{line}\n{OWN_MISTAKE}", config=None), RULES).findings
    assert [(f.code, f.level) for f in findings] == [("VIT006", Level.ERROR), (code, Level.WARN)]


def test_a_launchers_report_is_no_traceback_of_something_else() -> None:
    text = """Traceback (most recent call last):
  File "/app/train.py", line 3, in <module>
    import einops
ModuleNotFoundError: No module named 'einops'
Traceback (most recent call last):
  File "/opt/env/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
train.py FAILED
"""
    (only,) = diagnose(read_text(text, config=None), RULES).findings
    assert (only.code, only.level) == ("ERR307", Level.ERROR)
