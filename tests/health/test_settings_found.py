"""Every setting that the doctor names was found in sources, and can be looked for again."""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path

import pytest
from tests.support.named_settings import unknown_words
from typer.testing import CliRunner

from homeostat.cli.dev import app
from homeostat.cli.known_settings.checking import check, unplaced, updated
from homeostat.cli.known_settings.definitions import definitions, is_defined_by
from homeostat.cli.known_settings.files import file_text
from homeostat.cli.known_settings.reporting import LISTS as LISTS_FOLDER
from homeostat.cli.known_settings.reporting import chosen, report, write
from homeostat.health.frameworks.known import Known, Source, known

LISTS = chosen([])
CONFIG = '''
"""A docstring that names lost_rate."""
class TrainConfig:
    lr: float = 1e-3
    class Inner:
        rank = 8

def load(path, *, lazy=False):
    parser.add_argument("--max-len", type=int)
    for role in ("actor", "critic"):
        parser.add_argument(f"--{role}.adam.lr")
    return os.environ.get("SOME_VARIABLE")
'''


@pytest.mark.parametrize("name", LISTS)
def test_every_listed_setting_has_a_place_in_sources(name: str) -> None:
    facts = known(name)
    assert unplaced(facts) == [], "run homeostat dev check-settings --source ... --write"
    placed = {one for source in facts.sources for names in source.found.values() for one in names}
    assert placed <= (facts.settings or {}).keys()
    assert all(source.version and source.found for source in facts.sources)


def test_sentences_name_only_variables_and_flags_that_were_found() -> None:
    assert unknown_words() == {}, "find it in sources and add it to known/environment or commands"


@pytest.mark.parametrize("name", LISTS)
def test_lists_are_written_as_they_are_read(name: str) -> None:
    path = Path(inspect.getfile(Known)).with_suffix("") / f"{name}.toml"
    assert file_text(known(name)) == path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("setting", "owner"),
    [
        ("lr", "TrainConfig"),
        ("optim.lr", "TrainConfig"),
        ("--lr", "TrainConfig"),
        ("rank", "TrainConfig.Inner"),
        ("lazy", "load"),
        ("--max-len", ""),
        ("--max_len", ""),
        ("--actor.adam.lr", ""),
        ("SOME_VARIABLE", ""),
    ],
)
def test_a_definition_is_found_with_its_owner(setting: str, owner: str) -> None:
    found = {one.owner for one in definitions(CONFIG, path="a.py") if is_defined_by(setting, one)}
    assert owner in found


@pytest.mark.parametrize("setting", ["lost_rate", "max-len", "learning", "--actor.adam", "SOME"])
def test_words_of_docstrings_and_parts_of_names_define_nothing(setting: str) -> None:
    assert not any(is_defined_by(setting, one) for one in definitions(CONFIG, path="a.py"))


def test_keys_of_files_are_compared_by_their_whole_path() -> None:
    found = definitions("actor:\n  optim: {lr: 1}\nseed: 0\n", path="a.yaml")
    defined = [
        name
        for name in ("actor.optim.lr", "trainer.actor.optim.lr", "optim.lr", "lr", "seed")
        if any(is_defined_by(name, one) for one in found)
    ]
    assert defined == ["actor.optim.lr", "trainer.actor.optim.lr", "seed"]


def test_macros_and_quoted_words_of_compiled_code_are_variables() -> None:
    text = 'NCCL_PARAM(P2pDisable, "P2P_DISABLE", -2);\nRAY_CONFIG(uint64_t, refresh_ms, 250)\n'
    found = {one.name for one in definitions(text + 'getenv("A_B")', path="a.cc")}
    assert {"NCCL_P2P_DISABLE", "RAY_refresh_ms", "A_B"} <= found


def facts_of(found: dict[str, tuple[str, ...]], *, new: tuple[str, ...] = ()) -> Known:
    names = (*new, *(one for several in found.values() for one in several))
    source = Source("some/trainer", "0" * 12, "2026-01-01", "1.0", found=found)
    return Known((source,), dict.fromkeys(names, "int"))


