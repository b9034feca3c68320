"""`check`: what travels, by sharding types alone; held against the partitioner, against arithmetic, and against JAX."""

import json
import os
import subprocess
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tests.proving.compiled import ledger_of
from tests.proving.programs import PROGRAMS

import shardax as sx
from shardax.errors import MeshError, NoMeshError, ProofError
from shardax.proving.moves import moves

F32, BF16, I32 = jnp.float32, jnp.bfloat16, jnp.int32


def shape(*sizes, dtype=F32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def rows(check):
    return [(site.op, site.axes, site.count, site.payload_bytes) for site in check if site.op]


def causes(check):
    return {site.cause for site in check}


# ---- against the partitioner ----------------------------------------------------------------------------------------


def totals(found):
    counted = Counter()
    for row in found:
        counted[row.op, row.axes, row.payload_bytes] += row.count
    return counted


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_the_partitioner_does_the_same(name):
    """Kinds, axes, bytes and counts, to the last; one program is ambiguous, and said to be."""
    program = PROGRAMS[name]
    mesh = program.mesh(jax.devices()[:8])
    fn, args = program.build(mesh)
    found = sx.check(fn, *args, mesh=sx.MeshSpec.of(mesh))
    if name == "microbatch_blocks":  # a reshape that cuts across the shards: XLA pads and gathers in its own way
        assert [site.operation for site in found.ambiguous] == ["reshape"] and not found.ok
        return
    assert totals(site for site in found if site.op) == totals(ledger_of("partitioner", name))
    assert found.ok and not found.unknown
    assert found.ledger.wire_bytes == ledger_of("partitioner", name).wire_bytes
    assert {site.file.rpartition("/")[2] for site in found} <= {"programs.py"}


# ---- one operation after the other ----------------------------------------------------------------------------------

MESH = "a=4,b=2"
X = shape(64, 32)
INDICES = shape(16, dtype=I32)
OPERATIONS = [
    # name, function, arguments, specs, [(kind, axes, bytes)], causes
    ("elementwise", lambda x, y: x + y, (X, X), (P("a"), P("a")), [], set()),
    ("slicing is free", lambda x, y: x + y, (X, X), (P("a"), P()), [], set()),
    ("both are cut", lambda x, y: x + y, (X, X), (P("a"), P(None, "b")), [], set()),
    ("one must turn", lambda x, y: x + y, (X, X), (P("a"), P(None, "a")), [("all-to-all", ("a",), 2048)], {"ambiguous"}),
    ("a scalar", lambda x: x * 2 + jnp.float32(1), (X,), (P("a"),), [], set()),
    ("sum", lambda x: x.sum(), (X,), (P("a", "b"),), [("all-reduce", ("b",), 4), ("all-reduce", ("a",), 4)], {"implied"}),
    ("sum of whole dims", lambda x: x.sum(1), (X,), (P("a"),), [], set()),
    ("max", lambda x: x.max(0), (X,), (P("a", "b"),), [("all-reduce", ("a",), 64)], {"implied"}),
    ("softmax", jax.nn.softmax, (X,), (P("a"),), [], set()),
    ("argmax", lambda x: x.argmax(1), (X,), (P(None, "b"),), [("all-gather", ("b",), 512)] * 2, {"implied"}),
    ("matmul", lambda x, y: x @ y, (X, shape(32, 8)), (P("a"), P(None, "b")), [], set()),
    ("partial sums", lambda x, y: x @ y, (X, shape(32, 8)), (P("a", "b"), P("b")),
     [("all-reduce", ("b",), 512)], {"implied"}),
    ("one side whole", lambda x, y: x @ y, (X, shape(32, 8)), (P("a"), P("b")), [("all-reduce", ("b",), 512)], {"implied"}),
    ("stored weights", lambda x, y: jnp.tanh(x) @ y, (X, shape(32, 8)), (P("a"), P(None, "a")),
     [("all-gather", ("a",), 1024)], {"implied"}),
    ("two equals", lambda x, y: x @ y, (X, shape(32, 8)), (P("a"), P(None, "a")),
     [("all-gather", ("a",), 1024)], {"ambiguous"}),
    ("batched", lambda x, y: jnp.einsum("bik,bkj->bij", x, y), (shape(8, 4, 4), shape(8, 4, 4)), (P("a"), P()), [], set()),
    ("transpose", lambda x: x.T, (X,), (P("a", "b"),), [], set()),
    ("reshape merges", lambda x: x.reshape(-1), (X,), (P("a"),), [], set()),
    ("reshape across", lambda x: x.reshape(-1), (X,), (P("a", "b"),), [("all-gather", ("b",), 2048)], {"ambiguous"}),
    ("a slice", lambda x: x[:32], (X,), (P("a"),), [("collective-permute", ("a",), 1024)], {"ambiguous"}),
    ("every other row", lambda x: x[::2], (X,), (P("a"),), [], set()),
    ("one row", lambda x: lax.slice(x, (0, 0), (1, 32)), (X,), (P("a"),), [("all-gather", ("a",), 8192)], {"ambiguous"}),
    ("a dynamic slice", lambda x, i: lax.dynamic_slice_in_dim(x, i, 32), (X, shape(dtype=I32)), (P("a"), P()),
     [("all-gather", ("a",), 8192)], {"implied"}),
    ("reverse", lambda x: x[::-1], (X,), (P("a"),), [("collective-permute", ("a",), 2048)], {"implied"}),
    ("pad", lambda x: jnp.pad(x, ((0, 64), (0, 0))), (X,), (P("a"),), [("collective-permute", ("a",), 4096)], {"ambiguous"}),
    ("concatenate", lambda x, y: jnp.concatenate([x, y], 1), (X, X), (P("a"), P("a")), [], set()),
    ("concatenate along", lambda x, y: jnp.concatenate([x, y]), (X, X), (P("a"), P()),
     [("all-gather", ("a",), 8192)], {"ambiguous"}),
    ("sort", lambda x: jnp.sort(x, 0), (X,), (P("a", "b"),), [("all-gather", ("a",), 4096)], {"ambiguous"}),
    ("cumsum", lambda x: jnp.cumsum(x, 1), (X,), (P("a", "b"),), [("all-gather", ("b",), 2048)], {"ambiguous"}),
    ("look-up of sharded rows", lambda t, i: t[i], (X, INDICES), (P("a"), P()), [("all-reduce", ("a",), 2048)], {"implied"}),
    ("sharded look-up", lambda t, i: t[i], (X, INDICES), (P(), P("a")), [], set()),
    ("look-up of columns", lambda t, i: t[i], (X, INDICES), (P(None, "b"), P("a")), [], set()),
    ("both use one axis", lambda t, i: t[i], (X, INDICES), (P("b", "a"), P("a")),
     [("all-gather", ("a",), 4096), ("all-reduce", ("b",), 512)], {"ambiguous"}),
    ("rows are added", lambda t, i, u: t.at[i].add(u), (X, INDICES, shape(16, 32)), (P(), P("a"), P("a")),
     [("all-reduce", ("a",), 8192)], {"implied"}),
    ("rows are set", lambda t, i, u: t.at[i].set(u), (X, INDICES, shape(16, 32)), (P(), P(), P("a")),
     [("all-gather", ("a",), 2048)], {"ambiguous"}),
    ("a part is written", lambda x, y: lax.dynamic_update_slice(x, y, (0, 0)), (X, shape(1, 32)), (P(None, "b"), P()), [], set()),
    ("a part lies apart", lambda x, y: lax.dynamic_update_slice(x, y, (0, 0)), (X, shape(8, 32)), (P(None, "b"), P("a")),
     [("all-gather", ("a",), 1024)], {"ambiguous"}),
    ("asked", lambda x: lax.with_sharding_constraint(x, P(None, "a")), (X,), (P("a"),), [("all-to-all", ("a",), 2048)], {"asked"}),
    ("left open", lambda x: lax.with_sharding_constraint(x, P(P.UNCONSTRAINED, "b")), (X,), (P("a"),), [], set()),
    ("swapped axes", lambda x: lax.with_sharding_constraint(x, P(("b", "a"))), (X,), (P(("a", "b")),),
     [("collective-permute", ("a", "b"), 1024)], {"asked"}),
    ("whole again", lambda x: lax.with_sharding_constraint(x * 2, P()), (X,), (P("a", "b"),),
     [("all-gather", ("b",), 2048), ("all-gather", ("a",), 8192)], {"asked"}),
    ("fft", jnp.fft.fft, (shape(64, 32, dtype=jnp.complex64),), (P(None, "a"),), [("all-gather", ("a",), 16384)], {"implied"}),
    ("filters in parts", lambda x, k: lax.conv(x, k, (1, 1), "SAME"), (shape(8, 4, 16, 16), shape(4, 4, 3, 3)),
     (P("a", "b"), P(None, "b")), [("all-reduce", ("b",), 8192)], {"implied"}),
    ("gradient of filters", lambda x, k: jax.grad(lambda k: lax.conv(x, k, (1, 1), "SAME").sum())(k),
     (shape(8, 3, 16, 16), shape(4, 3, 3, 3)), (P("a"), P()), [("all-reduce", ("a",), 432)], {"implied"}),
    ("an image in parts", lambda x, k: lax.conv(x, k, (1, 1), "VALID"), (shape(8, 4, 16, 16), shape(4, 4, 3, 3)),
     (P(None, None, "a"), P()), [("all-gather", ("a",), 32768)], {"ambiguous"}),
    ("an image in parts, its edges", lambda x, k: lax.conv(x, k, (1, 1), "SAME"),
     (shape(8, 4, 16, 16), shape(4, 4, 3, 3)), (P(None, None, "a", "b"), P()),
     [("collective-permute", ("a",), 1024)] * 2 + [("collective-permute", ("b",), 8 * 4 * (4 + 2) * 4)] * 2, {"implied"}),
    ("strides", lambda x, k: lax.conv(x, k, (2, 2), "SAME"), (shape(8, 4, 16, 16), shape(4, 4, 3, 3)),
     (P(None, None, "a"), P()), [("collective-permute", ("a",), 8 * 4 * 16 * 4)], {"implied"}),
    ("pooling", lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 1), (2, 1), "VALID"), (X,), (P("a"),), [], set()),
    ("pooling over edges", lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (3, 1), (1, 1), "SAME"), (X,), (P("a"),),
     [("collective-permute", ("a",), 128)] * 2, {"implied"}),
    ("depthwise", lambda x, k: lax.conv_general_dilated(x, k, (1,), "SAME", feature_group_count=8),
     (shape(4, 8, 32), shape(8, 1, 3)), (P("b", "a"), P("a")), [], set()),
    ("packed numbers", lambda x: lax.with_sharding_constraint(x, P()), (shape(64, 32, dtype=jnp.int4),), (P("a"),),
     [("all-gather", ("a",), 1024)], {"asked"}),
    ("convolution", lambda x, k: lax.conv(x, k, (1, 1), "SAME"), (shape(8, 3, 16, 16), shape(4, 3, 3, 3)), (P("a"), P()), [], set()),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fn", "args", "specs", "travels", "why"), [case[1:] for case in OPERATIONS], ids=[case[0] for case in OPERATIONS]
)
def test_an_operation(fn, args, specs, travels, why):
    found = sx.check(fn, *args, mesh=MESH, in_specs=specs)
    assert [(op, axes, size) for op, axes, _, size in rows(found)] == travels
    assert causes(found) == why
    assert found.ok == ("ambiguous" not in why)


