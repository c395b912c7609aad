"""A hub on loopback: the endpoints that huggingface_hub asks when it downloads.

    GET  /api/{models,datasets}/{name}[/revision/{revision}]?blobs=true commit, files, checksums
    GET  /api/{models,datasets}/{name}/tree/{revision}                  the same as a tree
    HEAD /{[datasets/]name}/resolve/{revision}/{file}                   commit, ETag, size
    GET  the same                                                       content, whole or by Range

Small files answer at once; large ones (LFS) by a redirect to another address, as the hub's do.
Faults are set by attributes of the server.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

LARGE_BYTES = 1000
_RESOLVE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_API = re.compile(r"/api/(model|dataset)s/([^/]+/[^/]+)(?:/(revision|tree)/([^/?]+))?")


@dataclass
class Repository:
    """A repository: commits, each with its files, and branches that name commits."""

    kind: str
    name: str
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    gated: bool = False

    def commit(self, files: dict[str, bytes | str], *, branch: str = "main") -> str:
        """Add a commit to a branch and return its hash."""
        held = {name: v.encode() if isinstance(v, str) else v for name, v in files.items()}
        digest = hashlib.sha1(repr(sorted(held.items())).encode()).hexdigest()
        self.commits[digest] = held
        self.branches[branch] = digest
        return digest


class HubServer(ThreadingHTTPServer):
    """Serves repositories, and counts what it is asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.asked: list[str] = []
        self.downloads: list[tuple[str, str | None]] = []
        # Faults: bytes after which a content stops coming; a wrong byte; an answer for everything.
        self.stops_after: int | None = None
        self.damages = False
        self.status: int | None = None
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.in_content = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def cdn(self) -> str:
        """Return the address of large files: another host than the hub's, as in reality."""
        return f"http://localhost:{self.server_address[1]}/cdn"

    def add(self, kind: str, name: str, files: dict[str, bytes | str]) -> Repository:
        repository = Repository(kind, name)
        repository.commit(files)
        self.repositories[kind, name] = repository
        return repository


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing."""

    def _answer(self, *, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(f"{self.command} {path}")
        if self.server.status is not None:
            self._send(self.server.status, b"{}", with_body=with_body)
        elif path.startswith("/cdn/"):
            self._content(self._blob(path.removeprefix("/cdn/")), path, with_body=with_body)
        elif found := _API.fullmatch(path):
            self._api(found[1], found[2], found[3] or "revision", found[4] or "main")
        elif found := _RESOLVE.fullmatch(path):
            kind = "dataset" if found[1] else "model"
            self._resolve(kind, *found.groups()[1:], with_body=with_body)
        else:
            self._send(404, b"{}", with_body=with_body)

    def _open(self, kind: str, name: str, revision: str) -> tuple[Repository, str] | None:
        repository = self.server.repositories.get((kind, name))
        if repository is None:
            self._refuse(401, "RepoNotFound")
            return None
        if repository.gated:
            self._refuse(403, "GatedRepo")
            return None
        commit = repository.branches.get(revision, revision)
        if commit not in repository.commits:
            self._refuse(404, "RevisionNotFound")
            return None
        return repository, commit

    def _api(self, kind: str, name: str, what: str, revision: str) -> None:
        found = self._open(kind, name, revision)
        if found is None:
            return
        repository, commit = found
        files = [_described(name, body) for name, body in repository.commits[commit].items()]
        if what == "tree":
            self._send(200, json.dumps([{"type": "file", "path": f["rfilename"], "oid": f["blobId"],
                                         **f} for f in files]).encode())  # fmt: skip
            return
        info = {"id": name, "sha": commit, "siblings": files, "private": False, "tags": []}
        self._send(200, json.dumps(info).encode())

    def _resolve(self, kind: str, name: str, revision: str, file: str, *, with_body: bool) -> None:
        found = self._open(kind, name, revision)
        if found is None:
            return
        repository, commit = found
        body = repository.commits[commit].get(file)
        if body is None:
            self._refuse(404, "EntryNotFound")
            return
        described = _described(file, body)
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if "lfs" in described:
            sha = described["lfs"]["sha256"]
            headers |= {"X-Linked-Etag": f'"{sha}"', "X-Linked-Size": str(len(body))}
            headers |= {"Location": f"{self.server.cdn}/{sha}", "ETag": f'"{sha[:32]}"'}
            self._send(302, b"", headers=headers, with_body=with_body)
            return
        headers["ETag"] = f'"{described["blobId"]}"'
        if with_body:
            self._content(body, file, headers=headers, with_body=True)
        else:
            self._send(200, body, headers=headers, with_body=False)

    def _blob(self, sha: str) -> bytes:
        for repository in self.server.repositories.values():
            for files in repository.commits.values():
                for body in files.values():
                    if hashlib.sha256(body).hexdigest() == sha:
                        return body
        return b""

    def _content(
        self, body: bytes, path: str, *, with_body: bool, headers: dict[str, str] | None = None
    ) -> None:
        asked = self.headers.get("Range")
        if with_body:
            self.server.downloads.append((path.rpartition("/")[2], asked))
        start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        part = body[start:]
        if self.server.damages and len(body) > LARGE_BYTES:
            part = bytes([part[0] ^ 1]) + part[1:]
        headers = dict(headers or {}) | {"Content-Length": str(len(part))}
        if asked:
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        self.send_response(206 if asked else 200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self._write(part)

    def _write(self, part: bytes) -> None:
        stop = self.server.stops_after
        self.server.in_content.set()
        if stop is not None and len(part) > stop:
            self.wfile.write(part[:stop])
            self.wfile.flush()
            self.server.may_go_on.wait(30)
            if self.server.stops_after is not None:
                self.close_connection = True
                return
            part = part[stop:]
        self.wfile.write(part)

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", headers={"X-Error-Code": code, "X-Error-Message": code})

    def _send(
        self,
        status: int,
        body: bytes,
        *,
        headers: dict[str, str] | None = None,
        with_body: bool = True,
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body and self.command != "HEAD":
            self.wfile.write(body)


def _described(name: str, body: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()
    found: dict[str, Any] = {"rfilename": name, "size": len(body), "blobId": blob}
    if len(body) > LARGE_BYTES:
        sha256 = hashlib.sha256(body).hexdigest()
        found["lfs"] = {"sha256": sha256, "oid": sha256, "size": len(body), "pointerSize": 130}
    return found


@contextmanager
def local_hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Make a new server the hub of this process, with its cache in `home`."""
    with serving() as server:
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        set_home(home, monkeypatch)
        # The suite as a whole is offline.
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield server


def set_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do what HF_HOME does in a new process."""
    monkeypatch.setattr(constants, "HF_HOME", str(home))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))


@contextmanager
def serving() -> Iterator[HubServer]:
    """Serve on a free port of loopback for the duration of the block."""
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.daemon = True
    thread.start()
    try:
        yield server
    finally:
        server.may_go_on.set()
        server.shutdown()
        server.server_close()
        thread.join(10)
