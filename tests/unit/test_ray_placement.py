"""What a run asks of a Ray cluster, with the sum; the order of ranks; the judgement of nodes."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.ray_nodes import ListedNodes

from homeostat.config.loading.load import build_config
from homeostat.config.parts import PlacementSettings
from homeostat.config.ray_cluster import RayCluster
from homeostat.config.sync import CollectiveConfig, SharedMemoryConfig
from homeostat.errors import ConfigError, WorkerDiedError
from homeostat.run.ray.placement import Node, Place, describe_sum, find_shortages, needs_of
from homeostat.run.ray.probe import Facts, Question, probe
from homeostat.run.ray.proofs import judge, needed_paths
from homeostat.run.ray.seats import Deadline, _places, by_node
from homeostat.run.ray.transports import require_reachable
from homeostat.run.ray.user_files import UserCode, user_code
from homeostat.run.ray.vendor import _connect
from homeostat.workers.machine import Versions
from homeostat.workers.network import free_port, interface_of
from homeostat.workers.spec import GroupSpec

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples" / "plugins"
NODES = [Node(f"10.0.0.{n}", {"GPU": 3.0, "CPU": 16.0}, f"id{n}") for n in (1, 2)]
VERSIONS = Versions("3.11.9", {"homeostat": "1", "torch": "2"})
SAME = Facts(VERSIONS, (), shares_runs=True, network="")


def build(*overrides: str, **cluster: Any) -> PlacementSettings:
    raw = {
        "name": "run",
        "runs_dir": "runs",
        "algorithm": {"type": "grpo"},
        "model": {"path": "m"},
        "engine": {"type": "vllm", "tensor_parallel_size": 2, "data_parallel_size": 2},
        "cluster": {"type": "ray", "processes": 4, **cluster},
        "trainer": {"backend": {"type": "fsdp"}},
        "data": {"train": [{"type": "prompts", "path": "p.jsonl"}]},
        "rewards": {"functions": [{"type": "exact_match", "column": "answer"}]},
    }
    return build_config(raw, list(overrides), file=None).for_placement


def shortages(config: PlacementSettings, *, device: str = "cuda") -> list[str]:
    problems = find_shortages(config, needs_of(config, device=device), NODES)
    return [problem.render() for problem in problems]


def test_the_sum_is_written_out() -> None:
    needs = needs_of(build(), device="cuda")
    sentence = "trainer 4 x 1 GPU + engines 2 x 2 GPU = 8, the cluster has 6"
    assert describe_sum(needs, "GPU", has=6.0) == sentence
    (told,) = shortages(build())
    assert told.startswith(f"cluster.processes: {sentence}. Set cluster.placement=colocated")


def test_engines_that_share_the_trainers_devices_need_none() -> None:
    assert shortages(build(placement="colocated")) == []
    (told,) = shortages(build("engine.data_parallel_size=3", placement="colocated"))
    assert "engines 3 x 2 = 6 devices" in told
    assert "there are only 4 of these (cluster.processes)" in told


def test_on_the_cpu_only_cpus_are_counted() -> None:
    assert shortages(build(), device="cpu") == []
    (told,) = shortages(build(cpus_per_worker=8.0), device="cpu")
    assert "trainer 4 x 8 CPU + engines 2 x 8 CPU = 48, the cluster has 32" in told
    assert "cluster.cpus_per_worker" in told


def test_an_engine_must_fit_on_one_machine() -> None:
    wide = build("engine.tensor_parallel_size=4", "engine.data_parallel_size=1", processes=2)
    (told,) = shortages(wide)
    assert told.startswith("engine.tensor_parallel_size: each of the engines needs 4 GPU on one")
    assert "largest machine has 3" in told


def test_ranks_of_one_node_are_neighbours() -> None:
    places = [Place(node, node, ()) for node in "abab"]
    assert by_node(places) == [0, 2, 1, 3]


def test_memory_of_one_machine_reaches_no_engine_on_another() -> None:
    here, there = Place("a", "10.0.0.1", ()), Place("b", "10.0.0.2", ())
    for transport in (None, SharedMemoryConfig(type="shared_memory")):
        require_reachable(transport, [here, there], here)
        with pytest.raises(ConfigError, match=r"on 10\.0\.0\.1, and the engine on 10\.0\.0\.2"):
            require_reachable(transport, [here, there], there)
    require_reachable(CollectiveConfig(type="collective"), [here], there)


def test_problems_are_told_node_by_node(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    data = tmp_path / "rows.jsonl"
    data.touch()
    config = build(f"model.path={tmp_path}/model", f"data.train=[{{type: prompts, path: {data}}}]")
    here, model = needed_paths(config)
    assert here == os.getcwd()

    def found(**changes: Any) -> list[tuple[str, bool]]:
        judged = judge(config, NODES[1], ours=SAME, theirs=replace(SAME, **changes))
        return [(one.problem.render(), one.is_error) for one in judged]

    assert found() == []
    ((text, is_error),) = found(missing=(model,))
    assert text.startswith(f"node 10.0.0.2: {model} does not exist there.")
    assert is_error
    # The controller alone reads data.
    ((text, is_error),) = found(missing=(str(data),))
    assert not is_error
    ((text, _),) = found(versions=Versions("3.11.9", {"homeostat": "1", "torch": "3"}))
    assert "torch 3, the controller has 2" in text
    ((text, _),) = found(versions=replace(VERSIONS, python="3.12.1"))
    assert "Python 3.12.1, the controller has 3.11.9" in text
    # A patch release of Python speaks the same.
    assert found(versions=replace(VERSIONS, python="3.11.2")) == []
    ((text, _),) = found(shares_runs=False)
    assert "is not visible there" in text
    ((text, _),) = found(network="the controller at h:1 cannot be reached from it: no")
    assert "cannot be reached" in text


def test_the_code_of_plugins_must_be_the_same_on_every_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A helper beside the file belongs to it; an installed package is compared by its version.
    (tmp_path / "placement_helper.py").write_text("WEIGHT = 2.0\n")
    text = (EXAMPLES / "algorithm.py").read_text()
    own = tmp_path / "own.py"
    own.write_text(f"import placement_helper\n{text}")
    config = build(f"algorithm={{type: {own}:TrustGood}}")
    assert config.plugins == (("algorithm", f"{own}:TrustGood"),)
    code = user_code(config.plugins)
    assert code.files == (str(own), str(tmp_path / "placement_helper.py"))
    question = Question((), "", "", ("127.0.0.1", 1), "127.0.0.1", code=code)
    ours = replace(SAME, digests=probe(question).digests)
    (tmp_path / "placement_helper.py").write_text("WEIGHT = 3.0\n")
    own.unlink()
    theirs = replace(SAME, digests=probe(question).digests)
    told = [one.problem.message for one in judge(config, NODES[1], ours=ours, theirs=theirs)]
    assert [text.partition("plug-in, ")[2] for text in told] == [
        "does not exist there.",
        "has different content there.",
    ]
    assert list(judge(config, NODES[1], ours=ours, theirs=ours)) == []
    monkeypatch.delitem(sys.modules, "placement_helper")
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one != str(tmp_path)])
    info = tmp_path / "placed-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: placed\nVersion: 1.5\n")
    (info / "top_level.txt").write_text("placed_plugin\n")
    (tmp_path / "placed_plugin.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    installed = build("algorithm={type: 'placed_plugin:TrustGood'}")
    code = user_code(installed.plugins)
    assert code == UserCode((), ("placed",))
    assert probe(replace(question, code=code)).versions.packages["placed"] == "1.5"
    monkeypatch.delitem(sys.modules, "placed_plugin")


class FewerNodes(ListedNodes):
    """Stands for Ray as a machine leaves it: an actor has told that it is there."""

    exceptions = SimpleNamespace(GetTimeoutError=TimeoutError, RayError=RuntimeError)

    def get(self, asked: list[str], *, timeout: float) -> list[tuple[str, tuple[str, ...]]]:
        return [(node_id, ()) for node_id in asked]


def test_a_machine_that_leaves_as_an_actor_starts_there_is_a_death() -> None:
    def actor(node_id: str) -> Any:
        return SimpleNamespace(place=SimpleNamespace(remote=lambda: node_id))

    def places(*node_ids: str) -> list[Place]:
        spec = GroupSpec(factory="", kind="trainer", name="trainer", log_file=Path(), size=2)
        actors = [actor(node_id) for node_id in node_ids]
        return _places(FewerNodes(a=1.0), actors, spec, deadline=Deadline(20))

    assert places("a", "a") == [Place("a", "a", ())] * 2
    with pytest.raises(WorkerDiedError, match="the machine of rank 1 left the Ray cluster"):
        places("a", "b")


@pytest.mark.parametrize("kind", [Exception, ConnectionError, RuntimeError])
def test_a_ray_that_does_not_start_is_a_problem_of_the_recipe(kind: type[Exception]) -> None:
    """Ray itself raises plain Exceptions, for example on a machine that is too busy."""

    def init(**settings: Any) -> None:
        raise kind("The current node timed out during startup.")

    with pytest.raises(ConfigError, match=r"Ray did not start on this machine: The"):
        _connect(SimpleNamespace(init=init), RayCluster(type="ray", processes=1))


def test_addresses_of_this_machine() -> None:
    assert free_port("127.0.0.1") > 0
    with pytest.raises(OSError, match="assign"):
        free_port("192.0.2.77")
    assert interface_of("127.0.0.2") in ("lo", None)
    assert interface_of("192.0.2.77") is None
