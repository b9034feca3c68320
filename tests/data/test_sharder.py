"""The process sharder, line by line of its documented surface, and each place where the original fails."""

import collections
import dataclasses
import gc
import itertools
import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.data import sharder as sharder_module
from shardax.data.slicing import RowsView


def simulated(index, count, **config):
    sharder = sx.JaxProcessSharderModule(sx.JaxProcessSharderConfig(**config))
    sharder.process_index, sharder.process_count = index, count
    return sharder


def all_parts(make, count, **config):
    return [simulated(index, count, **config).shard_data(make()) for index in range(count)]


@pytest.fixture
def mesh():
    return sx.make_mesh("data=4,model=2")


# ---- config ---------------------------------------------------------------------------------------------------------


def test_config_is_frozen_hashable_and_compares_by_content():
    rules = [("batch", "data"), ("embed", ["fsdp", "tp"]), ("seq", None)]
    one = sx.JaxProcessSharderConfig(sharding_rules=rules, precomputed_stats={"mean": np.ones(3)})
    other = sx.JaxProcessSharderConfig(sharding_rules=tuple(map(tuple, rules)), precomputed_stats={"mean": np.ones(3)})
    assert one == other and hash(one) == hash(other)
    assert one != sx.JaxProcessSharderConfig(sharding_rules=rules, precomputed_stats={"mean": np.zeros(3)})
    assert [f.name for f in dataclasses.fields(one)] == [
        "cacheable", "batch_stats_fn", "precomputed_stats", "sharding_rules", "drop_remainder",
    ]  # fmt: skip
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.cacheable = True


def test_config_does_not_follow_its_arguments():
    rules, stats = [("batch", "data")], {"mean": 1}
    config = sx.JaxProcessSharderConfig(sharding_rules=rules, precomputed_stats=stats)
    rules.append(("x", "y"))
    stats["mean"] = 2
    assert config.sharding_rules == (("batch", "data"),) and config.precomputed_stats == {"mean": 1}


def test_both_kinds_of_statistics_are_refused():
    with pytest.raises(ValueError, match="Cannot specify both batch_stats_fn and precomputed_stats"):
        sx.JaxProcessSharderConfig(batch_stats_fn=lambda x: {}, precomputed_stats={})


def test_a_config_of_wrong_types_lists_them_all():
    with pytest.raises(sx.SharderError) as error:
        sx.JaxProcessSharderConfig("yes", batch_stats_fn=3, sharding_rules="batch", drop_remainder=None)
    assert [offence.where for offence in error.value.offences] == [
        "cacheable", "batch_stats_fn", "sharding_rules", "drop_remainder",
    ]  # fmt: skip
    with pytest.raises(sx.SharderError, match="precomputed_stats: 3 is not a mapping or None"):
        sx.JaxProcessSharderConfig(precomputed_stats=3)


@pytest.mark.parametrize("rules", [["batch"], [("a",)], [(1, "x")], [("a", 3)]])
def test_rules_that_are_no_pairs(rules):
    with pytest.raises(sx.SharderError, match="rule 0"):
        sx.JaxProcessSharderConfig(sharding_rules=rules)


def test_the_module_takes_only_its_config():
    with pytest.raises(sx.SharderError, match="of type dict, not a JaxProcessSharderConfig"):
        sx.JaxProcessSharderModule({"cacheable": True})


# ---- topology -------------------------------------------------------------------------------------------------------


def test_topology_is_live(monkeypatch):
    sharder = sx.JaxProcessSharderModule()
    assert (sharder.process_index, sharder.process_count, sharder.local_device_count) == (0, 1, 8)
    monkeypatch.setattr(jax, "process_index", lambda: 2)
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    assert sharder.process_index == 2 and sharder.shard_data(list(range(8))) == [4, 5]