def test_the_partitioner_agrees_where_nothing_is_ambiguous():
    """The operations of the table that have one way to be done, compiled in one program."""
    cases = [case for case in OPERATIONS if case[5] and "ambiguous" not in case[5]]
    assert len(cases) > 14
    for name, fn, args, specs, travels, _ in cases:
        found = sx.check(fn, *args, mesh=MESH, in_specs=specs)
        out = [leaf.spec for leaf in found.outputs]
        proof = sx.prove(fn, *args, mesh=MESH, in_specs=specs, out_specs=out[0])
        assert [(row.op, row.axes, row.payload_bytes) for row in proof.ledger] == travels, name


# ---- control flow ---------------------------------------------------------------------------------------------------


def one_site(check):
    (site,) = check
    return site.op, site.axes, site.count, site.payload_bytes, site.phase


def test_what_a_loop_does_counts_as_often_as_it_turns():
    def step(x, w):
        return lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, w)[0]

    found = sx.check(step, shape(64, 32), shape(5, 32, 32), mesh=MESH, in_specs=(P("a"), P(None, "a")))
    assert one_site(found) == ("all-gather", ("a",), 5, 32 * 32 * 4, "forward")
    assert found.sites[0].path == "w" and found.sites[0].function.endswith("<lambda>")
    assert found.outputs[0].spec == P("a", None)


