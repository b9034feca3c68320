"""Three notations of the same groups, and the mesh axes they are."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardax.errors import HloParseError
from shardax.proving.groups import DeviceGrid, groups_text, parse_groups, parse_pairs

MESH = {"dp": 2, "fsdp": 4, "tp": 3}
COUNT = math.prod(MESH.values())


def by_axes(mesh, axes):
    """The groups of devices that differ only along `axes`, from first principles."""
    groups = {}
    for device, place in enumerate(np.ndindex(*mesh.values())):
        key = tuple(p for p, name in zip(place, mesh, strict=True) if name not in axes)
        groups.setdefault(key, []).append(device)
    return tuple(tuple(group) for group in groups.values())


def as_list(groups):
    return "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in groups) + "}"


@pytest.mark.parametrize(
    ("text", "devices", "groups"),
    [
        ("{{0,1},{2,3}}", 4, ((0, 1), (2, 3))),
        ("{{0,3},{1,2}}", 4, ((0, 3), (1, 2))),
        ("{}", 4, ((0, 1, 2, 3),)),
        ("{{}}", 4, ((0, 1, 2, 3),)),
        (None, 2, ((0, 1),)),
        ("[2,2]<=[4]", 4, ((0, 1), (2, 3))),
        ("[4,2]<=[2,4]T(1,0)", 8, ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[2,4]<=[2,2,2]T(1,0,2)", 8, ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=2,'b'=4] {'b'}", 8, ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=2,'b'=4] {'a'}", 8, ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("@mesh[a=2,b=2] {'b'}", 4, ((0, 1), (2, 3))),
        ("mesh['a'=8] {'a':(1)4}", 8, ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['a'=8] {'a':(4)2}", 8, ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['a'=8] {'a':(2)2}", 8, ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", 4, ((0, 2), (1, 3))),
        ("mesh['a'=1,'b'=4,'c'=1] {'b'}", 4, ((0, 1, 2, 3),)),
    ],
)
def test_every_notation_expands(text, devices, groups):
    assert parse_groups(text, devices) == groups


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("{{0,1},{1,2}}", 4),  # a device twice
        ("{{0,1},{2,9}}", 4),  # one that is not there
        ("[2,4]<=[4]", 4),  # more than there are
        ("[2,2]<=[4]", 8),  # fewer than there are
        ("mesh['a'=2,'b'=4] {'c'}", 8),  # an axis that the mesh does not have
        ("mesh['a'=2,'b'=4] {'b'}", 16),
        ("mesh['a'=0] {'a'}", 8),
    ],
)
def test_groups_that_cannot_be_are_refused(text, devices):
    with pytest.raises(HloParseError):
        parse_groups(text, devices)


def test_an_unknown_notation_is_refused():
    with pytest.raises(HloParseError, match="not a notation of replica groups"):
        groups_text("channel_id=1, replica_groups=<0,1>, dimensions={0}")


def test_the_text_of_groups_is_cut_out_whole():
    line = "channel_id=1, replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}, dimensions={0}"
    assert groups_text(line) == "mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}"
    assert groups_text("replica_groups={{0,2},{1,3}}, use_global_device_ids=true") == "{{0,2},{1,3}}"
    assert groups_text("dimensions={0}") is None


SUBSETS = [c for n in (1, 2, 3) for c in itertools.combinations(MESH, n)]


@pytest.mark.parametrize("axes", SUBSETS, ids="-".join)
def test_whole_axes_are_named(axes):
    found = DeviceGrid.of(MESH).of_groups(by_axes(MESH, axes))
    assert (found.axes, found.subset) == (axes, "")
    assert found.size == math.prod(MESH[name] for name in axes)


@given(st.data())
def test_all_notations_agree_on_any_mesh(data):
    names = ["a", "b", "c"][: data.draw(st.integers(1, 3))]
    mesh = {name: data.draw(st.integers(1, 4)) for name in names}
    axes = data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1))
    order = [n for n in names if n in axes]
    count = math.prod(mesh.values())
    kept = [place for place, name in enumerate(names) if name not in axes]
    moved = [*kept, *(names.index(name) for name in order)]
    size = math.prod(mesh[name] for name in order)
    iota = f"[{count // size},{size}]<=[{','.join(map(str, mesh.values()))}]T({','.join(map(str, moved))})"
    named = f"mesh[{','.join(f'{n!r}={s}' for n, s in mesh.items())}] {{{','.join(map(repr, order))}}}"
    groups = by_axes(mesh, axes)
    assert parse_groups(iota, count) == parse_groups(named, count) == parse_groups(as_list(groups), count) == groups
    found = DeviceGrid.of(mesh).of_groups(groups)
    assert found.axes == tuple(name for name in order if mesh[name] > 1)
    assert found.subset == ""


def test_parts_of_an_axis_are_subsets():
    grid = DeviceGrid.of({"dp": 8})
    assert grid.of_groups(((0, 1), (2, 3), (4, 5), (6, 7))).subset == "2 of 8"
    assert grid.of_groups(((0, 1, 2, 3),)).subset == "4 of 8, 4 of 8 devices"
    assert grid.of_groups(((0, 1, 2), (3, 4), (5, 6, 7))).subset == "groups of unequal size"
    assert grid.of_groups(((0, 1, 2), (3, 4), (5, 6, 7))).size == 3


def test_pairs_move_along_the_axes_that_differ():
    grid = DeviceGrid.of({"dp": 2, "tp": 4})
    ring = "source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}"
    assert grid.of_pairs(parse_pairs(ring, 8)).axes == ("tp",)
    assert grid.of_pairs(parse_pairs("source_target_pairs={{0,4},{4,0}}", 8)).axes == ("dp",)
    assert grid.of_pairs(parse_pairs("source_target_pairs={{0,0},{1,1}}", 8)).axes == ()


@pytest.mark.parametrize("pairs", ["{{0,1},{0,2}}", "{{0,1},{2,1}}", "{{0,9}}"])
def test_pairs_that_cannot_be_are_refused(pairs):
    with pytest.raises(HloParseError, match="not pairs among 8 devices"):
        parse_pairs(f"source_target_pairs={pairs}", 8)


def test_a_slice_is_a_part_of_the_mesh():
    mesh, slice_of = {"dcn": 2, "tp": 4}, [0] * 4 + [1] * 4
    grid = DeviceGrid.of(mesh, slice_of, 1)
    assert grid.positions == (4, 5, 6, 7)
    assert grid.of_groups(((0, 1, 2, 3),)).axes == ("tp",)
    assert grid.of_groups(((0, 1, 2, 3),)).subset == ""