def test_topology_can_be_overridden_and_given_back():
    sharder = sx.JaxProcessSharderModule()
    sharder.process_count = 3
    sharder.process_index.set_value(1)
    assert sharder.process_index.get_value() == sharder.process_index.value == 1
    assert sharder.shard_data([0, 1, 2]) == [1]
    sharder.process_index.value = 2
    assert sharder.shard_data([0, 1, 2]) == [2]
    del sharder.process_index
    sharder.process_count = None
    assert sharder.shard_data([0, 1, 2]) == [0, 1, 2]
    with pytest.raises(sx.SharderError, match="process_count cannot be 0"):
        sharder.process_count = 0
    with pytest.raises(sx.SharderError, match=r"process_index cannot be 1\.5: it is a whole number"):
        sharder.process_index = 1.5


def test_a_process_that_there_is_not_gets_an_error_and_not_nothing():
    sharder = sx.JaxProcessSharderModule()
    sharder.process_index = 3
    with pytest.raises(sx.SharderError, match=r"no process 3 among 1 process\n.*together"):
        sharder.shard_data([1, 2, 3, 4])


def test_topology_can_be_overridden_in_a_subclass(monkeypatch):
    class Second(sx.JaxProcessSharderModule):
        process_index = 1
        process_count = property(lambda self: 2)

    assert Second().shard_data([0, 1, 2, 3]) == [2, 3]
    monkeypatch.setattr(sx.JaxProcessSharderModule, "process_count", 4)
    assert sx.JaxProcessSharderModule().shard_data([0, 1, 2, 3]) == [0]


def test_a_variable_of_a_framework_overrides_too():
    nnx = pytest.importorskip("flax.nnx")
    sharder = sx.JaxProcessSharderModule()
    sharder.process_count, sharder.process_index = nnx.Variable(2), nnx.Variable(1)
    assert sharder.shard_data([0, 1]) == [1]


# ---- shard_data: kinds ----------------------------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", "x y")