def test_loops_in_loops_multiply():
    def step(x, w):
        def outer(c, _):
            return lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ w), c), None

        return lax.scan(outer, x, None, length=4)[0]

    found = sx.check(step, shape(8, 32), shape(32, 32), mesh=MESH, in_specs=(P(), P("a")))
    assert one_site(found) == ("all-reduce", ("a",), 12, 8 * 32 * 4, "forward")


def test_what_a_loop_carries_is_settled_before_it_is_counted():
    """The carry starts whole, and is as the body leaves it from the first turn on: nothing is gathered in between."""

    def step(x, w):
        return lax.scan(lambda c, _: (c + x @ w, c.sum()), jnp.zeros((64, 32)), None, length=6)

    found = sx.check(step, shape(64, 32), shape(32, 32), mesh=MESH, in_specs=(P("a"), P(None, "b")))
    assert [row[:3] for row in rows(found)] == [("all-reduce", ("b",), 6), ("all-reduce", ("a",), 6)]
    assert [leaf.spec for leaf in found.outputs] == [P("a", "b"), P(None)]


def test_a_carry_that_changes_its_layout_travels_in_every_turn():
    def step(x):
        return lax.scan(lambda c, _: (lax.with_sharding_constraint(c, P(None, "a")), None), x, None, length=7)[0]

    found = sx.check(step, shape(64, 32), mesh=MESH, in_specs=P("a"))
    assert rows(found) == [("all-to-all", ("a",), 7, 2048), ("all-to-all", ("a",), 7, 2048)]
    assert "comes back in another layout" in found.sites[1].why


