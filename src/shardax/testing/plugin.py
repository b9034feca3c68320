"""The pytest half: `@pytest.mark.processes(4, devices=2)` and the fixture `process_pool`."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import iscoroutinefunction, isgeneratorfunction
from typing import Any
from unittest import TestCase

import pytest

from shardax.errors import ProcessesError
from shardax.testing.pool import ProcessPool, SkippedInProcesses

POOL = pytest.StashKey[ProcessPool]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "processes(n, devices=1, timeout=120): run the test in n real processes with that many simulated devices each",
    )


def pytest_unconfigure(config: pytest.Config) -> None:
    if (pool := config.stash.get(POOL, None)) is not None:
        pool.close()


@pytest.fixture(scope="session")
def process_pool(pytestconfig: pytest.Config) -> Iterator[ProcessPool]:
    """The suite's pool of processes: `process_pool.run(function, *args, processes=4, devices=2)`."""
    yield _pool(pytestconfig)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What would run here, alone, although it is marked, is an error."""
    if item.get_closest_marker("processes") is None:
        return
    function = getattr(item, "obj", None)
    if not isinstance(item, pytest.Function) or issubclass(getattr(item, "cls", None) or object, TestCase):
        pytest.fail("only functions, and methods of plain classes, run in processes; this is another kind", False)
    if iscoroutinefunction(function) or isgeneratorfunction(function):
        pytest.fail("a coroutine or a generator does not run in processes; write a plain function", False)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    marker = pyfuncitem.get_closest_marker("processes")
    if marker is None:
        return None
    names = pyfuncitem._fixtureinfo.argnames  # pyright: ignore[reportPrivateUsage]
    fixtures: dict[str, Any] = {name: pyfuncitem.funcargs[name] for name in names}
    try:
        world = _world(*marker.args, **marker.kwargs)
    except TypeError:
        written = [*map(repr, marker.args), *(f"{name}={value!r}" for name, value in marker.kwargs.items())]
        pytest.fail(f"processes({', '.join(written)}): write processes(n, devices=1, timeout=120)", False)
    failure = _run(_pool(pyfuncitem.config), pyfuncitem.obj, {**world, **fixtures})
    if failure is not None:  # outside the except clause: the message alone, not the story of how it came here
        raise failure
    return True


def _run(pool: ProcessPool, function: Any, arguments: dict[str, Any]) -> BaseException | None:
    try:
        pool.run(getattr(function, "__func__", function), **arguments)  # a method gets an instance in each process
    except SkippedInProcesses as reason:
        return pytest.skip.Exception(str(reason), _use_item_location=True)
    except ProcessesError as error:
        return pytest.fail.Exception(str(error), pytrace=False)
    return None


def _pool(config: pytest.Config) -> ProcessPool:
    return config.stash.setdefault(POOL, ProcessPool())


def _world(n: int, devices: int | tuple[int, ...] = 1, timeout: float = 120.0) -> dict[str, Any]:
    """The marker's arguments, under the names that `ProcessPool.run` gives them."""
    return {"processes": n, "devices": devices, "timeout": timeout}