SOURCES = {
    "list": lambda: list(range(11)),
    "tuple": lambda: tuple(range(11)),
    "range": lambda: range(11),
    "numpy": lambda: np.arange(11),
    "jax": lambda: jnp.arange(11),
    "iterator": lambda: iter(range(11)),
    "generator": lambda: (x for x in range(11)),
    "iterable": type("It", (), {"__iter__": lambda self: iter(range(11))}),
    "random access": type("RA", (), {"__len__": lambda self: 11, "__getitem__": lambda self, i: i}),
}


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_kind_is_split_without_loss(make, count):
    kept = [list(map(int, part)) for part in all_parts(make, count, drop_remainder=False)]
    assert sorted(itertools.chain(*kept)) == list(range(11))
    assert [len(part) for part in kept] == [11 // count + (i < 11 % count) for i in range(count)]
    dropped = [list(map(int, part)) for part in all_parts(make, count)]
    assert {len(part) for part in dropped} == {11 // count}
    assert len(set(itertools.chain(*dropped))) == 11 // count * count


@pytest.mark.parametrize("kind", ["list", "tuple", "range", "numpy", "jax", "random access"])
def test_contiguous_balanced_parts(kind):
    parts = [list(map(int, part)) for part in all_parts(SOURCES[kind], 3, drop_remainder=False)]
    assert parts == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


def test_the_type_is_kept():
    sharder = simulated(0, 2)
    for kind in (list, tuple):
        assert type(sharder.shard_data(kind(range(4)))) is kind
    assert isinstance(sharder.shard_data(jnp.arange(4)), jax.Array)


def test_arrays_are_views_never_copies():
    array = np.arange(12).reshape(6, 2)
    part = simulated(1, 3).shard_data(array)
    assert np.shares_memory(part, array) and part.shape == (2, 2)
    tree = simulated(1, 3).shard_data({"a": array, "b": {"c": array}})
    assert np.shares_memory(tree["a"], array) and np.shares_memory(tree["b"]["c"], array)
    whole = jnp.arange(4)
    assert sx.JaxProcessSharderModule().shard_data(whole) is whole


def test_a_memmap_is_not_read(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(20))
    part = simulated(1, 2).shard_data(np.load(tmp_path / "x.npy", mmap_mode="r"))
    assert isinstance(part, np.memmap) and part[0] == 10


def test_trees_of_columns():
    part = simulated(1, 2).shard_data({"x": np.arange(4), "names": ["a", "b", "c", "d"], "in": {"y": jnp.ones((4, 2))}})
    assert part["x"].tolist() == [2, 3] and part["names"] == ["c", "d"] and part["in"]["y"].shape == (2, 2)
    pair = simulated(1, 2).shard_data(Pair(np.arange(4), np.arange(4) * 10))
    assert isinstance(pair, Pair) and pair.y.tolist() == [20, 30]


def test_unequal_columns_are_named():
    with pytest.raises(sx.SharderError, match=r"x: 4 records[\s\S]*y: 3 records"):
        sx.JaxProcessSharderModule().shard_data({"x": np.zeros(4), "y": np.zeros(3)})
    with pytest.raises(sx.SharderError, match="step: int has no records"):
        sx.JaxProcessSharderModule().shard_data({"x": np.zeros(4), "step": 3})


def test_under_a_trace_rows_and_shardings_are_those_of_the_whole_array(mesh):
    assert jax.jit(lambda x: simulated(1, 2).shard_data(x))(jnp.arange(8)).tolist() == [4, 5, 6, 7]
    sharding = NamedSharding(mesh, P("data"))
    out = jax.jit(lambda x: sx.JaxProcessSharderModule().shard({"x": x}, sharding))(jnp.arange(8.0))
    assert out["x"].sharding.is_equivalent_to(sharding, 1)


def test_iterators_hold_one_group_in_memory():
    taken = []

    def endless():
        for i in itertools.count():
            taken.append(i)
            yield i

    stream = simulated(1, 3).shard_data(endless())
    assert [next(stream) for _ in range(3)] == [1, 4, 7] and len(taken) <= 9
    taken.clear()
    keep = simulated(1, 3, drop_remainder=False).shard_data(endless())
    assert next(keep) == 1 and len(taken) == 2


def test_random_access_is_lazy():
    class Source:
        def __len__(self):
            return 1_000_000_000

        def __getitem__(self, at):
            return at

    view = simulated(3, 4).shard_data(Source())
    assert (
        isinstance(view, RowsView) and len(view) == 250_000_000 and view[0] == 750_000_000 and view[-1] == 999_999_999
    )
    assert list(view[2:4]) == [750_000_002, 750_000_003] and view[0:10:5] == [750_000_000, 750_000_005]
    with pytest.raises(IndexError):
        view[250_000_000]


def test_grain_sources():
    grain = pytest.importorskip("grain")
    dataset = grain.MapDataset.range(10).map(lambda x: x * 10)
    part = simulated(1, 2).shard_data(dataset)
    assert isinstance(part, grain.MapDataset) and list(part) == [50, 60, 70, 80, 90]
    view = simulated(1, 2).shard_data(grain.sources.RangeDataSource(0, 10, 1))
    assert list(view) == [5, 6, 7, 8, 9]
    assert grain.MapDataset.source(view).shuffle(seed=1).batch(5)[0].shape == (5,)
    stream = simulated(1, 2).shard_data(dataset.to_iter_dataset())
    assert list(stream) == [10, 30, 50, 70, 90]


@pytest.mark.parametrize(
    "data", [3, None, "text", b"bytes", {1, 2}, {}, object(), np.float32(1.0), np.array(1), jnp.array(1)]
)
def test_what_has_no_rows(data):
    with pytest.raises(ValueError, match="Cannot shard data of type"):
        sx.JaxProcessSharderModule().shard_data(data)


@pytest.mark.parametrize("make", [lambda: [1, 2], lambda: np.zeros(2), lambda: {"a": [1, 2]}, lambda: iter([1, 2])])
@pytest.mark.parametrize("cacheable", [False, True])
def test_fewer_rows_than_processes_is_a_warning_not_silence(make, cacheable, caplog):
    with (
        pytest.warns(UserWarning, match="2 records are fewer than 4 processes") as warned,
        caplog.at_level(logging.WARNING, logger=sharder_module.logger.name),
    ):
        part = simulated(0, 4, cacheable=cacheable).shard_data(make())
        list(part)
    assert "drop_remainder=True" in caplog.text and warned[0].filename == __file__


def test_no_warning_without_reason(recwarn):
    simulated(0, 4, drop_remainder=False).shard_data([1, 2])
    simulated(0, 2).shard_data([1, 2])
    simulated(0, 2).shard_data([])
    assert not recwarn.list


def test_splits_like_grain():
    sharding = pytest.importorskip("grain").sharding
    even_split = getattr(sharding, "even_split", None)
    if even_split is None:
        from grain._src.core.sharding import even_split
    for n, count, drop in itertools.product((0, 1, 7, 10, 101), (1, 2, 3, 4), (True, False)):
        for index in range(count):
            options = sharding.ShardOptions(shard_index=index, shard_count=count, drop_remainder=drop)
            assert simulated(index, count, drop_remainder=drop)._shard_bounds(n) == even_split(n, options)


# ---- counters, statistics, cache --------------------------------------------------------------------------------------


def test_counters_count():
    sharder = sx.JaxProcessSharderModule(sx.JaxProcessSharderConfig(cacheable=True))
    assert sharder.get_operation_stats() == {"applied_count": 0, "skipped_count": 0}
    data = np.arange(4)
    for _ in range(3):
        sharder.shard_data(data)
    assert sharder.get_operation_stats() == {"applied_count": 1, "skipped_count": 2}
    with pytest.raises(ValueError):
        sharder.shard_data(3)
    assert sharder.get_operation_stats() == {"applied_count": 1, "skipped_count": 2}
    sharder.reset_operation_stats()
    assert sharder.get_operation_stats() == {"applied_count": 0, "skipped_count": 0}


def test_statistics_computed_set_and_reset():
    sharder = sx.JaxProcessSharderModule(
        sx.JaxProcessSharderConfig(batch_stats_fn=lambda x: {"mean": float(np.mean(x))})
    )
    assert sharder.get_statistics() is None
    assert sharder.compute_statistics([1, 3]) == {"mean": 2.0} == sharder.get_statistics()
    sharder.reset_statistics()
    assert sharder.get_statistics() is None
    assert sharder.compute_statistics([3, 5]) == {"mean": 4.0} == sharder.get_statistics()
    sharder.reset_statistics()
    sharder.set_statistics({"mean": 9.0})
    assert sharder.get_statistics() == {"mean": 9.0}


def test_set_statistics_override_precomputed_ones():
    sharder = sx.JaxProcessSharderModule(sx.JaxProcessSharderConfig(precomputed_stats={"mean": 1.0}))
    assert sharder.compute_statistics([1]) is None and sharder.get_statistics() == {"mean": 1.0}
    sharder.set_statistics({"mean": 2.0})
    assert sharder.get_statistics() == {"mean": 2.0}
    sharder.reset_statistics()
    assert sharder.get_statistics() is None
    sharder.set_statistics({"mean": 3.0})
    assert sharder.get_statistics() == {"mean": 3.0}


def test_statistics_are_not_shared_with_the_caller():
    sharder = sx.JaxProcessSharderModule()
    stats = {"by": {"mean": [1]}}
    sharder.set_statistics(stats)
    stats["by"]["mean"].append(2)
    sharder.get_statistics()["by"]["mean"].append(3)
    assert sharder.get_statistics() == {"by": {"mean": [1]}}
    with pytest.raises(sx.SharderError, match="a mapping, not float"):
        sharder.set_statistics(3.0)


def test_the_cache_returns_the_same_shard_of_the_same_object():
    sharder = simulated(0, 2, cacheable=True)
    data = list(range(4))
    first = sharder.shard_data(data)
    assert sharder.shard_data(data) is first
    assert sharder.shard_data(list(range(4))) is not first
    sharder.process_index = 1
    assert sharder.shard_data(data) == [2, 3]
    data.append(4)
    data.append(5)
    assert sharder.shard_data(data) == [3, 4, 5]
    sharder.reset_cache()
    assert not sharder._cache


def test_the_cache_never_answers_for_a_reused_id():
    sharder = simulated(0, 2, cacheable=True)
    for i in range(200):
        assert sharder.shard_data([i, i, 0, 0]) == [i, i]
        gc.collect(0)
    assert len(sharder._cache) <= sharder_module.CACHED


def test_without_cacheable_nothing_is_kept_and_streams_never_are():
    sharder = sx.JaxProcessSharderModule()
    sharder.shard_data([1])
    assert not sharder._cache
    cached = simulated(0, 1, cacheable=True)
    stream = iter([1, 2])
    assert list(cached.shard_data(stream)) == [1, 2] and list(cached.shard_data(stream)) == []


# ---- copies and checkpoints -----------------------------------------------------------------------------------------


def used():
    sharder = sx.JaxProcessSharderModule(
        sx.JaxProcessSharderConfig(cacheable=True, sharding_rules=[("batch", "data")]),
        rngs=jax.random.key(3),
        name="one",
    )
    sharder.process_index, sharder.process_count = 1, 2
    data = np.arange(4)
    sharder.shard_data(data)
    sharder.shard_data(data)
    sharder.set_statistics({"mean": np.ones(2), "by": {"n": 3}})
    return sharder


def test_copy_keeps_everything_that_is_not_replaced():
    sharder = used()
    same = sharder.copy()
    assert same.config is sharder.config and same.rngs is sharder.rngs and same.name == "one"
    assert same.get_operation_stats() == sharder.get_operation_stats() == {"applied_count": 1, "skipped_count": 1}
    assert same.get_statistics()["by"] == {"n": 3} and same.shard_data([0, 1]) == [1]
    config = sx.JaxProcessSharderConfig(drop_remainder=False)
    other = sharder.copy(config=config, name="two", rngs="r")
    assert (other.config, other.name, other.rngs) == (config, "two", "r")
    assert other.get_statistics()["by"] == {"n": 3} and sharder.name == "one"


def test_copies_of_a_subclass_keep_what_it_added():
    class Counting(sx.JaxProcessSharderModule):
        def __init__(self, seen):
            super().__init__(sx.JaxProcessSharderConfig(precomputed_stats={"mean": np.zeros(2)}), name="counting")
            self.seen = seen

    sharder = Counting([1, 2])
    assert sharder.copy(name="other").seen is sharder.seen
    twin = sharder.clone()
    twin.seen.append(3)
    twin.config.precomputed_stats["mean"][:] = 1
    assert sharder.seen == [1, 2] and sharder.config.precomputed_stats["mean"].tolist() == [0, 0]
    assert type(twin) is Counting and sharder.clone().config == sharder.config
    with pytest.raises(sx.SharderError, match="of type int, not a JaxProcessSharderConfig"):
        sharder.copy(config=3)


def test_clone_shares_nothing_mutable():
    sharder = used()
    twin = sharder.clone()
    twin.set_statistics({"mean": 0})
    twin.shard_data([1, 2])
    twin.process_index = 0
    twin._cache.clear()
    assert sharder.get_statistics()["by"] == {"n": 3} and sharder.get_operation_stats()["applied_count"] == 1
    assert sharder.process_index == 1 and sharder._cache and twin._overrides is not sharder._overrides


def test_clone_and_state_carry_random_streams():
    nnx = pytest.importorskip("flax.nnx")
    sharder = sx.JaxProcessSharderModule(rngs=nnx.Rngs(0, params=1))
    twin = sharder.clone()
    state = sharder.get_state()
    drawn = [int(jax.random.bits(sharder.rngs.params())) for _ in range(2)]
    assert [int(jax.random.bits(twin.rngs.params())) for _ in range(2)] == drawn
    sharder.set_state(state)
    assert [int(jax.random.bits(sharder.rngs.params())) for _ in range(2)] == drawn
    with pytest.raises(sx.SharderStateError, match="other random streams"):
        sx.JaxProcessSharderModule(rngs=nnx.Rngs(0)).set_state(state)


def test_a_key_is_restored():
    sharder = sx.JaxProcessSharderModule(rngs=jax.random.key(1))
    other = sx.JaxProcessSharderModule(rngs=jax.random.key(2))
    other.set_state(sharder.get_state())
    assert jnp.array_equal(jax.random.bits(other.rngs), jax.random.bits(sharder.rngs))


def test_state_is_a_plain_dict_without_topology():
    state = used().get_state()
    assert type(state) is dict
    assert not [key for key in state if "process" in key or "device" in key]
    text = json.dumps(jax.tree.map(lambda x: x.tolist() if hasattr(x, "tolist") else x, state))
    fresh = sx.JaxProcessSharderModule()
    fresh.set_state(json.loads(text))
    assert fresh.get_operation_stats() == {"applied_count": 1, "skipped_count": 1}
    assert fresh.config.sharding_rules == (("batch", "data"),) and fresh.get_statistics()["by"] == {"n": 3}


def test_set_state_never_changes_its_argument_nor_a_shared_config():
    config = sx.JaxProcessSharderConfig()
    one, other = sx.JaxProcessSharderModule(config), sx.JaxProcessSharderModule(config)
    state = used().get_state()
    before = dict(state)
    one.set_state(state)
    assert state.keys() == before.keys() and all(state[key] is before[key] for key in state)
    assert config.sharding_rules is None and other.config is config and one.config.sharding_rules
    one.get_statistics()["by"]["n"] = 7
    assert state["statistics"]["by"] == {"n": 3}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"process_index": 0}, "process_index: is topology"),
        ({"typo": 1}, "typo: is not part"),
        ({"applied_count": -1}, "-1 is not a count"),
        ({"applied_count": True}, "True is not a count"),
        ({"statistics": 3}, "a int is not a dict"),
        ({"statistics_reset": 1}, "1 is not true or false"),
        ({"sharding_rules": [3]}, "3 is no pair"),
    ],
)
def test_set_state_is_atomic(change, message):
    sharder = used()
    before = sharder.get_state()
    with pytest.raises(sx.SharderError, match=message):
        sharder.set_state({**sx.JaxProcessSharderModule().get_state(), "skipped_count": 77, **change})
    after = sharder.get_state()
    assert {k: after[k] for k in ("applied_count", "skipped_count", "sharding_rules")} == {
        k: before[k] for k in ("applied_count", "skipped_count", "sharding_rules")
    }


