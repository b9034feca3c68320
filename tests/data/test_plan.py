"""The epoch plan: what each policy does with a remainder, elasticity as a property, states and their errors."""

import json
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardax.data.plan import POLICIES, EpochPlan
from shardax.data.planned import PlannedSource
from shardax.data.reading import START, or_first
from shardax.data.sources import ColumnSource
from shardax.data.split import row_split
from shardax.errors import BatchSizeError, FeedError, FeedStateError


@pytest.mark.parametrize(
    "policy, batches, valid",
    [
        ("drop", [[0, 1, 2, 3], [4, 5, 6, 7]], 8),
        ("pad", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]], 10),
        ("wrap", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]], 12),
        ("keep", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]], 10),
    ],
)
def test_what_happens_to_the_remainder(policy, batches, valid):
    plan = EpochPlan(10, 4, policy, shuffle=False)
    assert plan.steps_per_epoch == len(batches)
    for epoch in range(2):
        steps = [plan.records_at(epoch * len(batches) + step) for step in range(len(batches))]
        assert [records.tolist() for records, _ in steps] == batches
        assert sum(int(mask.sum()) for _, mask in steps) == valid


@pytest.mark.parametrize("policy", ["pad", "wrap", "keep"])
def test_fewer_records_than_one_batch(policy):
    records, valid = EpochPlan(3, 8, policy, shuffle=False).records_at(0)
    assert records.tolist() == ([0, 1, 2] if policy == "keep" else [0, 1, 2, 0, 1, 2, 0, 1])
    assert int(valid.sum()) == (8 if policy == "wrap" else 3)


@given(n=st.integers(1, 500), batch=st.integers(1, 64), policy=st.sampled_from(POLICIES), seed=st.integers(0, 9), epoch=st.integers(0, 3))  # fmt: skip
def test_an_epoch_sees_every_record(n, batch, policy, seed, epoch):
    if policy == "drop" and n < batch:
        return
    plan = EpochPlan(n, batch, policy, seed)
    first = epoch * plan.steps_per_epoch
    parts = [plan.records_at(first + step) for step in range(plan.steps_per_epoch)]
    seen = np.concatenate([records[valid] for records, valid in parts])
    assert all(len(records) == batch for records, _ in parts[:-1])
    if policy in ("pad", "keep"):
        assert np.array_equal(np.sort(seen), np.arange(n))
    elif policy == "drop":
        assert len(set(seen.tolist())) == len(seen) == n // batch * batch
    else:
        assert set(seen.tolist()) == set(range(n))


MESHES = [
    ("d=1", [0]),
    ("d=2", [0, 1]),
    ("d=4", [0, 0, 1, 1]),
    ("d=2,t=4", [0, 0, 1, 1, 2, 2, 3, 3]),
    ("t=2,d=4", [0, 1, 2, 3, 3, 2, 1, 0]),
    ("d=8", [7, 6, 5, 4, 3, 2, 1, 0]),
    ("d=4,t=2", [0, 1, 2, 3, 4, 5, 6, 7]),
]


@given(
    n=st.integers(8, 300),
    groups=st.integers(1, 8),
    policy=st.sampled_from(["drop", "pad", "wrap"]),
    seed=st.integers(0, 5),
    legs=st.lists(st.tuples(st.sampled_from(MESHES), st.integers(1, 9)), min_size=1, max_size=5),
)
def test_elastic_every_mesh_at_every_resume_point_sees_the_same_rows(n, groups, policy, seed, legs):
    """Processes come and go at any step: what they load together is the one-process stream, row for row."""
    from jax.sharding import PartitionSpec as P

    batch = 8 * groups
    if policy == "drop" and n < batch:
        return
    alone = EpochPlan(n, batch, policy, seed)
    state = json.loads(json.dumps(alone.state(0)))
    for (mesh, owners), steps in legs:
        plan = EpochPlan(n, batch, policy, seed)
        first = plan.step_of(state)
        split = row_split((mesh, P("d")), (batch,), owners)
        per_process = {p: plan.blocks(first, split.rows(p)) for p in split.processes}
        for step in range(first, first + steps):
            expected, counts = alone.records_at(step)
            for process, stream in per_process.items():
                at, records, valid = next(stream)
                rows = split.rows(process)
                assert at == step
                assert np.array_equal(records, expected[rows]) and np.array_equal(valid, counts[rows])
        state = json.loads(json.dumps(plan.state(first + steps)))