def test_a_scan_along_a_sharded_dimension_gathers_it():
    found = sx.check(lambda x: lax.scan(lambda c, r: (c + r, None), jnp.zeros(32), x)[0], X, mesh=MESH, in_specs=P("a"))
    assert one_site(found) == ("all-gather", ("a",), 1, 64 * 32 * 4, "forward")


def test_a_loop_without_an_end_is_said_to_be_one():
    def step(x):
        return lax.while_loop(lambda c: c.sum() < 9, lambda c: c + c.max(), x)

    found = sx.check(step, X, mesh=MESH, in_specs=P("a"))
    assert {site.note for site in found} == {"in a loop: once for every turn"}
    assert rows(found) == [("all-reduce", ("a",), 1, 4), ("all-reduce", ("a",), 1, 4)]
    assert "once for every turn" in found.table().rows[0][-1]


def test_branches_are_walked_all():
    def step(x, flag):
        return lax.cond(flag, lambda x: x.sum(0), lambda x: x.max(0) * 2, x)

    found = sx.check(step, X, shape(dtype=jnp.bool_), mesh=MESH, in_specs=(P("a"), P()))
    assert rows(found) == [("all-reduce", ("a",), 1, 128)] * 2
    assert {site.note for site in found} == {"in a branch: at most this often"}


def test_gradients_through_remat_and_custom_rules():
    @jax.custom_vjp
    def double(x):
        return x * 2

    double.defvjp(lambda x: (x * 2, None), lambda _, ct: (ct * 2,))

    @jax.checkpoint
    def layer(x, w):
        return double(jax.nn.relu(jnp.tanh(x) @ w))

    def step(w, x):
        return jax.grad(lambda w: layer(x, w).sum())(w)

    found = sx.check(step, shape(32, 32), X, mesh=MESH, in_specs=(P("a"), P("a")))
    assert sorted((site.op, site.phase) for site in found) == [("all-gather", "backward"), ("all-reduce", "backward")]
    assert {site.path for site in found if site.op == "all-gather"} == {"w"}


def test_what_is_gathered_once_is_not_gathered_again():
    def step(x, w):
        return jnp.tanh(x) @ w + jnp.sin(x) @ w

    assert len(sx.check(step, X, shape(32, 32), mesh=MESH, in_specs=(P("a"), P("a")))) == 1


def test_dead_code_sends_nothing():
    def step(x):
        _ = x.sum()
        return x * 2

    assert rows(sx.check(step, X, mesh=MESH, in_specs=P("a"))) == []