def test_set_state_wants_a_whole_dict():
    with pytest.raises(TypeError, match="State must be a dict, got list"):
        sx.JaxProcessSharderModule().set_state([])
    with pytest.raises(ValueError, match=r"applied_count: is missing[\s\S]*statistics: is missing"):
        sx.JaxProcessSharderModule().set_state({"skipped_count": 1})


def test_random_stream_names():
    assert sx.JaxProcessSharderModule().requires_rng_streams() is None
    sx.JaxProcessSharderModule().ensure_rng_streams([])

    class Needy(sx.JaxProcessSharderModule):
        def requires_rng_streams(self):
            return ["noise", "params"]

    Needy().ensure_rng_streams(["params", "noise"])
    with pytest.raises(ValueError, match=r"'noise'[\s\S]*Available streams: \['params'\]"):
        Needy().ensure_rng_streams(["params"])


def test_repr():
    assert repr(sx.JaxProcessSharderModule(name="x")) == "JaxProcessSharderModule(name='x')"


# ---- specs, placing, transforms -------------------------------------------------------------------------------------

RULES = [("batch", "data"), ("hidden", "model"), ("feature", None), ("batch", "model")]


def with_rules():
    return sx.JaxProcessSharderModule(sx.JaxProcessSharderConfig(sharding_rules=RULES))


