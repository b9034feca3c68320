"""What is shared among the places of a structure: told without keeping anything alive and without `==` on cells."""

import gc
import weakref

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardax.state.sharing import Sharing

nnx = pytest.importorskip("flax.nnx", reason="needs flax")

ZERO = jnp.zeros(())
MAKERS = {"node": nnx.Module, "variable": lambda: nnx.Param(ZERO), "list": lambda: nnx.List([])}


class Named:
    """Equal to everything of its class, as a cell that computes would be."""

    def __eq__(self, other):
        raise AssertionError("compared")

    __hash__ = None


MAKERS["computing"] = Named
PLACES = st.lists(st.tuples(st.sampled_from(sorted(MAKERS)), st.integers(0, 3)), min_size=1, max_size=8)


def objects_of(places):
    made = {place: MAKERS[place[0]]() for place in dict.fromkeys(places)}
    return [made[place] for place in places]


def pattern(objects):
    first = {}
    return [first.setdefault(id(value), place) for place, value in enumerate(objects)]


@given(PLACES, PLACES, st.booleans())
def test_alike_is_the_pattern_of_sharing(before, now, again):
    kinds = [kind for kind, _ in before]
    now = [(kind, number) for kind, (_, number) in zip(kinds, now * 8, strict=False)]  # types are verified before
    surveyed, objects = objects_of(before), objects_of(now)
    sharing = Sharing(surveyed)
    assert sharing.alike(surveyed)
    for _ in range(3):
        assert sharing.alike(objects) == (pattern(surveyed) == pattern(objects))
        assert not again or sharing.alike(surveyed)


@pytest.mark.parametrize("kinds", [("variable", "variable"), ("node", "variable", "variable"), ("node", "node")])
def test_nothing_is_kept_alive(kinds):
    class Holder:
        pass

    objects = objects_of([(kind, number) for number, kind in enumerate(kinds)])
    holder = Holder()
    for value in objects:
        if isinstance(value, nnx.Variable):
            value._var_metadata["held"] = holder  # a variable has no weak references of its own
        else:
            value.held = nnx.data(holder)
    alive = weakref.ref(holder)
    sharing = Sharing(objects)
    assert sharing.alike(objects) and sharing.alike(objects_of([(kind, n) for n, kind in enumerate(kinds)]))
    assert sharing.alike(objects)
    del objects, holder, value
    gc.collect()
    assert alive() is None


def test_cells_whose_marks_are_shared_are_told_apart_all_the_same():
    first, second = nnx.Param(ZERO), nnx.Param(ZERO)
    object.__setattr__(second, "_trace_state", first._trace_state)
    sharing = Sharing([first, second])
    assert sharing.alike([first, second]) and not sharing.alike([first, first]) and sharing.alike([second, first])
    apart = Sharing([nnx.Param(ZERO), nnx.Param(ZERO)])
    assert apart.alike([first, second]) and not apart.alike([second, second]) and apart.alike([first, second])
