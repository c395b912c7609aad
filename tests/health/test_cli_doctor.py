"""The verbs doctor, rules and explain, as a user types them; and mutated logs."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from homeostat.cli import main as cli
from homeostat.cli.doctor import doctor
from homeostat.cli.explain import explain
from homeostat.cli.quick import arguments_of
from homeostat.cli.rules import rules
from homeostat.health.finding import Family, Level
from homeostat.health.registry import RULES

BENCH = Path(__file__).resolve().parents[2] / "bench"
NUM_MUTATED = 150
OOM = """\
(WorkerDict pid=7) actor_rollout_ref.actor.optim.lr=1e-06
(WorkerDict pid=7) Traceback (most recent call last):
(WorkerDict pid=7)   File "/venv/verl/workers/fsdp_workers.py", line 812, in update_actor
(WorkerDict pid=7)   File "/venv/torch/autograd/graph.py", line 824, in _engine_run_backward
(WorkerDict pid=7) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB. \
GPU 0 has a total capacity of 79.10 GiB of which 1.02 GiB is free.
"""
WELL = "".join(
    str({"loss": 2.0 - step / 40, "grad_norm": 0.5, "learning_rate": 1e-5, "epoch": step / 40})
    + "\n"
    for step in range(1, 31)
)


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str, str]:
    """Exit code, standard output and error of a command."""
    monkeypatch.setattr(sys, "argv", ["homeostat", *words])
    monkeypatch.setenv("COLUMNS", "80")
    code = 0
    try:
        cli.main()
    except SystemExit as end:
        code = int(end.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def oom_log(tmp_path: Path) -> Path:
    path = tmp_path / "train.log"
    path.write_text(OOM)
    return path


def test_an_ill_run_ends_with_1_and_the_setting_of_its_framework(
    oom_log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(monkeypatch, capsys, "doctor", str(oom_log), "--format", "json")
    found = json.loads(out)
    assert (code, found["healthy"], found["framework"]) == (1, False, "verl")
    first = found["findings"][0]
    assert first["family"] == "memory"
    assert any("actor_rollout_ref." in (fix["setting"] or "") for fix in first["fixes"])
    code, out, _ = run(monkeypatch, capsys, "doctor", str(oom_log))
    assert code == 1
    assert "ILL: " in out
    assert "What to do, with verl" in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_healthy_run_ends_with_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log.txt").write_text(WELL)
    code, out, _ = run(monkeypatch, capsys, "doctor", str(tmp_path / "log.txt"))
    assert (code, "NO ILLNESS FOUND, as far as it is logged." in out) == (0, True)


def test_standard_input_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(OOM.encode() + b"\xff\0")))
    code, out, _ = run(monkeypatch, capsys, "doctor", "-", "--format=json", "--select=ERR")
    assert (code, json.loads(out)["findings"][0]["family"]) == (1, "memory")


def test_what_cannot_be_read_ends_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(monkeypatch, capsys, "doctor", str(tmp_path / "nothing"))
    assert (code, "nothing" in err) == (2, True)
    code, out, _ = run(monkeypatch, capsys, "doctor", str(tmp_path / "nothing"), "--format", "json")
    assert (code, "nothing" in json.loads(out)["error"]["message"]) == (2, True)


def test_rules_are_chosen_by_code_beginning_name_or_family(
    oom_log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(oom_log)
    code, out, _ = run(monkeypatch, capsys, "doctor", path, "--select", "checkpoint,RWD001")
    assert (code, "CUDA out of memory" in out) == (1, True), "an end that these rules do not know"
    code, out, _ = run(monkeypatch, capsys, "doctor", path, "--ignore", "memory", "--format=json")
    codes = {one["family"] for one in json.loads(out)["findings"]}
    assert "memory" not in codes
    code, _, err = run(monkeypatch, capsys, "doctor", path, "--select", "XYZ9")
    assert (code, "--select XYZ9" in err) == (2, True)


def test_a_level_hides_what_is_below_it(
    oom_log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = run(
        monkeypatch, capsys, "doctor", str(oom_log), "--level", "error", "--format", "json"
    )
    assert {one["level"] for one in json.loads(out)["findings"]} == {"error"}


@pytest.mark.parametrize(
    "words",
    [["--help"], ["-x"], [], ["a", "--level", "huge"], ["a", "--config"], ["--", "a"]],
)
def test_what_is_not_said_plainly_is_left_to_typer(words: list[str]) -> None:
    assert arguments_of(doctor, words) is None


def test_plain_words_are_read_as_typer_reads_them() -> None:
    said = arguments_of(doctor, ["-", "--level=warn", "-v", "--config", "c.yaml"])
    assert said == {"paths": ["-"], "level": Level.WARN, "verbose": True, "config": Path("c.yaml")}
    assert arguments_of(rules, ["--family", "sync"]) == {"family": Family.SYNC}
    assert arguments_of(explain, ["RWD001"]) == {"code": "RWD001"}


@pytest.mark.parametrize("words", [["doctor"], ["doctor", "x", "--level", "huge"], ["explain"]])
def test_bad_usage_ends_with_2(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(monkeypatch, capsys, *words)
    assert (code, "Usage" in err) == (2, True)


def test_the_rules_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = run(monkeypatch, capsys, "rules")
    assert all(rule.code in out for rule in RULES)
    _, out, _ = run(monkeypatch, capsys, "rules", "--family", "reward", "--format", "json")
    listed = json.loads(out)
    assert {one["family"] for one in listed} == {"reward"}
    assert "max_share" in next(one for one in listed if one["code"] == "RWD001")["options"]


def test_a_rule_and_a_name_are_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = run(monkeypatch, capsys, "explain", "rwd001")
    assert out.startswith("# RWD001 zero-std-groups")
    assert "## What to do" in out
    assert "- max_share = " in out
    _, out, _ = run(monkeypatch, capsys, "explain", "zero-std-groups")
    assert "RWD001" in out
    _, out, _ = run(monkeypatch, capsys, "explain", "RWD001", "--format", "json")
    assert json.loads(out)["rules"][0]["code"] == "RWD001"
    code, _, err = run(monkeypatch, capsys, "explain", "zero-std-group")
    assert (code, "Did you mean zero-std-groups?" in err) == (2, True)


def test_the_doctor_loads_neither_torch_nor_pydantic(oom_log: Path) -> None:
    code = (
        "import sys\nfrom homeostat.cli.main import main\n"
        f"sys.argv = ['homeostat', 'doctor', {str(oom_log)!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 1\n"
        "heavy = {'torch', 'pydantic', 'rich', 'pyarrow', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "num_mutated", [60, pytest.param(NUM_MUTATED, marks=pytest.mark.slow)], ids=["few", "more"]
)
def test_mutated_logs_never_give_a_traceback(
    monkeypatch: pytest.MonkeyPatch, num_mutated: int
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import fuzz_logs

    found = fuzz_logs.summary(fuzz_logs.run_all(range(num_mutated), seed=20))
    assert not found["violations"], json.dumps(found["violations"][:3], indent=1)
    # The mutations must leave something to read.
    assert found["outcomes"]["read"] > num_mutated / 2


def test_rows_of_unknown_names_are_told_with_the_option_that_names_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "train.log"
    path.write_text("".join(f"{{'flux': {2 - n / 40}, 'my norm': 0.5}}\n" for n in range(1, 31)))
    _, out, _ = run(monkeypatch, capsys, "doctor", str(path))
    assert "Read 30 rows of numbers with names that no rule knows: flux, my norm." in out
    assert "--map flux=train/loss" in out
    words = ("--map", "flux=train/loss", "--map=my norm=grad_norm")
    _, out, _ = run(monkeypatch, capsys, "doctor", str(path), *words)
    assert "NO ILLNESS FOUND" in out
    assert "the loss went from" in out
    _, out, _ = run(monkeypatch, capsys, "doctor", str(path), "--format", "json")
    assert json.loads(out)["reading"]["unknown_names"] == ["flux", "my norm"]
