"""The feed and the sharder in real processes: gloo on CPU, several simulated devices each."""

import itertools
import json

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tests.data.meshes import BATCH, CASES, UNEVEN, UNEVEN_BATCH, UNEVEN_ROWS

import shardax as sx
from shardax.data.plan import EpochPlan
from shardax.data.split import process_bounds
from shardax.testing import run_processes, start_processes

RECORDS = np.arange(67)[:, None] * 100 + np.arange(8)
"""67 is no multiple of anything here; a row says its record and its columns."""


def in_order():
    """Every device of the job by process: their ids have gaps."""
    return sorted(jax.devices(), key=lambda device: (device.process_index, device.id))


def devices_hold(batch, whole):
    """What each device of this process holds is its part of the whole batch."""
    return [bool(np.array_equal(shard.data, whole[shard.index])) for shard in batch.addressable_shards]


def naive_batch(sharding, whole, shape=None):
    """What "process p of P takes the p-th part" makes of a batch."""
    mine = whole[slice(*process_bounds(len(whole), jax.process_index(), jax.process_count()))]
    return jax.make_array_from_process_local_data(sharding, mine, shape)


# ---- 4 processes × 2 devices: the nine meshes -----------------------------------------------------------------------


@pytest.mark.processes(4, devices=2)
@pytest.mark.parametrize("name", CASES)
def test_every_device_holds_its_rows(name):
    case = CASES[name]
    sharding = NamedSharding(case.mesh(in_order()), case.spec)
    plan = EpochPlan(len(RECORDS), BATCH, "pad", seed=5)
    with sx.Feed({"x": RECORDS}, sharding, BATCH, seed=5, policy="pad", debug=True) as feed:
        assert len(feed.rows) == case.rows[jax.process_index()]
        for step, batch in enumerate(feed):
            records, valid = plan.records_at(step)
            assert batch["x"].shape == (BATCH, 8)
            assert all(devices_hold(batch["x"], RECORDS[records])) and all(devices_hold(batch["mask"], valid))
    assert step == plan.steps_per_epoch - 1


@pytest.mark.processes(4, devices=2)
@pytest.mark.parametrize("name", CASES)
def test_the_naive_split_is_right_only_where_we_say_so(name):
    """Silent: wrong rows or a wrong shape. Loud: StopIteration where a host has no device of the batch."""
    case = CASES[name]
    sharding = NamedSharding(case.mesh(in_order()), case.spec)
    whole = RECORDS[:BATCH]
    if name.startswith("G"):
        return  # StopIteration inside JAX on the hosts without devices: nothing to compare
    naive = naive_batch(sharding, whole)
    right = naive.shape == whole.shape and all(devices_hold(naive, whole))
    everywhere = [json.loads(word) for word in said_by_all(f"naive {name}", json.dumps(right))]
    assert all(everywhere) == case.naive


def said_by_all(tag, word):
    from shardax.cluster.kv import job_store

    store = job_store()
    store.put(f"test/{tag}/{store.rank}", word)
    return [store.wait(f"test/{tag}/{rank}", 60) for rank in range(store.size)]


@pytest.mark.processes(4, devices=2)
def test_training_with_tensor_parallelism_over_hosts_equals_one_process():
    """Six steps of a regression; the naive split, without any error, trains another model on every pair of hosts."""
    mesh = Mesh(np.array(in_order()).reshape(2, 4), ("data", "model"))
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(40, 8)).astype(np.float32), "y": rng.normal(size=(40, 1)).astype(np.float32)}
    plan = EpochPlan(40, 8, seed=2)
    rate = 0.05

    def step(w, batch):
        def error(w):
            return ((batch["x"] @ w - batch["y"]) ** 2).mean()

        return w - rate * jax.grad(error)(w)

    alone = np.zeros((8, 1), np.float32)
    for at in range(6):
        records = plan.records_at(at)[0]
        x, y = data["x"][records], data["y"][records]
        alone = alone - rate * 2 * x.T @ (x @ alone - y) / 8

    w = jax.device_put(np.zeros((8, 1), np.float32), NamedSharding(mesh, P("model")))
    update = jax.jit(step, out_shardings=w.sharding)
    with sx.Feed(data, NamedSharding(mesh, P("data")), 8, seed=2, epochs=None) as feed:
        for batch in itertools.islice(feed, 6):
            w = update(w, batch)
    ours = multihost_utils.process_allgather(w, tiled=True)
    assert np.abs(ours - alone).max() < 1e-6

    w = jax.device_put(np.zeros((8, 1), np.float32), NamedSharding(mesh, P("model")))
    for at in range(6):
        records = plan.records_at(at)[0]
        w = update(w, {key: naive_batch(NamedSharding(mesh, P("data")), value[records]) for key, value in data.items()})
    naive = multihost_utils.process_allgather(w, tiled=True)
    assert np.abs(naive - alone).max() > 1e-3


