"""An OpenAI-compatible server on loopback, so that evaluation harnesses can use a model.

    GET /health, /v1/models      POST /v1/completions, /v1/chat/completions

It binds to a loopback address only, and answers only requests that were sent to one by name, so
that no page in a browser can reach it under another name. Bodies are bounded, and a client that
goes away ends its requests.
"""

from __future__ import annotations

import itertools
import json
import select
import socket
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from homeostat.arrays import IntArray
from homeostat.config.cluster import LOOPBACK
from homeostat.data.tokenizer import ChatTokenizer
from homeostat.errors import DataError, EngineError, HomeostatError
from homeostat.generation import openai_answers as answers
from homeostat.generation.engine_thread import EngineThread, Ticket
from homeostat.generation.openai_requests import (
    TextRequest,
    parse_chat_request,
    parse_text_request,
)
from homeostat.generation.scoring import TokenScores, score_text
from homeostat.generation.text_stream import TextStream
from homeostat.json_text import parse_json
from homeostat.observe.safe_text import safe_text
from homeostat.rollout.engine import Request
from homeostat.types import Completion, StopReason

MAX_BODY_BYTES = 16 * 2**20
_NAMES = (LOOPBACK, "localhost", "::1", "[::1]")
# How often it is checked whether a client that waits is still there.
_WATCH_S = 0.5
_PARSERS = {"/v1/completions": parse_text_request, "/v1/chat/completions": parse_chat_request}


class ClientGoneError(Exception):
    """The client closed its connection."""


