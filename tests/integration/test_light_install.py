"""`pip install homeostat` alone: what needs no model works, the rest says what to install.

The environment is made of links to the packages that the project requires without any extra, with
all that these require, so that a package that only `homeostat[train]` brings cannot be imported.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution, requires
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "recipes" / "tiny_sort_grpo_cpu.yaml")
HEAVY = ("torch", "transformers", "tokenizers", "safetensors", "pyarrow", "jinja2")


def base_distributions() -> dict[str, Distribution]:
    """Return the distributions that the project needs without extras, by name."""
    found: dict[str, Distribution] = {}
    waiting = list(requires("homeostat") or [])
    while waiting:
        requirement = waiting.pop()
        name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()
        if "extra ==" in requirement or name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            # Required on another platform or by another Python.
            continue
        waiting += found[name].requires or []
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("light")
    for one in base_distributions().values():
        for file in one.files or ():
            top = file.parts[0]
            link = folder / top
            if top not in ("..", "__pycache__") and not link.exists():
                link.symlink_to(Path(str(one.locate_file(top))))
    return folder


def homeostat(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-S", "-c", "from homeostat.cli.main import main; main()", *words]
    path = os.pathsep.join((str(ROOT / "src"), str(place)))
    return subprocess.run(
        line,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
        cwd=place,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_nothing_heavy_is_required() -> None:
    assert not set(base_distributions()) & set(HEAVY)


def test_the_doctor_reads_a_log(place: Path, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(
        "step 1 loss 2.0\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate\n"
    )
    done = homeostat(place, "doctor", str(log), "--format", "json")
    codes = [one["code"] for one in json.loads(done.stdout)["findings"]]
    assert any(code.startswith(("ERR", "MEM")) for code in codes), done.stdout


def test_watch_and_the_import_of_the_callback_need_no_more(place: Path) -> None:
    # The watched command imports the callback's module and tries to make a callback.
    code = """
from homeostat.errors import MissingDependencyError
from homeostat.integrations.transformers import HealthCallback
try:
    HealthCallback()
except MissingDependencyError as error:
    print(error)
"""
    done = homeostat(place, "watch", "--", sys.executable, "-S", "-c", code)
    assert (done.returncode, "needs the package transformers" in done.stdout) == (0, True), done
    assert "the command ended with exit code 0" in done.stderr


def test_the_keys_of_a_recipe_are_checked(place: Path) -> None:
    good = homeostat(place, "check", RECIPE)
    assert (good.returncode, "pip install 'homeostat[train]'" in good.stdout) == (0, True)
    bad = homeostat(place, "check", RECIPE, "trainer.learning_rate=1")
    assert (bad.returncode, "Did you mean trainer.lr?" in bad.stderr) == (2, True)


@pytest.mark.parametrize("verb", [("train", RECIPE), ("generate", "m", "hello")])
def test_a_verb_that_needs_more_says_what_to_install(place: Path, verb: tuple[str, ...]) -> None:
    done = homeostat(place, *verb)
    assert f"homeostat {verb[0]} needs the package" in done.stderr
    assert "pip install 'homeostat[train]'" in done.stderr
    assert "Traceback" not in done.stderr
