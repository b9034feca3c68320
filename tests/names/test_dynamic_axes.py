"""Axes with their mode, as class or instance."""

import dataclasses
import pickle
from typing import NamedTuple

import pytest
from jax.sharding import PartitionSpec as P

import shardax as sx

# what each ready one lays out, with a default PartitionAxis, while training
READY = [
    (sx.HiddenStateSharding, 1, P(("fsdp", "dp"), "sp", "tp")),
    (sx.AttnQSharding, 1, P(("fsdp", "dp"), "sp", "tp", None)),
    (sx.AttnKVSharding, 1, P(("fsdp", "dp"), "sp", "tp", None)),
    (sx.RowWise, sx.MODE_TRAIN, P("tp", ("fsdp", "sp"))),
    (sx.SRowWise, sx.MODE_TRAIN, P("tp")),
    (sx.ColumnWise, sx.MODE_TRAIN, P(("fsdp", "sp"), "tp")),
    (sx.SColumnWise, sx.MODE_TRAIN, P(("fsdp", "sp"))),
    (sx.Replicated, sx.MODE_TRAIN, P(None)),
    (sx.ExpertColumnWise, sx.MODE_TRAIN, P("ep", "fsdp", "tp")),
    (sx.ExpertRowWise, sx.MODE_TRAIN, P("ep", "tp", "fsdp")),
    (sx.ExpertColumnWiseAlt, sx.MODE_TRAIN, P("ep", ("fsdp", "sp"), "tp")),
    (sx.ExpertRowWiseAlt, sx.MODE_TRAIN, P("ep", "tp", ("fsdp", "sp"))),
    (sx.UnifiedExpertColumnWise, sx.MODE_TRAIN, P(("fsdp", "sp", "ep"), None, "tp")),
    (sx.UnifiedExpertRowWise, sx.MODE_TRAIN, P(("fsdp", "sp", "ep"), "tp", None)),
    (sx.ExpertActivations, sx.MODE_TRAIN, P("dp", "sp", "ep", "tp")),
    (sx.ExpertActivationsAlt, sx.MODE_TRAIN, P("dp", "sp", ("tp", "fsdp"))),
    (sx.ExpertTensorParallel, sx.MODE_TRAIN, P("tp", None, None)),
]


@pytest.mark.parametrize(("ready", "mode", "spec"), READY, ids=lambda value: getattr(value, "__name__", ""))
def test_ready_ones_as_class_and_as_instance(ready, mode, spec):
    manager = sx.PartitionManager(sx.PartitionAxis())
    shape = (8,) * len(spec)
    for dynamic in (ready, ready(), sx.DynamicShardingAxes(ready.axes, ready.mode)):
        assert dynamic.mode == mode
        assert manager.resolve(dynamic, shape=shape) == spec
        assert manager.resolve(dynamic_axes=dynamic, shape=shape) == spec


def test_an_integer_mode_is_the_dimension_whose_size_1_means_decode():
    manager = sx.PartitionManager(sx.PartitionAxis(decode_query_sequence_axis="dp", decode_batch_axis="fsdp"))
    assert manager.resolve(sx.HiddenStateSharding, shape=(2, 1, 32)) == P("fsdp", "dp", "tp")
    assert manager.resolve(sx.HiddenStateSharding, shape=(2, 8, 32)) == P(("fsdp", "dp"), "sp", "tp")
    assert manager.resolve([sx.BATCH], mode=-1, shape=(2, 8, 1)) == P("fsdp")


def test_an_integer_mode_needs_a_shape_that_has_the_dimension():
    manager = sx.PartitionManager(sx.PartitionAxis())
    with pytest.raises(ValueError, match="shape should be provided"):
        manager.resolve(sx.HiddenStateSharding)
    with pytest.raises(sx.SpecError, match=r"dimension 1.*shape \(4,\) has 1 dimension"):
        manager.resolve(sx.HiddenStateSharding, shape=(4,))


def test_own_subclasses_and_instances():
    class Mine(sx.DynamicShardingAxes):
        axes = [sx.BATCH, [sx.FSDP, sx.SP]]
        mode = sx.MODE_DECODE

    assert Mine.axes == Mine().axes == (sx.BATCH, (sx.FSDP, sx.SP))
    assert Mine(mode=1).mode == 1 and Mine(axes=[sx.HEAD]).axes == (sx.HEAD,)
    axes, mode = Mine()
    assert (axes, mode) == (Mine.axes, sx.MODE_DECODE)

    class MineInTraining(Mine):
        mode = sx.MODE_TRAIN

    assert MineInTraining().axes == Mine.axes and MineInTraining().mode == sx.MODE_TRAIN


def test_a_frozen_value():
    one = sx.DynamicShardingAxes([sx.BATCH], sx.MODE_TRAIN)
    assert one == sx.DynamicShardingAxes(axes=(sx.BATCH,), mode=sx.MODE_TRAIN) != sx.DynamicShardingAxes([sx.BATCH], 1)
    assert len({one, sx.DynamicShardingAxes((sx.BATCH,), sx.MODE_TRAIN)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.mode = 1
    for value in (one, sx.ColumnWise()):
        assert pickle.loads(pickle.dumps(value)) == value
    assert pickle.loads(pickle.dumps(sx.ColumnWise)) is sx.ColumnWise


def test_mistakes_are_found_when_it_is_made():
    with pytest.raises(TypeError, match="needs axes and a mode"):
        sx.DynamicShardingAxes([sx.BATCH])
    with pytest.raises(sx.AxisRuleError, match="Unknown mode 'train'"):
        sx.DynamicShardingAxes([sx.BATCH], "train")
    with pytest.raises(TypeError, match="one axis per dimension"):

        class Wrong(sx.DynamicShardingAxes):
            axes = sx.BATCH
            mode = 1

    with pytest.raises(ValueError, match="True"):
        sx.DynamicShardingAxes([sx.BATCH], True)


def test_named_tuples_with_axes_and_mode_are_welcome():
    class Theirs(NamedTuple):
        axes: list
        mode: object

    manager = sx.PartitionManager(sx.PartitionAxis())
    assert manager.resolve(Theirs([sx.BATCH], sx.MODE_TRAIN)) == P(("fsdp", "dp"))
