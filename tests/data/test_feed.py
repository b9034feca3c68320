"""The feed in one process on eight devices: sources, policies, states, transforms, threads and every error."""

import collections
import gc
import itertools
import json
import signal
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tests.data.meshes import BATCH, CASES

import shardax as sx
from shardax.data.plan import POLICIES, EpochPlan


def rows_sharding(**axes):
    axes = axes or {"data": 8}
    return NamedSharding(Mesh(np.array(jax.devices()).reshape(tuple(axes.values())), tuple(axes)), P(next(iter(axes))))


def feed_of(source, batch=8, sharding=None, **options):
    return sx.Feed(source, sharding or rows_sharding(), batch, **{"seed": 0, "prefetch": 0, **options})


def numbers(n):
    return {"x": np.arange(n) * 10, "y": np.arange(n, dtype=np.float32)[:, None] * [1, 2]}


# ---- what it yields ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_batches_follow_the_plan(policy, prefetch):
    plan = EpochPlan(29, 8, policy, seed=3)
    with feed_of(numbers(29), policy=policy, seed=3, prefetch=prefetch) as feed:
        batches = list(feed)
    assert len(batches) == plan.steps_per_epoch == feed.steps_per_epoch == len(feed)
    for step, batch in enumerate(batches):
        records, valid = plan.records_at(step)
        assert np.array_equal(batch["x"], records * 10) and np.array_equal(batch["y"][:, 1], records * 2)
        assert isinstance(batch["x"], jax.Array) and batch["y"].dtype == np.float32
        assert ("mask" in batch) == (policy == "pad")
        if policy == "pad":
            assert np.array_equal(batch["mask"], valid) and batch["mask"].sharding.spec == P("data")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_device_holds_its_rows_on_every_mesh(case):
    mesh = case.mesh(jax.devices())
    data = np.arange(64 * 4).reshape(64, 4)
    (batch,) = itertools.islice(feed_of(data, BATCH, NamedSharding(mesh, case.spec), shuffle=False), 1)
    for shard in batch.addressable_shards:
        assert np.array_equal(shard.data, data[:BATCH][shard.index])


@pytest.mark.parametrize(
    "source, leaves",
    [
        (np.arange(16), 1),
        (jnp.arange(16), 1),
        ((np.arange(16), np.ones((16, 2))), 2),
        ({"a": np.arange(16), "b": {"c": list(range(16))}}, 2),
        (list(range(16)), 1),
        ([{"a": i, "b": np.full(3, i)} for i in range(16)], 2),
        (range(16), 1),
    ],
    ids=["numpy", "jax", "tuple of arrays", "tree", "list", "records", "range"],
)
def test_sources(source, leaves):
    (first, second) = feed_of(source, shuffle=False)
    assert len(jax.tree.leaves(first)) == leaves
    for step, batch in enumerate((first, second)):
        leaf = jax.tree.leaves(batch)[0]
        assert np.array_equal(leaf, np.arange(8) + step * 8) and leaf.sharding == rows_sharding()


def test_numpy_numbers_are_numbers():
    feed = feed_of(np.arange(16), np.int64(8), seed=np.uint32(1), epochs=np.int64(2), prefetch=np.int8(1))
    assert len(list(feed)) == 4 and json.dumps(feed.state())
    stream = feed_of(iter(range(16)), np.int64(8), seed=np.int64(1))
    assert len(list(stream)) == 2 and json.dumps(stream.state())


def test_a_list_of_numbers_is_a_row_and_other_lists_are_nodes():
    """As a tokeniser gives it: one leaf, not one for every number."""
    rows = [[i, i + 1] for i in range(8)]
    for source in (rows, iter(rows), {"": rows}, [{"": row} for row in rows]):
        (leaf,) = jax.tree.leaves(next(feed_of(source, shuffle=False)))
        assert leaf.tolist() == rows and leaf.sharding == rows_sharding()
    pairs = next(feed_of([[np.full(2, i), i] for i in range(8)], shuffle=False))
    assert [leaf.shape for leaf in pairs] == [(8, 2), (8,)]
    ragged = [{"tokens": [1] * (i + 1), "id": i} for i in range(8)]
    with pytest.raises(sx.SourceError, match=r"leaf 'tokens' has several shapes[\s\S]*host=\('tokens',\)"):
        next(feed_of(ragged, shuffle=False))
    batch = next(feed_of(ragged, shuffle=False, host="tokens"))
    assert batch["tokens"].tolist() == [row["tokens"] for row in ragged] and isinstance(batch["id"], jax.Array)
    batch = next(feed_of({"tokens": [row["tokens"] for row in ragged]}, shuffle=False))
    assert batch["tokens"].dtype == object


