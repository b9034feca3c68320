"""Rows that each process must load: the table, every jax sharding as an oracle, and the errors."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from tests.data.meshes import BATCH, CASES, UNEVEN, UNEVEN_BATCH, UNEVEN_ROWS, stand_ins

from shardax.data.split import process_bounds, row_split, show_rows
from shardax.errors import BatchSizeError, SpecError, SplitError, UnknownAxisError


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_nine_meshes_on_paper(case):
    """The map from places to processes is enough: no device, not even a stand-in."""
    split = row_split((dict(case.shape), case.spec), (BATCH, 4), processes=case.owners())
    assert tuple(len(split.rows(process)) for process in range(4)) == case.rows
    assert split.follows_process_index(4) == case.naive


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_real_sharding_says_the_same(case):
    sharding = NamedSharding(case.mesh(jax.devices()), case.spec)
    ours = {cut.device: cut.index for cut in row_split(sharding, (BATCH, 4)).cuts}
    theirs = sharding.devices_indices_map((BATCH, 4))
    assert set(ours) == set(theirs)
    for device, index in ours.items():
        assert index == tuple(slice(*s.indices(n)[:2]) for s, n in zip(theirs[device], (BATCH, 4), strict=True))


def test_uneven_hosts():
    mesh = Mesh(np.array(stand_ins(UNEVEN)), ("data",))
    split = row_split((mesh, P("data")), (UNEVEN_BATCH, 3))
    assert tuple(len(split.rows(process)) for process in range(4)) == UNEVEN_ROWS


def test_what_the_naive_split_would_have_loaded():
    """Model parallel over hosts: half of the rows that process 0 needs would never reach it."""
    case = CASES["C model over hosts"]
    split = row_split((case.shape, case.spec), (BATCH,), processes=case.owners())
    naive = np.arange(*process_bounds(BATCH, 0, 4))
    assert sorted(set(split.rows(0).tolist()) - set(naive.tolist())) == [4, 5, 6, 7]
    assert split.shared == ((0, 1), (2, 3))


def test_several_separate_slices():
    case = CASES["B interleaved"]
    split = row_split((case.shape, case.spec), (BATCH,), processes=case.owners())
    assert [show_rows(split.rows(p)) for p in range(4)] == ["0–1, 8–9", "2–3, 10–11", "4–5, 12–13", "6–7, 14–15"]
    assert "0–1, 8–9" in str(split)


def test_sequence_is_reported_as_cut():
    case = CASES["F sequence over hosts"]
    assert row_split((case.shape, case.spec), (BATCH, 8), processes=case.owners()).cut_dims == (1,)
    assert row_split(("data=8", P("data")), (BATCH, 8), processes=[p // 2 for p in range(8)]).cut_dims == ()


AXES = ("a", "b", "c")


@given(
    sizes=st.permutations([2, 2, 2]) | st.permutations([4, 2, 1]) | st.permutations([2, 1, 3]),
    entries=st.permutations([*AXES, None]),
    cuts=st.integers(0, 3),
    order=st.randoms(use_true_random=False),
    per_process=st.sampled_from([1, 2, 3]),
)
def test_any_order_of_axes_and_devices_agrees_with_jax(sizes, entries, cuts, order, per_process):
    count = int(np.prod(sizes))
    devices = jax.devices()[:count]
    owners = {device: place // per_process for place, device in enumerate(devices)}
    order.shuffle(devices)
    mesh = Mesh(np.array(devices).reshape(sizes), AXES)
    batch_axes = tuple(entry for entry in entries[:cuts] if entry)
    rest = [entry for entry in entries[cuts:] if entry]
    spec = P(batch_axes or None, rest[0] if rest else None)
    sharding = NamedSharding(mesh, spec)
    shape = (24, 12)
    split = row_split(sharding, shape, owners)
    for device, theirs in sharding.devices_indices_map(shape).items():
        mine = next(cut.index for cut in split.cuts if cut.device is device)
        assert mine == tuple(slice(*s.indices(n)[:2]) for s, n in zip(theirs, shape, strict=True))
        rows = set(range(*theirs[0].indices(24)))
        assert rows <= set(split.rows(owners[device]).tolist())
    loaded = set(itertools.chain.from_iterable(split.rows(p).tolist() for p in split.processes))
    assert loaded == set(range(24))


def test_other_kinds_of_sharding_and_real_devices():
    device = jax.devices()[3]
    split = row_split(SingleDeviceSharding(device), (4, 2))
    assert split.rows(0).tolist() == [0, 1, 2, 3] and split.shards == 1
    named = NamedSharding(Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b")), P("b"))
    assert row_split(named, (8, 2)).rows(0).tolist() == list(range(8))


def test_owners_in_any_form():
    by_place = row_split(("d=4", P("d")), (8,), processes=[1, 1, 0, 0])
    by_name = row_split(("d=4", P("d")), (8,), processes={0: 1, 1: 1, 2: 0, 3: 0})
    by_rule = row_split(("d=4", P("d")), (8,), processes=lambda place: int(place < 2))
    assert by_place.rows(1).tolist() == by_name.rows(1).tolist() == by_rule.rows(1).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: row_split(("d=4", P("d")), (8,)), SplitError, "a mesh without devices does not say"),
        (lambda: row_split(("d=4", P("d")), (8,), [0, 1]), SplitError, "2 owners for 4 devices"),
        (lambda: row_split(("dp=2,fsdp=4", P(("dp", "fsdp"))), (30, 2), [0] * 8), BatchSizeError, r"30 does not divide over 8 shards \(dp=2 × fsdp=4\)[\s\S]*24 or 32"),
        (lambda: row_split(("d=4", P("d")), (-8,), [0] * 4), BatchSizeError, "no negative size"),
        (lambda: row_split(("d=4", P("d")), (), [0] * 4), BatchSizeError, "rows first"),
        (lambda: row_split(("d=4", P("e")), (8,), [0] * 4), UnknownAxisError, "'e'"),
        (lambda: row_split(("d=4", P(None, "d")), (8, 6), [0] * 4), SpecError, "6 does not divide by 'd'"),
    ],
)  # fmt: skip
def test_bad_splits(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_process_bounds_cover_everything_or_drop_equally():
    for total, count in itertools.product(range(23), range(1, 7)):
        kept = [process_bounds(total, i, count, drop_remainder=False) for i in range(count)]
        assert kept[0][0] == 0 and kept[-1][1] == total
        assert all(a[1] == b[0] for a, b in itertools.pairwise(kept))
        assert max(b - a for a, b in kept) - min(b - a for a, b in kept) <= 1
        assert {b - a for a, b in (process_bounds(total, i, count) for i in range(count))} == {total // count}
