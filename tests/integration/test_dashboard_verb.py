"""`homeostat dashboard` as a process: it ends when it is told to, also while a page is open."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.run_folders import write_run

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


def test_ctrl_c_ends_the_dashboard_while_a_page_is_open(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"train/loss": [2.0, 1.0]})
    command = [sys.executable, "-m", "homeostat", "dashboard", str(run), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", process.stderr.readline())
        assert found is not None
        with socket.create_connection(("127.0.0.1", int(found[1])), timeout=60) as page:
            page.sendall(b"GET /api/changes HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert page.recv(1000).startswith(b"HTTP/1.1 200")
            process.send_signal(signal.SIGINT)
            process.wait(timeout=30)
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()
