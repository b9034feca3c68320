"""`prove`: what it says of steps whose answers are known by hand, on the partitioner and on the TPU compiler."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import CompilerMissingError, CompilerTimeoutError, MeshError, NoMeshError, ProofError, TargetError
from shardax.proving.installed import missing

F32, BF16 = jnp.float32, jnp.bfloat16
needs_tpu = pytest.mark.skipif(missing("tpu") is not None, reason=f"no TPU compiler: {missing('tpu')}")
needs_gpu = pytest.mark.skipif(missing("gpu") is not None, reason=f"no GPU compiler: {missing('gpu')}")
tiers = pytest.mark.parametrize(
    "target", ["cpu:8", pytest.param("tpu:v5e:2x4", marks=needs_tpu), pytest.param("gpu:h100:8", marks=needs_gpu)]
)


def shape(*sizes, dtype=F32, spec=None, mesh=None):
    sharding = None if spec is None else NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)


def rows(proof):
    return sorted((row.op, row.axes, row.count, row.payload_bytes) for row in proof.ledger)


# ---- what a proof holds ---------------------------------------------------------------------------------------------

LAYERS, WIDTH = 4, 512
ADAM = optax.adam(1e-3)
PARAMS = {"w": shape(LAYERS, WIDTH, WIDTH, dtype=BF16), "scale": shape(WIDTH, dtype=BF16)}
RULES = [("w$", [None, "fsdp", "tp"]), ("scale$", [])]


def train(state, batch):
    """Scan over layers with remat, bf16 parameters, f32 moments."""

    @jax.checkpoint
    def layer(x, w):
        return jnp.tanh(x @ w), None

    def loss(params):
        x, _ = lax.scan(layer, batch * params["scale"], params["w"])
        return jnp.mean(x.astype(F32) ** 2)

    value, gradient = jax.value_and_grad(loss)(state["params"])
    gradient = jax.tree.map(lambda g: g.astype(F32), gradient)
    updates, moments = ADAM.update(gradient, state["opt"])
    params = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), state["params"], updates)
    return {"params": params, "opt": moments}, value


def train_state(mesh):
    params = sx.layout(PARAMS, RULES, mesh)
    moments = jax.tree.map(lambda leaf: shape(*leaf.shape), PARAMS)
    return {
        "params": params.abstract,
        "opt": sx.optimizer_layout(jax.eval_shape(ADAM.init, moments), params).abstract,
    }


def prove_train(target, mesh="fsdp=4,tp=2", **options):
    batch = shape(64, WIDTH, dtype=BF16)
    state = train_state(mesh)
    out = (jax.tree.map(lambda leaf: leaf.sharding.spec, state), P())  # left open, XLA shards the small moments anew
    return sx.prove(
        train, state, batch, mesh=mesh, target=target, in_specs={"batch": P("fsdp")}, out_specs=out,
        donate="state", **options,
    )  # fmt: skip


@tiers
def test_resident_state_and_flops_are_the_closed_form(target):
    proof = prove_train(target)
    parameters = LAYERS * WIDTH * WIDTH
    # ten bytes a parameter: itself and two moments; scale and its moments are on every device, beside Adam's counter
    resident = parameters * 10 // 8 + WIDTH * 10 + 4
    assert proof.memory.arguments == pytest.approx(
        resident + 64 // 4 * WIDTH * 2, rel=0.001 if target[0] != "t" else 0.01
    )
    forward = 2 * 64 * WIDTH * WIDTH * LAYERS
    assert proof.total_flops == pytest.approx(4 * forward, rel=0.02)  # forward, again for remat, two products backward
    assert proof.memory.aliased >= 0.99 * parameters * 10 // 8
    assert proof.lost_donations == ()
    assert proof.mesh == sx.MeshSpec.of("fsdp=4,tp=2")
    assert {leaf.path: leaf.donated for leaf in proof.inputs}["state['params']['w']"] is True
    assert dict(proof.memory.groups)["state['opt']"] == sum(
        leaf.bytes_on(proof.mesh) for leaf in proof.inputs if leaf.path.startswith("state['opt']")
    )


@tiers
def test_collectives_name_axes_phases_lines_and_parameters(target):
    proof = prove_train(target)
    gathers = [row for row in proof.ledger if row.op == "all-gather" and row.axes == ("fsdp",)]
    assert {row.file.rpartition("/")[2] for row in gathers} == {"test_prove.py"}
    assert proof.ledger.wire_bytes > 0
    assert {row.phase for row in proof.ledger} >= {"forward", "backward"}
    assert {axis for row in proof.ledger for axis in row.axes} <= {"fsdp", "tp"}
    assert proof.estimate is None if target == "cpu:8" else proof.estimate.seconds > 0


@tiers
def test_one_screen(target):
    lines = str(prove_train(target)).splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 120
    text = "\n".join(lines)
    assert re.search(r"train on \S+, mesh fsdp=4,tp=2 \(8 devices\): (partitions|FITS)", text)
    assert "memory      arguments" in text and "collectives" in text and "cannot see" in text
    assert "compiled in" in text and f"jax {jax.__version__}" in text
    html = prove_train(target)._repr_html_()
    assert "train" in html and "all-gather" in html and "<module>" not in html


def test_a_screen_has_no_column_with_nothing_in_it():
    x = shape(8, 4)
    proof = sx.prove(lambda x: x.sum(), x, mesh="dp=2", target="cpu:2", in_specs=P("dp"))
    header = next(line for line in str(proof).splitlines() if line.split()[:2] == ["op", "axes"])
    assert header.split()[-1] == "where" and proof.ledger.table().columns[-1] == "what"


def test_nothing_is_allocated():
    before = sum(array.nbytes for array in jax.live_arrays())
    huge = shape(1 << 17, 1 << 16, dtype=BF16)  # 16 GiB
    proof = sx.prove(lambda w: w * 2, huge, mesh="fsdp=2048", target="cpu:2048", in_specs=P("fsdp"), donate="w")
    assert proof.memory.arguments == 8 << 20
    assert sum(array.nbytes for array in jax.live_arrays()) == before


def test_thousands_of_devices_are_not_those_of_this_process():
    x = shape(2048, 16)
    proof = sx.prove(lambda x: x.sum(), x, mesh="dp=1024,tp=2", target="cpu:2048", in_specs=P(("dp", "tp")))
    assert rows(proof) == [("all-reduce", ("dp", "tp"), 1, 4)]
    assert len(jax.devices()) == 8


# ---- where shardings come from --------------------------------------------------------------------------------------


def sources(proof):
    return {leaf.path: (sx.canonical(leaf.spec), leaf.source) for leaf in proof.inputs}


def test_shardings_come_from_specs_layouts_jit_and_arrays():
    here = sx.make_mesh("fsdp=4,tp=2")
    real = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(here, P("tp")))
    layout = sx.layout({"k": shape(8, 16)}, [("k", ["fsdp", None])], "fsdp=4,tp=2")
    jitted = jax.jit(
        lambda a, b, c, d: a.sum() + b["k"].sum() + c.sum() + d.sum(),
        in_shardings=(None, None, NamedSharding(here, P("fsdp", "tp")), None),
    )
    proof = sx.prove(
        jitted, real, {"k": shape(8, 16)}, shape(16, 16), shape(8), mesh="fsdp=4,tp=2",
        layout=(None, layout, None, None), in_specs={"d": P(("fsdp", "tp"))},
    )  # fmt: skip
    assert sources(proof) == {
        "a": (P("tp"), "array"),
        "b['k']": (P("fsdp"), "layout"),
        "c": (P("fsdp", "tp"), "jit"),
        "d": (P(("fsdp", "tp")), "in_specs"),
    }


def test_shardings_follow_their_axis_names_to_another_mesh():
    small = sx.make_mesh("fsdp=4,tp=2")
    weight = jax.device_put(np.ones((64, 64), np.float32), NamedSharding(small, P("fsdp", "tp")))

    @jax.jit
    def step(w):
        return lax.with_sharding_constraint(w * 2, NamedSharding(small, P("tp", "fsdp"))).sum()

    proof = sx.prove(step, weight, mesh="tp=4,fsdp=16", target="cpu:64")
    assert proof.inputs[0].spec == P("fsdp", "tp") and proof.inputs[0].bytes_on(proof.mesh) == 64 * 64 * 4 // 64
    sums = [row for row in rows(proof) if row[0] == "all-reduce"]  # in one step or one per axis
    assert {axis for row in sums for axis in row[1]} == {"tp", "fsdp"} and {row[3] for row in sums} == {4}


@pytest.mark.filterwarnings("ignore:`with mesh")
def test_the_targets_mesh_is_the_current_one_however_it_is_asked():
    seen = {}
    outside = sx.make_mesh("x=8")

    def step(a):
        seen["abstract"] = dict(jax.sharding.get_abstract_mesh().shape)
        seen["ours"] = dict(sx.current_mesh().shape)
        return lax.with_sharding_constraint(a, P("dp"))

    with jax.set_mesh(outside):
        sx.prove(step, shape(32, 4), mesh="dp=16,tp=2", target="cpu:32", in_specs=P("dp"))
    assert seen == {"abstract": {"dp": 16, "tp": 2}, "ours": {"dp": 16, "tp": 2}}


def test_the_mesh_in_force_serves_when_none_is_given():
    with jax.set_mesh(sx.make_mesh("dp=8")):
        assert sx.prove(lambda a: a * 2, shape(8), in_specs=P("dp")).mesh == sx.MeshSpec.of("dp=8")
    layout = sx.layout({"a": shape(8)}, [("a", ["dp"])], "dp=8")
    assert sx.prove(lambda t: t["a"] * 2, {"a": shape(8)}, layout=layout).mesh == sx.MeshSpec.of("dp=8")


def test_shard_map_without_a_mesh_takes_the_targets():
    def body(x):
        return lax.psum(x, "dp")

    def step(x):
        return jax.shard_map(body, in_specs=P("dp"), out_specs=P())(x)

    proof = sx.prove(step, shape(64, 8), mesh="dp=64", target="cpu:64", in_specs=P("dp"))
    (row,) = proof.ledger
    assert (row.op, row.axes, row.payload_bytes, row.origin) == ("all-reduce", ("dp",), 32, "user")


def test_keyword_and_static_arguments_and_functions_in_trees():
    def step(x, mode, *, scale, act):
        return act["f"](x) * scale["s"] if mode == "on" else x

    proof = sx.prove(
        step, shape(8, 8), "on", scale={"s": shape(8)}, act={"f": jnp.tanh},
        mesh="dp=8", in_specs={"x": P("dp"), "scale": P()}, static="mode",
    )  # fmt: skip
    assert [leaf.path for leaf in proof.inputs] == ["x", "scale['s']"]


def test_explicit_meshes_are_proved_as_such():
    explicit = sx.MeshSpec.of("dp=4,tp=2", "explicit")
    seen = []

    def step(x, w):
        seen.append(jax.typeof(x).sharding.spec)
        return x @ w

    proof = sx.prove(step, shape(16, 8), shape(8, 16), mesh=explicit, in_specs=(P("dp"), P(None, "tp")))
    assert seen[-1] == P("dp", None)
    assert proof.outputs[0].spec == P("dp", "tp")


# ---- what is not as it was meant to be ------------------------------------------------------------------------------


@tiers
def test_lost_donations_are_found_by_path(target):
    def step(state, x):
        return {"kept": state["kept"] + 1, "other": x.sum(0)}

    state = {"kept": shape(64, 8, spec=P(), mesh=sx.MeshSpec.of("dp=8").abstract()), "gone": shape(32, 8)}
    proof = sx.prove(
        step,
        state,
        shape(8, 4),
        mesh="dp=8",
        target=target,
        donate="state",
        in_specs=({"kept": P("dp"), "gone": P("dp")}, P()),
    )
    unused = [leaf.path for leaf in proof.inputs if leaf.number is None]
    assert unused == ["state['gone']"]  # jax drops it before the compiler sees it
    assert proof.lost_donations == ()

    def swap(state):
        return {"kept": state["kept"] + state["gone"].sum()}

    proof = sx.prove(
        swap, state, mesh="dp=8", target=target, donate="state", in_specs=({"kept": P("dp"), "gone": P("dp")},)
    )
    assert [(lost.path, lost.bytes) for lost in proof.lost_donations] == [("state['gone']", 32 * 8 * 4 // 8)]
    assert "donation    lost: state['gone']" in str(proof)


def test_replication_above_the_threshold_has_its_cost():
    def step(a, b, c):
        return a.sum() + b.sum() + c.sum()

    args = (shape(1024, 1024), shape(1024, 1024), shape(64))
    proof = sx.prove(step, *args, mesh="dp=4,tp=2", in_specs=(P(), P("dp"), P()), replicated_over="1MB")
    whole, part = proof.replicated
    assert (whole.path, whole.whole, whole.copies, whole.bytes_per_device) == ("a", True, 8, 4 << 20)
    assert (part.path, part.whole, part.copies, part.unused_axes) == ("b", False, 2, ("tp",))
    assert whole.wasted == (4 << 20) - (4 << 20) // 8
    assert "replicated  a on every device: 4 MiB per device" in str(proof)


def test_constraints_that_a_jit_drops_without_a_word():
    """jax#26946: an indivisible constraint inside a jit is padded or dropped silently."""

    def step(x):
        return lax.with_sharding_constraint(x * 2, P("dp"))

    proof = sx.prove(step, shape(10, 4), mesh="dp=4,tp=2", in_specs=P())
    (found,) = proof.not_as_asked
    assert found.asked == P("dp") and found.got == P() and found.shape == (10, 4)
    assert found.where.startswith("test_prove.py:") or found.where == "result"
    assert "not as asked" in str(proof)


