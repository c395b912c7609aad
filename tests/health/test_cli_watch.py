"""`homeostat watch`: a growing log, a command, a folder, webhooks, and stopping."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.support.patience import patiently

from homeostat.cli import main as cli
from homeostat.errors import HomeostatError
from homeostat.health.finding import Level
from homeostat.health.readers import read_text
from homeostat.health.readers.growing import GrowingFile
from homeostat.health.registry import RULES
from homeostat.integrations.outlets import Sender, UserCommand, Webhook
from homeostat.integrations.pace import Pace
from homeostat.integrations.watching import RereadPlace, Watcher, followed_path, stop_own_run
from homeostat.observe.run_dir import RunDir

NAN_FROM = 9


def row(step: int) -> str:
    nan = 0.0 if step < NAN_FROM else float("nan")
    return (
        str({"loss": 2.0 - step / 50 + nan, "grad_norm": 0.5 + nan, "learning_rate": 1e-5}) + "\n"
    )


# A trainer that prints rows until it is asked to stop.
TRAINER = f"""
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("begins", file=sys.stderr)
for step in range(1, 2000):
    nan = 0.0 if step < {NAN_FROM} else float("nan")
    print({{"loss": 2.0 - step / 5000 + nan, "grad_norm": 0.5 + nan, "learning_rate": 1e-5}})
    time.sleep(0.01)