# ---- a program's own collectives and shardings ----------------------------------------------------------------------


def test_collectives_in_shard_map_with_axes_left_to_the_compiler():
    def step(x, w):
        def local(x):
            return lax.psum(x, "a") @ w

        return jax.shard_map(local, in_specs=P("a"), out_specs=P(), axis_names={"a"})(x)

    found = sx.check(step, X, shape(32, 32), mesh=MESH, in_specs=(P("a"), P("b")))
    assert rows(found) == [("all-reduce", ("a",), 1, 16 * 32 * 4), ("all-reduce", ("b",), 1, 16 * 32 * 4)]
    assert [site.cause for site in found] == ["asked", "implied"]


def test_arguments_are_brought_to_a_shard_map():
    def step(x):
        return jax.shard_map(lambda x: x * 2, in_specs=P(None, "a"), out_specs=P(None, "a"))(x)

    found = sx.check(step, X, mesh=MESH, in_specs=P("a"))
    assert [(site.op, site.operation, site.why) for site in found] == [("all-to-all", "shard_map", "its in_specs")]


def test_a_jit_inside_asks_for_its_own():
    mesh = sx.make_mesh(MESH)
    inner = jax.jit(lambda x: x * 2, in_shardings=NamedSharding(mesh, P()), out_shardings=NamedSharding(mesh, P("a")))
    found = sx.check(lambda x: inner(x) + 1, X, mesh=MESH, in_specs=P("b"))
    assert [(site.op, site.axes, site.why) for site in found] == [("all-gather", ("b",), "its in_shardings")]


def test_results_are_brought_where_they_are_asked_for():
    found = sx.check(lambda x: {"y": x * 2}, X, mesh=MESH, in_specs=P("a"), out_specs={"y": P()})
    (site,) = found
    assert (site.op, site.operation, site.path, site.cause) == ("all-gather", "result", "result['y']", "asked")
    assert found.outputs[0].spec == P(None, None)


def test_what_nobody_can_see_into_is_said(capsys):
    def step(x):
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x) * 2

    found = sx.check(step, X, mesh=MESH, in_specs=P("a"))
    assert rows(found) == [("all-gather", ("a",), 1, 64 * 32 * 4)] and not found.ok
    (unknown,) = found.unknown
    assert "pure_callback" in unknown and "test_check.py" in unknown
    assert "opaque      test_check.py:" in str(found) and "1 of them opaque" in str(found)


# ---- Explicit meshes ------------------------------------------------------------------------------------------------

EXPLICIT = sx.MeshSpec.of("dp=512,tp=8", "explicit")


def ambiguous(x, w1, w2, table, ids):
    h = jnp.tanh(x @ w1)
    y = h @ w2
    e = table[ids]
    return jax.reshard(y, P(None, "dp")).sum() + e.sum()


TYPED = (shape(4096, 512), shape(512, 512), shape(512, 512), shape(1024, 64), shape(4096, dtype=I32))
TYPED_SPECS = (P("dp"), P(None, "tp"), P("tp"), P(), P("dp"))


def test_every_refusal_of_one_pass_with_its_line():
    found = sx.check(ambiguous, *TYPED, mesh=EXPLICIT, in_specs=TYPED_SPECS)
    first = ambiguous.__code__.co_firstlineno
    refused = [(site.operation, site.line - first, site.op) for site in found.ambiguous]
    assert refused == [("dot_general", 2, "all-reduce"), ("gather", 3, "")]
    assert "out_sharding" in found.ambiguous[0].why  # JAX's own words
    assert {site.file.rpartition("/")[2] for site in found} == {"test_check.py"}
    assert [(site.op, site.cause) for site in found if site.cause == "asked"] == [("all-to-all", "asked")]
    assert not found.ok and "2 places are ambiguous" in str(found)


