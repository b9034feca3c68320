"""The meeting before `jax.distributed.initialize`: JAX answers most mistakes there with an abort from C++ or a hang.

Rank 0 listens on the coordinator's own address; every other rank says who it is and gets the same verdict. The port
passes from this meeting to JAX's service without a moment in which another job could take it.
"""

from __future__ import annotations

import json
import logging
import socket
import time
import uuid
from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import asdict
from typing import Any

from shardax.cluster.desk import GREETING, LINGER, LONGEST_LINE, Desk
from shardax.cluster.detect import Place
from shardax.cluster.facts import Fault, ProcessFacts
from shardax.errors import PreflightError

logger = logging.getLogger("shardax")

STRANGER_SECONDS = 5.0
"""How long something else may answer at the coordinator's address: an earlier run of this job may be leaving."""

OTHER_JOB = (
    "another port (coordinator_address, or JAX_COORDINATOR_PORT under SLURM and Open MPI), or the end of the other job"
)


@contextmanager
def preflight(place: Place, facts: ProcessFacts, timeout: float) -> Generator[str, None, None]:
    """Meet the other processes of the job; gives a token that all of them, and only they, now share.

    Raises `PreflightError` in each of them with the same list of faults. On rank 0 the port stays taken until the end
    of the `with` block, in which JAX's service starts to listen on it.
    """
    end = time.monotonic() + timeout
    if place.rank == 0:
        with closing(_listen(place, facts)) as listener:
            yield _receive(listener, place, facts, end, timeout)
    else:
        yield _arrive(place, facts, end, timeout)


# ---- rank 0 ---------------------------------------------------------------------------------------------------------


def _listen(place: Place, facts: ProcessFacts) -> socket.socket:
    """The coordinator's port, for this process alone: JAX's own service would share it with another job's."""
    try:
        return _bind(place)
    except OSError as error:
        occupant = _who_listens(place)
        if occupant is not None and occupant.job == facts.job:
            problem = f"two processes say they are rank 0: {occupant} (there first) and {facts}"
            raise _error(place, Fault((0,), problem)) from None
        who = f"the job {occupant.job!r} ({occupant})" if occupant else "another program, perhaps another job's rank 0,"
        problem = f"cannot listen on {place.coordinator} ({error.strerror}): {who} is there"
        raise _error(place, Fault((0,), problem, OTHER_JOB)) from None


def _bind(place: Place) -> socket.socket:
    host = place.bind_host
    anywhere = host in ("", "::") and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if anywhere or ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        if anywhere:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("::" if anywhere else host, place.port))
        listener.listen(place.size + 16)
    except OSError:
        listener.close()
        raise
    return listener


def _hand_over(listener: socket.socket) -> None:
    """Stop listening but keep the port: only a socket with `SO_REUSEPORT`, as JAX's, can now be bound to it."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    listener.shutdown(socket.SHUT_RDWR)


def _receive(listener: socket.socket, place: Place, facts: ProcessFacts, end: float, timeout: float) -> str:
    with closing(Desk(listener, facts, end)) as desk:
        found = desk.gather()
        if desk.absent and not found:
            here = ", ".join(f"{one.rank} ({one})" for one in desk.arrived[:8])
            more = f" and {len(desk.arrived) - 8} more" if len(desk.arrived) > 8 else ""
            found = [Fault(tuple(desk.absent), f"did not arrive within {timeout:.0f} s; here: {here}{more}")]
        token = uuid.uuid4().hex
        _hand_over(listener)
        desk.answer({"token": token, "faults": [asdict(fault) for fault in found]})
    if found:
        raise _error(place, *found)
    return token


# ---- the others -----------------------------------------------------------------------------------------------------


class _Stranger(Exception):
    """What answers is not the preflight of this job."""


def _arrive(place: Place, facts: ProcessFacts, end: float, timeout: float) -> str:
    why, met = "it was not tried", ""
    stranger_since: float | None = None
    next_note = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            return _ask(place, facts, end)
        except _Stranger as error:
            why, stranger_since = str(error), stranger_since or time.monotonic()
            met = f"; earlier, {why}"
            if time.monotonic() - stranger_since > STRANGER_SECONDS:
                break
        except OSError as error:
            why, stranger_since = str(error), None
        if time.monotonic() > next_note:
            logger.warning("rank %d still waits for rank 0 at %s (%s)", place.rank, place.coordinator, why)
            next_note += 30
        time.sleep(0.1)
    if stranger_since is not None:
        said = f"came to {place.coordinator}, where {why}: its job has begun without it, or the port is another job's"
        raise _error(place, Fault((place.rank,), said, OTHER_JOB))
    said = f"did not arrive: nothing answers at {place.coordinator} after {timeout:.0f} s ({why}{met}); {facts} waited"
    remedy = (
        "if there are several hosts, the address of rank 0's: this one is every host's own" if place.local else None
    )
    raise _error(place, Fault((0,), said, remedy))


def _ask(place: Place, facts: ProcessFacts, end: float) -> str:
    """One attempt: hear who is there, say who this is, hear the verdict."""
    with socket.create_connection((place.host, place.port), timeout=5) as connection:
        coordinator, seconds = _greeted(connection)
        if coordinator.job != facts.job:
            other = f"job {coordinator.job!r} ({coordinator}) meets; this process is of job {facts.job!r}"
            raise _Stranger(other)
        connection.sendall(json.dumps(facts.to_json()).encode() + b"\n")
        # Rank 0 may have begun later; then it waits longer than this process would.
        connection.settimeout(max(end - time.monotonic(), seconds) + LINGER + 5)
        line = connection.makefile("rb").readline()
    if not line.endswith(b"\n"):
        raise OSError("rank 0 went away without a verdict")
    verdict: dict[str, Any] = json.loads(line)
    if verdict["faults"]:
        raise _error(place, *(Fault(tuple(one["ranks"]), one["problem"], one["remedy"]) for one in verdict["faults"]))
    return str(verdict["token"])


def _greeted(connection: socket.socket) -> tuple[ProcessFacts, float]:
    """Rank 0 as it presents itself, and for how long it will wait; anything else that answers is a stranger."""
    received = b""
    try:
        while not received.endswith(b"\n") and len(received) < LONGEST_LINE:
            part = connection.recv(65536)
            received += part
            if not part or not received.startswith(GREETING[: len(received)]):
                break
    except TimeoutError:
        raise _Stranger("something accepts connections and says nothing") from None
    if not received:
        raise OSError("the connection was closed")
    if not received.startswith(GREETING) or not received.endswith(b"\n"):
        raise _Stranger("another program answers, as a JAX coordinator does once its job has begun")
    content = json.loads(received[len(GREETING) :])
    return ProcessFacts.from_json(content["facts"]), float(content["seconds"])


def _who_listens(place: Place) -> ProcessFacts | None:
    """Who holds the coordinator's port, if it is another preflight."""
    try:
        with socket.create_connection((place.host, place.port), timeout=2) as connection:
            return _greeted(connection)[0]
    except (OSError, _Stranger):
        return None


def _error(place: Place, *found: Fault) -> PreflightError:
    headline = f"the {place.size} processes of the job at {place.coordinator} cannot begin together"
    ranks = sorted({rank for fault in found for rank in fault.ranks})
    return PreflightError(headline, [fault.as_offence() for fault in found], ranks=ranks)