def test_an_iterable_with_a_length_is_a_stream():
    class Loader:  # as torch's
        def __len__(self):
            return 2

        def __iter__(self):
            return iter([np.arange(8), np.arange(8, 16)])

    assert [b.tolist()[0] for b in feed_of(Loader(), batched=True)] == [0, 8]
    assert [b.tolist() for b in feed_of(dict.fromkeys(range(8)).keys())] == [list(range(8))]


class Series:
    """As pandas has it: a subscript looks labels up, and NumPy takes the values."""

    dtype = np.dtype(int)
    iloc = property(lambda self: self.values)

    def __init__(self, values):
        self.values, self.shape = values, values.shape

    def __len__(self):
        return len(self.values)

    def __getitem__(self, labels):
        raise KeyError(labels)

    def __array__(self, dtype=None, copy=None):
        return self.values


def test_data_frames_and_series_are_read_by_place():
    class Frame:
        columns = ("x", "name")
        shape = (8, 2)

        def __dataframe__(self):
            raise NotImplementedError

        def __len__(self):
            return 8

        def __getitem__(self, name):
            return Series(np.arange(8)) if name == "x" else Series(np.array(list("abcdefgh"), object))

    batch = next(feed_of(Frame(), shuffle=False))
    assert batch["x"].tolist() == list(range(8)) and batch["name"].tolist() == list("abcdefgh")
    order = EpochPlan(8, 8, seed=3).records_at(0)[0]
    assert next(feed_of({"y": Series(np.arange(8) * 2)}, seed=3))["y"].tolist() == (order * 2).tolist()
    assert next(feed_of(Series(np.arange(8) * 2), seed=3)).tolist() == (order * 2).tolist()


def test_numbers_that_a_device_would_cut_in_half_are_an_error():
    big = np.arange(16) + 2**40
    with pytest.raises(sx.FeedError, match=rf"int64 do not fit int32[\s\S]*id: holds {2**40 + 7} [\s\S]*x64"):
        next(feed_of({"x": np.arange(16), "id": big}, shuffle=False))
    batch = next(feed_of({"x": np.arange(16), "id": big}, shuffle=False, host=("id",)))
    assert batch["id"].tolist() == big[:8].tolist()
    with jax.enable_x64(True), feed_of(big, shuffle=False, prefetch=2) as feed:  # it holds in the thread, too
        assert next(feed).tolist() == big[:8].tolist()


def test_memmaps_and_array_likes_are_read_in_blocks(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(64).reshape(32, 2))
    plan = EpochPlan(32, 8)
    asked = []

    class File:  # as HDF5 has it: growing numbers, each once
        shape, dtype = (32, 2), np.dtype(int)

        def __len__(self):
            return 32

        def __getitem__(self, at):
            at = np.arange(32)[at] if isinstance(at, slice) else np.asarray(at)
            assert (np.diff(at) > 0).all()
            asked.append(len(at))
            return np.arange(64).reshape(32, 2)[at]

    for source in (np.load(tmp_path / "x.npy", mmap_mode="r"), File()):
        for step, batch in enumerate(feed_of(source)):
            assert np.array_equal(batch[:, 0], plan.records_at(step)[0] * 2)
    assert asked == [8, 8, 8, 8]


def test_a_batch_does_not_change_with_its_source():
    data = np.arange(16.0)
    feed = feed_of(data, shuffle=False)
    batch = next(feed)
    data[:] = -1
    assert np.array_equal(batch, np.arange(8))


def test_grain_sources():
    grain = pytest.importorskip("grain")
    dataset = grain.MapDataset.range(16).map(lambda i: {"x": i * 10})
    plan = EpochPlan(16, 8, seed=5)
    for step, batch in enumerate(feed_of(dataset, seed=5)):
        assert np.array_equal(batch["x"], plan.records_at(step)[0] * 10)
    assert [b.tolist() for b in feed_of(grain.sources.RangeDataSource(0, 16, 1), shuffle=False)][1][0] == 8


@pytest.mark.parametrize("policy", ["drop", "pad", "keep"])
def test_grain_reads_and_decodes_in_threads(policy):
    grain = pytest.importorskip("grain")
    dataset = grain.MapDataset.range(27).map(lambda i: {"x": np.array([i])})
    options = grain.ReadOptions(num_threads=4, prefetch_buffer_size=8)
    plain = [b["x"].tolist() for b in feed_of(dataset, policy=policy, epochs=2)]
    feed = feed_of(dataset, policy=policy, epochs=2, read_options=options)
    assert [b["x"].tolist() for b in feed] == plain
    feed.restore({**feed.state(), "global_step": 2, "epoch": 0})
    assert [b["x"].tolist() for b in feed] == plain[2:]


