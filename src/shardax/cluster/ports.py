"""Free TCP ports on this machine, held until the process that wants one has it."""

from __future__ import annotations

import socket
from dataclasses import dataclass


@dataclass(frozen=True)
class ReservedPort:
    """A port nobody else is given while this object is open, and on which a JAX coordinator can still listen.

    The socket is bound but does not listen, with `SO_REUSEPORT` as JAX's service uses it: the kernel hands the port to
    no one who asks for a free one, and no connection ends here.
    """

    socket: socket.socket

    @property
    def number(self) -> int:
        return int(self.socket.getsockname()[1])

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.number}"

    def close(self) -> None:
        self.socket.close()


def reserve_port() -> ReservedPort:
    """A free port of the loopback interface, reserved until closed.

    >>> port = reserve_port()
    >>> port.address.startswith("127.0.0.1:"), port.number > 0
    (True, True)
    >>> port.close()
    """
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("127.0.0.1", 0))
    return ReservedPort(held)
