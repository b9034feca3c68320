"""`check`: what a step sends between devices, without compiling anything, for a mesh of any size."""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from shardax._compat import Repair, abstract_mesh_of_a_kind, forgiving_trace, only_abstract_mesh, without_dead_code
from shardax.errors import plural
from shardax.names.mesh import MeshLike, MeshSpec
from shardax.proving.compiling import quiet_start
from shardax.proving.ledger import Ledger
from shardax.proving.moves import Entries, as_spec, entries
from shardax.proving.operation import Operations
from shardax.proving.outcomes import Laid, bring
from shardax.proving.placing import Placed, Replicated, check_placed, chosen_mesh, replicated
from shardax.proving.propagate import SCOPE, Propagation, Where, never_met
from shardax.proving.rebind import Result, placed_leaves, results_of, trace_on, traced_on
from shardax.proving.site import Site
from shardax.proving.step import Names, Step
from shardax.proving.tracing import Call
from shardax.tables import Reported, Table, parse_bytes, show_bytes

_SHOWN = 20
_WIDTH = 118
_PATH = 26
_number = count(1)


@dataclass(frozen=True)
class Check(Reported):
    """The places of a step where data travels, and those where how it travels is ambiguous.

    Iterable over its `Site`s; `check.ledger` adds them up by axis, line and kind as a proof's ledger does.
    """

    name: str
    mesh: MeshSpec
    sites: tuple[Site, ...]
    inputs: tuple[Placed, ...]
    outputs: tuple[Placed, ...]
    replicated: tuple[Replicated, ...]
    operations: int
    unknown: tuple[str, ...]  # operations that nobody can see into
    seconds: float = field(default=0.0, compare=False)

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    @property
    def ok(self) -> bool:
        """Is there but one way to do everything?"""
        return not self.ambiguous and not self.unknown

    @property
    def ambiguous(self) -> tuple[Site, ...]:
        """Where the compiler chooses what travels; on an Explicit mesh JAX refuses these."""
        return tuple(site for site in self.sites if site.cause == "ambiguous")

    @property
    def ledger(self) -> Ledger:
        """The collectives as the rows of a ledger."""
        rows = tuple(site.as_collective() for site in self.sites if site.op)
        return Ledger(rows, tuple(self.mesh.shape.items()))

    @property
    def argument_bytes(self) -> int:
        """What the arguments take on every device."""
        return sum(leaf.bytes_on(self.mesh) for leaf in self.inputs)

    @property
    def how_far(self) -> str:
        """How much of the program was seen."""
        walked = f"{plural(self.operations, 'operation')} walked"
        seen = f"{walked}, {len(self.unknown):,} of them opaque" if self.unknown else f"all {walked}"
        return f"{seen} in {self.seconds:.1f} s; nothing was compiled"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "shardax": "check",
            "name": self.name,
            "mesh": str(self.mesh),
            "ok": self.ok,
            "operations": self.operations,
            "argument_bytes": self.argument_bytes,
            "wire_bytes": self.ledger.wire_bytes,
            "sites": [site.to_json() for site in self.sites],
            "inputs": {leaf.path: str(leaf.spec) for leaf in self.inputs},
            "outputs": {leaf.path: str(leaf.spec) for leaf in self.outputs},
            "replicated": [each.path for each in self.replicated],
            "unknown": list(self.unknown),
        }

    def table(self, limit: int | None = _SHOWN) -> Table:
        """One line per kind of site (sites alike are added up), the ambiguous first, then the largest on the wire."""
        groups: dict[tuple[Any, ...], list[Site]] = {}
        for site in self.sites:
            what = _any_number(site.path)
            look = (site.op, site.axes, site.payload_bytes, site.phase, site.cause, site.place, site.operation, what)
            groups.setdefault(look, []).append(site)

        def weight(sites: list[Site]) -> tuple[bool, int]:
            return sites[0].cause != "ambiguous", -sum(site.wire_bytes for site in sites)

        ordered = sorted(groups.values(), key=weight)
        shown = ordered if limit is None else ordered[:limit]
        notes = (f"… and {len(ordered) - len(shown)} more places",) if len(shown) < len(ordered) else ()
        return Table("", _COLUMNS, tuple(map(_line, shown)), ("times", "payload", "on the wire"), notes)

    def __str__(self) -> str:
        return "\n".join(_text(self))