"""


def run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["homeostat", "watch", *words])
    monkeypatch.setenv("NO_COLOR", "1")
    code = 0
    try:
        cli.main()
    except SystemExit as end:
        code = int(end.code or 0)
    out, err = capfd.readouterr()
    return code, out, err


def test_a_command_is_passed_on_and_asked_to_stop_at_the_first_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    code, out, err = run(
        monkeypatch, capfd,
        "--stop-on", "error", "--interval", "0",
        "--exec", f'echo "$HOMEOSTAT_LEVEL $HOMEOSTAT_CODE $HOMEOSTAT_STEP" >> {seen}',
        "--", sys.executable, "-c", TRAINER,
    )  # fmt: skip
    assert code == 7, "the command's own exit code"
    assert out.startswith("{'loss': ")
    assert "homeostat" not in out
    assert "begins\n" in err
    told = [line for line in err.splitlines() if line.startswith("homeostat: step")]
    # A slow machine gives the other rules time to speak, too.
    assert sum("NUM002" in line for line in told) == 1, "told once"
    assert "asking the command to stop (SIGTERM) because of NUM002" in err
    assert "verdict: ill" in err
    passed_on = [line.split() for line in seen.read_text().splitlines()]
    ((level, _, step),) = [words for words in passed_on if words[1] == "NUM002"]
    assert level == "error"
    assert int(step) >= NAN_FROM


def test_a_command_that_is_killed_is_not_called_healthy(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = "import os\n"
    script += "".join(
        f"print({row(1).replace('1.98', str(2 - at / 50))!r}, end='')\n" for at in range(20)
    )
    script += "print(end='', flush=True); os.kill(os.getpid(), 9)\n"
    code, _, err = run(monkeypatch, capfd, "--interval", "0", "--", sys.executable, "-c", script)
    assert code == 137
    assert "verdict: no illness" not in err
    assert "not known" in err


def test_a_message_is_no_part_of_a_progress_bar_of_the_command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    bar = "import sys; sys.stderr.write('\\r 50%|##  | 1/2 [00:01<00:01]')"
    _, _, err = run(monkeypatch, capfd, "--", sys.executable, "-c", bar)
    assert "[00:01<00:01]\nhomeostat: the command ended" in err


def test_a_log_is_followed_until_nothing_more_comes(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def check(limit_s: float) -> None:
        path = tmp_path / f"{limit_s:g}.log"
        path.write_text("".join(map(row, range(1, NAN_FROM))))

        def write() -> None:
            for step in range(NAN_FROM, NAN_FROM + 8):
                time.sleep(0.02)
                with path.open("a") as file:
                    file.write(row(step))

        writer = threading.Thread(target=write)
        writer.start()
        settings = ("--interval", "0", "--idle-timeout", f"{limit_s:g}", "--format", "json")
        code, out, err = run(monkeypatch, capfd, str(path), *settings)
        writer.join()
        messages = [json.loads(line) for line in out.splitlines()]
        opened = {m["finding"]["code"]: m for m in messages if m["event"] == "opened"}
        # The first value that is not finite is the newest one, of which another rule speaks.
        assert {"NUM002"} <= opened.keys() <= {"NUM002", "VIT004"}
        assert opened["NUM002"]["finding"]["first_step"] == NAN_FROM
        assert code == 1
        assert f"nothing was written for {limit_s:g} s" in err

    patiently(check)


def test_what_does_not_exist_yet_is_followed_as_what_it_becomes(tmp_path: Path) -> None:
    for name, kind in (("run", RereadPlace), ("train.log", GrowingFile), ("x.log", RereadPlace)):
        path = tmp_path / name
        place, followed = followed_path(path, config=None)
        assert place.path == path
        assert not followed.poll()
        with pytest.raises(HomeostatError, match="no such file or folder"):
            followed.view()
        followed.finish()
        text = "".join(map(row, range(1, 6)))
        if name == "run":
            path.mkdir()
            assert followed.poll(), "the folder is there, but it may be empty"
            (path / "train.log").write_text(text)
        else:
            path.write_bytes(text.encode() if name == "train.log" else gzip.compress(text.encode()))
        assert followed.poll()
        assert type(followed_path(path, config=None)[1]) is kind
        followed.finish()
        assert followed.view().last_step == 5


def test_a_file_of_our_run_folder_stands_for_the_run(tmp_path: Path) -> None:
    config = {"algorithm": {"type": "sft"}, "runs_dir": "runs", "trainer": {"lr": 1e-3}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0}\n')
    place, followed = followed_path(tmp_path / "metrics.jsonl", config=None)
    assert place.path == tmp_path
    assert followed.view().settings["trainer.lr"] == 1e-3


def test_what_is_no_log_is_refused_at_once(tmp_path: Path) -> None:
    binary = tmp_path / "model.bin"
    binary.write_bytes(bytes(range(256)) * 40)
    with pytest.raises(HomeostatError, match="binary, not text"):
        followed_path(binary, config=None)
    recipe = tmp_path / "run.yaml"
    recipe.write_text("model: {path: x}\ndata: {path: y}\n")
    with pytest.raises(HomeostatError, match="this is a recipe, not a log"):
        followed_path(recipe, config=None)


@pytest.mark.parametrize("name", ["pipe", "/dev/zero", "-"])
def test_what_can_be_read_only_once_is_refused_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    name: str,
) -> None:
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    code, _, said = run(monkeypatch, capfd, name)
    assert code == 2
    assert "homeostat watch -- COMMAND" in " ".join(said.split())


def test_findings_that_open_together_are_told_most_likely_first() -> None:
    told: list[str] = []
    watcher = Watcher(
        run="-", rules=RULES, level=Level.INFO, tell=lambda one: told.append(one.finding.code)
    )
    log = "".join(map(row, range(1, NAN_FROM + 6)))
    watcher.look(read_text(f"Error computing reward\nno space left on device\n{log}"))
    assert watcher.report is not None
    assert told == [finding.code for finding in watcher.report.diagnosis.findings]
    assert len(told) > 1


def test_what_cannot_be_watched_or_stopped_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, _, err = run(monkeypatch, capfd, "--stop-on", "error", str(tmp_path / "train.log"))
    assert (code, "is not known which process writes it" in err) == (2, True)
    code, _, err = run(monkeypatch, capfd, "--", str(tmp_path / "nothing"), "--lr", "3")
    assert (code, "cannot be started" in err) == (2, True)
    code, _, err = run(monkeypatch, capfd, "--webhook", "ftp://x", str(tmp_path))
    assert (code, "http://" in err) == (2, True)
    code, _, err = run(monkeypatch, capfd, "--config", "x.yaml", "--", "echo", "a")
    assert (code, "--config is for a PATH" in err) == (2, True)
    code, _, err = run(monkeypatch, capfd, "--idle-timeout", "1", "--", sys.executable, "-c", "")
    assert (code, "--idle-timeout: a command is followed until it ends" in err) == (2, True)


def test_a_finding_that_gets_worse_or_goes_away_is_told() -> None:
    told: list[tuple[str, str]] = []
    watcher = Watcher(
        run="-", rules=RULES, level=Level.WARN,
        tell=lambda message: told.append((message.news.value, message.finding.code)),
    )  # fmt: skip
    ill = "".join(map(row, range(1, NAN_FROM + 6)))
    for _ in range(2):
        watcher.look(read_text(ill))
    well = "".join(map(row, range(1, NAN_FROM)))
    for _ in range(3):
        watcher.look(read_text(well))
    assert told == [("opened", "NUM002"), ("cleared", "NUM002")]


def test_a_folder_is_read_again_only_if_something_was_written(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "loss": 2.0}\n')
    place, followed = followed_path(tmp_path, config=None)
    assert (place.path, type(followed)) == (tmp_path, RereadPlace)
    assert [followed.poll(), followed.poll()] == [True, False]
    with metrics.open("a") as file:
        file.write('{"step": 2, "loss": 1.5}\n')
    assert followed.poll()
    assert followed.view().last_step == 2


def test_the_process_that_writes_a_run_folder_is_asked_to_stop(tmp_path: Path) -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    try:
        with RunDir(tmp_path / "run") as folder:
            stop_own_run(folder.path)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert got == [signal.SIGTERM]
    with pytest.raises(Exception, match="nothing to stop"):
        stop_own_run(tmp_path / "run")


def test_looking_takes_at_most_a_share_of_the_time() -> None:
    pace, now = Pace(0.0, interval_s=1.0, allowance_s=0.5), 0.0
    looks = 0
    for now in (step / 10 for step in range(10_000)):
        if pace.is_due(now):
            looks += 1
            pace.looked(now, 0.2)
    assert looks > 10
    assert pace.spent_s <= 0.5 + 0.2 + 0.01 * now


class _Hook(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: Any = self.server
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server.got.append(json.loads(body))
        self.send_response(server.answers.pop(0) if server.answers else 200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def hook() -> Iterator[Any]:
    server: Any = HTTPServer(("127.0.0.1", 0), _Hook)
    server.got, server.answers = [], []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


MESSAGE = {"event": "opened", "run": "-", "step": 3, "text": "homeostat: x",
           "finding": {"code": "NUM002", "level": "error"}}  # fmt: skip


def test_a_webhook_is_tried_again_if_that_may_help(hook: Any) -> None:
    url = f"http://127.0.0.1:{hook.server_address[1]}/hooks/secretpart"
    hook.answers = [503, 200]
    assert Webhook(url, pause_s=0.0).send(MESSAGE) == ""
    assert hook.got == [MESSAGE, MESSAGE]
    hook.answers = [404]
    assert Webhook(url, pause_s=0.0).send(MESSAGE) == "the webhook was not reached: it answered 404"
    assert len(hook.got) == 3
    hook.answers = [302]
    assert "302" in Webhook(url, pause_s=0.0).send(MESSAGE)


def test_a_webhook_that_is_down_is_told_and_ends_nothing() -> None:
    told: list[str] = []
    sender = Sender([Webhook("http://127.0.0.1:9/hooks/secretpart", pause_s=0.0)], tell=told.append)
    sender.send(MESSAGE)
    sender.close()
    assert len(told) == 1
    assert "secretpart" not in told[0]


def test_text_of_a_log_is_no_part_of_the_command(tmp_path: Path) -> None:
    evil = {**MESSAGE, "text": f"$(touch {tmp_path / 'made'}); `id`"}
    out = tmp_path / "out"
    assert UserCommand(f'cat > {out}; printf %s "$HOMEOSTAT_TEXT" >> {out}').send(evil) == ""
    assert not (tmp_path / "made").exists()
    assert out.read_text() == json.dumps(evil) + evil["text"]
    assert "exit code 3" in UserCommand("exit 3").send(MESSAGE)
    assert "did not end" in UserCommand("exec sleep 5", timeout_s=0.1).send(MESSAGE)


@pytest.mark.slow
def test_ctrl_c_ends_a_watch_with_a_last_look(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("".join(map(row, range(1, NAN_FROM + 6))))
    line = [sys.executable, "-c", "from homeostat.cli.main import main; main()", "watch", str(path)]
    process = subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
    )
    assert process.stdout is not None
    assert "NUM002" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, "interrupted; verdict: ill" in err) == (1, True)
