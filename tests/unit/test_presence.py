"""Files that living processes hold: they are never removed as those of dead ones."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import tempfile
import threading
from pathlib import Path

from homeostat.sync.presence import hold, is_held, remove_unheld


def test_a_held_file_stays_while_others_remove_what_nobody_holds(tmp_path: Path) -> None:
    path, ended = tmp_path / "segment", threading.Event()

    def remove() -> None:
        while not ended.is_set():
            remove_unheld(path)

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        for _ in range(300):
            descriptor = hold(path)
            assert os.path.samestat(os.stat(path), os.fstat(descriptor))
            os.close(descriptor)
    finally:
        ended.set()
        remover.join()


def test_what_nobody_holds_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    os.close(hold(path))
    assert not is_held(path)
    remove_unheld(path)
    assert not path.exists()
    remove_unheld(path)


def _as_somebody_else(path: Path) -> None:
    if os.getuid() == 0:
        os.setuid(65534)
    remove_unheld(path)


def test_the_file_of_another_user_is_left_alone() -> None:
    # Shared by all users of a machine, who may have used the same names.
    path = Path(tempfile.gettempdir()) / f"homeostat-test-{secrets.token_hex(8)}"
    path.touch()
    path.chmod(0)
    try:
        child = multiprocessing.get_context("fork").Process(target=_as_somebody_else, args=(path,))
        child.start()
        child.join(60)
        assert (child.exitcode, path.exists()) == (0, True)
    finally:
        path.unlink()
