"""One process of a `ProcessPool`: joins worlds, runs the functions it is sent, and dies with its parent.

python -m shardax.testing.worker FD
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import jax
from jax.extend import backend

from shardax.testing.functions import FunctionAddress


def main(fd: int) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # the pool asks a hanging process where it stands
    parent = Connection(fd)
    requests: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(parent, requests), daemon=True).start()
    while True:
        verb, content = requests.get()
        parent.send_bytes(_packed(_answer(verb, content)))


def _listen(parent: Connection, requests: queue.SimpleQueue[tuple[str, Any]]) -> None:
    # Reading on a thread of its own: the end of the parent is noticed also in the middle of a test.
    try:
        while True:
            requests.put(parent.recv())
    except (EOFError, OSError):
        os._exit(0)


def _packed(answer: tuple[str, Any]) -> bytes:
    try:
        return pickle.dumps(answer)
    except Exception as error:  # noqa: BLE001 — pickling may raise anything
        return pickle.dumps(("failed", f"its result cannot be sent to the parent: {error!r}"))


def _answer(verb: str, content: Any) -> tuple[str, Any]:
    try:
        match verb:
            case "join":
                return "done", _join(**content)
            case "leave":
                return "done", _leave()
            case _:
                return _call(*content)
    except BaseException as error:  # noqa: BLE001 — whatever it is, it is the answer
        return _outcome(error)


def _join(coordinator: str, processes: int, rank: int, devices: int) -> None:
    jax.config.update("jax_num_cpu_devices", devices)
    jax.distributed.initialize(
        coordinator,
        processes,
        rank,
        coordinator_bind_address=coordinator,
        cluster_detection_method="deactivate",
        heartbeat_timeout_seconds=60,
        initialization_timeout=120,
    )
    jax.devices()


def _leave() -> None:
    jax.distributed.shutdown()
    backend.clear_backends()


def _call(address: FunctionAddress, arguments: bytes) -> tuple[str, Any]:
    function = address.load()
    positional, named = pickle.loads(arguments)
    result = function(*positional, **named)
    return "done", jax.tree.map(_to_host, result)


def _to_host(leaf: Any) -> Any:
    return jax.device_get(leaf) if isinstance(leaf, jax.Array) else leaf


def _outcome(error: BaseException) -> tuple[str, Any]:
    if type(error).__name__ == "Skipped":
        return "skipped", str(error)
    return "failed", "".join(traceback.format_exception(type(error), error, _visible(error.__traceback__)))


def _visible(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame that is not ours."""
    here = trace
    while here is not None and here.tb_frame.f_code.co_filename == __file__:
        here = here.tb_next
    return here or trace


if __name__ == "__main__":
    main(int(sys.argv[1]))