def test_grain_loader_is_a_stream_that_resumes_by_its_own_state():
    grain = pytest.importorskip("grain")

    def loader(shards=None):
        sampler = grain.samplers.IndexSampler(
            40, num_epochs=1, shuffle=True, seed=1, shard_options=shards or grain.sharding.NoSharding()
        )
        return grain.DataLoader(data_source=grain.sources.RangeDataSource(0, 40, 1), sampler=sampler)

    whole = [b.tolist() for b in feed_of(loader())]
    assert sorted(itertools.chain(*whole)) == list(range(40))
    feed = feed_of(loader())
    next(feed), next(feed)
    state = json.loads(json.dumps(feed.state()))
    again = feed_of(loader())
    again.restore(state)
    assert [b.tolist() for b in again] == whole[2:]
    with pytest.raises(sx.SourceError, match=r"already shards by process[\s\S]*NoSharding"):
        feed_of(loader(grain.sharding.ShardOptions(shard_index=0, shard_count=2)))


def test_a_grain_loader_resumes_though_its_source_shows_an_address():
    grain = pytest.importorskip("grain")

    class Source:  # without a repr of its own: in every run, and every process, Grain takes it for another one
        def __len__(self):
            return 40

        def __getitem__(self, at):
            return np.int32(at)

    def loader():
        sampler = grain.samplers.SequentialSampler(40, shard_options=grain.sharding.NoSharding())
        return grain.DataLoader(data_source=Source(), sampler=sampler)

    feed = feed_of(loader())
    next(feed), next(feed)
    again = feed_of(loader())
    again.restore(json.loads(json.dumps(feed.state())))
    assert next(again).tolist() == list(range(16, 24))


def test_the_state_of_another_iterator_is_an_error_that_says_so():
    grain = pytest.importorskip("grain")
    feed = feed_of(grain.MapDataset.range(40).to_iter_dataset())
    next(feed)
    state = feed.state()
    plain = feed_of(iter(range(40)))
    plain.restore(state)
    with pytest.raises(sx.FeedStateError, match="source: .* range_iterator takes none"):
        next(plain)
    feed.restore({**state, "global_step": 2, "source": {"next": 8}})
    with pytest.raises(sx.FeedStateError, match="does not take it: KeyError"):
        next(feed)


def test_plain_iterators_and_generators():
    batches = list(feed_of(({"x": i} for i in range(20)), policy="keep"))
    assert [b["x"].tolist() for b in batches] == [list(range(8)), list(range(8, 16)), [16, 17, 18, 19]]
    padded = list(feed_of(iter(range(20)), policy="pad"))
    assert [int(mask.sum()) for _, mask in padded] == [8, 8, 4] and padded[2][0].tolist() == [16, 17, 18, 19] * 2
    assert len(list(feed_of(iter(range(20))))) == 2


def test_iterables_of_whole_batches():
    batches = [np.arange(8), np.arange(8, 16), np.arange(16, 20)]
    assert [b.tolist() for b in feed_of(iter(batches), batched=True, policy="keep")] == [b.tolist() for b in batches]
    with pytest.raises(sx.SourceError, match=r"batch 1 of the stream is no global batch of 8 rows[\s\S]*9 rows"):
        list(feed_of(iter([np.arange(8), np.arange(9)]), batched=True))


def test_a_plain_array_with_a_mask_is_a_pair():
    batch, mask = list(feed_of(np.arange(10), policy="pad", shuffle=False))[1]
    assert batch.tolist()[:2] == [8, 9] and mask.tolist() == [True] * 2 + [False] * 6


def test_the_mask_can_be_named_and_never_hides_a_leaf():
    batch = next(feed_of(numbers(16), policy="pad", mask="valid"))
    assert "valid" in batch and "mask" not in batch
    with pytest.raises(sx.FeedError, match="the batch has one already"):
        next(feed_of({"mask": np.arange(16)}, policy="pad"))


def test_a_kept_tail_that_does_not_divide_is_replicated():
    sharding = rows_sharding(data=4, model=2)
    tail = list(feed_of(np.arange(13), 8, sharding, policy="keep", shuffle=False))[1]
    assert tail.tolist() == [8, 9, 10, 11, 12] and tail.sharding.is_fully_replicated


# ---- text and ragged leaves ------------------------------------------------------------------------------------------


def test_text_stays_on_the_host():
    source = {"x": np.arange(16), "name": [f"n{i}" for i in range(16)], "tag": np.array(["t"] * 16)}
    batch = next(feed_of(source, shuffle=False))
    assert isinstance(batch["name"], np.ndarray) and batch["name"].dtype == object
    assert batch["name"].tolist() == [f"n{i}" for i in range(8)] and isinstance(batch["tag"], np.ndarray)
    records = [{"x": i, "name": f"n{i}"} for i in range(16)]
    assert next(feed_of(records, shuffle=False))["name"].tolist() == [f"n{i}" for i in range(8)]


def test_a_ragged_column_stays_on_the_host():
    tokens = [np.arange(i) for i in range(16)]
    batch = next(feed_of({"x": np.arange(16), "tokens": tokens}, shuffle=False))
    assert batch["tokens"].dtype == object and [len(t) for t in batch["tokens"]] == list(range(8))