def test_outputs_as_asked_are_no_worry():
    proof = sx.prove(lambda x: x * 2, shape(16, 4), mesh="dp=4,tp=2", in_specs=P("dp"), out_specs=P("dp", "tp"))
    assert proof.outputs[0].spec == P("dp", "tp") and proof.not_as_asked == ()


@needs_tpu
def test_involuntary_rematerialization_is_told_at_its_row():
    def step(x):
        y = lax.with_sharding_constraint(x.reshape(16, 4, 8), P(None, "a", "b"))
        return lax.with_sharding_constraint(jnp.swapaxes(y, 0, 1) * 2, P(("b", "a"), None, None))

    proof = sx.prove(step, shape(16, 32), mesh="a=2,b=4", target="tpu:v5e:2x4", in_specs=P(("a", "b")))
    assert "remat" in str(proof.ledger).lower() or all(row.op != "all-gather" for row in proof.ledger)


# ---- does it fit ----------------------------------------------------------------------------------------------------


@needs_tpu
def test_out_of_memory_is_an_answer():
    def step(w, x):
        return jnp.tanh(x @ w) @ w.T

    w, x = shape(1 << 16, 1 << 17, dtype=BF16), shape(1024, 1 << 16, dtype=BF16)  # 16 GiB in two parts
    proof = sx.prove(step, w, x, mesh="tp=1", target="tpu:v5e:1x1", in_specs=P())
    assert proof.fits is False and proof.margin < 0
    assert proof.memory.arguments >= 16 << 30 and proof.memory.peak > proof.memory.hbm
    text = str(proof)
    assert "DOES NOT FIT" in text and "too much" in text and "Ran out of memory" in text
    assert len(text.splitlines()) < 30
    assert sx.Proof.from_json(proof.to_json()) == proof.without_hlo()
    assert proof.lock()["layout"]["outputs"] == {} and "result" not in {each.path for each in proof.replicated}
    with pytest.raises(sx.ProofFailure, match=r"step does not fit on tpu:v5e:1x1: 16"):
        sx.assert_fits(proof)