_COLUMNS = ("op", "axes", "times", "payload", "on the wire", "phase", "how", "what", "where", "")


def _short(path: str) -> str:
    return path if len(path) <= _PATH else f"{path[: _PATH // 2 - 1]}…{path[-_PATH // 2 :]}"


def _any_number(path: str | None) -> str | None:
    """Layers are alike: "params['layers'][3]['up']" is "params['layers'][*]['up']"."""
    return None if path is None else re.sub(r"\d+", "*", path)


def _line(sites: list[Site]) -> tuple[str, ...]:
    one = sites[0]
    times, sent = sum(site.count for site in sites), sum(site.wire_bytes for site in sites)
    path = one.path if len({site.path for site in sites}) == 1 else _any_number(one.path)
    sizes = (show_bytes(one.payload_bytes), show_bytes(sent)) if one.op else ("", "")
    over, what = "×".join(one.axes), _short(path or one.operation)
    return one.op or "-", over, f"{times:,}", *sizes, one.phase, one.cause, what, one.place, one.note


def _text(check: Check) -> Iterator[str]:
    ledger, ambiguous = check.ledger, check.ambiguous
    verdict = "nothing travels"
    if len(ledger):
        verdict = f"{plural(ledger.executions, 'collective')}, {show_bytes(ledger.wire_bytes)} sent by each device"
    doubts = f"; {plural(len(ambiguous), 'place is', 'places are')} ambiguous" if ambiguous else ""
    yield f"{check.name} on mesh {check.mesh} ({plural(check.mesh.size, 'device')}): {verdict}{doubts}"
    yield f"arguments {show_bytes(check.argument_bytes)} per device"
    if check.sites:
        yield from (
            line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…" for line in str(check.table()).splitlines()
        )
    reasons = dict.fromkeys((site.place or site.operation, site.why) for site in ambiguous)
    for place, why in list(reasons)[:6]:
        yield from textwrap.wrap(f"ambiguous   {place}: {why}", _WIDTH, subsequent_indent=" " * 12)
    if len(reasons) > 6:
        yield f"ambiguous   … and {len(reasons) - 6} more"
    for each in check.replicated[:6]:
        over = "on every device" if each.whole else f"over {', '.join(each.unused_axes)}"
        yield f"replicated  {each.path} {over}: {show_bytes(each.bytes_per_device)} per device"
    for words in check.unknown[:6]:
        yield from textwrap.wrap(f"opaque      {words}", _WIDTH, subsequent_indent=" " * 12)
    yield f"seen        {check.how_far}"


def check(
    fn: Any,
    *args: Any,
    mesh: MeshLike | None = None,
    layout: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
    donate: Names = None,
    static: Names = None,
    replicated_over: str | int = "64MB",
    **kwargs: Any,
) -> Check:
    """Say where `fn(*args, **kwargs)` makes data travel, with the Python line, without compiling: for any size of mesh.

    The arguments are those of `sx.prove`. The function is traced once; layouts go through it operation by operation as
    the types of an Explicit mesh do. An operation that such a mesh refuses is reported and the walk goes on, with the
    fewest bytes gathered that settle it. What a compiler then makes of it (merges, overlaps) `sx.prove` says.

    >>> import jax, jax.numpy as jnp
    >>> x, w = jax.ShapeDtypeStruct((4096, 512), jnp.float32), jax.ShapeDtypeStruct((512, 512), jnp.float32)
    >>> found = check(lambda x, w: jnp.tanh(x @ w), x, w, mesh="dp=1024,tp=4", in_specs=(jax.P("dp"), jax.P("tp")))
    >>> [(site.op, site.axes, site.payload_bytes, site.cause) for site in found], found.ok
    ([('all-reduce', ('tp',), 8192, 'implied')], True)
    """
    began = time.perf_counter()
    spec = MeshSpec.of(chosen_mesh(mesh, layout, in_specs, need="check"))
    step = Step.of(fn, args, kwargs, donate, static)
    refusals: list[str] = []
    with quiet_start():
        call, abstract = _traced(step, spec, in_specs, layout, refusals)
    inputs = placed_leaves(call.leaves)
    check_placed(inputs, spec)
    results, asked = results_of(call, out_specs, spec)
    walk = Propagation(Operations(abstract), refusals)
    laid = [Laid(leaf.shape, leaf.dtype, entries(leaf.spec, len(leaf.shape)), leaf.path) for leaf in inputs]
    with only_abstract_mesh(walk.rules.mesh):
        found = walk.walk(
            without_dead_code(call.traced.jaxpr), _typed(laid, call), Where(), _consts(call.traced.jaxpr, spec)
        )
    outputs = _outputs(walk, found, results, asked)
    return Check(
        name=step.name,
        mesh=spec,
        sites=(*walk.sites, *never_met(call.traced.jaxpr, walk)),
        inputs=inputs,
        outputs=outputs,
        replicated=replicated([*inputs, *(leaf for leaf in outputs if leaf.shape)], spec, parse_bytes(replicated_over)),
        operations=walk.operations,
        unknown=tuple(dict.fromkeys(walk.unknown)),
        seconds=time.perf_counter() - began,
    )