@pytest.mark.parametrize(
    "logical, spec",
    [
        (("batch", None, "feature"), P("data", None, None)),
        (("hidden", "feature"), P("model", None)),
        ((("batch", "hidden"), None), P(("data", "model"), None)),
        ((("batch", "feature"),), P("data")),
        (("data", "hidden"), P("data", "model")),
        (P("anything"), P("anything")),
        ("batch", P("data")),
        ((), P()),
        (None, P()),
    ],
)
def test_logical_names(logical, spec):
    assert tuple(with_rules().get_partition_spec(logical)) == tuple(spec)


def test_names_that_nothing_knows(mesh):
    with pytest.raises(sx.UnknownAxisError, match="'bacth' is unknown; did you mean 'batch'"):
        with_rules().get_partition_spec(("bacth", None))
    with pytest.raises(sx.UnknownAxisError, match="dim 1: 'modle'"):
        sx.JaxProcessSharderModule().get_named_sharding(mesh, ("data", "modle"))
    with pytest.raises(sx.SpecError, match="'data': shards dims 0, 1"):
        with_rules().get_partition_spec(("batch", "data"))
    with pytest.raises(sx.UnknownAxisError, match="'dta': is no mesh axis; did you mean 'data'"):
        with_rules().get_named_sharding(mesh, P("dta"))
    with pytest.raises(sx.UnknownAxisError, match="'dta': is no mesh axis; did you mean 'data'"):
        with_rules().shard(np.zeros(8), (mesh, P("dta")))


