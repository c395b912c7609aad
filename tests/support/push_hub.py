"""A model hub on the loopback address that accepts uploads, as huggingface_hub makes them.

POST /api/repos/create, /api/validate-yaml
POST /api/models/OWNER/NAME/preupload/main     which files go through LFS
POST /OWNER/NAME.git/info/lfs/objects/batch    where to put them
PUT  /lfs/OID, POST /lfs/verify
POST /api/models/OWNER/NAME/commit/main        JSON lines: header, then files
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HOST = "127.0.0.1"
LFS = (".safetensors", ".gguf", ".bin")


class PushHub:
    """The server and all that it was given. Use it as a context manager."""

    def __init__(self, *, token: str | None = None) -> None:
        self.token = token
        self.repos: dict[str, dict[str, Any]] = {}
        self.files: dict[str, bytes] = {}
        self.messages: list[str] = []
        self._objects: dict[str, bytes] = {}
        self._server = ThreadingHTTPServer((HOST, 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._server.server_port}"

    def __enter__(self) -> PushHub:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        path = path.partition("?")[0]
        if method == "PUT" and path.startswith("/lfs/"):
            oid = path.rpartition("/")[2]
            assert hashlib.sha256(body).hexdigest() == oid
            self._objects[oid] = body
            return 200, {}
        if path.endswith("/commit/main"):
            return self._commit(path.split("/")[3:5], body)
        asked = json.loads(body or b"{}")
        if path == "/api/repos/create":
            return self._create(asked)
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path.endswith("/preupload/main"):
            files = [
                {
                    "path": one["path"],
                    "uploadMode": "lfs" if one["path"].endswith(LFS) else "regular",
                    "shouldIgnore": False,
                    "oid": None,
                }
                for one in asked["files"]
            ]
            return 200, {"files": files}
        if path.endswith("/info/lfs/objects/batch"):
            return 200, {
                "transfer": "basic",
                "objects": [self._object(o) for o in asked["objects"]],
            }
        if path == "/lfs/verify":
            return (200 if asked["oid"] in self._objects else 404), {}
        return 404, {"error": f"no such path: {path}"}

    def _create(self, asked: dict[str, Any]) -> tuple[int, Any]:
        name = f"{asked['organization']}/{asked['name']}"
        url = f"{self.url}/{name}"
        if name in self.repos:
            return 409, {"error": "You already created this model repo", "url": url}
        self.repos[name] = asked
        return 200, {"url": url, "name": name, "id": name}

    def _object(self, asked: dict[str, Any]) -> dict[str, Any]:
        upload, verify = f"{self.url}/lfs/{asked['oid']}", f"{self.url}/lfs/verify"
        actions = {"upload": {"href": upload}, "verify": {"href": verify}}
        return {"oid": asked["oid"], "size": asked["size"], "actions": actions}

    def _commit(self, name: list[str], body: bytes) -> tuple[int, Any]:
        repo = "/".join(name)
        if repo not in self.repos:
            return 404, {"error": "no such repository"}
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.messages.append(value["summary"])
            elif line["key"] == "lfsFile":
                self.files[f"{repo}/{value['path']}"] = self._objects[value["oid"]]
            else:
                self.files[f"{repo}/{value['path']}"] = base64.b64decode(value["content"])
        oid = hashlib.sha1(body).hexdigest()
        return 200, {"commitUrl": f"{self.url}/{repo}/commit/{oid}", "commitOid": oid}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                pass

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                is_known = hub.token in (None, (self.headers["Authorization"] or "")[7:])
                # An upload to a storage service carries no token of the hub.
                is_open = self.path.startswith("/lfs/") and self.command == "PUT"
                refused = (401, {"error": "Invalid username or password."})
                answered = hub.answer(self.command, self.path, body)
                status, content = answered if is_known or is_open else refused
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = _serve

        return Handler
