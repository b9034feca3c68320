"""`barrier` and `agree` in real processes: who is absent, who is odd, and in which field."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.cluster.fields import digest, fields_of


@dataclasses.dataclass(frozen=True)
class Settings:
    batch: int
    rules: tuple[tuple[str, P], ...]


def odd(rank, usual, other):
    return other if jax.process_index() == rank else usual


@pytest.mark.processes(4)
def test_a_barrier_names_the_absent_and_can_be_used_again():
    sx.barrier("begin")
    if jax.process_index() == 2:
        time.sleep(3)
        with pytest.raises(sx.BarrierError, match="rank 2: came too late: the others had given up") as caught:
            sx.barrier("epoch")
    else:
        with pytest.raises(sx.BarrierError) as caught:
            sx.barrier("epoch", timeout=1.0)
        text = str(caught.value)
        assert text.startswith("barrier 'epoch' was not reached by all 4 processes within 1 s")
        assert "rank 2: is absent; it was last at barrier 'begin'" in text
        assert "here: ranks 0, 1, 3" in text
    assert caught.value.ranks == (2,)
    for _ in range(3):
        sx.barrier("epoch")


def give_up():
    if jax.process_index() == 0:
        with pytest.raises(sx.BarrierError):
            sx.barrier("several jobs", timeout=0.5)
    sx.barrier("given up")


def meet_in_another_job():
    sx.barrier("several jobs", timeout=10)
    if jax.process_index() != 2:
        with pytest.raises(sx.BarrierError) as caught:
            sx.barrier("several jobs", timeout=0.5)
        assert caught.value.ranks == (2,), caught.value
    sx.barrier("met")


def test_a_barrier_of_another_job_counts_from_zero(process_pool):
    """Processes that were in an earlier job, as after an elastic restart, meet those that were not."""
    process_pool.run(give_up, processes=2)
    process_pool.run(meet_in_another_job, processes=3)


@pytest.mark.parametrize("name, timeout", [("", 1), (3, 1), ("x", 0), ("x", -1), ("x", "1"), ("x", None), ("x", 1e9)])
def test_a_barrier_has_a_name_and_an_end(name, timeout):
    with pytest.raises(sx.ClusterError, match="is named by a text|is no time to wait"):
        sx.barrier(name, timeout)
    with pytest.raises(sx.ClusterError):
        sx.agree(name, 1, timeout)


@pytest.mark.processes(3, devices=(2, 2, 1))
def test_a_barrier_works_with_uneven_devices():
    sx.barrier("uneven")


@pytest.mark.processes(4)
@pytest.mark.parametrize(
    ("usual", "other", "says"),
    [
        ({"batch": 32, "seed": 0}, {"batch": 64, "seed": 0}, "rank 3, batch: 64, but 32 on ranks 0, 1, 2"),
        ({"lr": {"peak": 0.1}}, {"lr": {}}, "rank 3, lr/peak: absent, but 0.1 on ranks 0, 1, 2"),
        ([1, 2, 3], [1, 2], "rank 3, [2]: absent, but 3 on ranks 0, 1, 2"),
        ("a\nb\nc", "a\nX\nc", "rank 3, line 2: X, but b on ranks 0, 1, 2"),
        (Settings(8, (("w", P("dp")),)), Settings(8, (("w", P("tp")),)), "rank 3, rules[0][1]: P"),
        (np.arange(3), np.arange(4), "rank 3, value: int64[4] "),
        (AbstractMesh((2, 4), ("dp", "tp")), AbstractMesh((4, 2), ("dp", "tp")), "rank 3, dp: 4, but 2 on ranks 0, 1, 2"),
        (sx.Rules([("w", P("dp"))]), sx.Rules([("w", P("tp"))]), "rank 3, "),
    ],
    ids=["dict", "absent field", "list", "text", "dataclass", "array", "mesh", "rules"],
)  # fmt: skip
def test_agree_shows_the_first_differing_field_and_the_odd_rank(usual, other, says):
    sx.agree("value", usual)
    with pytest.raises(sx.DisagreementError) as caught:
        sx.agree("value", odd(3, usual, other))
    assert str(caught.value).startswith("the processes disagree on 'value': rank 3")
    assert says in str(caught.value), str(caught.value)
    assert caught.value.ranks == (3,)
    sx.agree("value", usual)


@pytest.mark.processes(4)
def test_agree_catches_another_program():
    """HOSTS section 3: the same shapes and other arithmetic on one rank is a silent wrong result."""
    usual = jax.jit(lambda x: (x * 2).sum())
    sx.agree("step", usual.lower(jnp.ones((4, 4))))
    other = jax.jit(lambda x: (x + 2).sum())
    with pytest.raises(sx.DisagreementError) as caught:
        sx.agree("step", odd(1, usual, other).lower(jnp.ones((4, 4))))
    assert "stablehlo.add" in str(caught.value)
    assert "stablehlo.multiply" in str(caught.value)
    assert caught.value.ranks == (1,)


@pytest.mark.processes(4)
def test_agree_catches_another_layout_and_names_the_leaf():
    tree = {
        "mlp": {"kernel": jax.ShapeDtypeStruct((8, 8), jnp.float32), "bias": jax.ShapeDtypeStruct((8,), jnp.float32)}
    }
    mesh = AbstractMesh((2, 2), ("fsdp", "tp"))
    usual, other = (sx.layout(tree, sx.Rules([("kernel", spec), (".*", P())]), mesh) for spec in (P("fsdp"), P("tp")))
    sx.agree("layout", usual)
    with pytest.raises(sx.DisagreementError, match="mlp") as caught:
        sx.agree("layout", odd(2, usual, other))
    assert caught.value.ranks == (2,)
    assert "rank 2" in str(caught.value)


@pytest.mark.processes(4)
def test_agree_with_many_differences_and_three_opinions():
    value = {f"field {i}": jax.process_index() // 2 for i in range(2000)} | {"who": min(jax.process_index(), 2)}
    with pytest.raises(sx.DisagreementError) as caught:
        sx.agree("many", value)
    assert caught.value.ranks == (0, 1)  # two say the same, and two each something else
    assert "the first of 2,001 differing fields" in str(caught.value)
    assert len(str(caught.value).splitlines()) < 15


@pytest.mark.processes(2)
def test_agree_says_who_has_not_asked():
    if jax.process_index() == 0:
        with pytest.raises(sx.BarrierError, match="rank 1: is absent"):
            sx.agree("lonely", {"a": 1}, timeout=1)
    sx.barrier("after")


@pytest.mark.parametrize(
    ("value", "fields"),
    [
        ({}, {"": "no keys"}),
        ([], {"": "no items"}),
        ({"b": 1, "a": (True, None)}, {"a[0]": "True", "a[1]": "None", "b": "1"}),
        ({"s": {"z", "a"}}, {"s": "{a, z}"}),
        (jnp.float32(1.5), {"": "float32[] "}),
        (jnp.dtype("bfloat16"), {"": "dtype(bfloat16)"}),
    ],
)
def test_fields(value, fields):
    found = fields_of(value)
    assert list(found) == list(fields)
    assert all(found[name].startswith(text) for name, text in fields.items())


def test_fields_with_and_without_content_do_not_collide():
    values = [{"a": "bc"}, {"ab": "c"}, {"a": "b", "c": ""}, [], {}, "", {"a": []}, {"a": {}}]
    assert len({digest(fields_of(value)) for value in values}) == len(values)


def test_a_memory_address_is_refused():
    with pytest.raises(TypeError, match=r"object at 'model' shows its memory address"):
        sx.agree("thing", {"model": object()})