@pytest.mark.parametrize("logical", [3, {"x": "data"}, (3,), (("data", 3),)])
def test_what_is_no_name_is_an_error_and_not_none(logical):
    with pytest.raises(sx.SpecError, match="names"):
        with_rules().get_partition_spec(logical)


def test_without_rules_names_are_taken_as_they_are_and_a_mesh_in_force_is_asked(mesh):
    assert sx.JaxProcessSharderModule().get_partition_spec(("anything", None)) == P("anything", None)
    rules = sx.JaxProcessSharderConfig(sharding_rules=[("batch", "data")])
    with jax.set_mesh(mesh):
        assert sx.JaxProcessSharderModule(rules).get_partition_spec(("batch", "model")) == P("data", "model")


def test_named_sharding(mesh):
    wanted = NamedSharding(mesh, P("data", "model"))
    assert with_rules().get_named_sharding(mesh, ("batch", "hidden")) == wanted
    with pytest.raises(sx.NoMeshError, match="a named sharding needs a mesh"):
        with_rules().get_named_sharding(None, ("batch", "hidden"))
    with jax.set_mesh(mesh):
        assert with_rules().get_named_sharding(None, ("batch", "hidden")) == wanted
        assert with_rules().parallel_transform(np.ones(8), lambda x: x + 1, None, ("batch",)).tolist() == [2] * 8


