"""The C side of signal handlers, which Python's `signal` does not show, and where JAX installs its own."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable

_LIBC = ctypes.CDLL(None)
_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
_LIBC.signal.restype = ctypes.c_void_p
_LIBC.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]


def handler_address(number: int) -> int:
    """Where the C handler of a signal is; 0 and 1 stand for the default and for ignoring it.

    >>> import signal
    >>> handler_address(signal.SIGUSR2)
    0
    """
    action = ctypes.create_string_buffer(512)  # struct sigaction begins with the handler on every Unix
    if _LIBC.sigaction(ctypes.c_int(number), None, action) != 0:
        raise OSError(f"no handler can be read for signal {number}")
    return int(ctypes.c_size_t.from_buffer(action).value)


def call_handler(address: int, number: int) -> None:
    """Do what the C handler at this address does on this signal."""
    if address > 1:
        _HANDLER(address)(number)


class AbortHandler:
    """Python code that runs when C++ aborts the process, in place of the core dump.

    JAX's runtime ends a process with `abort()` when its coordinator is gone; nothing in Python can catch that, but the
    signal comes synchronously, in a thread without the interpreter's lock, so a handler may take the lock and speak.
    """

    def __init__(self, action: Callable[[], None]) -> None:
        self._callback = _HANDLER(lambda _: action())  # kept alive: C holds only its address
        self._earlier: int | None = None

    def install(self) -> None:
        self._earlier = _LIBC.signal(signal.SIGABRT, ctypes.cast(self._callback, ctypes.c_void_p)) or 0

    def remove(self) -> None:
        if self._earlier is not None:
            _LIBC.signal(signal.SIGABRT, ctypes.c_void_p(self._earlier))
            self._earlier = None