@given(
    n=st.integers(1, 120),
    groups=st.integers(1, 4),
    policy=st.sampled_from(POLICIES),
    seed=st.integers(0, 5),
    legs=st.lists(st.tuples(st.sampled_from(MESHES), st.integers(1, 9)), min_size=1, max_size=4),
)
def test_elastic_reading_under_every_policy_equals_one_process(n, groups, policy, seed, legs):
    """The same through the reading itself, tails included: every process opens the source at the state and goes on."""
    from jax.sharding import PartitionSpec as P

    batch = 8 * groups
    if policy == "drop" and n < batch:
        return
    alone, step = EpochPlan(n, batch, policy, seed), 0
    for (mesh, owners), steps in legs:
        for process in set(owners):

            def rows_of(size, mesh=mesh, owners=owners, process=process):
                ways = row_split(
                    (mesh, P("d")), (64,), owners
                ).shards  # a tail that does not divide is whole everywhere
                return row_split((mesh, P("d")), (size,), owners).rows(process) if size % ways == 0 else np.arange(size)

            plan = EpochPlan(n, batch, policy, seed)
            reader = PlannedSource(ColumnSource({"x": np.arange(n) * 10}), plan, None, rows_of)
            position = reader.restore(json.loads(json.dumps(alone.state(step))), START)
            for at, local in zip(range(step, step + steps), reader.batches(position, None), strict=False):
                records, valid = alone.records_at(at)
                assert local.held.tolist() == rows_of(len(records)).tolist()
                rows = or_first(local.held)
                assert local.columns["x"].tolist() == (records[rows] * 10).tolist()
                assert local.about.valid.tolist() == valid[rows].tolist() and local.after.step == at + 1
        step += steps


def test_a_state_has_no_topology_and_is_json():
    state = json.loads(json.dumps(EpochPlan(1000, 32, "pad", 7).state(70)))
    assert {k: state[k] for k in ("seed", "epoch", "global_step", "policy", "records")} == {
        "seed": 7, "epoch": 2, "global_step": 70, "policy": "pad", "records": 1000,
    }  # fmt: skip
    assert not [key for key in state if any(word in key for word in ("process", "device", "host", "mesh", "rank"))]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"records": 999}, r"records: the state has 999, this feed 1000"),
        ({"policy": "drop"}, "policy: the state has 'drop', this feed 'pad'"),
        ({"seed": 8}, "seed: the state has 8, this feed 7"),
        ({"global_batch": 64}, "global_batch: the state has 64, this feed 32"),
        ({"shuffle": False}, "shuffle"),
        ({"global_step": -1}, "-1 is not a step"),
        ({"global_step": "3"}, "'3' is not a step"),
        ({"epoch": 5}, "step 70 lies in epoch 2 here, the state says 5"),
        ({"seed": None, "records": 1}, "seed[\\s\\S]*records"),
    ],
)
def test_a_state_of_another_stream_is_refused(change, message):
    plan = EpochPlan(1000, 32, "pad", 7)
    with pytest.raises(FeedStateError, match=message):
        plan.step_of({**plan.state(70), **change})


def test_a_state_without_its_keys_is_refused_and_the_short_form_is_taken():
    plan = EpochPlan(1000, 32, "pad", 7)
    with pytest.raises(FeedStateError, match="global_step: is missing"):
        plan.step_of({"seed": 7, "epoch": 0, "policy": "pad", "records": 1000})
    with pytest.raises(FeedStateError, match="a mapping, not a int"):
        plan.step_of(3)
    assert plan.step_of({"seed": 7, "epoch": 2, "global_step": 70, "policy": "pad", "records": 1000}) == 70


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ((0, 4), BatchSizeError, "records: 0 is not a positive"),
        ((-3, -4), BatchSizeError, r"records: -3[\s\S]*global_batch: -4"),
        ((10, 4.0), BatchSizeError, "4.0"),
        ((10, True), BatchSizeError, "True"),
        ((10, 4, "dorp"), FeedError, "unknown policy 'dorp'; did you mean 'drop'"),
        ((10, 4, "drop", "x"), FeedError, "seed 'x'"),
        ((3, 4), BatchSizeError, "3 records are fewer than one batch of 4"),
    ],
)
def test_plans_that_cannot_be(arguments, error, message):
    with pytest.raises(error, match=message):
        EpochPlan(*arguments)


def test_seek_at_a_billion_records_costs_what_step_0_costs():
    plan = EpochPlan(10**9, 1024, "drop", 3)
    rows = np.arange(256)

    def best(step):
        times = []
        for _ in range(15):
            start = time.perf_counter()
            next(plan.blocks(step, rows))
            times.append(time.perf_counter() - start)
        return min(times)

    assert best(10**6) < 5 * best(0) + 1e-3


def test_blocks_stop_before_a_kept_tail_and_cross_epochs_otherwise():
    assert [step for step, _, _ in EpochPlan(10, 4, "keep").blocks(0, np.arange(2))] == [0, 1]
    stream = EpochPlan(10, 4, "pad", 1).blocks(0, np.arange(4))
    got = [next(stream) for _ in range(9)]
    assert [step for step, _, _ in got] == list(range(9))
    with pytest.raises(ValueError, match="not of one epoch"):
        EpochPlan(10, 4).records_of_steps(1, 2, np.arange(4))
    with pytest.raises(ValueError, match="kept last batch"):
        EpochPlan(10, 4, "keep").records_of_steps(2, 1, np.arange(4))