def test_shard_places_reshards_and_leaves_text_alone(mesh):
    sharding = NamedSharding(mesh, P("data"))
    batch = {
        "host": np.arange(8.0),
        "jax": jnp.ones((8, 2)),
        "text": np.array(list("abcdefgh")),
        "names": ["a", "b"],
        "id": 7,
        "half": np.zeros(8, jnp.bfloat16),
        "none": None,
    }
    out = sx.JaxProcessSharderModule().shard(batch, sharding)
    for key in ("host", "jax", "half"):
        assert out[key].sharding.is_equivalent_to(sharding, out[key].ndim), key
    assert out["text"] is batch["text"] and out["names"] == ["a", "b"] and out["none"] is None
    assert isinstance(out["id"], jax.Array) and out["id"].sharding.is_fully_replicated
    assert np.array_equal(out["host"], batch["host"]) and set(out) == set(batch)


def test_shard_takes_a_tree_of_shardings_and_other_kinds(mesh):
    one = jax.sharding.SingleDeviceSharding(jax.devices()[2])
    out = sx.JaxProcessSharderModule().shard(
        {"a": np.zeros(4), "b": np.ones(4)}, {"a": one, "b": NamedSharding(mesh, P())}
    )
    assert out["a"].devices() == {jax.devices()[2]} and out["b"].sharding.is_fully_replicated
    with pytest.raises(sx.FeedError, match="not a sharding: str"):
        sx.JaxProcessSharderModule().shard({"a": np.zeros(4)}, "data")