@pytest.mark.processes(4, devices=2)
def test_text_ragged_columns_and_transforms_on_every_process():
    mesh = Mesh(np.array(in_order()).reshape(2, 4), ("data", "model"))
    source = {
        "x": np.arange(32),
        "name": [f"n{i}" for i in range(32)],
        "tokens": [np.arange(i % 5) for i in range(32)],
    }
    seen = []

    def transform(columns, about):
        seen.append(about.rows.tolist())
        return {**columns, "wide": np.repeat(columns["x"][:, None], 4, 1)}

    with sx.Feed(
        source, NamedSharding(mesh, P("data", "model")), 8, seed=0, shuffle=False, transform=transform
    ) as feed:
        batch = next(feed)
        mine = feed.rows.tolist()
    assert seen[0] == mine == ([0, 1, 2, 3] if jax.process_index() < 2 else [4, 5, 6, 7])
    assert batch["name"].tolist() == [f"n{i}" for i in mine]
    assert [len(t) for t in batch["tokens"]] == [i % 5 for i in mine]
    assert batch["wide"].shape == (8, 4) and all(devices_hold(batch["wide"], np.repeat(np.arange(8)[:, None], 4, 1)))


@pytest.mark.processes(4, devices=2)
def test_debug_names_the_processes_whose_replicas_differ():
    mesh = Mesh(np.array(in_order()).reshape(2, 4), ("data", "model"))
    odd = jax.process_index() == 3

    def transform(columns):
        return {"x": columns["x"] + np.float32(odd), "y": columns["y"]}

    source = {"x": np.arange(32, dtype=np.float32), "y": np.arange(32)}
    sharding = NamedSharding(mesh, P("data"))
    with (
        sx.Feed(source, sharding, 8, seed=0, shuffle=False, transform=transform, debug=True) as feed,
        pytest.raises(sx.ReplicaError) as error,
    ):
        next(feed)
    assert str(error.value).splitlines()[1] == "  x: rows 4–7 differ: process [2] vs process [3]"
    with sx.Feed(source, sharding, 8, seed=0, debug=True) as feed:
        assert len(list(feed)) == 4


@pytest.mark.processes(4, devices=2)
def test_an_iterator_that_ends_early_on_one_process_is_named_on_all():
    mesh = Mesh(np.array(in_order()), ("data",))
    count = 20 if jax.process_index() == 2 else 40
    got = 0
    feed = sx.Feed(iter(range(count)), NamedSharding(mesh, P("data")), 8, seed=0)
    with pytest.raises(
        sx.SourceEndedError, match=r"step 2[\s\S]*process 1: got 8 records of 8[\s\S]*process 2: got 4 records of 8"
    ):
        for batch in feed:
            got += batch.shape[0]
    assert got == 16


@pytest.mark.processes(4, devices=2)
def test_a_source_that_raises_on_one_process_raises_there():
    mesh = Mesh(np.array(in_order()), ("data",))
    broken = jax.process_index() == 1

    class Source:
        def __len__(self):
            return 32

        def __getitem__(self, at):
            if broken and at >= 8:
                raise OSError("disk gone")
            return at

    with sx.Feed(Source(), NamedSharding(mesh, P("data")), 8, seed=0, shuffle=False) as feed:
        assert all(devices_hold(next(feed), np.arange(8)))
        if broken:
            with pytest.raises(OSError, match="disk gone"):
                next(feed)
            broken = False
        assert all(devices_hold(next(feed), np.arange(8, 16)))  # the feed is usable: the same step again