def test_refusals_in_a_gradient():
    """The forward product is refused, nothing uses its value, and yet JAX would stop there."""
    found = sx.check(jax.grad(ambiguous, argnums=(1, 2)), *TYPED, mesh=EXPLICIT, in_specs=TYPED_SPECS)
    assert [(site.operation, site.op, site.phase) for site in found.ambiguous] == [
        ("dot_general", "", "forward"),
        ("gather", "", "forward"),
    ]
    sums = [site for site in found if site.op == "all-reduce"]
    assert [site.payload_bytes for site in sums] == [512 // 8 * 512 * 4] * 2 and {s.phase for s in sums} == {"backward"}


def test_a_check_leaves_no_trace_behind():
    """What `check` gathers on the way is not what JAX remembers of the function."""
    mesh = jax.make_mesh((4, 2), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)

    @jax.jit
    def product(x, w):
        return x @ w

    specs = (P(None, "tp"), P("tp"))
    with jax.set_mesh(mesh):
        args = [jax.device_put(jnp.ones((8, 8)), spec) for spec in specs]
        for _ in range(2):
            with pytest.raises(Exception, match="Contracting dimensions are sharded"):
                product(*args)
            assert not sx.check(product, *args).ok
            assert not sx.check(lambda x, w: product(x, w) * 2, *args).ok


def test_explicit_results_are_given_by_the_program():
    def step(x, w):
        return jnp.dot(x, w, out_sharding=P(None, "a"))

    found = sx.check(step, X, shape(32, 8), mesh=sx.MeshSpec.of(MESH, "explicit"), in_specs=(P(None, "a"), P("a")))
    assert rows(found) == [("reduce-scatter", ("a",), 1, 64 * 8 * 4)] and found.ok


def test_an_explicit_error_that_is_no_question_of_layout_ends_it():
    def step(x):
        return jax.reshard(x, P("nope"))

    with pytest.raises(ProofError, match=r"step does not trace\n  test_check.py:\d+ \(step\): .*nope"):
        sx.check(step, shape(512, 8), mesh=EXPLICIT, in_specs=P("dp"))


# ---- where shardings come from --------------------------------------------------------------------------------------


def test_layouts_and_thousands_of_devices():
    params = {
        f"layer{at}": {"up": shape(256, 1024, dtype=BF16), "down": shape(1024, 256, dtype=BF16)} for at in range(100)
    }
    layout = sx.layout(params, [("up", ["fsdp", "tp"]), ("down", ["tp", "fsdp"])], "fsdp=256,tp=16")

    def forward(params, x):
        for layer in params.values():
            x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
        return x

    found = sx.check(forward, params, shape(4096, 256, dtype=BF16), layout=(layout, None), in_specs={"x": P("fsdp")})
    assert found.mesh.size == 4096 and found.ok
    assert found.ledger.by_op()["all-gather"].executions == 200
    assert found.ledger.by_op()["all-reduce"].executions == 100
    assert found.argument_bytes == 100 * 2 * 256 * 1024 * 2 // 4096 + 16 * 256 * 2
    assert "params['layer*']['up']" in [line[7] for line in found.table().rows]  # one line for a hundred


def test_stateful_steps():
    class Model:
        def __init__(self):
            self.up = sx.State(jnp.zeros((512, 64)))
            self.steps = sx.State(jnp.zeros((), I32))

    @sx.jit
    def step(model, x):
        model.steps.value = model.steps.value + 1
        return jnp.tanh(x) @ model.up.value

    found = sx.check(step, Model(), shape(1024, 512), mesh="dp=512,tp=2", in_specs=(P("dp", "tp"), P("dp")))
    (site,) = found
    assert (site.op, site.axes, site.path) == ("all-gather", ("dp",), "model.up")
    assert {leaf.path: leaf.spec for leaf in found.outputs}["model.steps (new)"] == P()


def test_the_mesh_is_the_one_in_force_or_of_the_layouts():
    with jax.set_mesh(sx.make_mesh(MESH)):
        assert sx.check(lambda x: x, X, in_specs=P("a")).mesh == sx.MeshSpec.of(MESH)
        assert sx.check(lambda x: x, X, mesh="z=64", in_specs=P("z")).mesh.size == 64
    layout = sx.layout({"x": X}, [("x", ["dp"])], "dp=64")
    assert sx.check(lambda t: t["x"] * 2, {"x": X}, layout=layout).mesh == sx.MeshSpec.of("dp=64")


def test_a_shard_map_bound_to_devices_of_this_process():
    mesh = sx.make_mesh("dp=4,tp=2")

    def step(x):
        return jax.shard_map(lambda x: lax.psum(x, "dp"), mesh=mesh, in_specs=P("dp"), out_specs=P())(x)

    found = sx.check(step, X, mesh="dp=4,tp=2", in_specs=P("dp"))
    assert rows(found) == [("all-reduce", ("dp",), 1, 16 * 32 * 4)]
    proof = sx.prove(step, X, mesh="dp=4,tp=2", in_specs=P("dp"))
    assert [(row.op, row.axes, row.payload_bytes) for row in proof.ledger] == [("all-reduce", ("dp",), 2048)]
    with pytest.raises(ProofError, match="leave mesh= out of shard_map"):
        sx.check(step, X, mesh="dp=8,tp=2", in_specs=P("dp"))


# ---- the value ------------------------------------------------------------------------------------------------------


def test_a_check_is_a_value():
    one, other = (sx.check(ambiguous, *TYPED, mesh=EXPLICIT, in_specs=TYPED_SPECS) for _ in range(2))
    assert one == other and hash(one) == hash(other) and len({one, other}) == 1
    assert one != sx.check(lambda x: x, X, mesh=MESH, in_specs=P())
    data = json.loads(json.dumps(one.to_json()))
    assert data["ok"] is False and data["sites"][0]["axes"] == ["tp"] and data["sites"][0]["line"] > 0
    assert data["wire_bytes"] == one.ledger.wire_bytes == sum(site.wire_bytes for site in one)
    with pytest.raises(AttributeError):
        one.name = "other"


def test_one_screen():
    def step(x, w):
        for _ in range(30):
            x = lax.with_sharding_constraint(jnp.sort(jnp.tanh(x) @ w, axis=0), P("dp"))
        return x

    text = str(sx.check(step, shape(1 << 12, 1 << 12), shape(1 << 12, 1 << 12), mesh="dp=4096", in_specs=P("dp")))
    lines = text.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 118
    assert lines[0].startswith("step on mesh dp=4096 (4,096 devices): ")
    assert "30 places are ambiguous" in lines[0]
    assert any(line.startswith("ambiguous   test_check.py:") for line in lines)
    assert any(line.startswith("replicated  ") for line in lines) is False
    assert lines[-1].startswith("seen        all ") and lines[-1].endswith("nothing was compiled")


def test_what_is_replicated_is_said():
    found = sx.check(lambda x: x * 2, shape(1024, 1024), mesh=MESH, in_specs=P(), replicated_over="1MB")
    assert [each.path for each in found.replicated] == ["result", "x"]
    assert "replicated  x on every device: 4 MiB per device" in str(found)
    assert str(found).splitlines()[0] == "<lambda> on mesh a=4,b=2 (8 devices): nothing travels"


def test_a_notebook_shows_it():
    html = sx.check(lambda x: x.sum(), X, mesh=MESH, in_specs=P("a"))._repr_html_()
    assert "all-reduce" in html and "<lambda>" not in html and "&lt;lambda&gt;" in html


def test_no_device_is_touched():
    code = (
        "import jax, jax.numpy as jnp, shardax as sx\n"
        "from shardax._compat import backend_initialised\n"
        "x = jax.ShapeDtypeStruct((8192, 8), jnp.float32)\n"
        "found = sx.check(lambda x: (x @ x.T).sum(), x, mesh='dp=8192', in_specs=jax.P('dp'))\n"
        "print(backend_initialised(), found.mesh.size, len(found))\n"
    )
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)
    assert (done.stdout, done.stderr) == ("False 8192 2\n", "")


