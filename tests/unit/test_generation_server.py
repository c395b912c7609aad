"""The server of `homeostat serve`: what it answers to requests that are none."""

from __future__ import annotations

import http.client
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from homeostat.generation.server import TextServer


@pytest.mark.parametrize("length", ["-1", "99999999999", "9" * 5000])
def test_a_length_that_cannot_be_is_refused(length: str) -> None:
    service = SimpleNamespace(name="m", parse=None, thread=SimpleNamespace(problem=None))
    server = TextServer(cast(Any, service), port=0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        client.putrequest("POST", "/v1/completions")
        client.putheader("Content-Length", length)
        client.endheaders()
        assert client.getresponse().status == 400
        client.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