class TextService:
    """Turns API requests into engine requests, and their completions into answers."""

    def __init__(self, thread: EngineThread, tokenizer: ChatTokenizer, *, name: str) -> None:
        self.thread, self.tokenizer, self.name = thread, tokenizer, name
        self._numbers = itertools.count(1)

    def parse(self, path: str, body: Any) -> TextRequest:
        """Return the request. Raises DataError that names the field at fault."""
        context = self.thread.engine.max_tokens
        # A text that cannot fit is refused unread: tokenising megabytes takes a minute.
        return _PARSERS[path](body, self.tokenizer.bounded(context), context=context)

    def envelope(self, request: TextRequest) -> answers.Envelope:
        number = next(self._numbers)
        kind = "chatcmpl" if request.is_chat else "cmpl"
        return answers.Envelope(f"{kind}-{number}", int(time.time()), self.name, request.is_chat)

    def submit(self, request: TextRequest, envelope: answers.Envelope) -> list[Ticket]:
        """Start all answers, prompt by prompt. None is left behind if one cannot be started."""
        seed = request.seed if request.seed is not None else int(envelope.id.rpartition("-")[2])
        tickets: list[Ticket] = []
        try:
            for number, tokens_T in enumerate(request.prompts):
                room = self.thread.engine.max_tokens - len(tokens_T)
                sampling = request.options.for_engine(self.tokenizer, room=room)
                group = f"{envelope.id}/{number}"
                for sample in range(request.samples):
                    # A seed repeats an answer, so the noise must not depend on the request's id.
                    id = f"{number}/{sample}/{envelope.id}"
                    one = Request(
                        id, tokens_T, sampling, seed, group, noise_id=f"{number}/{sample}"
                    )
                    tickets.append(self.thread.submit(one))
        except HomeostatError:
            self.cancel(tickets)
            raise
        return tickets

    def cancel(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            self.thread.cancel(ticket.id)

    def choice(self, request: TextRequest, index: int, completion: Completion) -> answers.Choice:
        """Return a finished answer, with its log-probs where they were asked for."""
        prompt_T = request.prompts[index // request.samples]
        text = self.text_stream(request)
        text.finish(completion.tokens_T.tolist())
        shown_T = np.concatenate([prompt_T, completion.tokens_T]) if request.echo else None
        lead = self.tokenizer.decode(prompt_T) if request.echo else ""
        scores, tokens = None, completion.tokens_T.tolist()
        if request.top_logprobs is not None:
            scores = self._scores(prompt_T, completion.tokens_T, request)
            tokens = shown_T.tolist() if shown_T is not None else tokens
        return answers.Choice(index, lead + text.text, completion.stop_reason, tokens, scores)

    def echoed(self, request: TextRequest, index: int) -> answers.Choice:
        """Return a prompt that is only to be scored (echo with max_tokens 0)."""
        prompt_T = request.prompts[index // request.samples]
        scores = None
        if request.top_logprobs is not None:
            scores = self._scores(prompt_T, prompt_T[:0], request)
        text = self.tokenizer.decode(prompt_T)
        return answers.Choice(index, text, StopReason.LENGTH, prompt_T.tolist(), scores)

    def text_stream(self, request: TextRequest) -> TextStream:
        return TextStream(
            self.tokenizer.decode,
            stop_ids=self.tokenizer.stop_ids,
            stop_strings=request.options.stop,
        )

    def _scores(self, prompt_T: IntArray, new_T: IntArray, request: TextRequest) -> TokenScores:
        engine, top = self.thread.engine, request.top_logprobs
        assert top is not None, "the caller asks"
        whole_T = np.concatenate([prompt_T, new_T])
        scores = self.thread.call(
            lambda: score_text(
                engine.model,
                whole_T,
                top=top,
                device=engine.device,
                chunk_bytes=engine.chunk_bytes,
            )
        )
        if request.echo:
            return scores
        since = len(prompt_T) - 1
        return TokenScores(scores.logprobs[since:], scores.top[since:])


class Handler(BaseHTTPRequestHandler):
    """One HTTP request."""

    protocol_version = "HTTP/1.1"
    timeout = 60

    @property
    def service(self) -> TextService:
        assert isinstance(self.server, TextServer), self.server
        return self.server.service

    def do_GET(self) -> None:
        if not self._is_allowed():
            return
        if self.path == "/health":
            problem = self.service.thread.problem
            status = 200 if problem is None else 503
            self._send(status, {"status": "ok" if problem is None else str(problem)})
        elif self.path == "/v1/models":
            one = {"id": self.service.name, "object": "model", "owned_by": "local"}
            self._send(200, {"object": "list", "data": [one]})
        else:
            self._send(404, answers.error_answer(f"there is no {safe_text(self.path)[:100]}."))

    def do_POST(self) -> None:
        if not self._is_allowed():
            return
        service = self.service
        try:
            if self.path not in _PARSERS:
                self.close_connection = True  # its body stays unread
                known = ", ".join(_PARSERS)
                self._send(404, answers.error_answer(f"there is no such path. Known: {known}."))
                return
            request = service.parse(self.path, self._body())
            envelope = service.envelope(request)
            if request.echo and request.options.max_new_tokens == 0:
                self._send_echo(service, request, envelope)
            elif request.streams:
                self._stream(service, request, envelope)
            else:
                self._answer(service, request, envelope)
        except (DataError, EngineError) as error:
            is_dead = service.thread.problem is not None
            kind = "server_error" if is_dead else "invalid_request_error"
            self._send(503 if is_dead else 400, answers.error_answer(str(error), kind=kind))
        except (ClientGoneError, ConnectionError, TimeoutError):
            self.close_connection = True

    def _send_echo(
        self, service: TextService, request: TextRequest, envelope: answers.Envelope
    ) -> None:
        choices = [
            service.echoed(request, index)
            for index in range(len(request.prompts) * request.samples)
        ]
        counts = answers.usage(sum(map(len, request.prompts)), 0)
        self._send(200, answers.whole_answer(envelope, choices, service.tokenizer, counts))

    def _answer(
        self, service: TextService, request: TextRequest, envelope: answers.Envelope
    ) -> None:
        tickets = service.submit(request, envelope)
        try:
            completions = [self._wait(ticket) for ticket in tickets]
        finally:
            service.cancel(tickets)
        choices = [service.choice(request, i, one) for i, one in enumerate(completions)]
        num_prompt = sum(map(len, request.prompts))
        counts = answers.usage(num_prompt, sum(map(len, completions)))
        self._send(200, answers.whole_answer(envelope, choices, service.tokenizer, counts))

    def _wait(self, ticket: Ticket) -> Completion:
        while True:
            news = ticket.next_news(timeout_s=_WATCH_S)
            if news is not None and news.completion is not None:
                return news.completion
            if self._client_is_gone():
                raise ClientGoneError

    def _stream(
        self, service: TextService, request: TextRequest, envelope: answers.Envelope
    ) -> None:
        tickets = service.submit(request, envelope)
        try:
            self._start_events()
            for event in self._events(service, request, envelope, tickets):
                self._send_event(json.dumps(event))
            self._send_event("[DONE]")
            self.wfile.write(b"0\r\n\r\n")
        except HomeostatError as error:
            # The status line has been sent: the error is an event, and the stream ends after it.
            self._send_event(json.dumps(answers.error_answer(str(error), kind="server_error")))
            self.wfile.write(b"0\r\n\r\n")
        finally:
            service.cancel(tickets)

    def _events(
        self,
        service: TextService,
        request: TextRequest,
        envelope: answers.Envelope,
        tickets: list[Ticket],
    ) -> Iterator[dict[str, Any]]:
        """Yield the events of all answers, one answer after the other."""
        num_new = 0
        for index, ticket in enumerate(tickets):
            text = service.text_stream(request)
            if request.is_chat:
                yield answers.opening_chunk(envelope, index)
            for news in ticket.all_news():
                num_new += len(news.tokens)
                if news.completion is not None:
                    reason = news.completion.stop_reason
                    yield answers.chunk(envelope, index, text.finish(news.tokens), reason)
                elif piece := text.push(news.tokens):
                    yield answers.chunk(envelope, index, piece, None)
        if request.with_usage:
            counts = answers.usage(sum(map(len, request.prompts)), num_new)
            yield answers.usage_chunk(envelope, counts)

    def _body(self) -> Any:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            self.close_connection = True
            raise DataError("a request needs a Content-Length.")
        # Python refuses to convert thousands of digits.
        if len(length) > 20 or int(length) > MAX_BODY_BYTES:
            self.close_connection = True
            raise DataError(f"the body is larger than {MAX_BODY_BYTES} bytes.")
        try:
            return parse_json(self.rfile.read(int(length)))
        except ValueError:
            raise DataError("the body is not JSON.") from None

    def _is_allowed(self) -> bool:
        """Refuse a request that was sent to another name than a loopback one (DNS rebinding)."""
        host = self.headers.get("Host", "").lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if name in _NAMES:
            return True
        self.close_connection = True
        self._send(403, answers.error_answer("this server answers on loopback addresses only."))
        return False

    def _client_is_gone(self) -> bool:
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)

    def _send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def _start_events(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _send_event(self, data: str) -> None:
        line = f"data: {data}\n\n".encode()
        self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing: prompts and paths of clients do not belong on the terminal."""


class TextServer(ThreadingHTTPServer):
    """Listens on a loopback port; 0 takes a free one."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, service: TextService, *, port: int) -> None:
        self.service = service
        super().__init__((LOOPBACK, port), Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback of an error, but not of a client that has hung up."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def port(self) -> int:
        return self.server_address[1]
