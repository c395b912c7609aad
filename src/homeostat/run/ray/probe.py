"""Gathers the facts of one machine, in a Ray task on it. Needs no torch, and changes nothing."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field

from homeostat.run.ray.user_files import UserCode, digest
from homeostat.workers.machine import Versions, text_of
from homeostat.workers.network import free_port

REACH_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Question:
    """The facts that are asked of every node. `token_file` holds `token` where it was written.

    `code` is what plug-ins are made of.
    """

    paths: tuple[str, ...]
    token_file: str
    token: str
    controller: tuple[str, int]
    node_address: str = ""
    code: UserCode = field(default_factory=UserCode)


@dataclass(frozen=True, slots=True)
class Facts:
    """The answer of a node. `network` is what is wrong with its ports; empty if nothing is.

    `digests` has the checksums of plug-ins' files.
    """

    versions: Versions
    missing: tuple[str, ...]
    shares_runs: bool
    network: str
    digests: dict[str, str | None] = field(default_factory=dict)


def probe(question: Question) -> Facts:
    """Gather the facts of the machine that this runs on."""
    return Facts(
        versions=Versions.here(question.code.packages),
        missing=tuple(path for path in question.paths if not os.path.exists(path)),
        shares_runs=text_of(question.token_file) == question.token,
        network=_network(question),
        digests={file: digest(file) for file in question.code.files},
    )


def _network(question: Question) -> str:
    try:
        free_port(question.node_address)
    except OSError as error:
        return f"no port of its address {question.node_address} can be used: {error}"
    host, port = question.controller
    try:
        with socket.create_connection((host, port), timeout=REACH_SECONDS):
            return ""
    except OSError as error:
        return f"the controller at {host}:{port} cannot be reached from it: {error}"