# ---- what is refused ------------------------------------------------------------------------------------------------

REFUSED = [
    ("not a function", lambda: sx.check(3, X, mesh=MESH), ProofError, "not a function: 3 (int)"),
    ("no mesh", lambda: sx.check(lambda x: x, X), NoMeshError, "check needs a mesh"),
    ("open mesh", lambda: sx.check(lambda x: x, X, mesh="a=-1", in_specs=P("a")), MeshError, "-1"),
    ("no layout", lambda: sx.check(lambda x: x + 1, X, mesh=MESH), ProofError, "x: 8 KiB with no sharding"),
    ("axis", lambda: sx.check(lambda x: x, X, mesh="dp=4", in_specs=P("pd")), ProofError, "did you mean 'dp'"),
    ("divides explicitly", lambda: sx.check(lambda x: x, shape(10), mesh=EXPLICIT, in_specs=P("tp")), ProofError, "10 does not divide by 'tp' (8)"),
    ("divides", lambda: sx.check(lambda x: x, shape(10), mesh="a=4", in_specs=P("a")), ProofError, "10 does not divide by 'a' (4)"),
    ("static", lambda: sx.check(lambda x: x, X, mesh=MESH, in_specs=P(), static="y"), ProofError, "static='y'"),
    ("out tree", lambda: sx.check(lambda x: x, X, mesh=MESH, in_specs=P(), out_specs=(P(), P())), ProofError, "out_specs do not follow"),
    ("values", lambda: sx.check(lambda x: x if x.sum() > 0 else -x, X, mesh=MESH, in_specs=P()), ProofError, "needs concrete values"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "text"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_bad_input_is_named(call, kind, text):
    with pytest.raises(kind) as failure:
        call()
    assert text in str(failure.value)
    assert len(str(failure.value).splitlines()) < 25


# ---- the arithmetic of moves ----------------------------------------------------------------------------------------

SIZES = {"a": 4, "b": 2, "one": 1}
A, B, AB, NONE = ("a",), ("b",), ("a", "b"), ()
MOVES = [
    # before, after, [(kind, axes, bytes)] of a 64 x 64 f32 array
    ((A, NONE), (A, NONE), []),
    ((NONE, NONE), (A, B), []),
    ((A, NONE), (NONE, NONE), [("all-gather", A, 16384)]),
    ((A, B), (NONE, B), [("all-gather", A, 8192)]),
    ((A, B), (NONE, NONE), [("all-gather", B, 4096), ("all-gather", A, 16384)]),
    ((A, NONE), (AB, NONE), []),
    ((AB, NONE), (A, NONE), [("all-gather", B, 4096)]),
    ((A, NONE), (NONE, A), [("all-to-all", A, 4096)]),
    ((A, B), (B, A), [("all-to-all", ("a", "b"), 2048)]),
    ((AB, NONE), (B, NONE), [("collective-permute", AB, 2048), ("all-gather", A, 8192)]),
    ((A, B), (NONE, A), [("all-gather", B, 4096), ("all-to-all", A, 4096)]),
    ((("b", "a"), NONE), (AB, NONE), [("collective-permute", AB, 2048)]),
    ((B, NONE), (AB, NONE), [("collective-permute", AB, 2048)]),
    ((("one",), NONE), (NONE, NONE), []),
]


@pytest.mark.parametrize(("before", "after", "expected"), MOVES)
def test_moves(before, after, expected):
    found = moves(before, after, (64, 64), 4, SIZES)
    assert [(move.collective, move.axes, move.payload_bytes) for move in found] == expected


# ---- what a program says of its own groups ---------------------------------------------------------------------------


def test_groups_of_the_programs_own_are_as_small_as_it_says():
    def step(x):
        return jax.shard_map(
            lambda x: lax.psum(x, "x", axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]]),
            in_specs=P("x"), out_specs=P("x"), check_vma=False,
        )(x)  # fmt: skip

    (site,) = sx.check(step, shape(64, 32), mesh="x=8", in_specs=P("x"))
    (row,) = sx.prove(step, shape(64, 32), mesh="x=8", in_specs=P("x")).ledger
    assert site.wire_bytes == row.wire_bytes == 2 * (8 * 32 * 4) * 3 // 4


def test_a_ragged_exchange_is_one_collective():
    def step(x, n):
        def local(x, n):
            out = jnp.zeros((64, 32))
            return lax.ragged_all_to_all(x, out, n, n, n, n, axis_name="x")

        return jax.shard_map(local, in_specs=(P("x"), P()), out_specs=P("x"), check_vma=False)(x, n)

    found = sx.check(step, shape(64, 32), shape(8, dtype=I32), mesh="x=8", in_specs=(P("x"), P()))
    assert rows(found) == [("ragged-all-to-all", ("x",), 1, 8 * 32 * 4)]


def test_a_transform_of_whole_rows_is_what_this_partitioner_does():
    args = shape(64, 32, dtype=jnp.complex64)
    found = sx.check(jnp.fft.fft, args, mesh="x=8", in_specs=P("x"))
    proof = sx.prove(jnp.fft.fft, args, mesh="x=8", in_specs=P("x"), out_specs=found.outputs[0].spec)
    assert totals(site for site in found if site.op) == totals(proof.ledger)
