"""Proofs from every node before a run starts: paths, shared folders, versions, ports.

Otherwise a node that lacks something would fail minutes later with an unclear error, or never
answer.
"""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from homeostat.config.parts import PlacementSettings
from homeostat.errors import ConfigError, Problem
from homeostat.run.ray.nodes import own_node
from homeostat.run.ray.placement import Node
from homeostat.run.ray.probe import Facts, Question, probe
from homeostat.run.ray.user_files import user_code
from homeostat.workers.machine import differing

PROBE_SECONDS = 90.0


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem of one node. It is an error only if it keeps the run from working."""

    problem: Problem
    is_error: bool = True


def require_proofs(ray: Any, config: PlacementSettings, nodes: Sequence[Node]) -> None:
    """Raise ConfigError with all problems, node by node."""
    errors = [found.problem for found in prove(ray, config, nodes) if found.is_error]
    if errors:
        raise ConfigError(errors)


def prove(ray: Any, config: PlacementSettings, nodes: Sequence[Node]) -> list[Finding]:
    """Ask every node for its facts, and judge them."""
    with _question(ray, config) as question:
        ours = probe(replace(question, node_address=question.controller[0]))
        found: list[Finding] = []
        for node, facts in _asked(ray, question, nodes):
            if isinstance(facts, str):
                found.append(_finding(node, facts, "Look at Ray's logs there."))
            else:
                found += judge(config, node, ours=ours, theirs=facts)
    return found


@contextmanager
def _question(ray: Any, config: PlacementSettings) -> Iterator[Question]:
    """Yield what is asked, while the file that proves a shared folder and a port are there."""
    folder = config.run_dir.resolve()
    while not folder.exists():
        folder = folder.parent
    address = own_node(ray).address
    token = secrets.token_hex(8)
    code = user_code(config.plugins)
    paths = (*needed_paths(config), *data_paths(config))
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with (
        socket.create_server((address, 0), family=family, backlog=4096) as server,
        tempfile.NamedTemporaryFile("w", dir=folder, prefix=".homeostat-shared-") as file,
    ):
        file.write(token)
        file.flush()
        here = (address, server.getsockname()[1])
        yield Question(paths, file.name, token, here, code=code)


def _asked(
    ray: Any, question: Question, nodes: Sequence[Node]
) -> Iterator[tuple[Node, Facts | str]]:
    """Yield the facts of each node, or what kept it from telling them."""
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    asked = [
        ray.remote(probe)
        .options(num_cpus=0, max_retries=0, scheduling_strategy=strategy(node.node_id, soft=False))
        .remote(replace(question, node_address=node.address))
        for node in nodes
    ]
    ray.wait(asked, num_returns=len(asked), timeout=PROBE_SECONDS)
    for node, answer in zip(nodes, asked, strict=True):
        try:
            yield node, ray.get(answer, timeout=0)
        except ray.exceptions.GetTimeoutError:
            yield node, f"it did not answer within {PROBE_SECONDS:g} s."
        except ray.exceptions.RayError as error:
            last = str(error).strip().splitlines()[-1]
            yield node, f"it cannot run homeostat: {last}"


def judge(
    config: PlacementSettings, node: Node, *, ours: Facts, theirs: Facts
) -> Iterator[Finding]:
    """Yield what is wrong with a node."""
    for words in differing(ours.versions, theirs.versions):
        yield _finding(node, f"{words}.", "Install the same versions on every machine.")
    for path in theirs.missing:
        if path in needed_paths(config):
            hint = "Put it there under the same path, or on a file system that all machines share."
            yield _finding(node, f"{path} does not exist there.", hint)
        elif path not in ours.missing:
            why = f"{path} does not exist there. The controller alone reads it."
            yield Finding(Problem(f"node {node.address}", why), is_error=False)
    for file, own in ours.digests.items():
        if theirs.digests.get(file) != own:
            lacks = theirs.digests.get(file) is None
            what = "does not exist there" if lacks else "has different content there"
            hint = "Copy it to every machine, or keep it on a file system that all machines share."
            yield _finding(node, f"{file}, the code of a plug-in, {what}.", hint)
    if not theirs.shares_runs:
        why = f"the run folder {config.run_dir}, to which ranks save, is not visible there."
        hint = "Set runs_dir to a folder on a file system that all machines share."
        yield _finding(node, why, hint)
    if theirs.network:
        yield _finding(node, f"{theirs.network}.", "Look at its firewall and its address in Ray.")


def _finding(node: Node, message: str, hint: str) -> Finding:
    return Finding(Problem(f"node {node.address}", message, hint))


def needed_paths(config: PlacementSettings) -> tuple[str, ...]:
    """Return the paths that ranks and engines read; names of a hub are no paths."""
    # Workers run in the controller's folder, to which paths of the recipe are relative.
    places = [os.getcwd(), config.model.path, getattr(config.used_reference, "path", None)]
    return tuple(str(Path(place).resolve()) for place in places if place and Path(place).exists())


def data_paths(config: PlacementSettings) -> tuple[str, ...]:
    """Return the files that rows are read from."""
    sources = [*config.data.train, *(config.data.validation or ())]
    paths = [getattr(source, "path", None) for source in sources]
    return tuple(str(Path(path).resolve()) for path in paths if path and Path(path).exists())
