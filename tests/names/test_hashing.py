"""Structural hashes: equal structures alike, in every process."""

import dataclasses
import enum
import os
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import shardax as sx


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Point:
    x: object
    note: str = dataclasses.field(default="", compare=False)
    __hash__ = sx.hash_fn


class Plain:
    def __init__(self, **fields):
        self.__dict__.update(fields)

    def __eq__(self, other):
        return vars(self) == vars(other)

    __hash__ = sx.hash_fn


class Pair(NamedTuple):
    a: int
    b: int


SAMPLES = [
    None,
    ...,
    0,
    2.5,
    3j,
    "",
    "0",
    b"0",
    "abc",
    (1, (2, 3)),
    (1, 2, 3),
    ((1, 2), 3),
    {"a": 1},
    {"a": 2},
    {1, "x"},
    frozenset({2}),
    Colour.RED,
    Colour.BLUE,
    Point(1),
    Point((1, None)),
    Plain(x=1),
    Pair(4, 5),
    int,
    len,
    Plain,
    P("dp", None),
    P("tp"),
    np.arange(3),
    np.arange(3.0),
    np.zeros((3, 1), np.int64),
    range(3),
    slice(1, 2),
    object(),
    sx.PartitionAxis(),
    sx.PartitionAxis(head_axis="model"),
]


def test_different_structures_hash_differently():
    hashes = [sx.hash_fn(sample) for sample in SAMPLES]
    assert len(set(hashes)) == len(hashes)
    assert all(0 <= value < 2**60 for value in hashes)


def test_hashes_agree_between_processes():
    code = f"import runpy; m = runpy.run_path({__file__!r}); print([m['sx'].hash_fn(s) for s in m['SAMPLES']])"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_usable_as_a_hash_method():
    assert hash(Point(1, "a")) == hash(Point(1, "b")) == sx.hash_fn(Point(1)) != hash(Point(2))
    assert hash(Plain(a=[1], b={2})) == hash(Plain(b={2}, a=[1]))
    assert {Plain(a=1): "found"}[Plain(a=1)] == "found"


def test_order_matters_where_it_means_something():
    assert sx.hash_fn([1, 2]) != sx.hash_fn([2, 1])
    assert sx.hash_fn({"a": 1, "b": 2}) == sx.hash_fn({"b": 2, "a": 1})
    assert sx.hash_fn({1, "a", None}) == sx.hash_fn({None, "a", 1})
    assert sx.hash_fn({"a": "b"}) != sx.hash_fn({"b": "a"})


def test_equal_numbers_hash_alike_and_nan_is_stable():
    assert sx.hash_fn(1) == sx.hash_fn(1.0) == sx.hash_fn(True) == sx.hash_fn(np.int32(1))
    assert sx.hash_fn(float("nan")) == sx.hash_fn(float("nan"))


def test_structures_that_contain_themselves():
    loop = [1]
    loop.append(loop)
    assert sx.hash_fn(loop) == sx.hash_fn(loop)
    node = Plain(name="n")
    node.self = node
    assert isinstance(hash(node), int)


trees = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=4), st.floats(allow_nan=False)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=3)),
    max_leaves=8,
)


def rebuilt(tree):
    if isinstance(tree, dict):
        return {key: rebuilt(tree[key]) for key in reversed(tree)}
    return tuple(map(rebuilt, tree)) if isinstance(tree, list) else tree


@given(trees)
def test_law_the_hash_follows_structure_alone(tree):
    assert sx.hash_fn(tree) == sx.hash_fn(rebuilt(tree))
    assert sx.hash_fn([tree]) != sx.hash_fn([[tree]])


def test_get_safe_hash_int():
    assert sx.get_safe_hash_int("abc") == int("900150983cd24fb0d6963f7d28e17f72", 16)
    assert sx.get_safe_hash_int("abc", algorithm="sha256") == sx.get_safe_hash_int("abc", "sha256")
    assert sx.get_safe_hash_int(12) == sx.get_safe_hash_int("12")


@pytest.mark.parametrize(
    ("algorithm", "hint"),
    [("not_a_real_hash", ""), ("sha257", "did you mean.*sha256"), ("new", ""), ("shake_128", "length"), (3, "")],
)
def test_get_safe_hash_int_refuses_what_is_not_an_algorithm(algorithm, hint):
    with pytest.raises(sx.HashingError, match=f"(?s)Unsupported hash algorithm.*{hint}") as caught:
        sx.get_safe_hash_int("abc", algorithm=algorithm)
    assert isinstance(caught.value, ValueError)