def test_ragged_records_are_an_error_that_says_what_would_work():
    records = [{"tokens": np.arange(3 + (i == 5))} for i in range(16)]
    with pytest.raises(
        sx.SourceError, match=r"leaf 'tokens' has several shapes[\s\S]*record 5[\s\S]*host=\('tokens',\)"
    ):
        next(feed_of(records, shuffle=False))
    batch = next(feed_of(records, shuffle=False, host=("tokens",)))
    assert [len(t) for t in batch["tokens"]] == [3, 3, 3, 3, 3, 4, 3, 3]

    def pad(columns):
        return {"tokens": np.stack([np.pad(t, (0, 4 - len(t))) for t in columns["tokens"]])}

    with pytest.raises(sx.SourceError):
        next(feed_of(records, shuffle=False, transform=pad))  # stacked before the transform sees it


def test_the_first_record_settles_the_dtype():
    """Else it would depend on the records that a process happens to hold."""
    records = [{"x": np.float16(0.5)}, {"x": 1.5}, {"x": np.float32(2)}, *[{"x": np.float16(3)}] * 5]
    assert next(feed_of(records, shuffle=False))["x"].dtype == np.float16
    with pytest.raises(
        sx.SourceError, match=r"leaf 'x' has several dtypes\n  the first record: int64\n  record 2: float64"
    ):
        next(feed_of([{"x": 0}, {"x": True}, {"x": 0.5}, *[{"x": 3}] * 5], shuffle=False))


def test_random_keys_and_nothing_are_no_records():
    keys = [{"k": key} for key in jax.random.split(jax.random.key(0), 8)]
    with pytest.raises(sx.SourceError, match=r"random keys[\s\S]*k: holds keys"):
        next(feed_of(keys, shuffle=False))
    for source in ([None] * 8, iter([None] * 8)):
        with pytest.raises(sx.SourceError, match="record 0: is None"):
            next(feed_of(source, shuffle=False))
    with pytest.raises(sx.SourceError, match="batch 1 of the stream is no global batch"):
        list(feed_of(iter([np.arange(8), None, np.arange(8)]), batched=True))


def test_host_names_leaves_that_there_are():
    with pytest.raises(sx.FeedError, match=r"'tokns': is no leaf; did you mean 'tokens'[\s\S]*'tokens', 'x'"):
        next(feed_of({"tokens": np.arange(8), "x": np.arange(8)}, host=("tokns",)))
    batch = next(feed_of(np.arange(8), host="text", transform=lambda c: {"text": c, "x": c}))
    assert isinstance(batch["text"], np.ndarray) and isinstance(batch["x"], jax.Array)


def test_a_transform_can_pad_what_is_ragged():
    tokens = [np.arange(i % 4) for i in range(16)]
    feed = feed_of(
        tokens, transform=lambda c: np.stack([np.pad(t, (0, 4 - len(t))) for t in c]), host=("",), shuffle=False
    )
    assert next(feed).shape == (8, 4)


def test_records_of_several_forms_are_an_error():
    with pytest.raises(sx.SourceError, match=r"the same leaves[\s\S]*record 3"):
        next(feed_of([{"a": 1} if i != 3 else {"b": 1} for i in range(8)], shuffle=False))
    with pytest.raises(sx.SourceError, match="record 2: is None"):
        next(feed_of([1, 1, None, 1, 1, 1, 1, 1], shuffle=False, host=("",)))


# ---- transforms -----------------------------------------------------------------------------------------------------


def test_a_transform_may_change_everything_but_the_rows():
    def transform(columns):
        return {"image": np.repeat(columns["x"][:, None], 3, axis=1).astype(np.float16), "both": columns}

    batch = next(feed_of(numbers(16), transform=transform, shuffle=False))
    assert batch["image"].shape == (8, 3) and batch["image"].dtype == np.float16
    assert batch["both"]["y"].shape == (8, 2)


@pytest.mark.parametrize(
    "transform, message",
    [
        (lambda c: {"x": c["x"][:5]}, r"one row for each of its 8 rows \(step 0\)[\s\S]*x: 5 rows for 8"),
        (lambda c: {"x": c["x"].sum()}, r"x: no rows for 8"),
        (lambda c: {}, "it returned dict without arrays"),
        (lambda c: None, "without arrays"),
    ],
)
def test_a_transform_that_changes_the_rows_is_an_error(transform, message):
    feed = feed_of(numbers(16), transform=transform)
    with pytest.raises(sx.TransformError, match=message):
        next(feed)
    assert feed.global_step == 0