def test_what_moved_and_what_vanished_is_told(tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "config.py").write_text("class Config:\n    held: int\n")
    (tmp_path / "trainer" / "other_args.py").write_text("class Args:\n    moved: int\n    new: int")
    place = "src/trainer/config.py::Config"
    facts = facts_of({place: ("held", "moved", "gone")}, new=("new",))
    (result,) = check(facts, {"": [tmp_path]})
    there = "trainer/other_args.py::Args"
    assert result.held == ("held",)
    assert result.moved == {"moved": there, "new": there}
    assert result.vanished == ("gone",)
    (source,) = updated(facts, [result]).sources
    assert source.found == {place: ("gone", "held"), there: ("moved", "new")}


def test_sources_that_are_not_there_are_not_compared(tmp_path: Path) -> None:
    (result,) = check(facts_of({"trainer/config.py": ("held",)}), {"": [tmp_path]})
    assert not result.is_compared
    assert result.vanished == ()


def test_a_prefix_that_a_user_writes_is_not_part_of_the_name(tmp_path: Path) -> None:
    (tmp_path / "args.py").write_text("class ServerArgs:\n    tp_size: int\n")
    source = Source(
        "a/b", "0" * 12, "2026-01-01", "1", prefix="--sglang-",
        found={"args.py::ServerArgs": ("--sglang-tp-size",)},
    )  # fmt: skip
    (result,) = check(Known((source,), {"--sglang-tp-size": "int"}), {"": [tmp_path]})
    assert result.held == ("--sglang-tp-size",)


def test_the_command_ends_with_1_if_a_setting_vanished(tmp_path: Path) -> None:
    (tmp_path / "python" / "ray" / "scripts").mkdir(parents=True)
    script = tmp_path / "python" / "ray" / "scripts" / "scripts.py"
    script.write_text('@click.option("--num-gpus", type=int)\ndef start(num_gpus): ...\n')
    asked = ["check-settings", "ray", "--source", str(tmp_path)]
    good = CliRunner().invoke(app, asked)
    assert (good.exit_code, "1 stand where" in good.output) == (0, True)
    script.write_text("def start(): ...\n")
    bad = CliRunner().invoke(app, asked)
    assert (bad.exit_code, "vanished  --num-gpus" in bad.output) == (1, True)


def written_list(root: Path, sources: dict[str, list[Path]]) -> str:
    """Return the list of Ray as --write leaves it in a checkout that begins with the real one."""
    path = root / LISTS_FOLDER / "ray.toml"
    path.parent.mkdir(parents=True)
    path.write_text("# by hand\n" + file_text(known("ray")), encoding="utf-8")
    write(root, report("ray", sources))
    return path.read_text(encoding="utf-8")


def test_write_stores_the_new_place_of_a_setting(tmp_path: Path) -> None:
    source = tmp_path / "checkout" / "new"
    source.mkdir(parents=True)
    options = '@click.option("--num-gpus", type=int)\ndef start(num_gpus): ...\n'
    (source / "cli_options.py").write_text(options)
    told = tomllib.loads(written_list(tmp_path, {"ray-project/ray": [source.parent]}))
    before = known("ray")
    assert told["source"][0]["found"] == {"new/cli_options.py": ["--num-gpus"]}
    assert told["source"][0]["commit"] == before.sources[0].commit
    assert told["settings"] == before.settings


def test_write_keeps_the_place_of_what_vanished(tmp_path: Path) -> None:
    (tmp_path / "checkout").mkdir()
    text = written_list(tmp_path, {"ray-project/ray": [tmp_path / "checkout"]})
    assert text == file_text(known("ray"))


def test_write_leaves_a_list_alone_that_was_not_compared(tmp_path: Path) -> None:
    (tmp_path / "packages").mkdir()
    text = written_list(tmp_path, {"": [tmp_path / "packages"]})
    assert text.startswith("# by hand")
