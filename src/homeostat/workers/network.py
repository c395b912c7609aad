"""Addresses, ports and network interfaces of this machine. Standard library only."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys

# Linux: the address of a network interface.
_SIOCGIFADDR = 0x8915
# An address of nobody: to find the interface that leads to other machines. Nothing is sent there.
_ELSEWHERE = ("192.0.2.1", 9)


def own_address(name: str) -> str:
    """Return the address by which other machines reach this one, whose name or address is given.

    A machine may resolve its own name to a loopback address, which others cannot use; it is then
    the address of the interface that leads to others. Raises OSError if the name is unknown.
    """
    found = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    if not is_loopback(found) or name == "localhost" or is_loopback(name):
        return found
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_ELSEWHERE)
        return str(probe.getsockname()[0])


def is_loopback(address: str) -> bool:
    """Return whether only processes of this machine reach an address."""
    return address.startswith("127.") or address == "::1"


def free_port(address: str) -> int:
    """Return a port of an address of this machine that nothing uses. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


def network_variables(address: str) -> dict[str, str]:
    """Return the variables that bind collectives to the interface of an address of this machine.

    Without them gloo takes what the host's name resolves to, which may be the loopback address.
    """
    name = interface_of(address)
    if name is None:
        return {}
    variables = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    return {key: value for key, value in variables.items() if key not in os.environ}


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has an address; None where it is not found."""
    if address.startswith("127."):
        return "lo" if sys.platform == "linux" else None
    try:
        import fcntl

        packed = socket.inet_aton(address)
    except (ImportError, OSError):
        return None
    with socket.socket() as probe:
        for _, name in socket.if_nameindex():
            asked = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                if fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)[20:24] == packed:
                    return name
    return None