def test_lists_that_a_transform_returns():
    def ragged(columns):
        return {"x": columns, "rows": [np.arange(i % 3) for i in columns]}

    batch = next(feed_of(np.arange(8), transform=lambda c: {"x": [[i, i] for i in c], "t": ["a"] * 8, "b": [b"b"] * 8}))
    assert batch["x"].shape == (8, 2) and batch["t"].dtype == batch["b"].dtype == object
    with pytest.raises(sx.TransformError, match=r"several shapes: \(0,\), \(1,\), \(2,\)[\s\S]*host=\('rows',\)"):
        next(feed_of(np.arange(8), transform=ragged))
    assert next(feed_of(np.arange(8), transform=ragged, host="rows"))["rows"].dtype == object


def test_random_augmentation_depends_on_the_record_alone():
    def jitter(columns, about):
        noise = jax.vmap(jax.random.uniform)(about.keys())
        host = [rng.random() for rng in about.generators()]
        return {"record": columns, "noise": np.asarray(noise), "host": np.array(host, np.float32)}

    def by_record(feed):
        found = {}
        for batch in feed:
            for record, noise, host in zip(
                *map(np.asarray, (batch["record"], batch["noise"], batch["host"])), strict=True
            ):
                found[int(record)] = (float(noise), float(host))
        return found

    one = by_record(feed_of(np.arange(32), 8, transform=jitter))
    other = by_record(feed_of(np.arange(32), 16, rows_sharding(data=2, model=4), transform=jitter))
    assert one == other and len({noise for noise, _ in one.values()}) == 32
    again = feed_of(np.arange(32), 8, transform=jitter, epochs=2)
    assert by_record(itertools.islice(again, 4)) != by_record(again)


def test_shapes_that_change_from_step_to_step():
    steps = itertools.count(1)
    feed = feed_of(np.arange(24), transform=lambda c: np.zeros((len(c), next(steps))))
    assert [batch.shape for batch in feed] == [(8, 1), (8, 2), (8, 3)]


# ---- epochs, states, resuming ---------------------------------------------------------------------------------------


def test_one_loop_is_one_pass():
    feed = feed_of(np.arange(16))
    first, second = list(feed), list(feed)
    assert len(first) == len(second) == 2 and [a.tolist() for a in first] != [b.tolist() for b in second]
    assert feed.epoch == 2 and feed.global_step == 4
    assert next(feed, None) is None
    assert len(list(feed_of(np.arange(16), epochs=3))) == 6
    assert len(list(itertools.islice(feed_of(np.arange(16), epochs=None), 9))) == 9


def test_a_broken_loop_goes_on_where_it_was():
    feed = feed_of(np.arange(32), prefetch=2)
    first = [b.tolist() for b in itertools.islice(feed, 1)]
    rest = [b.tolist() for b in feed]
    assert len(rest) == 3 and sorted(itertools.chain(*first, *rest)) == list(range(32))
    feed.close()


@settings(max_examples=40)
@given(n=st.integers(8, 60), policy=st.sampled_from(POLICIES), cut=st.integers(0, 20), prefetch=st.sampled_from([0, 3]))
def test_resuming_anywhere_continues_exactly(n, policy, cut, prefetch):
    def text(batches):
        return [str(jax.tree.map(np.asarray, batch)) for batch in batches]

    def fresh():
        return feed_of(np.arange(n), policy=policy, epochs=3, prefetch=prefetch)

    with fresh() as feed:
        whole = text(feed)
    cut = min(cut, len(whole) - 1)
    with fresh() as feed:
        text(itertools.islice(feed, cut))
        state = json.loads(json.dumps(feed.state()))
        assert state["global_step"] == cut  # what was read ahead does not count
    with fresh() as feed:
        feed.restore(state)
        assert text(feed) == whole[cut:]


def test_state_has_the_documented_keys():
    feed = feed_of(np.arange(16))
    next(feed)
    state = feed.state()
    assert {k: state[k] for k in ("seed", "epoch", "global_step", "policy", "records")} == {
        "seed": 0, "epoch": 0, "global_step": 1, "policy": "drop", "records": 16,
    }  # fmt: skip


@pytest.mark.parametrize(
    "other, message",
    [
        ({"source": np.arange(24)}, "records: the state has 24, this feed 16"),
        ({"policy": "wrap"}, "policy: the state has 'wrap', this feed 'drop'"),
        ({"seed": 1}, "seed: the state has 1, this feed 0"),
        ({"batch": 16}, "global_batch: the state has 16, this feed 8"),
    ],
)
def test_a_state_of_another_stream_leaves_the_feed_as_it_was(other, message):
    options = {"source": np.arange(16), "policy": "drop", "seed": 0, **other}
    state = feed_of(options.pop("source"), options.pop("batch", 8), **options).state()
    feed = feed_of(np.arange(16), prefetch=2)
    whole = [b.tolist() for b in feed_of(np.arange(16))]
    assert next(feed).tolist() == whole[0]
    with pytest.raises(sx.FeedStateError, match=message):
        feed.restore(state)
    assert next(feed).tolist() == whole[1]
    feed.close()


