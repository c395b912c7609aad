"""Plug-ins: the examples of docs/examples/plugins run, and mistakes are told by their names."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import ranks, runs, tiny, tiny_rl
from typer.testing import CliRunner

import homeostat
from homeostat.algorithms import grpo
from homeostat.algorithms.catalogue import algorithm_of
from homeostat.algorithms.terms import PolicyTokens
from homeostat.cli.verbs import app
from homeostat.config import RunConfig, load_config
from homeostat.config.loading.load import build_config
from homeostat.config.loading.resume import saved_config
from homeostat.config.loading.shareable import shared_config
from homeostat.errors import ConfigError, DataError, PluginError
from homeostat.health.readers import open_run
from homeostat.health.registry import RULES, rules_with
from homeostat.health.view import Kind
from homeostat.observe.jsonl import iter_jsonl, read_metrics
from homeostat.workers.wire import pack, unpack

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
PLUGINS = EXAMPLES / "plugins"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plugins")
    tiny_rl.recipe(folder)
    return folder


def small(folder: Path, name: str, *overrides: str) -> RunConfig:
    """The recipe of the examples, with a smaller model."""
    own = [f"name={name}", f"runs_dir={folder / 'runs'}", f"model.path={folder / 'model'}"]
    own += ["trainer.device=cpu", "trainer.threads=1", "observe.console=quiet"]
    own += ["observe.report=false", "checkpoint.export=off"]
    return load_config(PLUGINS / "recipe.yaml", [*own, *overrides])


class _Cell:
    """Stands in for IPython's display: keeps every state of every output."""

    def __init__(self) -> None:
        self.outputs: list[list[dict[str, str]]] = []

    def display(self, data: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        states = [data]
        self.outputs.append(states)
        return SimpleNamespace(update=lambda data, *, raw: states.append(data))


def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    cell = _Cell()
    shell = SimpleNamespace(kernel="a kernel")
    kernel = SimpleNamespace(get_ipython=lambda: shell, display=cell)
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    monkeypatch.chdir(EXAMPLES)
    names: dict[str, Any] = {"__name__": "__main__"}
    notebook = json.loads((EXAMPLES / "first_steps.ipynb").read_text())
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    assert all(not c.get("outputs") for c in notebook["cells"])
    for number, text in enumerate(cells):
        exec(compile(text, f"cell {number}", "exec"), names)
    shown = capsys.readouterr().out
    assert "ready to train" in shown
    assert "saved step_00000006" in shown
    assert len(names["rewards"]) == names["result"].step == 6
    # Two runs in one process have a panel each, which is rewritten in place; no lines are printed.
    first, second = (states[-1]["text/plain"] for states in cell.outputs)
    assert "step 3/6" in first
    assert "step 6/6" in second
    assert "reward" in second
    assert "health" in second
    assert "step 6/6" not in shown
    shutil.rmtree(names["work"])


def test_the_examples_train_together(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = small(folder, "together")
    with caplog.at_level(logging.WARNING):
        steps = list(homeostat.steps(config))
    # The source's rows, the reward's values, and advantages that the algorithm made.
    for group in (group for step in steps for group in step.groups):
        assert group.columns["answer"] == "".join(sorted(group.prompt[:-1]))
        right = group.columns["answer"]
        for text, reward in zip(group.completions, group.rewards, strict=True):
            hits = sum(a == b for a, b in zip(text, right, strict=False)) / len(right)
            assert reward == pytest.approx(hits - 0.05 * max(0, len(text) - len(right)))
        spread = np.array(group.rewards) - np.mean(group.rewards)
        plain = spread / (np.std(group.rewards, ddof=1) + 1e-4)
        np.testing.assert_allclose(
            group.advantages, np.where(plain < 0, plain / 4, plain), atol=1e-6
        )
    assert "16 completions were requested" in caplog.text
    opened = list(iter_jsonl(config.run_dir / "findings.jsonl"))
    assert {"OWN001"} <= {line["code"] for line in opened if line["state"] == "open"}
    # The config of the run names the files in full, and can be read again.
    again = saved_config(config.run_dir / "config.json")
    assert again.algorithm == config.algorithm
    assert again.algorithm.type == f"{PLUGINS / 'algorithm.py'}:TrustGood"
    assert homeostat.train(config).step == 4
    report = homeostat.diagnose(config.run_dir, rules=[f"{PLUGINS / 'rule.py'}:RULE"])
    assert "answers-too-short" in str(report), "the options of the run are the doctor's"


def test_a_surrogate_gets_its_keys_as_params() -> None:
    count = 12
    generator = torch.Generator().manual_seed(3)
    log_ratio_M = torch.randn(count, generator=generator, dtype=torch.float64) * 0.3
    zeros_M, row_of_M = torch.zeros(count), torch.zeros(count, dtype=torch.long)
    advantage_M = torch.randn(count, generator=generator, dtype=torch.float64)
    tokens = PolicyTokens(zeros_M, zeros_M, zeros_M, row_of_M, 1, advantage_M, None, None, None)
    params = {"clip_low": 0.2, "clip_high": 0.2, "hold": 0.7}
    found = algorithm_of(f"{PLUGINS / 'algorithm.py'}:TrustGood").surrogate(
        tokens, log_ratio_M, params
    )
    ratio_M = log_ratio_M.exp()
    plain_M = -torch.minimum(ratio_M * advantage_M, ratio_M.clamp(0.8, 1.2) * advantage_M)
    torch.testing.assert_close(found.loss_M, plain_M + 0.35 * log_ratio_M**2)
    assert algorithm_of("grpo").surrogate is grpo.surrogate


def test_rows_without_an_advantage_are_trained_by_a_surrogate_of_ones_own(tmp_path: Path) -> None:
    """The example's `hold` has a gradient in them, from the second update on."""
    plugin = {"type": f"{PLUGINS / 'algorithm.py'}:TrustGood", "hold": 5.0}
    found = []
    for skip in (True, False):
        config = tiny_rl.config(
            tmp_path,
            f"name=skip_{skip}",
            algorithm={**plugin, "skip_zero_advantage": skip},
            trainer={"updates_per_step": 1, "epochs_per_step": 2, "max_steps": 1},
        )
        runs.train(config)
        (record,) = read_metrics(config.run_dir / "metrics.jsonl")
        assert record["advantages/zero_share"] > 0
        found.append((record["data/trained_rows"], record["train/loss"], record["grad_norm"]))
    assert found[0] == found[1]


def test_a_preference_algorithm_trains_as_its_formula_says(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}", "chosen": "12", "rejected": "21"} for n in range(10, 18)]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("\n".join(map(json.dumps, rows)))
    raw = tiny.recipe(tmp_path)
    raw["algorithm"] = {"type": f"{PLUGINS / 'preference.py'}:Hinge", "margin": 0.5}
    source = {"type": "preference", "path": str(pairs), "chat": False}
    raw["data"] = {"train": [source], "max_length": 32}
    raw["trainer"] |= {"max_steps": 3, "batch_rows": 4, "lr": 1e-2}
    config = homeostat.recipe(raw)
    lines = [item.text for item in homeostat.check(config).items if item.name == "plug-ins"]
    assert any("needs pairs (a preference source) and a reference" in line for line in lines)
    first, _, last = (step.metrics for step in homeostat.steps(config))
    # Policy and reference are equal at first, so every pair lacks the whole margin.
    assert first["train/loss"] == pytest.approx(0.5)
    assert last["preference/margin"] > 0
    assert last["train/loss"] == pytest.approx(0.5 - last["preference/margin"], abs=1e-6)
    assert open_run(config.run_dir).kind is Kind.PREFERENCE
    assert saved_config(config.run_dir / "config.json").preference.beta == 0.2


@pytest.mark.slow
def test_weights_travel_by_a_plugged_transport(folder: Path) -> None:
    """The engine in a process of its own samples as one that shares the trainer's weights."""
    own = "engine={type: native, own_process: true}"
    plugged = f"sync.transport={{type: {PLUGINS / 'transport.py'}:Zipped, level: 3}}"
    first, second = (
        small(folder, "here", "engine={type: native}"),
        small(folder, "zipped", own, plugged),
    )
    for config in (first, second):
        assert homeostat.train(config).step == 4
    assert runs.final_tensors(first) == runs.final_tensors(second)
    assert {one["transport"] for one in runs.events(second, "weights_published")} == {"zipped"}


def test_objects_of_a_file_travel_to_a_process_that_has_not_imported_it(folder: Path) -> None:
    config = small(folder, "travel")
    for settings in (config.algorithm, config.engine, config.data.train[0]):
        assert pickle.loads(pickle.dumps(settings)) == settings
    transport = homeostat.recipe(
        config,
        engine={"type": "native", "own_process": True},
        sync={"transport": {"type": f"{PLUGINS / 'transport.py'}:Zipped"}},
    ).sync.transport
    kind = type(transport)
    message = pack(transport.open(_Site(folder)))
    del sys.modules[kind.__module__]
    found = unpack(message)
    assert (found.name, found.folder) == ("zipped", folder)


class _Site:
    def __init__(self, folder: Path) -> None:
        self.folder, self.prefix = folder, "x"


def test_check_lists_plugins_with_what_they_need(folder: Path) -> None:
    found = homeostat.check(small(folder, "checked"))
    lines = [item.text for item in found.items if item.name == "plug-ins"]
    assert found.ok, str(found)
    assert any("TrustGood; its keys: negative_weight=0.25, hold=0.05" in line for line in lines)
    assert any("Places; its keys: extra=0.05; needs rows with answer" in line for line in lines)
    assert any("OWN001 answers-too-short" in line for line in lines)
    assert len(lines) == 5
    prompts = f"data.train=[{{type: prompts, path: {folder / 'prompts.jsonl'}, chat: false}}]"
    lacking = folder / "lacking.jsonl"
    lacking.write_text('{"prompt": "1>"}\n' * 8)
    bad = homeostat.check(small(folder, "bad", prompts.replace("prompts.jsonl", "lacking.jsonl")))
    (line,) = [item for item in bad.items if item.level == "error"]
    assert "Places" in line.text
    assert "'answer'" in line.text


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.hodl=1.0", "algorithm.hodl: unknown key. Did you mean algorithm.hold?"),
        ("algorithm.hold=-1.0", "algorithm.hold: -1.0: should be greater than or equal to 0"),
        ("algorithm.clip_low=-1.0", "algorithm.clip_low: -1.0"),
        ("data.train.0.count=0", "data.train.0.count: 0"),
        ("data.train.0.path=x.jsonl", "data.train.0.path: unknown key"),
        ("rewards.functions.0.extr=1", "Did you mean rewards.functions.0.extra?"),
        ("engine.log_every=0", "engine.log_every: 0"),
        ("algorithm.type=./reward.py:Places", "no class derived from homeostat.plugins.Algorithm"),
        ("algorithm.type=./algorithm.py:Missing", "has no name 'Missing'"),
        ("engine.type=./nowhere.py:Name", "there is no file"),
        ("engine.type=no_such_package.x:Name", "there is no module 'no_such_package.x'"),
        ("algorithm.type=trust_god", "there is no type 'trust_god'"),
    ],
)
def test_a_mistake_is_told_with_its_place(folder: Path, override: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        small(folder, "mistake", override)
    assert words in str(caught.value)
    assert len(caught.value.problems) == 1


BROKEN = """
from homeostat import plugins

class Lacks(plugins.Reward):
    pass

class Neither(plugins.Algorithm):
    pass

class Taken(plugins.Algorithm):
    temperature: float = plugins.key(1.0, help="x")
    def advantages(self, batch):
        return []

class Vetoes(plugins.Algorithm):
    veto: float = plugins.key(0.5, help="x")
    def advantages(self, batch):
        return []

class Warm(plugins.PreferenceAlgorithm):
    temperature: float = plugins.key(2.0, help="x")
    def losses(pairs, params):
        return None

class NoLoss(plugins.PreferenceAlgorithm):
    pass

class Raises(plugins.Prompts):
    def rows(self):
        raise OSError("the server is gone")

class NoMapping(plugins.Texts):
    def rows(self):
        return ["text"]

def function():
    pass
"""


@pytest.fixture(scope="module")
def broken(folder: Path) -> str:
    (folder / "broken.py").write_text(BROKEN)
    (folder / "failing.py").write_text("import does_not_exist_at_all\n")
    return str(folder / "broken.py")


def test_a_plugin_that_cannot_be_used_is_refused_by_its_name(folder: Path, broken: str) -> None:
    def problem(override: str) -> str:
        with pytest.raises(ConfigError) as caught:
            small(folder, "broken", override)
        assert len(caught.value.problems) == 1
        return str(caught.value)

    rewards = f"rewards={{functions: [{{type: {broken}:Lacks}}]}}"
    assert f"the reward '{broken}:Lacks' cannot be used: it does not define score." in problem(
        rewards
    )
    neither = f"algorithm={{type: {broken}:Neither}}"
    assert "it defines neither advantages nor surrogate" in problem(neither)
    taken = f"algorithm={{type: {broken}:Taken}}"
    assert "its key 'temperature' has the name of a parameter" in problem(taken)
    vetoes = f"algorithm={{type: {broken}:Vetoes}}"
    assert "its key 'veto' has the name of a parameter" in problem(vetoes)
    warm = f"algorithm={{type: {broken}:Warm}}"
    assert "its key 'temperature' has the name of a parameter" in problem(warm)
    assert "it does not define losses" in problem(f"algorithm={{type: {broken}:NoLoss}}")
    failing = f"algorithm={{type: {folder / 'failing.py'}:X}}"
    assert "importing it raised ModuleNotFoundError: No module named 'does_not" in problem(failing)
    rule = f"health.rules=['{broken}:function']"
    with pytest.raises(ConfigError, match=r"cannot be used: it is no homeostat\.plugins\.Rule"):
        homeostat.train(small(folder, "broken", rule, "health.options={}"))
    with pytest.raises(PluginError, match="must be absolute"):
        rules_with(["rule.py:RULE"])


def test_rows_of_a_source_that_fails_are_told_with_its_name(folder: Path, broken: str) -> None:
    raises = f"data.train=[{{type: {broken}:Raises, chat: false}}]"
    with pytest.raises(DataError, match=r"broken\.py:Raises' raised OSError: the server is gone"):
        homeostat.train(small(folder, "raises", raises))
    raw = tiny.recipe(folder / "sft" if (folder / "sft").mkdir() is None else folder)
    raw["data"]["train"] = [{"type": f"{broken}:NoMapping"}]
    with pytest.raises(DataError, match="a row is a mapping of columns, not a str"):
        homeostat.train(raw)


TEXTS = """
from homeostat import plugins

class Words(plugins.Texts):
    word: str = plugins.key("abc", help="The word of every row.")
    def rows(self):
        return [{"text": f"{self.word} {number}"} for number in range(WORDS)]
"""


def test_a_source_of_texts_is_tokenised_again_if_its_rows_change(tmp_path: Path) -> None:
    file = tmp_path / "words.py"
    raw = tiny.recipe(tmp_path, data={"cache_dir": str(tmp_path / "cache")})
    raw["data"]["train"] = [{"type": "./words.py:Words", "word": "cab", "limit": 16}]

    def rows(count: int, name: str) -> int:
        file.write_text(TEXTS.replace("WORDS", str(count)))
        # The file's time tells that it has changed.
        config = build_config(
            raw, [f"name={name}", "trainer.max_steps=1"], file=str(tmp_path / "r")
        )
        homeostat.train(config)
        (event,) = runs.events(config, "data_prepared")
        return event["seen"]

    assert [rows(12, "first"), rows(14, "second"), rows(20, "third")] == [12, 14, 16]
    assert len(list((tmp_path / "cache").iterdir())) == 3


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with entry points, of which one raises when it is imported."""
    info = tmp_path / "my_plugins-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-plugins\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[homeostat.algorithms]\ntrust_good = my_plugins_algorithm:TrustGood\n"
        "grpo = my_plugins_trap:Never\ntrap = my_plugins_trap:Never\n"
        "[homeostat.rules]\nshort_answers = my_plugins_rule:RULE\n"
    )
    for name in ("algorithm", "rule"):
        shutil.copy(PLUGINS / f"{name}.py", tmp_path / f"my_plugins_{name}.py")
    (tmp_path / "my_plugins_trap.py").write_text("raise RuntimeError('loaded without being named')")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("my_plugins_")]:
        del sys.modules[name]


def test_entry_points_are_loaded_only_if_they_are_named(folder: Path, installed: Path) -> None:
    config = small(folder, "named", "algorithm.type=trust_good", "health.rules=[short_answers]")
    assert type(config.algorithm).__name__ == "TrustGood"
    assert type(config.algorithm).__module__ == "my_plugins_algorithm"
    assert pickle.loads(pickle.dumps(config.algorithm)) == config.algorithm
    assert algorithm_of("trust_good").surrogate.__module__ == "my_plugins_algorithm"
    assert rules_with(config.health.rules)[-1].code == "OWN001"
    # A built-in name means the built-in one, whatever is installed.
    plain = small(folder, "plain", "algorithm={type: grpo}")
    assert plain.algorithm.type == "grpo"
    assert "my_plugins_trap" not in sys.modules
    with pytest.raises(ConfigError, match=r"'trap' cannot be used.*loaded without being named"):
        small(folder, "trapped", "algorithm={type: trap}")


def test_a_rule_may_not_take_the_code_of_another(tmp_path: Path) -> None:
    text = (PLUGINS / "rule.py").read_text().replace("OWN001", RULES[0].code)
    (tmp_path / "rule.py").write_text(text)
    with pytest.raises(PluginError, match=f"another rule has its code {RULES[0].code}"):
        rules_with([str(tmp_path / "rule.py:RULE")])
    (tmp_path / "log.jsonl").write_text(
        "".join(
            f'{{"step": {n}, "completions/mean_length": 1.0, "reward": 0.5}}\n' for n in range(9)
        )
    )
    rule = f"{PLUGINS / 'rule.py'}:RULE"
    page = homeostat.diagnose(tmp_path / "log.jsonl", rules=[rule])
    assert "answers-too-short" in str(page)
    arguments = ["doctor", str(tmp_path / "log.jsonl"), "--rule", rule]
    assert "answers-too-short" in CliRunner().invoke(app, arguments).output


def test_a_plugins_values_are_shared_as_its_keys_say(folder: Path) -> None:
    config = small(folder, "shared")
    shown = shared_config(json.loads(config.model_dump_json()))
    assert shown["algorithm"]["hold"] == 0.05
    assert shown["algorithm"]["type"] == "algorithm.py:TrustGood"


@pytest.mark.slow
@pytest.mark.ranks
def test_the_ranks_of_a_trainer_find_the_algorithm(folder: Path) -> None:
    over = ["trainer.backend={type: fsdp}", "cluster={type: torchrun, processes: 2}"]
    over += ["trainer.threads=null", "engine={type: native, own_process: true}"]
    config = small(folder, "ranks", *over)
    with ranks.forked():
        assert homeostat.train(config).step == 4