def _traced(step: Step, spec: MeshSpec, in_specs: Any, layout: Any, refusals: list[str]) -> tuple[Call, AbstractMesh]:
    """The step, traced on its own axis types; what an Explicit mesh refuses is noted and gathered on the way."""
    if AxisType.Explicit not in spec.axis_types:
        return traced_on(step, spec, ("cpu", "cpu"), in_specs, layout)
    # a kind of its own: JAX keeps what it traced, and must not show the user what was gathered here
    abstract = abstract_mesh_of_a_kind(spec.sizes, spec.names, spec.axis_types, f"check {next(_number)}")
    with forgiving_trace(_repairing(abstract, refusals)):
        return trace_on(step, abstract, ("cpu", "cpu"), in_specs, layout), abstract


def _repairing(mesh: AbstractMesh, refusals: list[str]) -> Callable[..., Repair]:
    """Note what is refused, and say with which layout of the result the trace goes on."""
    rules = Operations(mesh)

    def repair(error: Exception, primitive: Any, types: Sequence[Any], params: Mapping[str, Any]) -> Repair:
        refusals.append(" ".join(str(error).split())[:300])
        outcome = rules.of_types(primitive, types, params)
        specs = [as_spec(each) for each in outcome.results]
        scope = f"{SCOPE}{len(refusals) - 1}"
        if primitive.name == "dot_general":
            return scope, {**params, "out_sharding": NamedSharding(mesh, specs[0])}, specs
        return scope, None, specs

    return repair


def _typed(laid: list[Laid], call: Call) -> list[Laid]:
    """The dtypes as types; a path's text serves in the report only."""
    return [Laid(each.shape, leaf.dtype, each.entries, each.path) for each, leaf in zip(laid, call.leaves, strict=True)]


def _consts(jaxpr: Any, spec: MeshSpec) -> list[Laid]:
    """Arrays that the function closes over, as they lie."""
    found: list[Laid] = []
    for value in getattr(jaxpr, "consts", ()):
        sharding = getattr(value, "sharding", None)
        whole = Laid.whole(value)
        if isinstance(sharding, NamedSharding) and set(sharding.mesh.axis_names) <= set(spec.names):
            whole = Laid(whole.shape, whole.dtype, entries(sharding.spec, len(whole.shape)))
        found.append(whole)
    return found


def _outputs(
    walk: Propagation, found: list[Laid], results: tuple[Result, ...], asked: list[PartitionSpec | None]
) -> tuple[Placed, ...]:
    """The results as they lie in the end, brought to where they are asked for."""
    outputs: list[Placed] = []
    for laid, result, spec in zip(found, results, asked, strict=True):
        lies: Entries = laid.entries
        if spec is not None:
            lies = entries(spec, len(laid.shape))
            for travel in bring(0, laid, lies, walk.sizes):
                walk.add(travel, "result", "asked", "the result is asked for so", Where(), result.dtype, result.path)
        outputs.append(Placed(result.path, result.shape, result.dtype, result.itemsize, as_spec(lies), "check"))
    return tuple(outputs)
