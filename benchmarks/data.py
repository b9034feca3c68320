"""Sharding, placing, feeding, resuming: the four tables of the data room."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
import tracemalloc
from pathlib import Path

from benchmarks.timing import ROUNDS, Facts, Race, Result, race, simulate_devices

DEVICES = 8
BATCH, BYTES = 1024, 1024
STEP_SECONDS = 0.005


def run(quick: bool) -> list[Result]:
    simulate_devices(DEVICES)
    rounds = 7 if quick else ROUNDS
    with tempfile.TemporaryDirectory() as folder:
        return [
            *shard_data(rounds),
            global_batch(rounds),
            *throughput(Path(folder), rounds, 20_000 if quick else 200_000),
            *resume(Path(folder), rounds),
        ]


def shard_data(rounds: int) -> list[Race]:
    import numpy as np

    import shardax as sx

    sharder = sx.JaxProcessSharderModule()
    sharder.process_count = 4
    array, rows = np.zeros(10**7, np.float32), list(range(10**6))
    first = {"NumPy array of 10⁷": (array, 200), "list of 10⁶": (rows, 16)}
    races: list[Race] = []
    for name, (data, loops) in first.items():
        part = len(data) // 4
        contenders = {
            "slice": lambda data=data, part=part: data[0:part],
            "shardax shard_data": lambda data=data: sharder.shard_data(data),
        }
        theirs = _datarax()
        if theirs is not None:
            contenders["datarax shard_data"] = lambda data=data, theirs=theirs: theirs.shard_data(data)
        goal = "at most 3 µs over the slice, no copy of arrays"
        title = f"shard_data, {name}, 1 of 4 processes"
        races.append(race(title, contenders, rounds=rounds, loops=loops, goal=goal, clock="cpu"))
    return races


def _datarax() -> object | None:
    try:
        from datarax.sharding import JaxProcessSharderModule
    except ImportError:
        return None
    sharder = JaxProcessSharderModule()
    sharder.process_count.set_value(4)
    return sharder


def global_batch(rounds: int) -> Race:
    import jax
    import numpy as np

    from shardax.data.batches import BatchPlacer

    sharding = _sharding()
    local = np.random.default_rng(0).integers(0, 255, (BATCH, BYTES), np.uint8)
    placer = BatchPlacer(sharding)
    rows = placer.rows(BATCH)
    return race(
        f"one global batch from local rows ({BATCH} × {BYTES} B on {DEVICES} devices)",
        {
            "make_array_from_process_local_data": lambda: jax.block_until_ready(
                jax.make_array_from_process_local_data(sharding, local, local.shape)
            ),
            "shardax": lambda: jax.block_until_ready(placer.put(local, rows, BATCH, frozenset())),
        },
        rounds=rounds,
        loops=20,
        goal="at most 1.1×",
        clock="cpu",
    )


def _sharding() -> object:
    import jax
    import numpy as np

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))


def throughput(folder: Path, rounds: int, records: int) -> list[Result]:
    import jax
    import numpy as np

    import shardax as sx

    np.save(folder / "records.npy", np.random.default_rng(0).integers(0, 255, (records, BYTES), np.uint8))
    data = np.load(folder / "records.npy", mmap_mode="r")
    sharding = _sharding()
    order = itertools.cycle(
        np.random.default_rng(0).permutation(records)[: records // BATCH * BATCH].reshape(-1, BATCH)
    )

    def by_hand() -> None:
        jax.block_until_ready(jax.device_put(data[next(order)], sharding))

    direct = sx.Feed(data, sharding, BATCH, seed=0, prefetch=0, epochs=None)
    contenders = {
        "NumPy fancy index + device_put": by_hand,
        "Feed, no prefetch": lambda: jax.block_until_ready(next(direct)),
    }
    fast = race(
        f"one shuffled batch of {BATCH} records of 1 KB from a memmap of {records:,}",
        contenders,
        rounds=rounds,
        loops=16,
        goal="at least 0.9× of the floor's speed: a ratio of at most 1.11",
        clock="cpu",
    )
    return [fast, _grain(data, sharding, rounds), _hidden(data, sharding, 3 if rounds < ROUNDS else 15)]


def _grain(data: object, sharding: object, rounds: int) -> Race:
    import grain
    import jax

    import shardax as sx

    small = 64
    feed = sx.Feed(data, sharding, small, seed=0, prefetch=0, epochs=None)
    shuffled = iter(grain.MapDataset.source(data).shuffle(seed=0).repeat().batch(small))
    sampler = grain.samplers.IndexSampler(
        len(data), shuffle=True, seed=0, shard_options=grain.sharding.NoSharding(), num_epochs=None
    )
    operations = [grain.transforms.Batch(small, drop_remainder=True)]
    loader = iter(grain.DataLoader(data_source=data, sampler=sampler, operations=operations))
    return race(
        f"the same in batches of {small}, with Grain's own shuffle and batching",
        {
            "Feed, no prefetch": lambda: jax.block_until_ready(next(feed)),
            "Grain shuffled MapDataset": lambda: jax.block_until_ready(jax.device_put(next(shuffled), sharding)),
            "Grain DataLoader": lambda: jax.block_until_ready(jax.device_put(next(loader), sharding)),
        },
        rounds=rounds,
        per=small,
        unit="record",
    )


def _hidden(data: object, sharding: object, turns: int) -> Facts:
    """How much of the feed's own time disappears behind a step of 5 ms: what is left above taking ready batches."""
    import jax

    import shardax as sx

    def feed(prefetch: int) -> sx.Feed:
        return sx.Feed(data, sharding, BATCH, seed=0, prefetch=prefetch, epochs=None)

    with feed(0) as direct, feed(2) as ahead:
        batches = {
            "ready": itertools.cycle([next(direct) for _ in range(4)]),
            "direct": direct,
            "ahead": ahead,
        }
        waited: dict[str, list[float]] = {name: [] for name in batches}
        for name in list(batches) * turns:  # by turns, a run of steps each: the machine is not the same for long
            for step in range(12):
                time.sleep(STEP_SECONDS)
                start = time.perf_counter()
                jax.block_until_ready(next(batches[name]))
                if step > 1:
                    waited[name].append(time.perf_counter() - start)
    ready, alone, behind = (statistics.median(waited[name]) * 1e3 for name in ("ready", "direct", "ahead"))
    return Facts(
        "waiting for a batch after a step of 5 ms (medians)",
        ("batches that are ready", "no prefetch", "prefetch=2", "hidden"),
        ((f"{ready:.3f} ms", f"{alone:.3f} ms", f"{behind:.3f} ms", f"{1 - (behind - ready) / (alone - ready):.0%}"),),
        goal="at least 90 % of the feed's own time hidden: of what is above taking batches that are ready",
    )