def test_a_state_of_numpy_numbers_is_taken():
    """As a checkpoint of arrays gives it back."""
    feed, stream = feed_of(np.arange(32)), feed_of(iter(range(32)))
    for one, other in ((feed, feed_of(np.arange(32))), (stream, feed_of(iter(range(32))))):
        next(one)
        state = one.state()
        arrays = {k: np.asarray(v)[()] if isinstance(v, int) else v for k, v in state.items()}
        other.restore(arrays)
        assert other.state() == state and next(other).tolist() == next(one).tolist()


def test_resuming_streams():
    class Again:
        def __iter__(self):
            return iter(range(40))

    whole = [b.tolist() for b in feed_of(Again())]
    feed = feed_of(Again(), prefetch=2)
    next(feed), next(feed)
    state = json.loads(json.dumps(feed.state()))
    other = feed_of(Again())
    other.restore(state)
    assert [b.tolist() for b in other] == whole[2:]
    assert [b.tolist() for b in other] == whole and other.epoch == 2
    feed.restore({**state, "global_step": 0})
    assert [b.tolist() for b in feed] == whole


def test_an_iterator_only_goes_forward():
    state = {**feed_of(iter(range(40))).state(), "global_step": 3}
    feed = feed_of(iter(range(40)))
    feed.restore(state)
    assert next(feed).tolist() == list(range(24, 32))
    with pytest.raises(
        sx.FeedStateError, match=r"cannot go to step 1[\s\S]*stands before step 4[\s\S]*cannot be iterated again"
    ):
        feed.restore({**state, "global_step": 1})
    assert next(feed).tolist() == list(range(32, 40))
    short = feed_of(iter(range(10)))
    short.restore(state)
    with pytest.raises(sx.FeedStateError, match="the stream ended before step 3"):
        next(short)


# ---- shardings ------------------------------------------------------------------------------------------------------


def test_shardings_in_every_form():
    mesh = rows_sharding(data=4, model=2).mesh
    source = numbers(16)
    want = NamedSharding(mesh, P("data"))
    tree = {"x": want, "y": NamedSharding(mesh, P("data", "model"))}
    for form in (want, (mesh, P("data")), tree, sx.layout(source, [(".*", P("data"))], mesh)):
        batch = next(feed_of(source, 8, form))
        assert batch["x"].sharding.is_equivalent_to(want, 1)
    assert next(feed_of(source, 8, tree))["y"].sharding.spec == P("data", "model")
    with jax.set_mesh(mesh):
        assert next(feed_of(source, 8, P("data")))["x"].sharding.is_equivalent_to(want, 1)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    assert next(feed_of(source, 8, one))["x"].devices() == {jax.devices()[1]}


def test_a_layout_without_devices_takes_the_mesh_in_force():
    source, mesh = numbers(16), rows_sharding(data=4, model=2).mesh
    laid = sx.layout(source, [(".*", P("data"))], "data=4,model=2")
    with pytest.raises(sx.PlacementError, match=r"layout.on\(sx.make_mesh"):
        feed_of(source, 8, laid)
    with jax.set_mesh(mesh):
        assert next(feed_of(source, 8, laid))["y"].sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)


def test_a_tree_of_shardings_may_be_any_tree_and_leave_parts_on_the_host():
    pair = collections.namedtuple("Pair", "x y")
    mesh = rows_sharding(data=4, model=2).mesh
    with jax.set_mesh(mesh):
        batch = next(feed_of(pair(np.arange(16), np.arange(16)), 8, pair(P("data"), None), shuffle=False, debug=True))
    assert batch.x.sharding.spec == P("data") and isinstance(batch.y, np.ndarray) and batch.y.tolist() == list(range(8))


def test_the_kind_of_memory_is_kept():
    mesh = rows_sharding(data=8).mesh
    pinned = NamedSharding(mesh, P("data", None), memory_kind="pinned_host")
    for batch in feed_of(numbers(12), 8, pinned, policy="keep"):
        assert {leaf.sharding.memory_kind for leaf in batch.values()} == {"pinned_host"}
    assert sx.JaxProcessSharderModule().shard(np.zeros(8), pinned).sharding.memory_kind == "pinned_host"


def test_one_spec_serves_leaves_of_any_rank():
    mesh = rows_sharding(data=4, model=2).mesh
    batch = next(feed_of(numbers(16), 8, NamedSharding(mesh, P("data", "model"))))
    assert batch["x"].sharding.spec == P("data") and batch["y"].sharding.spec == P("data", "model")


def test_leaves_may_split_their_rows_in_different_ways():
    mesh = rows_sharding(data=4, model=2).mesh
    feed = feed_of(
        numbers(16), 8, {"x": NamedSharding(mesh, P("data")), "y": NamedSharding(mesh, P(("data", "model")))}
    )
    batch = next(feed)
    assert np.array_equal(batch["y"][:, 0] * 10, batch["x"]) and len(feed.splits) == 2


