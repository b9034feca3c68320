"""A long run: hundred thousand calls, thousands of modules that come and go; memory stays flat and nothing goes stale."""

import gc
import tracemalloc
import types
import weakref

import jax
import jax.numpy as jnp
import pytest
from jax.core import Tracer

import shardax as sx


def tracers():
    gc.collect()
    return [thing for thing in gc.get_objects() if isinstance(thing, Tracer)]


@pytest.fixture
def leaked():
    """Asks for tracers that this test made and somebody still holds; other tests' failures hold theirs."""
    before = tracers()
    known = set(map(id, before))

    def ask():
        assert len(before) == len(known)  # held till here, so that no new one takes an old one's place
        return [tracer for tracer in tracers() if id(tracer) not in known]

    return ask


def settled():
    """Bytes that Python holds."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def test_a_hundred_thousand_calls_on_one_state():
    count = sx.State(jnp.int32(0))
    calls = []

    @sx.jit
    def bump(by):
        calls.append(None)
        count.value += by

    one = jnp.int32(1)
    bump(one)
    for _ in range(4_999):
        bump(one)
    tracemalloc.start()
    before = settled()
    for _ in range(5_000):
        bump(one)
    grown = settled() - before
    tracemalloc.stop()
    for _ in range(90_000):
        bump(one)
    assert int(count.value) == 100_000 and len(calls) == 1
    assert grown < 20_000, f"{grown} bytes more after 5,000 calls"


def churn(step, make, rounds):
    """Make a module, call, change it in some way, call again, drop it; returns those still alive at the end."""
    alive = []
    for n in range(rounds):
        module = make(n)
        alive.append(weakref.ref(module))
        if n % 3 == 0:
            module.scale = 1 + n % 5
        if n % 7 == 0:
            module.extra = module.weight  # a shared cell
        if n % 11 == 0:
            module.more = type(module.weight)(jnp.float32(n))
        expected = float(module.weight[...] if hasattr(module.weight, "set_value") else module.weight.value)
        for _ in range(2):
            expected += module.scale
            assert float(step(module)) == expected
    del module
    gc.collect()
    return [ref for ref in alive if ref() is not None]


class Own(types.SimpleNamespace):
    def __init__(self, n):
        super().__init__(weight=sx.State(jnp.float32(n)), scale=1)


def own_step(module):
    module.weight.value += module.scale
    return module.weight.value


def soak(step, make, rounds, leaked):
    assert churn(step, make, rounds) == []  # every structure has been seen by now
    tracemalloc.start()
    start = settled()
    assert churn(step, make, rounds) == []
    grown = settled() - start
    tracemalloc.stop()
    assert grown < 300 * rounds, f"{grown} bytes more after {rounds} modules"
    assert leaked() == []
    lift = step._lift
    assert len(lift.lifted) <= 5 * 2 * 2 + 5 and sum(map(len, lift.plans.values())) <= 32


def test_modules_that_come_and_go(leaked):
    soak(sx.jit(own_step), Own, 600, leaked)


def test_nnx_modules_that_come_and_go(leaked):
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")

    class Module(nnx.Module):
        def __init__(self, n):
            self.weight, self.scale = nnx.Param(jnp.float32(n)), 1

    @sx.jit
    def step(module):
        module.weight[...] += module.scale
        return module.weight[...]

    soak(step, Module, 300, leaked)


def test_structures_without_end_are_bounded():
    """A counter kept as a plain attribute re-traces at every call, as in jax; what is kept of it is bounded."""
    step = sx.jit(own_step)
    module = Own(0)
    for n in range(40):
        module.scale = n
        step(module)
    assert sum(map(len, step._lift.plans.values())) <= 32
    assert float(module.weight.value) == sum(range(40))


def test_failures_do_not_pile_up(leaked):
    cell = sx.State(jnp.float32(1))

    @sx.jit
    def fail(x):
        cell.value = cell.value + x
        raise RuntimeError("no")

    for _ in range(200):
        with pytest.raises(RuntimeError):
            fail(jnp.float32(1))
    assert float(cell.value) == 1 and leaked() == [] and len(fail._lift.lifted) == 1
    assert jax.jit(lambda x: x + 1)(1) == 2  # the trace was left in order