def resume(folder: Path, rounds: int) -> list[Result]:
    import jax
    import numpy as np

    import shardax as sx

    data = np.memmap(folder / "sparse", np.uint8, "w+", shape=(10**9,))  # a hole of 1 GB: no disk, real page faults
    sharding = _sharding()

    def fresh() -> sx.Feed:
        return sx.Feed(data, sharding, BATCH, seed=0, prefetch=0, epochs=None)

    state = {**fresh().state(), "global_step": 10**6, "epoch": 10**6 // fresh().steps_per_epoch}

    def first(feed: sx.Feed) -> None:
        jax.block_until_ready(next(feed))

    def restored(feed: sx.Feed) -> None:
        feed.restore(state)
        jax.block_until_ready(next(feed))

    contenders = {"first batch of a new feed": first, "restore at step 10⁶, first batch": restored}
    timed = race(
        "restore at step 10⁶ of 10⁹ records, first batch included",
        contenders,
        rounds=rounds,
        prepare=dict.fromkeys(contenders, fresh),
        goal="at most 1.2×",
        clock="cpu",
    )
    tracemalloc.start()
    plan = sx.EpochPlan(10**9, BATCH, seed=0)
    next(plan.blocks(10**5, np.arange(BATCH)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    memory = Facts("memory of the index at 10⁹ records", ("peak",), ((f"{peak / 1e6:.2f} MB",),), goal="less than 1 MB")
    return [timed, memory]
