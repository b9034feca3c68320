"""What is in force, entered and left in any order, against a model; and jit, which must agree with it."""

import threading

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardax as sx
from shardax.arrays.ambient import Ambient


@settings(max_examples=25)
@given(st.lists(st.tuples(st.sampled_from(["enter", "leave"]), st.integers(0, 3)), max_size=10))
def test_law_the_innermost_that_is_left_is_in_force_and_jit_knows(steps):
    values = [object() for _ in range(4)]
    ambient, entered = Ambient("value"), []
    jitted = jax.jit(lambda: values.index(ambient.current()) if ambient.current() else -1)
    for step, number in steps:
        if step == "enter":
            ambient.enter(values[number], number + 1)
            entered.append(number)
        elif entered:
            left = entered[number % len(entered)]
            del entered[len(entered) - 1 - entered[::-1].index(left)]  # entered twice: the inner one is left
            ambient.leave(values[left])
        current = entered[-1] if entered else None
        assert ambient.current() is (None if current is None else values[current])
        assert int(jitted()) == (-1 if current is None else current)
    for number in entered:
        ambient.leave(values[number])
    assert ambient.current() is None and int(jitted()) == -1


def test_each_thread_has_its_own_and_the_last_is_everybodys():
    ambient, seen = Ambient("value"), []
    jitted = jax.jit(lambda: seen.append(ambient.last()) or 0)
    ambient.made("first", 1)
    ambient.enter("mine", 7)
    jitted()
    ambient.made("second", 2)

    def work():
        assert ambient.current() is None
        ambient.enter("theirs", 8)
        assert ambient.current() == "theirs"
        ambient.leave("theirs")
        jitted()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ambient.current() == "mine"
    ambient.leave("mine")
    jitted()
    assert seen == ["first", "second"]


def test_leaving_what_was_never_entered():
    with pytest.raises(sx.NoManagerError, match="'nothing' is left in a context where it was not entered"):
        Ambient("value").leave("nothing")
