"""Assertions over proofs and trees: each fails with everything that is wrong, in one message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardax.errors import Offence, ProofError, ProofFailure, did_you_mean, plural
from shardax.names.layout import Layout
from shardax.names.mesh import MeshSpec
from shardax.names.paths import flatten
from shardax.names.spec import as_spec, canonical
from shardax.proving.check import Check
from shardax.proving.collectives import Collective
from shardax.proving.placing import replicated
from shardax.proving.proof import Proof
from shardax.tables import parse_bytes, show_bytes

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)


def assert_fits(proof: Proof, margin: str | int = 0) -> None:
    """The step fits its device, with at least `margin` to spare ("4GB", bytes).

    >>> import jax, shardax as sx
    >>> x = jax.ShapeDtypeStruct((8,), "float32")
    >>> proof = sx.prove(lambda x: x + 1, x, target="cpu:1", mesh="dp=1", in_specs=jax.P())
    >>> sx.assert_fits(proof, margin="1GB")
    Traceback (most recent call last):
        ...
    shardax.errors.ProofFailure: cpu:1 has no device memory to fit
    prove for a device, for example target="tpu:v5p:2x2x1" or "gpu:h100:8"
    """
    __tracebackhide__ = True
    wanted = parse_bytes(margin)
    if proof.fits is None:
        raise ProofFailure(
            f"{proof.target} has no device memory to fit",
            remedy='prove for a device, for example target="tpu:v5p:2x2x1" or "gpu:h100:8"',
        )
    left = proof.margin or 0
    if proof.fits and left >= wanted:
        return
    largest = [Offence(buffer.place, f"{show_bytes(buffer.bytes)} {buffer.what}") for buffer in proof.memory.buffers]
    asked = f", asked for {show_bytes(wanted)} free" if wanted else ""
    have = f"{show_bytes(proof.memory.peak)} of {show_bytes(proof.memory.hbm or 0)}"
    verdict = "does not fit" if left < 0 else f"leaves {show_bytes(left)}"
    raise ProofFailure(f"{proof.name} {verdict} on {proof.target}: {have}{asked}", largest[:5])


def assert_collectives(
    proof: Proof | Check, expected: Mapping[str, Any] | None = None, *, no: Iterable[str] = (), exact: bool = False
) -> None:
    """The step runs these collectives, so often: `{"all-gather": {"fsdp": 3}}`, and none of the kinds in `no`.

    A count is of executions (a collective in a scan of 32 counts 32 times). Axes are one name or a tuple of names;
    an axis that is not mentioned may do as it likes, unless `exact`. A `Check` will do for a proof.

    >>> import jax, shardax as sx
    >>> rows = jax.ShapeDtypeStruct((64, 32), "float32")
    >>> check = sx.check(lambda x: x.sum(), rows, mesh="dp=8", in_specs=jax.P("dp"))
    >>> sx.assert_collectives(check, {"all-reduce": {"dp": 1}}, no=["all-gather"])
    """
    __tracebackhide__ = True
    wanted = {
        (op, (axes,) if isinstance(axes, str) else tuple(axes)): count
        for op, by_axes in (expected or {}).items()
        for axes, count in (by_axes.items() if isinstance(by_axes, Mapping) else [((), by_axes)])
    }
    no = [no] if isinstance(no, str) else list(no)
    _known_names([*(op for op, _ in wanted), *no], [axis for _, axes in wanted for axis in axes], proof.mesh)
    problems: list[Offence] = []
    for (op, axes), count in wanted.items():
        rows = [row for row in proof.ledger if row.op == op and (not axes or set(row.axes) == set(axes))]
        found = sum(row.count for row in rows)
        if found != count:
            problems.append(Offence(_kind(op, axes), f"expected {count:,}, found {found:,}{_places(rows)}"))
    for op in no:
        rows = [row for row in proof.ledger if row.op == op]
        if rows:
            problems.append(Offence(op, f"expected none, found {sum(row.count for row in rows):,}{_places(rows)}"))
    if exact:
        problems += _unexpected(proof, wanted)
    if problems:
        where = f"{proof.target} ({proof.mesh})" if isinstance(proof, Proof) else f"mesh {proof.mesh}"
        raise ProofFailure(f"{proof.name} on {where} does not run the expected collectives", problems)


def _known_names(kinds: Iterable[str], axes: Iterable[str], mesh: MeshSpec) -> None:
    """A mistyped name must not make a test that always passes."""
    unknown = [Offence(kind, f"is no collective{did_you_mean(kind, KINDS)}") for kind in kinds if kind not in KINDS]
    if unknown:
        raise ProofError("unknown collectives", unknown, f"known: {', '.join(KINDS)}")
    strange = [
        Offence(axis, f"is no axis of the mesh{did_you_mean(axis, mesh.names)}")
        for axis in axes
        if axis not in mesh.names
    ]
    if strange:
        raise ProofError("unknown axes", strange, f"the mesh is {mesh}")


def _kind(op: str, axes: tuple[str, ...]) -> str:
    return f"{op} over {'×'.join(axes)}" if axes else op


def _unexpected(proof: Proof | Check, wanted: Mapping[tuple[str, tuple[str, ...]], int]) -> list[Offence]:
    rest: dict[tuple[str, tuple[str, ...]], list[Collective]] = {}
    for row in proof.ledger:
        if not any(op == row.op and (not axes or set(axes) == set(row.axes)) for op, axes in wanted):
            rest.setdefault((row.op, row.axes), []).append(row)
    return [
        Offence(_kind(op, axes), f"not expected, found {sum(row.count for row in rows):,}{_places(rows)}")
        for (op, axes), rows in rest.items()
    ]


def _places(rows: list[Collective], most: int = 4) -> str:
    if not rows:
        return ""
    listed = sorted(rows, key=lambda row: -row.wire_bytes)
    shown = [
        f"{row.count:,}× {row.place or row.op_name or row.name}" + (f" {row.path}" if row.path else "")
        for row in listed
    ]
    more = f", … {len(shown) - most} more" if len(shown) > most else ""
    return f": {', '.join(shown[:most])}{more}"


def assert_no_replication_over(
    proof: Proof | Check | str | int,
    threshold: Proof | Check | str | int,
    *,
    axes: Iterable[str] | None = None,
    ignore: Iterable[str] = (),
) -> None:
    """No array of the step costs `threshold` or more on every device of the mesh (or on every device along `axes`).

    `ignore` are beginnings of paths that may.

    >>> import jax, shardax as sx
    >>> weight = jax.ShapeDtypeStruct((1024, 1024), "float32")
    >>> check = sx.check(lambda weight: weight * 2, weight, mesh="dp=2,tp=4", in_specs=jax.P("tp"))
    >>> sx.assert_no_replication_over(check, "1MB")
    >>> sx.assert_no_replication_over(check, "1MB", axes=["dp"])
    Traceback (most recent call last):
        ...
    shardax.errors.ProofFailure: 2 arrays of 1 MiB or more replicated by <lambda>
      result: 1 MiB on every device along dp, 2 copies; 512 KiB could be saved [spec P('tp', None)]
      weight: 1 MiB on every device along dp, 2 copies; 512 KiB could be saved [spec P('tp',)]
    """
    __tracebackhide__ = True
    if isinstance(proof, (str, int)):  # either order reads well
        proof, threshold = threshold, proof
    if isinstance(proof, (str, int)) or not isinstance(threshold, (str, int)):
        raise TypeError("assert_no_replication_over takes a proof and a size")
    limit = parse_bytes(threshold)
    along = None if axes is None else set([axes] if isinstance(axes, str) else axes)
    _known_names((), along or (), proof.mesh)
    skip = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    arrays = [leaf for leaf in (*proof.inputs, *proof.outputs) if not (skip and leaf.path.startswith(skip))]
    problems = [
        Offence(
            each.path,
            f"{show_bytes(each.bytes_per_device)} on every device"
            f"{'' if along is None else f' along {chr(44).join(sorted(along))}'}, {each.copies} copies;"
            f" {show_bytes(each.wasted)} could be saved",
            spec=each.spec,
        )
        for each in replicated(arrays, proof.mesh, limit)
        if (each.whole if along is None else along <= set(each.unused_axes))
    ]
    if problems:
        raise ProofFailure(
            f"{plural(len(problems), 'array')} of {show_bytes(limit)} or more replicated by {proof.name}", problems
        )


def assert_donated(proof: Proof, *paths: str) -> None:
    """Every donated buffer (or those whose paths begin so) is reused; a named one must have been donated at all.

    >>> import jax, shardax as sx
    >>> state, gradient = jax.ShapeDtypeStruct((8, 4), "float32"), jax.ShapeDtypeStruct((8, 4), "float32")
    >>> def step(state, gradient):
    ...     return state - gradient
    >>> proof = sx.prove(step, state, gradient, in_specs=jax.P("dp"), mesh="dp=2", target="cpu:2", donate="state")
    >>> sx.assert_donated(proof, "state")
    """
    __tracebackhide__ = True
    problems = [
        Offence(lost.path, f"was donated and is not reused: {show_bytes(lost.bytes)} per device held twice")
        for lost in proof.lost_donations
        if not paths or lost.path.startswith(paths)
    ]
    donated = [leaf.path for leaf in proof.inputs if leaf.donated]
    for path in paths:
        matching = [leaf.path for leaf in proof.inputs if leaf.path.startswith(path)]
        if not matching:
            problems.append(Offence(path, f"is no argument of {proof.name}{did_you_mean(path, _heads(proof))}"))
        problems += [
            Offence(leaf.path, f"is not donated ({show_bytes(leaf.bytes_on(proof.mesh))} per device)")
            for leaf in proof.inputs
            if leaf.path.startswith(path) and not leaf.donated and leaf.shape
        ]
    if not paths and not donated:
        problems.append(
            Offence(proof.name, "donates nothing", remedy='prove(…, donate="state") or jit(donate_argnums=)')
        )
    if problems:
        raise ProofFailure(f"{proof.name} holds donated memory twice", problems)


def _heads(proof: Proof) -> list[str]:
    return sorted({leaf.group for leaf in proof.inputs} | {leaf.path.split("[")[0] for leaf in proof.inputs})


def assert_sharded(tree: Any, layout: Any, mesh: Any = None) -> None:
    """Every array of a tree lies as a layout says (a `Layout`, or a tree of specs or shardings shaped like it).

    >>> import jax, jax.numpy as jnp, shardax as sx
    >>> rows = jax.device_put(jnp.ones((8, 2)), jax.NamedSharding(sx.make_mesh("dp=8"), jax.P("dp")))
    >>> sx.assert_sharded({"rows": rows}, {"rows": jax.P("dp")})
    >>> sx.assert_sharded({"rows": rows}, {"rows": jax.P(None, "dp")})
    Traceback (most recent call last):
        ...
    shardax.errors.ProofFailure: 1 leaf not as the layout says
      rows: lies as P('dp',), not as P(None, 'dp') [shape (8, 2)]
    """
    __tracebackhide__ = True
    paths, leaves = flatten(tree)
    wanted = _wanted(tree, layout, paths)
    problems: list[Offence] = []
    for path, leaf in zip(paths, leaves, strict=True):
        if path not in wanted:
            problems.append(Offence(path, "is not in the layout"))
        elif hasattr(leaf, "shape"):
            problems += _misplaced(path, leaf, wanted[path], mesh)
    problems += [Offence(path, "is in the layout, not in the tree") for path in wanted if path not in set(paths)]
    if problems:
        raise ProofFailure(f"{plural(len(problems), 'leaf', 'leaves')} not as the layout says", problems)


def _wanted(tree: Any, layout: Any, paths: list[str]) -> dict[str, Any]:
    if isinstance(layout, Layout):
        return {path: decision.spec for path, decision in layout.by_path.items()}
    if isinstance(layout, (PartitionSpec, NamedSharding)):
        return dict.fromkeys(paths, layout)
    found = jax.tree.map(_Boxed, layout, is_leaf=lambda n: n is None or isinstance(n, PartitionSpec))
    names, specs = flatten(found)
    return {name: box.spec for name, box in zip(names, specs, strict=True)}


class _Boxed:
    """A spec as a leaf: a bare None would vanish from the tree."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec


def _misplaced(path: str, leaf: Any, wanted: Any, mesh: Any) -> list[Offence]:
    sharding = getattr(leaf, "sharding", None)
    asked = as_spec(wanted.spec if isinstance(wanted, NamedSharding) else wanted)
    if isinstance(sharding, (PartitionSpec, NamedSharding)):
        spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
        on = mesh if mesh is not None else getattr(sharding, "mesh", None)
        shape = MeshSpec.of(on) if on is not None and getattr(on, "axis_names", ("",)) else None
        if canonical(spec, shape) == canonical(asked, shape):
            return []
        return [Offence(path, f"lies as {spec}, not as {asked}", tuple(leaf.shape))]
    if sharding is not None and getattr(sharding, "is_fully_replicated", False) and not canonical(asked):
        return []
    found = "no sharding" if sharding is None else type(sharding).__name__
    return [Offence(path, f"has {found}, not {asked}", tuple(leaf.shape))]