@needs_tpu
def test_what_fits_has_its_margin():
    w = shape(1 << 15, 1 << 16, dtype=BF16)  # 4 GiB
    proof = sx.prove(lambda w: w * 2, w, mesh="tp=4", target="tpu:v5e:2x2", in_specs=P("tp"))
    assert proof.fits and proof.memory.hbm == 15.75 * 2**30
    assert proof.memory.arguments == 1 << 30 and proof.memory.outputs == 1 << 30
    assert proof.margin == proof.memory.hbm - proof.memory.peak and proof.memory.peak >= 2 << 30
    sx.assert_fits(proof, margin="13GB")
    with pytest.raises(sx.ProofFailure, match="asked for"):
        sx.assert_fits(proof, margin="15GB")


def test_the_cpu_tier_has_nothing_to_fit():
    proof = sx.prove(lambda x: x * 2, shape(8), mesh="dp=8", in_specs=P("dp"))
    assert proof.fits is None and proof.margin is None
    with pytest.raises(sx.ProofFailure, match="has no device memory to fit"):
        sx.assert_fits(proof)


@needs_tpu
def test_slices_talk_over_the_network():
    def step(x):
        return x.sum(0)

    proof = sx.prove(step, shape(64, 1 << 20), mesh="dp=2,fsdp=16", target="tpu:v5e:4x4*2", in_specs=P(("dp", "fsdp")))
    across = [row for row in proof.ledger if row.link == "dcn"]
    assert across and all(row.axes == ("dp",) for row in across)
    assert any(time.link == "DCN" for time in proof.estimate.link_seconds)