def test_shard_names_every_leaf_that_does_not_divide(mesh):
    with pytest.raises(sx.SpecError, match=r"x: dim 0: 6 does not divide by 'data'[\s\S]*y: dim 0: 7"):
        batch = {"x": np.zeros(6), "y": np.zeros((7, 2)), "z": np.zeros(8)}
        sx.JaxProcessSharderModule().shard(batch, NamedSharding(mesh, P("data")))


def test_shard_counts():
    sharder = sx.JaxProcessSharderModule()
    sharder.shard(np.zeros(8), NamedSharding(sx.make_mesh("d=8"), P("d")))
    assert sharder.get_operation_stats()["applied_count"] == 1


def test_parallel_transform_defaults_to_its_input_spec_and_P_means_replicated(mesh):
    sharder = with_rules()
    x = np.arange(16.0).reshape(8, 2)
    out = sharder.parallel_transform(x, lambda b: b * 2, mesh, ("batch", "feature"))
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2) and np.array_equal(out, x * 2)
    total = sharder.parallel_transform(x, lambda b: jax.lax.psum(b.sum(), "data"), mesh, ("batch", None), P())
    assert total.sharding.is_fully_replicated and float(total) == x.sum()
    assert sharder.get_operation_stats()["applied_count"] == 2


def test_parallel_transform_is_stateful(mesh):
    """The cells that a transform closes over are read and written, whatever framework they are of."""
    nnx = pytest.importorskip("flax.nnx")

    class Centre(nnx.Module):
        def __init__(self):
            self.mean, self.calls = nnx.BatchStat(jnp.zeros(2)), nnx.Variable(jnp.zeros((), jnp.int32))

        def __call__(self, x):
            self.mean[...] = jax.lax.pmean(x.mean(0), "data")
            self.calls[...] += 1
            return x - self.mean[...]

    module, total, sharder = Centre(), sx.State(jnp.zeros(())), sx.JaxProcessSharderModule()
    x = np.arange(16, dtype=np.float32).reshape(8, 2)

    def add(block):
        total.value += jax.lax.psum(block.sum(), "data")
        return block

    def called(block):
        return module(block)

    for transform in (module, called, module.__call__):
        out = sharder.parallel_transform(x, transform, mesh, P("data"))
        assert np.allclose(out, x - x.mean(0))
    assert int(module.calls[...]) == 3 and np.allclose(module.mean[...], x.mean(0))
    for _ in range(2):
        sharder.parallel_transform(x, add, mesh, P("data"))
    assert float(total.value) == 2 * x.sum()


def test_parallel_transform_takes_what_does_not_hash(mesh):
    class Twice:
        __hash__ = None
        traces = 0

        def __call__(self, block):
            Twice.traces += 1
            return block * 2

        def again(self, block):
            return self(block)

    twice, sharder = Twice(), sx.JaxProcessSharderModule()
    for transform in (lambda: twice, lambda: twice.again):  # a method is a new object whenever it is looked up
        Twice.traces = 0
        for _ in range(3):
            assert float(sharder.parallel_transform(np.ones(8), transform(), mesh, P("data")).sum()) == 16
        assert Twice.traces == 1


def test_parallel_transform_compiles_once(mesh):
    traces = []

    def double(batch):
        traces.append(1)
        return jax.tree.map(lambda x: x * 2, batch)

    sharder = with_rules()
    for _ in range(5):
        sharder.parallel_transform({"x": np.ones((8, 2))}, double, mesh, ("batch",))
    first = len(traces)
    for _ in range(5):
        sharder.parallel_transform({"x": np.ones((8, 2))}, double, mesh, ("batch",))
    assert len(traces) == first
