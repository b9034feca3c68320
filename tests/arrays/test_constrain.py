"""Constraints mean the same in every context, on every kind of mesh, eager and traced; nothing is silent."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
KINDS = {
    "auto": (AUTO, AUTO),
    "explicit": (EXPLICIT, EXPLICIT),
    "mixed": (AUTO, EXPLICIT),
    "mixed-reversed": (EXPLICIT, AUTO),
}
SPECS = [P("dp", "tp"), P(None, "tp"), P("dp"), P(), P(None, "dp"), P(("dp", "sp"), "tp"), P(None, ("dp",))]


def mesh_of(kind="auto"):
    return sx.make_mesh("dp=2,tp=4", axis_types=KINDS[kind])


@contextlib.contextmanager
def context_of(name, mesh):
    if name == "set_mesh":
        with jax.set_mesh(mesh):
            yield None
    elif name == "with mesh":
        with mesh:
            yield None
    else:
        yield mesh  # the argument


def constrain_with(x, spec, argument):
    if argument is not None:
        return (
            sx.with_sharding_constraint(x, NamedSharding(argument, spec))
            if spec_is_clean(spec)
            else sx.constrain(x, spec, mesh=argument, on_misfit="adapt")
        )
    return sx.with_sharding_constraint(x, spec)


def spec_is_clean(spec):
    return "sp" not in str(spec)


def numbers():
    return np.arange(8 * 16, dtype=np.float32).reshape(8, 16)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("context", ["argument", "with mesh", "set_mesh"])
def test_the_same_call_means_the_same_everywhere(context, kind, traced, spec):
    mesh = mesh_of(kind)
    expected = NamedSharding(mesh, sx.fit(spec, (8, 16), mesh, "adapt").spec)
    with context_of(context, mesh) as argument:
        call = lambda x: constrain_with(x, spec, argument)  # noqa: E731
        x = jax.device_put(numbers(), NamedSharding(mesh, P("tp")))
        out = jax.jit(call)(x) if traced else call(x)
    assert out.sharding.is_equivalent_to(expected, 2), out.sharding
    np.testing.assert_array_equal(np.asarray(out), numbers())


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("kind", KINDS)
def test_without_a_mesh_nothing_moves_and_that_is_said(kind, traced):
    x = jax.device_put(numbers(), NamedSharding(mesh_of(kind), P("tp")))  # its own mesh is not one in force
    call = lambda x: sx.with_sharding_constraint(x, P("dp", "tp"))  # noqa: E731
    with pytest.warns(UserWarning, match="no mesh is in force") as caught:
        out = jax.jit(call)(x) if traced else call(x)
    assert caught[0].filename == __file__ and out.sharding.is_equivalent_to(x.sharding, 2)
    strict = lambda x: sx.constrain(x, P("dp", "tp"))  # noqa: E731
    with pytest.raises(sx.NoMeshError, match="no mesh is in force: the constraint .* on shape \\(8, 16\\)"):
        jax.jit(strict)(x) if traced else strict(x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("context", ["argument", "with mesh", "set_mesh"])
def test_host_arrays_are_sharded_too(context, kind):
    mesh = mesh_of(kind)
    with context_of(context, mesh) as argument:
        call = lambda x: constrain_with(x, P("dp", "tp"), argument)  # noqa: E731
        assert call(numbers()).sharding.is_equivalent_to(NamedSharding(mesh, P("dp", "tp")), 2)
        if not (
            kind.startswith("mixed") and context != "set_mesh"
        ):  # JAX itself needs set_mesh for uncommitted inputs here
            assert jax.jit(call)(numbers()).sharding.is_equivalent_to(NamedSharding(mesh, P("dp", "tp")), 2)


@pytest.mark.parametrize("kind", ["auto", "mixed"])
@pytest.mark.parametrize("with_set_mesh", [False, True])
@pytest.mark.parametrize("eager", [False, True], ids=["jit", "eager"])
def test_manual_axes_are_dropped_inside_a_partial_shard_map(kind, with_set_mesh, eager):
    mesh = mesh_of(kind)

    def body(x):
        assert x.shape == (4, 16)
        out = sx.with_sharding_constraint(x, P("dp", "tp"))
        if kind == "mixed" and not eager:  # Explicit axes show in the type (not in jax 0.10's eager shard_map)
            assert jax.typeof(out).sharding.spec == P(None, "tp")
        return out

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"})
    with jax.set_mesh(mesh) if with_set_mesh else contextlib.nullcontext():
        out = (mapped if eager and with_set_mesh else jax.jit(mapped))(numbers())
    np.testing.assert_array_equal(np.asarray(out), numbers())
    if kind == "auto":  # jax 0.10 forgets Explicit axes where a partial shard_map ends
        assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("dp", "tp")), 2)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_to_constrain_inside_a_full_shard_map(kind):
    mesh = mesh_of(kind)
    body = lambda x: sx.with_sharding_constraint(x, P("dp", "tp")) * 2  # noqa: E731
    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("dp", "tp"), out_specs=P("dp", "tp")))
    x = sx.put(numbers(), NamedSharding(mesh, P("dp", "tp")))
    np.testing.assert_array_equal(np.asarray(mapped(x)), numbers() * 2)


def constraints_in(jaxpr):
    """The parameters of every sharding constraint of a program, in order."""
    found = []
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if equation.primitive.name == "sharding_constraint":
            found.append(dict(equation.params))
        for value in equation.params.values():
            if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                found += constraints_in(value)
    return found


@pytest.mark.parametrize("spec", [P("dp", "tp"), P(None, "tp"), P(sx.FREE, "tp"), P()], ids=str)
@pytest.mark.parametrize("where", ["set_mesh", "with mesh", "argument", "shard_map"])
def test_a_traced_constraint_is_the_one_that_jax_makes(where, spec):  # we make its checks once, not at every call
    mesh = mesh_of()
    sharding = NamedSharding(mesh, spec)
    ours = {"argument": lambda x: sx.constrain(x, spec, mesh=mesh)}.get(where, lambda x: sx.constrain(x, spec))
    theirs = lambda x: jax.lax.with_sharding_constraint(x, sharding if where == "argument" else spec)  # noqa: E731
    if where == "shard_map":
        spec = P(None, *spec[1:])  # dp is Manual inside
        body = {
            f: jax.shard_map(f, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"})
            for f in (ours, theirs)
        }
        ours, theirs = body[ours], body[theirs]
    with context_of("argument" if where == "argument" else "with mesh" if where == "with mesh" else "set_mesh", mesh):
        made, expected = (constraints_in(jax.jit(f).trace(numbers()).jaxpr) for f in (ours, theirs))
    assert made and len(made) == len(expected)
    for mine, other in zip(made, expected, strict=True):
        one, two = mine.pop("sharding"), other.pop("sharding")
        assert mine == other
        assert sx.canonical(one.spec) == sx.canonical(two.spec)  # ours names every dimension
        assert one.mesh.abstract_mesh.shape_tuple == two.mesh.abstract_mesh.shape_tuple


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("context", ["argument", "set_mesh"])
def test_a_constraint_moves_to_the_memory_it_names_and_back(context, kind):
    mesh = mesh_of(kind)
    host, device = (NamedSharding(mesh, P("dp"), memory_kind=memory) for memory in ("pinned_host", "device"))
    with context_of(context, mesh):
        away = jax.jit(lambda x: sx.constrain(x, host))(numbers())
        back = jax.jit(lambda x: sx.constrain(x, device))(away)
        batched = jax.jit(jax.vmap(lambda x: sx.constrain(x, host)))(jnp.stack([numbers()] * 4))
        put = jax.jit(lambda x: sx.put({"x": x}, host))(numbers())["x"]
    kinds = [x.sharding.memory_kind for x in (away, back, batched, put)]
    assert kinds == ["pinned_host", "device", "pinned_host", "pinned_host"]
    assert batched.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "dp"), memory_kind="pinned_host"), 3)
    np.testing.assert_array_equal(np.asarray(back), numbers())


def test_a_memory_kind_is_kept():
    mesh = mesh_of()
    pinned = NamedSharding(mesh, P("dp"), memory_kind="unpinned_host")
    with jax.set_mesh(mesh):
        assert sx.with_sharding_constraint(numbers(), pinned).sharding.memory_kind == "unpinned_host"
        (found,) = constraints_in(jax.jit(lambda x: sx.constrain(x, pinned)).trace(numbers()).jaxpr)
    assert found["sharding"].memory_kind == "unpinned_host"


# ---- Better than the original ---------------------------------------------------------------------------------------


def test_set_mesh_is_honoured_and_no_mesh_is_said():  # "Under jax.set_mesh the original does nothing and says nothing"
    with jax.set_mesh(mesh_of()):
        assert sx.with_sharding_constraint(jnp.ones((8, 16)), P("dp")).sharding.spec == P("dp")
    with pytest.warns(UserWarning, match="no mesh is in force.*does nothing") as caught:
        x = jnp.ones((8, 16))
        assert sx.with_sharding_constraint(x, P("dp")) is x
    assert caught[0].filename == __file__  # the user's line, not ours


def test_explicit_meshes_work_for_arrays_and_trees():  # "raises for an array and swallows the error for a tree"
    with jax.set_mesh(mesh_of("explicit")):
        x = jnp.ones((8, 16))
        one = sx.with_sharding_constraint(x, P("dp"))
        tree = sx.with_sharding_constraint({"a": x, "b": [x]}, P("dp"))
    assert all(leaf.sharding.spec[0] == "dp" for leaf in (one, tree["a"], tree["b"][0]))


def test_a_composite_keeps_what_fits():  # "(fsdp, sp) with sp absent loses fsdp too"
    with jax.set_mesh(sx.make_mesh("fsdp=8")):
        assert sx.get_corrected_named_sharding((8, 4), P(("fsdp", "sp"))).spec == P("fsdp")
        assert sx.with_sharding_constraint(jnp.ones((8, 4)), P(("fsdp", "sp"))).sharding.spec == P("fsdp")


# ---- trees, prefixes, leaves ----------------------------------------------------------------------------------------


def test_prefix_trees_and_other_leaves():
    x = jnp.ones((8, 16))
    with jax.set_mesh(mesh_of()):
        out = sx.with_sharding_constraint(
            {"w": {"a": x, "b": x}, "b": x, "name": "text", "n": 3, "skip": x},
            {"w": P("dp"), "b": P("tp"), "name": P("dp"), "n": P("dp"), "skip": None},
        )
    assert out["w"]["a"].sharding.spec == out["w"]["b"].sharding.spec == P("dp") and out["b"].sharding.spec == P("tp")
    assert out["name"] == "text" and out["n"] == 3 and out["skip"] is x


def test_bad_targets_are_named():
    x = jnp.ones((8, 16))
    with jax.set_mesh(mesh_of()):
        with pytest.raises(sx.LayoutError, match="not a prefix of the tree"):
            sx.with_sharding_constraint({"a": x}, {"b": P("dp")})
        with pytest.raises(sx.SpecError, match="not a sharding constraint: 3"):
            sx.with_sharding_constraint(x, 3)
        with pytest.raises(sx.SpecError, match="SingleDeviceSharding"):
            sx.with_sharding_constraint(x, x.sharding)


def test_size_one_axes_stay():
    with jax.set_mesh(sx.make_mesh("dp=8,tp=1")):
        assert sx.get_corrected_named_sharding((8, 3), P("dp", "tp")).spec == P("dp", "tp")


def test_get_corrected_named_sharding_without_a_mesh():
    with pytest.raises(AssertionError, match="none is in force"):
        sx.get_corrected_named_sharding((8,), P("dp"))
    with pytest.warns(UserWarning, match="replicated on an empty mesh"):
        sharding = sx.get_corrected_named_sharding((8,), P("dp"), raise_mesh_error=False)
    assert sharding.spec == P() and sharding.mesh.empty


# ---- constrain ------------------------------------------------------------------------------------------------------


def test_constrain_is_strict_unless_told():
    mesh, x = mesh_of(), jnp.ones((6, 16))
    with pytest.raises(sx.SpecError, match=r"test_constrain.py:\d+: dim 0: 6 does not divide by 'tp' \(4\)"):
        sx.constrain(x, P("tp"), mesh=mesh)
    with pytest.raises(sx.UnknownAxisError, match="did you mean 'tp'"):
        sx.constrain(x, P("tpp"), mesh=mesh)
    with pytest.raises(sx.NoMeshError):
        sx.constrain(x, P("tp"))
    with pytest.raises(ValueError, match="on_misfit='adapted' is unknown"):
        sx.constrain(x, P("tp"), mesh=mesh, on_misfit="adapted")
    with pytest.warns(UserWarning, match="dim 0 loses 'tp'"):
        sx.constrain(x, P("tp"), mesh=mesh, on_misfit="warn")


def test_an_adapted_activation_is_free_not_replicated():
    mesh = mesh_of()
    x = jax.device_put(numbers()[:6], NamedSharding(mesh, P("dp", None)))
    assert sx.constrain(x, P("tp", "dp"), mesh=mesh, on_misfit="adapt").sharding.spec == P(None, "dp")
    assert sx.constrain(x, P("tp", None), mesh=mesh, on_misfit="adapt").sharding.spec[0] == "dp"  # keeps what it has

    @jax.jit
    def step(x):
        return sx.constrain(x, P("tp", "tp"), mesh=mesh, on_misfit="adapt") + 0

    assert "all-gather" not in step.lower(x).compile().as_text()


def test_free_dimensions_stay_as_they_are_on_explicit_meshes():
    mesh = mesh_of("explicit")
    x = jax.device_put(numbers(), NamedSharding(mesh, P("dp", None)))
    with jax.set_mesh(mesh):
        assert sx.constrain(x, P(sx.FREE, "tp")).sharding.spec == P("dp", "tp")
        assert jax.jit(lambda y: sx.constrain(y, P(sx.FREE, "tp")))(x).sharding.spec == P("dp", "tp")


def test_an_order_that_a_mixed_mesh_cannot_hold_is_an_error():
    mesh = mesh_of("mixed")
    with jax.set_mesh(mesh), pytest.raises(sx.SpecError, match="name the Explicit axes first"):
        jax.jit(lambda x: sx.constrain(x, P(("dp", "tp"))))(numbers())


def test_an_abstract_mesh_has_nowhere_to_put_an_array_but_traces():
    mesh = sx.MeshSpec.of("dp=64,tp=64").abstract()
    with jax.sharding.use_abstract_mesh(mesh):
        with pytest.raises(sx.MeshError, match="abstract"):
            sx.constrain(jnp.ones((64, 64)), P("dp"))
        out = jax.eval_shape(lambda x: sx.constrain(x, P("dp")), jax.ShapeDtypeStruct((64, 64), np.float32))
    assert out.shape == (64, 64)


def test_two_meshes_that_disagree_are_an_error():
    other = sx.make_mesh("zz=8")
    with jax.set_mesh(mesh_of()), pytest.raises(sx.MeshConflictError):
        sx.with_sharding_constraint(jnp.ones(8), NamedSharding(other, P("zz")))


def test_a_sharding_and_another_mesh_are_an_error():
    with pytest.raises(sx.MeshConflictError, match="(?s)two meshes are given.*argument: dp=8.*sharding: dp=2,tp=4"):
        sx.constrain(jnp.ones(8), NamedSharding(mesh_of(), P("dp")), mesh=sx.make_mesh("dp=8"))
    assert sx.constrain(jnp.ones(8), NamedSharding(mesh_of(), P("dp")), mesh="dp=2,tp=4").sharding.spec == P("dp")


def test_a_tree_is_constrained_by_its_layout_and_a_scalar_by_no_axes():
    tree = {"a": jnp.ones((8, 4)), "b": [jnp.ones(8)]}
    layout = sx.layout(tree, {"a": P("dp", "tp"), "b": P("tp")}, mesh_of())
    for out in (sx.constrain(tree, layout), jax.jit(lambda t: sx.constrain(t, layout))(tree)):
        assert (out["a"].sharding.spec, out["b"][0].sharding.spec) == (P("dp", "tp"), P("tp"))
    with pytest.raises(sx.LayoutError, match="a: is in the layout, not in the tree"):
        sx.constrain({"b": [jnp.ones(8)]}, layout)
    assert sx.constrain(jnp.ones(()), [], mesh=mesh_of()).sharding.is_fully_replicated
    rules = sx.LogicalRules.of({"batch": "dp", "mlp": "tp"})
    assert sx.constrain(jnp.ones((8, 8)), ["batch", "mlp"], mesh=mesh_of(), axes=rules).sharding.spec == P("dp", "tp")


def test_a_text_is_no_spec():
    with jax.set_mesh(mesh_of()), pytest.raises(sx.SpecError, match="not a partition spec: 'dp'"):
        sx.get_corrected_named_sharding((8,), "dp")


def squares(x):
    return (sx.with_sharding_constraint(x, P("dp", "tp")) ** 2).sum()


TRANSFORMED = {
    "grad": jax.grad(squares),
    "jvp": lambda x: jax.jvp(lambda y: sx.with_sharding_constraint(y, P("dp", "tp")), (x,), (2 * x,))[1],
    "vmap": lambda x: 2 * jax.vmap(lambda row: sx.with_sharding_constraint(row, P("tp")), spmd_axis_name="dp")(x),
    "checkpoint": lambda x: 2 * jax.checkpoint(lambda y: sx.with_sharding_constraint(y, P("dp", "tp")))(x),
}


@pytest.mark.parametrize("transform", TRANSFORMED)
@pytest.mark.parametrize("kind", KINDS)
def test_a_transformation_that_runs_eagerly_means_what_it_means_under_jit(kind, transform):
    mesh, call = mesh_of(kind), TRANSFORMED[transform]
    x = jax.device_put(numbers(), NamedSharding(mesh, P("dp")))
    with jax.set_mesh(mesh):
        eager, jitted = call(x), jax.jit(call)(x)
    np.testing.assert_array_equal(np.asarray(eager), 2 * numbers())
    assert jax.typeof(eager) == jax.typeof(jitted)
    if kind != "auto" and transform != "grad":  # the compiler chooses where Auto axes are not constrained
        assert eager.sharding.is_equivalent_to(jitted.sharding, 2)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("context", ["argument", "with mesh", "set_mesh"])
def test_arrays_that_are_on_no_mesh_yet_are_constrained_under_grad_vmap_and_checkpoint(context, kind, traced):
    mesh = mesh_of(kind)
    with context_of(context, mesh) as argument:
        call = lambda x: constrain_with(x, P("dp", "tp"), argument)  # noqa: E731
        transformed = {
            "jvp": lambda x: jax.jvp(call, (x,), (x,))[1],
            "vmap": lambda x: jax.vmap(call)(jnp.stack([x] * 8))[3],
            "grad": jax.grad(lambda x: (call(x) ** 2).sum() / 2),
            "checkpoint": jax.grad(lambda x: (jax.checkpoint(lambda y: call(y) ** 2)(x)).sum() / 2),
        }
        if not traced:
            del transformed["checkpoint"]  # jax.lax.with_sharding_constraint cannot do it either
            if kind != "auto" and context != "set_mesh":
                del transformed["grad"]  # nor can JAX add up an array on Explicit axes without jax.set_mesh
        for name, transform in transformed.items():
            x = jnp.asarray(numbers())
            out = (jax.jit(transform) if traced else transform)(x)
            np.testing.assert_array_equal(np.asarray(out), numbers(), err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("context", ["argument", "with mesh", "set_mesh"])
def test_vmap_leaves_the_mapped_dimension_alone(context, kind):
    mesh = mesh_of(kind)
    batch = jnp.stack([jnp.asarray(numbers())] * 8)
    with context_of(context, mesh) as argument:
        mapped = jax.vmap(lambda x: constrain_with(x, P("dp", "tp"), argument))
        for call in (mapped, jax.jit(mapped), jax.vmap(jax.jit(lambda x: constrain_with(x, P("dp", "tp"), argument)))):
            assert call(batch).sharding.is_equivalent_to(NamedSharding(mesh, P(None, "dp", "tp")), 3)


# ---- the log --------------------------------------------------------------------------------------------------------


def test_corrections_are_collected_eagerly_and_while_tracing():
    x = jnp.ones((6, 16))
    with jax.set_mesh(mesh_of()), sx.corrections() as log:
        sx.with_sharding_constraint(x, P("tp", "dp"))
        jax.jit(lambda y: sx.with_sharding_constraint(y, P("sp", "dp")))(x)
        with sx.corrections() as inner:
            sx.get_corrected_named_sharding((6,), P("tp"))
        sx.with_sharding_constraint(x, P("dp"))  # fits: nothing to record
    assert [[c.reason for c in d.fit.corrections] for d in log] == [["indivisible"], ["unknown-axis"], ["indivisible"]]
    assert len(inner) == 1 and log[0].path.startswith("test_constrain.py:") and log[0].spec == P(None, "dp")


def test_costly_corrections_warn_and_cheap_ones_do_not(recwarn):
    with jax.set_mesh(mesh_of()):
        sx.with_sharding_constraint(jnp.ones((6, 16)), P("tp"))
        assert not recwarn.list
        with pytest.warns(UserWarning, match="dim 0 loses 'tp'.*MiB more per device"):
            sx.with_sharding_constraint(jnp.ones((6, 1 << 20)), P("tp"))


def test_log_sharding_move_is_read_when_used(monkeypatch):
    monkeypatch.setenv("LOG_SHARDING_MOVE", "1")
    with jax.set_mesh(mesh_of()), pytest.warns(UserWarning, match="dim 0 loses 'tp'"):
        sx.with_sharding_constraint(jnp.ones((6, 16)), P("tp"))