@pytest.mark.processes(4, devices=2)
@pytest.mark.parametrize(
    "option, usual, other, says",
    [
        ("seed", 0, 1, "rank 2, seed: 1, but 0 on ranks 0, 1, 3"),
        ("global_batch", 8, 16, "rank 2, global_batch: 16, but 8 on ranks 0, 1, 3"),
        ("policy", "drop", "wrap", "rank 2, policy: wrap, but drop on ranks 0, 1, 3"),
        ("source", np.arange(64), np.arange(65), "rank 2, records: 65, but 64 on ranks 0, 1, 3"),
        ("state", None, {"global_step": 3}, "rank 2, global_step: 3, but 0 on ranks 0, 1, 3"),
    ],
)
def test_a_process_with_another_stream_is_named_before_the_first_batch(option, usual, other, says):
    """Without a word each would load other rows, and the batch would be a mixture of two."""
    mesh = Mesh(np.array(in_order()), ("data",))
    options = {"source": np.arange(64), "global_batch": 8, "seed": 0, "policy": "drop", "state": None}
    options[option] = other if jax.process_index() == 2 else usual
    source, batch, state = options.pop("source"), options.pop("global_batch"), options.pop("state")
    with sx.Feed(source, NamedSharding(mesh, P("data")), batch, **options) as feed:
        if state is not None:
            feed.restore({**feed.state(), **state})
        with pytest.raises(sx.DisagreementError, match=f"disagree on 'feed': rank 2\n  {says}") as error:
            next(feed)
    assert error.value.ranks == (2,)


