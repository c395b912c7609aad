"""Find out what failed when the user's code called a server: a judge, an environment, a tool.

Rewards and environments call services over the network, with httpx, requests, aiohttp or a client
such as openai's. Their exceptions show whether the server could not be reached, answered too late
or received too many requests. The frames show which service was called.
"""

from __future__ import annotations

from homeostat.health.failures.code_owners import owner_of
from homeostat.health.failures.frames import Frame
from homeostat.health.failures.tracebacks import Traceback

_TIMEOUTS = frozenset(
    (
        "ReadTimeout", "ConnectTimeout", "WriteTimeout", "PoolTimeout", "Timeout",
        "TimeoutException", "TimeoutError", "APITimeoutError", "ServerTimeoutError",
        "ReadTimeoutError", "ConnectTimeoutError", "DeadlineExceeded", "SocketTimeoutError",
    )
)  # fmt: skip
_UNREACHABLE = frozenset(
    (
        "ConnectError", "ConnectionError", "APIConnectionError", "ClientConnectorError",
        "ClientConnectionError", "ClientOSError", "ServerDisconnectedError", "MaxRetryError",
        "NewConnectionError", "ConnectionRefusedError", "ConnectionResetError",
        "RemoteProtocolError", "ReadError", "WriteError", "ProxyError", "SSLError",
        "InternalServerError",
        "ServiceUnavailable", "HTTPStatusError", "ConnectionClosedError", "InvalidStatus",
        "BadGateway", "GatewayTimeout", "ConnectionClosed", "URLError",
    )
)  # fmt: skip
_TOO_OFTEN = frozenset(("RateLimitError", "ResourceExhausted", "TooManyRequests"))
_CLIENTS = (
    "httpx", "httpcore", "requests", "aiohttp", "urllib3", "openai", "anthropic", "litellm",
    "websockets", "grpc", "google", "openenv", "socket.py", "urllib/request.py", "http/client.py",
)  # fmt: skip
_WORLDS = ("env", "environment", "sandbox", "gym", "simulat", "browser")
_TOOLS = ("tool", "search", "retriev")


def failed_request(
    found: Traceback, *, is_reward: bool, is_engine: bool = False
) -> tuple[str, str] | None:
    """Return the illness and the reason if the exception is a failed request; else None."""
    kind = found.kind.rpartition(".")[2]
    if not _is_request(found, kind):
        # Trainers and scripts set one time limit for all rewards of a batch.
        is_limit = is_reward and kind == "TimeoutError" and not found.message
        return ("reward-timeout", f"the reward's time limit passed ({kind})") if is_limit else None
    if kind in _TOO_OFTEN or "429" in found.message:
        return "external-api-rate-limited", f"the service refuses further requests ({kind})"
    is_late = kind in _TIMEOUTS
    how = "did not answer in time" if is_late else "could not be reached"
    if is_reward:
        name = "reward-timeout" if is_late else "reward-server-unreachable"
        return name, f"the service that the reward calls {how} ({kind})"
    mine = " ".join(_names(one) for one in found.frames if owner_of(one.file) == "user")
    if any(word in mine for word in _WORLDS):
        return "environment-failed", f"the environment's server {how} ({kind})"
    if any(word in mine for word in _TOOLS):
        return "tool-server-failed", f"the tool's server {how} ({kind})"
    if is_engine:
        return "inference-server-unresponsive", f"the server that generates {how} ({kind})"
    return None


def _is_request(found: Traceback, kind: str) -> bool:
    if kind not in _TIMEOUTS | _UNREACHABLE | _TOO_OFTEN:
        return False
    if found.kind.startswith(_CLIENTS):
        return True
    return any(client in frame.file for frame in found.frames for client in _CLIENTS)


def _names(frame: Frame) -> str:
    """Return names that show the purpose of the user's code: folder, file and function."""
    parts = frame.file.replace("\\", "/").lower().split("/")
    return " ".join((*parts[-2:], frame.function.lower()))