# ---- state ----------------------------------------------------------------------------------------------------------


def test_state_of_our_own():
    class Counter:
        def __init__(self):
            self.w = sx.State(jnp.zeros((64, 64)))
            self.n = sx.State(jnp.zeros((), jnp.int32))

    model = Counter()

    def step(model, x):
        model.w.value = model.w.value + (x.T @ x)
        model.n.value = model.n.value + 1
        return model.n.value

    proof = sx.prove(step, model, shape(16, 64), mesh="dp=4,tp=2", in_specs=(P(None, "tp"), P("dp")), donate="state")
    paths = {leaf.path: leaf for leaf in proof.inputs}
    assert paths["model.w"].spec == P(None, "tp") and paths["model.w"].donated
    assert paths["x"].spec == P("dp")
    assert ("all-reduce", ("dp",), 1, 64 * 32 * 4) in rows(proof)
    assert proof.lost_donations == () and proof.not_as_asked == ()
    assert {leaf.path: leaf.spec for leaf in proof.outputs}["model.w (new)"] == P(None, "tp")
    assert float(model.n.value) == 0  # a proof runs nothing


@tiers
def test_nnx_modules_with_their_optimizer(target):
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(64, 256, rngs=rngs, use_bias=False)
            self.down = nnx.Linear(256, 64, rngs=rngs, use_bias=False)

        def __call__(self, x):
            return self.down(nnx.gelu(self.up(x)))

    model = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    optimizer = nnx.eval_shape(lambda: nnx.Optimizer(Model(nnx.Rngs(0)), optax.adam(1e-3), wrt=nnx.Param))

    def step(model, optimizer, x):
        loss, gradient = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
        optimizer.update(model, gradient)
        return loss

    rules = [("up/kernel", [None, "tp"]), ("down/kernel", ["tp", None])]
    layout = sx.layout(nnx.state(model), rules, "dp=4,tp=2")
    proof = sx.prove(
        step, model, optimizer, shape(32, 64), mesh="dp=4,tp=2", target=target,
        layout=(layout, layout, None), in_specs={"optimizer": None, "x": P("dp")}, donate="state",
    )  # fmt: skip
    specs = {leaf.path: leaf.spec for leaf in proof.inputs}
    assert specs["model.up.kernel"] == P(None, "tp") and specs["model.down.kernel"] == P("tp", None)
    moments = [leaf for leaf in proof.inputs if leaf.path.startswith("optimizer") and leaf.shape == (64, 256)]
    assert len(moments) == 2 and all(leaf.spec == P(None, "tp") for leaf in moments)
    assert proof.lost_donations == ()