# ---- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: feed_of(np.arange(64), 12), sx.BatchSizeError, r"12 does not divide over 8 shards \(data=8\)[\s\S]*8 or 16"),
        (lambda: feed_of(np.arange(4), 8), sx.BatchSizeError, "4 records are fewer than one batch of 8"),
        (lambda: feed_of(np.arange(0), 8), sx.BatchSizeError, "records: 0"),
        (lambda: feed_of(np.arange(8), -8), sx.BatchSizeError, "global_batch: -8"),
        (lambda: feed_of(iter([1]), -8), sx.BatchSizeError, "global_batch: -8"),
        (lambda: feed_of(np.arange(8), policy="keeep"), sx.FeedError, "did you mean 'keep'"),
        (lambda: feed_of(np.arange(8), seed=None), sx.FeedError, "seed None"),
        (lambda: feed_of(np.arange(8), prefetch=-1), sx.FeedError, "prefetch=-1"),
        (lambda: feed_of(np.arange(8), epochs=0), sx.FeedError, "epochs=0"),
        (lambda: feed_of(np.arange(8), workers=-1), sx.FeedError, "workers=-1"),
        (lambda: feed_of(np.arange(8), workers=2), sx.FeedError, "columns are read in blocks"),
        (lambda: feed_of({"x": np.zeros(8), "y": np.zeros(9)}), sx.SourceError, r"x: 8 records[\s\S]*y: 9 records"),
        (lambda: feed_of({"x": np.zeros(8), "n": 3}), sx.SourceError, "n: int has no records"),
        (lambda: feed_of({}), sx.SourceError, "no columns"),
        (lambda: feed_of(3), sx.SourceError, "cannot feed from int"),
        (lambda: feed_of("text"), sx.SourceError, "cannot feed from str"),
        (lambda: feed_of(iter([1]), policy="wrap"), sx.FeedError, "'wrap' needs the first records again"),
        (lambda: feed_of(iter([1]), shuffle=True, epochs=2), sx.FeedError, r"shuffle[\s\S]*epochs"),
        (lambda: sx.Feed(np.arange(8), "data", 8, seed=0), sx.FeedError, "not a sharding: str"),
        (lambda: sx.Feed(np.arange(8), {}, 8, seed=0), sx.FeedError, "an empty tree"),
        (lambda: sx.Feed(np.arange(8), P("data"), 8, seed=0), sx.NoMeshError, "needs a mesh"),
        (lambda: sx.Feed(np.arange(8), ("data=8", P("data")), 8, seed=0), sx.PlacementError, "data=8 .*has no devices"),
        (lambda: feed_of(jax.random.split(jax.random.key(0), 8)), sx.SourceError, r"jax.random.key_data\(keys\)"),
        (lambda: feed_of(np.array(3)), sx.SourceError, "cannot feed from ndarray without dimensions"),
        (lambda: feed_of(iter([1]), seed="x"), sx.FeedError, "seed 'x'"),
        (lambda: feed_of(np.arange(8), transform=3), sx.TransformError, "transform=3 cannot be called"),
        (lambda: feed_of(np.arange(8), transform=lambda a, b, c: a), sx.TransformError, "needs 3 arguments: a, b, c"),
        (lambda: sx.Feed(np.arange(8), (rows_sharding().mesh, P("dta")), 8, seed=0), sx.UnknownAxisError, "did you mean 'data'"),
        (lambda: sx.EpochPlan(2**63 - 1, 8), sx.BatchSizeError, "`.repeat\\(\\)`"),
    ],
)  # fmt: skip
def test_feeds_that_cannot_be(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_columns_that_do_not_fit_are_named():
    sharding = NamedSharding(rows_sharding(data=2, model=4).mesh, P("data", "model"))
    with pytest.raises(sx.SpecError, match="y: dim 1: 2 does not divide by 'model'"):
        next(feed_of(numbers(16), 8, sharding))
    with pytest.raises(sx.FeedError, match="not a prefix of the batch"):
        next(feed_of(numbers(16), 8, {"x": sharding, "z": sharding}))


# ---- failures, threads, shutdown ------------------------------------------------------------------------------------


class Flaky:
    """A source whose record 11 cannot be read until it is repaired."""

    broken = True

    def __len__(self):
        return 32

    def __getitem__(self, at):
        if at == 11 and self.broken:
            raise OSError("disk gone")
        return at


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_an_error_surfaces_at_its_own_step_and_the_feed_stays_usable(prefetch):
    source = Flaky()
    feed = feed_of(source, shuffle=False, prefetch=prefetch)
    assert next(feed).tolist() == list(range(8))
    for _ in range(2):
        with pytest.raises(OSError, match="disk gone"):
            next(feed)
        assert feed.global_step == 1
    source.broken = False
    assert [b.tolist()[0] for b in feed] == [8, 16, 24]
    feed.close()


def test_an_iterator_that_raised_says_so_when_asked_again():
    def breaking():
        yield from range(12)
        raise OSError("socket gone")

    feed = feed_of(breaking(), prefetch=2)
    assert next(feed).tolist() == list(range(8))
    with pytest.raises(OSError, match="socket gone"):
        next(feed)
    with pytest.raises(sx.FeedStateError, match=r"cannot go to step 1[\s\S]*socket gone"):
        next(feed)


def feed_threads():
    return [thread for thread in threading.enumerate() if thread.name == "shardax feed"]


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_closing_ends_the_thread_and_a_closed_feed_can_go_on():
    feed = feed_of(np.arange(64), prefetch=2, epochs=None)
    first = next(feed)
    assert feed_threads()
    feed.close()
    feed.close()
    assert not feed_threads()
    assert next(feed).tolist() != first.tolist() and feed.global_step == 2
    feed.close()
    assert not feed_threads()


def test_an_exhausted_feed_and_a_forgotten_one_leave_no_thread():
    assert len(list(feed_of(np.arange(16), prefetch=3))) == 2
    assert not feed_threads()
    feed = feed_of(np.arange(64), prefetch=2, epochs=None)
    next(feed)
    gone = weakref.ref(feed)
    del feed
    gc.collect()
    assert gone() is None and wait_until(lambda: not feed_threads())


def test_a_loop_left_by_an_exception_is_cleaned_up_by_the_context():
    with pytest.raises(ZeroDivisionError), feed_of(np.arange(64), prefetch=2) as feed:
        for _ in feed:
            raise ZeroDivisionError
    assert not feed_threads()


def test_an_interrupt_does_not_wait_for_a_slow_source():
    asleep, awake = threading.Event(), threading.Event()

    class Slow:
        def __len__(self):
            return 64

        def __getitem__(self, at):
            asleep.set()
            awake.wait(8)
            return at

    feed = feed_of(Slow(), prefetch=2)
    main = threading.get_ident()
    threading.Thread(target=lambda: asleep.wait(20) and signal.pthread_kill(main, signal.SIGINT)).start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        next(feed)
    assert time.monotonic() - begun < 5
    awake.set()
    assert wait_until(lambda: not feed_threads()) and next(feed).shape == (8,)
    feed.close()


def test_no_more_is_read_ahead_than_asked():
    read = []

    class Counting:
        def __len__(self):
            return 800

        def __getitem__(self, at):
            read.append(at)
            return at

    feed = feed_of(Counting(), prefetch=2)
    next(feed)
    assert wait_until(lambda: len(read) >= 1 + 3 * 8)
    time.sleep(0.1)
    assert len(read) <= 1 + 3 * 8
    feed.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_transform_sees_the_callers_mesh(prefetch):
    mesh = rows_sharding().mesh
    seen = []

    def transform(columns):
        seen.append(sx.current_mesh())
        return columns

    with jax.set_mesh(mesh), feed_of(np.arange(16), 8, P("data"), prefetch=prefetch, transform=transform) as feed:
        next(feed)
    assert seen[0] == mesh


def test_reading_ahead_hides_the_time_of_the_source():
    class Slow:
        def __len__(self):
            return 64

        def __getitems__(self, numbers):
            time.sleep(0.05)
            return numbers

        def __getitem__(self, at):
            return at

    feed = feed_of(Slow(), prefetch=2)
    next(feed)
    waited = 0.0
    for _ in range(5):
        time.sleep(0.15)
        start = time.perf_counter()
        next(feed)
        waited += time.perf_counter() - start
    feed.close()
    assert waited < 0.6 * 5 * 0.05


def test_progress_on_request(capsys):
    told = []
    list(feed_of(np.arange(24), progress=lambda done, total: told.append((done, total))))
    assert told == [(1, 3), (2, 3), (3, 3)]
    with feed_of(np.arange(24), progress=True) as feed:
        assert len(list(feed)) == 3
    list(feed_of(np.arange(24)))


def test_debug_in_one_process_changes_nothing():
    assert [b.tolist() for b in feed_of(np.arange(24), debug=True)] == [b.tolist() for b in feed_of(np.arange(24))]


def test_repr_and_rows():
    feed = feed_of(np.arange(24))
    assert repr(feed) == "Feed(global_batch=8, 3 steps per epoch, global_step=0)"
    assert feed.rows.tolist() == list(range(8)) and feed.splits[0].shards == 8
    stream = feed_of(iter(range(8)))
    assert "a stream" in repr(stream)
    with pytest.raises(TypeError, match="does not say"):
        len(stream)


def test_masked_training_equals_training_without_padding():
    data = {"x": np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)}

    @jax.jit
    def loss(batch):
        return sx.masked_mean(jnp.sum(batch["x"] ** 2, axis=1), batch["mask"])

    last = list(feed_of(data, policy="pad", shuffle=False))[1]
    assert np.isclose(loss(last), np.mean(np.sum(data["x"][8:] ** 2, axis=1)))
