"""`should_stop`: all processes learn at the same step that one of them is to be preempted (SIGTERM).

JAX's preemption service notices SIGTERM with a C handler of its own, and has two traps. A Python handler that was there
before `initialize` is displaced and never runs; one that is installed afterwards displaces JAX's, and the service never
hears of a SIGTERM. Here both are called.
"""

from __future__ import annotations

import operator
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, SupportsIndex

from jax.experimental import multihost_utils

from shardax._compat import distributed_client, preemption_service_runs
from shardax.cluster.progress import PROGRESS
from shardax.cluster.signals import call_handler, handler_address
from shardax.errors import ClusterError

Handler = Callable[[int, FrameType | None], Any]


@dataclass(eq=False)
class _Watch:
    """JAX's C handler, our Python one that calls it, and the user's that it calls next."""

    service: int = 0
    theirs: Any = None
    asked: bool = False
    busy: bool = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.busy:  # their handler calls the one before it, which is this one
            return
        self.busy = True
        try:
            call_handler(self.service, number)
            if self.asked and not self.service:
                os.kill(os.getpid(), self._give_up(number))
            self.asked = True
            if callable(self.theirs):
                self.theirs(number, frame)
        finally:
            self.busy = False

    def _give_up(self, number: int) -> int:
        """A process alone that is asked twice was not asking `should_stop` any more."""
        signal.signal(number, signal.SIG_DFL)
        return number


_watch = _Watch()


def before_initialize() -> Any:
    """The Python handler of SIGTERM that JAX is about to displace."""
    return signal.getsignal(signal.SIGTERM)


def after_initialize(earlier: Any) -> None:
    """Remember JAX's handler, and put the displaced one behind it."""
    if not preemption_service_runs():
        return
    _watch.service = handler_address(signal.SIGTERM)
    if callable(earlier) and earlier is not _watch:
        _install(earlier)


def should_stop(step: SupportsIndex) -> bool:
    """True in every process, at the same step, once one of them has got SIGTERM: save, and leave.

    Call it once a step in every process, with the step's number. It works in a process alone, too (there a second
    SIGTERM ends it); SIGTERM handlers of your own, installed before or after `sx.initialize()`, still run.

        for step in range(steps):
            train(step)
            if sx.should_stop(step):
                save(step)
                break
    """
    PROGRESS.reach(step)
    if distributed_client() is None:
        _close_traps()
        return _watch.asked
    if not preemption_service_runs():
        raise ClusterError(
            "should_stop needs JAX's preemption service, which is off",
            remedy="jax.config.update('jax_enable_preemption_service', True) before sx.initialize()",
        )
    _close_traps()
    return bool(multihost_utils.reached_preemption_sync_point(operator.index(step)))


def _close_traps() -> None:
    """If a handler was installed since, it displaced JAX's: put it behind."""
    now = signal.getsignal(signal.SIGTERM)
    displaced = distributed_client() is None or handler_address(signal.SIGTERM) != _watch.service
    if now is _watch or not displaced:
        return
    if threading.current_thread() is not threading.main_thread():
        raise ClusterError(
            "a SIGTERM handler installed after sx.initialize() hides preemption from JAX",
            remedy="call should_stop in the main thread, or install the handler before sx.initialize()",
        )
    _install(now)


def _install(theirs: Any) -> None:
    if threading.current_thread() is threading.main_thread():
        _watch.theirs = theirs
        signal.signal(signal.SIGTERM, _watch)