@pytest.mark.processes(4, devices=2)
def test_feeds_of_some_processes_do_not_ask_the_others():
    """One process feeds its own devices with what is its own; two share a mesh; the job's feed counts for itself."""
    rank = jax.process_index()
    own = NamedSharding(Mesh(np.array(jax.local_devices()), ("data",)), P("data"))
    half = [device for device in in_order() if device.process_index // 2 == rank // 2]
    shared = NamedSharding(Mesh(np.array(half).reshape(2, 2).T, ("data", "model")), P("data"))
    whole = NamedSharding(Mesh(np.array(in_order()), ("data",)), P("data"))
    if rank == 1:
        with sx.Feed(iter(range(6)), own, 2, seed=rank, debug=True) as feed:
            assert [batch.tolist() for batch in feed] == [[0, 1], [2, 3], [4, 5]]
    if rank > 1:
        batch = sx.JaxProcessSharderModule().shard(np.arange(4), shared)
        assert all(devices_hold(batch, np.arange(4)))
        with sx.Feed(iter(range(8)), shared, 4, seed=7, debug=True) as feed:
            assert [all(devices_hold(batch, np.arange(4) + 4 * at)) for at, batch in enumerate(feed)] == [True, True]
    with sx.Feed(iter(range(16)), whole, 8, seed=0, debug=True) as feed:
        assert [all(devices_hold(batch, np.arange(8) + 8 * at)) for at, batch in enumerate(feed)] == [True, True]


@pytest.mark.processes(4, devices=2)
def test_shard_takes_the_rows_that_each_process_holds():
    mesh = Mesh(np.array(in_order()), ("data",))
    sharder = sx.JaxProcessSharderModule()
    whole = np.arange(16 * 2).reshape(16, 2)
    mine = sharder.shard_data({"x": whole, "name": list("abcdefghijklmnop")})
    out = sharder.shard({**mine, "step": 3}, NamedSharding(mesh, P("data")))
    assert out["x"].shape == (16, 2) and all(devices_hold(out["x"], whole))
    assert out["name"] == list("abcdefghijklmnop")[4 * jax.process_index() :][:4] and int(out["step"]) == 3
    moved = sharder.shard(out["x"], NamedSharding(mesh, P(None, None)))
    assert all(devices_hold(moved, whole))
    doubled = sharder.parallel_transform(mine["x"], lambda x: x * 2, mesh, P("data"))
    assert all(devices_hold(doubled, whole * 2))


@pytest.mark.processes(4, devices=2)
def test_shard_refuses_replicas_that_differ():
    """The split by process index on a mesh with tensor parallelism over hosts: JAX takes it without a word."""
    mesh = Mesh(np.array(in_order()).reshape(2, 4), ("data", "model"))
    sharder = sx.JaxProcessSharderModule()
    with pytest.raises(sx.ReplicaError, match=r"x: rows 0–3 differ: process \[0\] vs process \[1\]"):
        sharder.shard({"x": sharder.shard_data(np.arange(16))}, NamedSharding(mesh, P("data")))
    group = jax.process_index() // 2
    right = sharder.shard({"x": np.arange(16)[8 * group :][:8]}, NamedSharding(mesh, P("data")))
    assert all(devices_hold(right["x"], np.arange(16)))


@pytest.mark.processes(4, devices=2)
def test_shard_must_be_told_about_other_dimensions_that_are_cut():
    mesh = Mesh(np.array(in_order()).reshape(2, 4), ("data", "seq"))
    sharding = NamedSharding(mesh, P("data", "seq"))
    whole = np.arange(4 * 8).reshape(4, 8)
    rows = whole[2 * (jax.process_index() // 2) :][:2]
    sharder = sx.JaxProcessSharderModule()
    with pytest.raises(sx.SplitError, match=r"x: dims \(1,\) are cut over processes[\s\S]*whole_rows=True"):
        sharder.shard({"x": rows}, sharding)
    assert all(devices_hold(sharder.shard(rows, sharding, whole_rows=True), whole))
    block = rows[:, 4 * (jax.process_index() % 2) :][:, :4]
    assert all(devices_hold(sharder.shard(block, sharding, whole_rows=False), whole))


# ---- uneven hosts ---------------------------------------------------------------------------------------------------


@pytest.mark.processes(4, devices=UNEVEN)
def test_uneven_hosts():
    sharding = NamedSharding(Mesh(np.array(in_order()), ("data",)), P("data"))
    plan = EpochPlan(len(RECORDS), UNEVEN_BATCH, "wrap", seed=1)
    with sx.Feed(RECORDS, sharding, UNEVEN_BATCH, seed=1, policy="wrap", debug=True) as feed:
        assert len(feed.rows) == UNEVEN_ROWS[jax.process_index()]
        for step, batch in enumerate(feed):
            assert all(devices_hold(batch, RECORDS[plan.records_at(step)[0]]))


# ---- two processes: the original's failure --------------------------------------------------------------------------


def shard_and_save():
    sharder = sx.JaxProcessSharderModule()
    return sharder.shard_data(list(range(8))), sharder.get_state()


def restore_and_shard(state):
    sharder = sx.JaxProcessSharderModule()
    sharder.set_state(json.loads(json.dumps(state)))
    return sharder.shard_data(list(range(8)))


def test_a_restored_sharder_reads_its_own_half(process_pool):
    """The original saves the topology: after this both processes read the first half, and the second is never read."""
    saved = process_pool.run(shard_and_save, processes=2, devices=1)
    assert [rows for rows, _ in saved] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    restored = process_pool.run(restore_and_shard, saved[0][1], processes=2, devices=1)
    assert restored == [[0, 1, 2, 3], [4, 5, 6, 7]]


# ---- elastic: 4 → 2 → 8 processes -------------------------------------------------------------------------------------

LEGS = [(4, {"data": 8}, 3), (2, {"data": 2, "model": 2}, 4), (8, {"model": 2, "data": 4}, 6)]
"""Processes, mesh, steps: flat, tensor parallel, and tensor parallel over hosts with the model axis major."""


def run_leg(policies, state, shape, steps):
    """A few steps from a state under every policy: what each process loaded, by row, and the states after."""
    mesh = Mesh(np.array(in_order()).reshape(tuple(shape.values())), tuple(shape))
    sharding = NamedSharding(mesh, P("data"))
    loaded, states = {}, {}
    for policy in policies:
        feed = sx.Feed({"x": np.arange(67)}, sharding, 8, seed=11, policy=policy, epochs=None)
        if state is not None:
            feed.restore(state[policy])
        with feed:
            for batch in itertools.islice(feed, steps):
                x = batch["x"]
                rows = {}
                for shard in x.addressable_shards:
                    rows |= dict(
                        zip(range(*shard.index[0].indices(len(x))), np.asarray(shard.data).tolist(), strict=True)
                    )
                loaded.setdefault(policy, []).append((len(x), rows))
        states[policy] = json.dumps(feed.state())
    return loaded, states


def test_elastic_resume_is_the_one_process_stream_row_for_row(process_pool):
    policies = ["drop", "pad", "wrap", "keep"]
    stream = {policy: [] for policy in policies}
    state = None
    for processes, shape, steps in LEGS:
        devices = int(np.prod(list(shape.values()))) // processes
        results = process_pool.run(
            run_leg, policies, state, shape, steps, processes=processes, devices=devices, timeout=200
        )
        assert len({json.dumps(states, sort_keys=True) for _, states in results}) == 1
        state = {policy: json.loads(text) for policy, text in results[0][1].items()}
        for policy, at in itertools.product(policies, range(steps)):
            rows = {}
            for loaded, _ in results:
                size, mine = loaded[policy][at]
                assert all(rows.get(row, value) == value for row, value in mine.items())  # replicas agree
                rows |= mine
            assert sorted(rows) == list(range(size))
            stream[policy].append([rows[row] for row in range(size)])
    for policy in policies:
        plan = EpochPlan(67, 8, policy, seed=11)
        assert stream[policy] == [plan.records_at(step)[0].tolist() for step in range(13)], policy
        epoch = list(itertools.chain(*stream[policy][: plan.steps_per_epoch]))
        if policy == "keep":
            assert sorted(epoch) == list(range(67))


# ---- kill -9 in the middle of an epoch --------------------------------------------------------------------------------


def train_and_log():
    """Logs the rows it holds at every step and, on rank 0, saves the feed's state at every third."""
    import json
    import os
    import time
    from pathlib import Path

    import jax
    import numpy as np

    import shardax as sx

    rank = sx.initialize(initialization_timeout=90).rank
    folder = Path(os.environ["FEED_LOG"])
    devices = np.array(sorted(jax.devices(), key=lambda d: (d.process_index, d.id)))
    mesh = jax.sharding.Mesh(devices.reshape(2, -1), ("data", "model"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    feed = sx.Feed(np.arange(101), sharding, 4, seed=9, policy="pad", epochs=2)
    total = jax.jit(lambda x: x.sum(), out_shardings=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    if os.environ["FEED_STATE"]:
        feed.restore(json.loads(os.environ["FEED_STATE"]))
    with sx.guard() as guard, open(folder / f"{os.environ['FEED_RUN']}-{rank}.log", "w", buffering=1) as log:
        for x, _ in feed:
            held = {int(s.index[0].start): np.asarray(s.data).tolist() for s in x.addressable_shards}
            guard.step(feed.global_step)
            log.write(json.dumps([feed.global_step - 1, held]) + "\n")
            float(total(x))  # a collective: nobody runs ahead, as in training
            if rank == 0 and feed.global_step % 3 == 0:
                (folder / "next.json").write_text(json.dumps(feed.state()))
                (folder / "next.json").rename(folder / "state.json")
            print(f"step {feed.global_step - 1}", flush=True)
            if os.environ["FEED_RUN"] == "first":
                time.sleep(0.05)


def logged(folder, run):
    """Step → the whole global batch, put together from every rank's log."""
    steps = {}
    for path in sorted(folder.glob(f"{run}-*.log")):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # a killed process may have left half a line
                step, held = json.loads(line)
                steps.setdefault(step, {}).update({int(start): rows for start, rows in held.items()})
    return {step: list(itertools.chain(*(held[start] for start in sorted(held)))) for step, held in steps.items()}


def test_kill_9_in_the_middle_of_an_epoch_and_the_stream_goes_on(tmp_path):
    log = {"FEED_LOG": str(tmp_path)}
    with start_processes(train_and_log, 4, devices=2, env={**log, "FEED_RUN": "first", "FEED_STATE": ""}) as running:
        running.wait_for("step 10", timeout=120)
        running.kill(2)
        ended = running.finish(timeout=60)
    assert [process.returncode for process in ended] == [70, 70, -9, 70], ended
    assert all("rank 2 of 4" in process.stderr for process in ended if process.rank != 2), ended
    text = (tmp_path / "state.json").read_text()
    state = json.loads(text)
    assert 9 <= state["global_step"] < 52
    again = run_processes(
        train_and_log, 2, devices=2, timeout=120, env={**log, "FEED_RUN": "second", "FEED_STATE": text}
    )
    assert [process.returncode for process in again] == [0, 0], again
    plan = EpochPlan(101, 4, "pad", seed=9)
    expected = {step: plan.records_at(step)[0].tolist() for step in range(2 * plan.steps_per_epoch)}
    first, second = logged(tmp_path, "first"), logged(tmp_path, "second")
    assert second == {step: expected[step] for step in range(state["global_step"], 52)}
    assert {step: first[step] for step in range(state["global_step"])} == {
        step: expected[step] for step in range(state["global_step"])
    }
    for epoch in range(2):
        steps = range(26 * epoch, 26 * epoch + 26)
        seen = [(first | second)[step][row] for step in steps for row in range(4) if plan.records_at(step)[1][row]]
        assert sorted(seen) == list(range(101))