# ---- bad input ------------------------------------------------------------------------------------------------------

X = shape(8, 8)
REFUSED = [
    ("not a function", lambda: sx.prove(3, X, mesh="dp=8"), ProofError, "not a function: 3 (int)"),
    ("no mesh", lambda: sx.prove(lambda x: x, X), NoMeshError, "prove"),
    ("other size", lambda: sx.prove(lambda x: x, X, mesh="dp=4"), TargetError, 'would work: target="cpu:4"; mesh="dp=8"'),
    ("no divisor", lambda: sx.prove(lambda x: x, X, mesh="dp=-1,tp=3"), MeshError, "does not divide"),
    ("target", lambda: sx.prove(lambda x: x, X, mesh="dp=8", target="tpu:v5x:2x4"), TargetError, "did you mean 'v5"),
    ("no layout", lambda: sx.prove(lambda t: t["a"] + 1, {"a": X}, mesh="dp=8"), ProofError, "t['a']: 256 B with no sharding"),
    ("axis", lambda: sx.prove(lambda x: x, X, mesh="dp=8", in_specs=P("pd")), ProofError, "did you mean 'dp'"),
    ("divides", lambda: sx.prove(lambda x: x, shape(10), mesh="dp=8", in_specs=P("dp")), ProofError, "x: dim 0: 10 does not divide by 'dp' (8)"),
    ("rank", lambda: sx.prove(lambda x: x, X, mesh="dp=8", in_specs=P(None, None, "dp")), ProofError, "x: "),
    ("entries", lambda: sx.prove(lambda x, y: x, X, X, mesh="dp=8", in_specs=(P(),)), ProofError, "2 positional arguments (x, y)"),
    ("tree", lambda: sx.prove(lambda t: t, {"a": X}, mesh="dp=8", in_specs=({"b": P()},)), ProofError, "the specs for 't' do not follow"),
    ("option", lambda: sx.prove(lambda x: x, X, mesh="dp=8", in_spec=P()), ProofError, "in_spec: is no parameter; did you mean 'in_specs'"),
    ("argument", lambda: sx.prove(lambda p, x: x, X, X, mesh="dp=8", in_specs={"p": P(), "y": P()}), ProofError, "y: is no argument of ['p', 'x']"),
    ("row", lambda: sx.prove(lambda x: x, X, mesh="dp=8", in_specs=P()).ledger.where(op="allgather"), ProofError, "did you mean 'all-gather'"),
    ("callback", lambda: sx.prove(lambda x: jax.pure_callback(lambda a: a, x, x), X, mesh="dp=8", in_specs=P()), ProofError, "a callback into Python needs devices"),
    ("layout type", lambda: sx.prove(lambda x: x, X, mesh="dp=8", layout=3), ProofError, "layout is a Layout, or one per argument, not int"),
    ("donate", lambda: sx.prove(lambda state: state, X, mesh="dp=8", in_specs=P(), donate="stat"), ProofError, "did you mean 'state'"),
    ("static", lambda: sx.prove(lambda x: x, X, mesh="dp=8", in_specs=P(), static=3), ProofError, "static=3: is no argument of ['x']; there are 1"),
    ("out tree", lambda: sx.prove(lambda x: x, X, mesh="dp=8", in_specs=P(), out_specs=(P(), P())), ProofError, "out_specs do not follow"),
    ("result divides", lambda: sx.prove(lambda x: x[:6], X, mesh="dp=8", in_specs=P(), out_specs=P("dp")), ProofError, "results do not fit the mesh dp=8\n  result: dim 0: 6 does not divide by 'dp' (8)"),
    ("result axis", lambda: sx.prove(lambda x: {"y": x}, X, mesh="dp=8", in_specs=P(), out_specs=P("pd")), ProofError, "result['y']: "),
    ("unit", lambda: sx.prove(lambda x: x, X, mesh="dp=8", in_specs=P(), replicated_over="64 elephants"), ValueError, "elephants"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "text"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_bad_input_is_named(call, kind, text):
    with pytest.raises(kind) as failure:
        call()
    assert text in str(failure.value)
    assert len(str(failure.value).splitlines()) < 25


def test_what_does_not_trace_has_its_line():
    def needs_value(x):
        return x if x.sum() > 0 else -x

    def wrong_shapes(x):
        return x @ jnp.ones((3, 3))

    with pytest.raises(
        ProofError, match=r"needs_value needs concrete values\n  test_prove.py:\d+ \(needs_value\)"
    ) as failure:
        sx.prove(needs_value, X, mesh="dp=8", in_specs=P())
    assert "jax.lax.cond" in str(failure.value)
    with pytest.raises(
        ProofError, match=r"wrong_shapes does not trace\n  test_prove.py:\d+ \(wrong_shapes\): TypeError"
    ):
        sx.prove(wrong_shapes, X, mesh="dp=8", in_specs=P())


def test_a_jit_of_another_library_is_proved_by_the_function_inside():
    nnx = pytest.importorskip("flax.nnx")

    @nnx.jit(donate_argnums=0)
    def step(x):
        return x * 2

    with pytest.raises(ProofError, match=r"which does not say what it donates\n.*sx.prove\(step.__wrapped__"):
        sx.prove(step, X, mesh="dp=8", in_specs=P("dp"))
    assert sx.prove(step.__wrapped__, X, mesh="dp=8", in_specs=P("dp"), donate="x").memory.aliased == 8 * 4


def test_an_error_inside_a_library_has_the_line_that_called_it():
    with pytest.raises(ProofError, match=r"test_prove.py:\d+ \(<lambda>\): "):
        sx.prove(lambda x: optax.apply_updates(x, "nonsense"), X, mesh="dp=8", in_specs=P("dp"))


def test_what_numpy_or_a_shape_needs_is_a_concrete_value_too():
    for step, args in ((np.asarray, (X,)), (lambda x, n: x.reshape(n, -1), (X, shape(dtype=jnp.int32)))):
        with pytest.raises(ProofError, match=r"needs concrete values\n.*\n.*static="):
            sx.prove(step, *args, mesh="dp=8", in_specs=P())


def test_types_are_those_of_the_trace():
    """Without x64 a NumPy f64 and a Python float are f32 in the program: their bytes are the program's."""
    proof = sx.prove(lambda x, s: x * s, np.ones((64, 8)), 0.5, mesh="dp=8", in_specs={"x": P("dp")})
    assert [(leaf.path, leaf.dtype, leaf.itemsize) for leaf in proof.inputs] == [
        ("x", "float32", 4),
        ("s", "float32", 4),
    ]
    assert proof.memory.arguments == 64 * 8 * 4 // 8 + 4 == sum(size for _, size in proof.memory.groups)


def test_a_constraint_for_strange_axes_has_its_line():
    other = sx.make_mesh("rows=8")

    def step(x):
        return lax.with_sharding_constraint(x, NamedSharding(other, P("rows")))

    with pytest.raises(
        ProofError, match=r"cannot be put on the mesh dp=8\n  test_prove.py:\d+ \(step\): names axis 'rows'"
    ):
        sx.prove(step, X, mesh="dp=8", in_specs=P())


def test_a_shard_map_bound_to_another_mesh_has_its_line():
    other = sx.make_mesh("dp=4,tp=2")

    def step(x):
        return jax.shard_map(lambda x: lax.psum(x, "dp"), mesh=other, in_specs=P("dp"), out_specs=P())(x)

    with pytest.raises(ProofError) as failure:
        sx.prove(step, X, mesh="dp=8", in_specs=P())
    assert "test_prove.py:" in str(failure.value) and len(str(failure.value).splitlines()) < 10


def test_every_missing_layout_is_listed():
    tree = {f"w{at}": shape(8, at + 1) for at in range(20)}
    with pytest.raises(ProofError, match=r"20 arrays without a layout \(the largest 12 of 20\)") as failure:
        sx.prove(lambda t: t, tree, mesh="dp=8")
    assert len(failure.value.offences) == 12 and failure.value.offences[0].where == "t['w19']"


def test_a_missing_compiler_says_what_to_install(monkeypatch):
    monkeypatch.setattr("shardax.proving.installed.package_version", lambda name: None)
    monkeypatch.setattr("shardax.proving.installed._own_ptxas", lambda: False)
    for target, extra in (("tpu:v5e:2x4", "tpu"), ("gpu:h100:8", "cuda")):
        with pytest.raises(CompilerMissingError, match=rf'pip install "shardax\[{extra}\]"'):
            sx.prove(lambda x: x, X, mesh="dp=8", target=target, in_specs=P())


def test_a_slow_compiler_is_stopped():
    with pytest.raises(CompilerTimeoutError, match="did not answer within 0.001 s"):
        sx.prove(lambda x: x * 7, X, mesh="dp=8", in_specs=P(), timeout=0.001, cache=False)


def test_an_unknown_compiler_option_is_the_compilers_own_word():
    with pytest.raises(sx.CompilerError, match="no_such_option"):
        sx.prove(lambda x: x, X, mesh="dp=8", in_specs=P(), compiler_options={"xla_no_such_option": True})


# ---- the whole process ----------------------------------------------------------------------------------------------


def test_nothing_is_printed_and_the_target_is_no_device_here(tmp_path):
    """JAX lowers for a default device of its own platform; the 64 are in the compiler's process only."""
    code = (
        "import jax, jax.numpy as jnp, shardax as sx\n"
        "from shardax._compat import backend_initialised\n"
        "x = jax.ShapeDtypeStruct((64, 8), jnp.float32)\n"
        "proof = sx.prove(lambda x: x @ x.T, x, mesh='dp=64', target='cpu:64', in_specs=jax.P('dp'))\n"
        "print(proof.mesh.size, backend_initialised() and jax.device_count())\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"SHARDAX_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, env=env)
    assert (done.stdout, done.stderr) == ("64 1\n", "")


def test_reductions_that_the_partitioner_replaced_leave_nothing_in_the_way():
    """The variance of sharded rows: the text holds the scalar function of a sum that is no longer there."""
    proof = sx.prove(lambda x: (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True), shape(64, 128), mesh="x=8",
                     in_specs=P(None, "x"))  # fmt: skip
    assert rows(proof) == [("all-reduce", ("x",), 1, 64 * 4)] * 3


def test_what_the_partitioner_finds_twice_leaves_nothing_in_the_way():
    """Two draws of one key are one loop: the text holds the second loop's body, which nobody calls any more."""

    def draws(key, x):
        return jnp.where(jax.random.bernoulli(key, 0.1, x.shape), jax.random.uniform(key, x.shape), x).sum()

    proof = sx.prove(
        draws, jax.eval_shape(lambda: jax.random.key(0)), shape(64, 128), mesh="x=8", in_specs=(P(), P("x"))
    )
    assert rows(proof) == [("all-reduce", ("x",), 1, 4)]


@tiers
def test_packed_numbers_take_the_bytes_that_the_compiler_says(target):
    proof = sx.prove(lambda x: x[:1], shape(512, 1024, dtype=jnp.int4), mesh="x=8", in_specs=P("x"), target=target)
    assert proof.memory.arguments == proof.inputs[0].bytes_on(proof.mesh) == 512 * 1024 // 8 // 2


@tiers
def test_a_chain_of_products_on_two_axes(target):
    """Rows over a, columns over b, and weights the other way round; a TPU rounds to bf16 what it multiplies next."""

    def chain(x, up, down):
        return (x @ up) @ down

    args = shape(512, 256), shape(256, 1024), shape(1024, 256)
    specs = P("a", "b"), P("b", "a"), P("a", "b")
    proof = sx.prove(chain, *args, mesh="a=4,b=2", in_specs=specs, target=target)
    gathered = 512 * 128 * (2 if target.startswith("tpu") else 4)
    assert rows(proof) == [
        ("all-gather", ("a",), 1, gathered),
        ("all-reduce", ("a",), 1, 512 * 128 * 4),
        ("all-reduce", ("b",), 1, 512 * 256 * 4),
    ]
    assert proof.flops == 2 * (2 * 512 * 256 * 1024) // 8


@tiers
def test_the_gradient_of_pooling_is_read(target):
    """`select-and-scatter` calls two computations, in words of its own."""

    def pooled(x):
        window = (1, 2, 2, 1)
        return (lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID") ** 2).sum()

    image = shape(8, 16, 16, 4)
    proof = sx.prove(jax.grad(pooled), image, mesh="x=8", in_specs=P("x"), out_specs=P("x"), target=target)
    assert not proof.ledger and not proof.ledger.notes
