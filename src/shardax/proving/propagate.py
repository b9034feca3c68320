"""`Propagation`: a walk over a traced program that carries layouts from its arguments to its results.

Loops are walked until what they carry lies the same before and after; a layout only goes forward, as in JAX's own
sharding types.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from shardax._compat import equation_frames, is_jaxpr, name_stack, scan_counts, subjaxprs
from shardax.proving.collectives import wire
from shardax.proving.moves import Entries, Move, entries
from shardax.proving.operation import Operations, explicit_axes
from shardax.proving.outcomes import Laid, Outcome, Travel, bring, joined
from shardax.proving.rebind import place_of
from shardax.proving.site import Cause, Site
from shardax.proving.sources import Source, own_frames, recognisable

SCOPE = "shardax_refused_"  # the scope of an operation that was refused while the program was traced
_REFUSED = re.compile(rf"(?<!\w){SCOPE}(\d+)")
_HANDS_ON = frozenset(
    {"convert_element_type", "copy", "copy_p", "reshape", "transpose", "squeeze", "slice", "dynamic_slice",
     "expand_dims", "optimization_barrier", "sharding_constraint", "reshard"}
)  # fmt: skip
_CALLS = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call",
     "custom_vjp_call_jaxpr", "custom_lin"}
)  # fmt: skip
NOWHERE = Source("", 0, "")
_LONGEST = 12  # walks of a loop until its layouts are settled; every one adds an axis


@dataclass(frozen=True)
class Where:
    """Where the walk is: how often it comes here, and in which phase."""

    times: int = 1
    phase: str = "forward"
    note: str = ""
    place: Source = NOWHERE


@dataclass
class Propagation:
    """What one walk finds; `sites` and `operations` grow while it goes."""

    rules: Operations
    refusals: Sequence[str] = ()  # what JAX said, by the number in the scope
    sites: list[Site] = field(default_factory=list[Site])
    operations: int = 0
    unknown: list[str] = field(default_factory=list[str])
    met: set[int] = field(default_factory=set[int])  # refusals that were come by
    moved: set[tuple[int, Move]] = field(default_factory=set[tuple[int, Move]])

    @property
    def sizes(self) -> Mapping[str, int]:
        return self.rules.sizes

    def walk(self, jaxpr: Any, inputs: Sequence[Laid], where: Where, consts: Sequence[Laid] = ()) -> list[Laid]:
        """The results of a jaxpr for arguments that lie so."""
        open_ = getattr(jaxpr, "jaxpr", jaxpr)
        known: dict[Any, Laid] = dict(zip(open_.invars, inputs, strict=True))
        given = iter(consts)
        known.update((var, next(given, None) or Laid.whole(var.aval)) for var in open_.constvars)

        def read(var: Any) -> Laid:
            return Laid.whole(var.aval) if hasattr(var, "val") else known[var]

        for equation in open_.eqns:
            results = self._equation(equation, [read(var) for var in equation.invars], where)
            known.update(zip(equation.outvars, results, strict=True))
        return [read(var) for var in open_.outvars]

    # ---- one equation -----------------------------------------------------------------------------------------------

    def _equation(self, equation: Any, operands: list[Laid], where: Where) -> list[Laid]:
        self.operations += 1
        stack = name_stack(equation)
        if "transpose(" in stack and where.phase == "forward":
            where = replace(where, phase="backward")
        name = equation.primitive.name
        if name in _CALLS and (inner := _only_jaxpr(equation)) is not None:
            return self._call(equation, inner, operands, self._at(equation, where))
        step = getattr(self, f"_{name}", None) if name in _SPECIAL else None
        if step is not None:
            return step(equation, operands, self._at(equation, where))
        refused = refused_in(stack)
        if name in ("reshard", "sharding_constraint"):
            return self._constrained(equation, operands, where, SCOPE in stack)
        outcome = self.rules.outcome(equation, operands)
        if outcome.opaque:
            self.unknown.append(f"{place_of(equation)}: {outcome.why}")
        if refused is not None:
            outcome = replace(outcome, ambiguous=True, why=self.refusals[refused])
            self.met.add(refused)
            self._refused(equation, outcome, operands, where)
        elif outcome.travels:
            self._record(equation, outcome, operands, where)
        return _results(equation, outcome, operands)

    def _constrained(self, equation: Any, operands: list[Laid], where: Where, gathered: bool) -> list[Laid]:
        """The program says how an array is to lie. (What `forgiving_trace` gathered is not the program's word.)"""
        (operand,) = operands
        asked = equation.params.get("sharding", equation.params.get("dst_sharding"))
        if gathered or not isinstance(asked, NamedSharding):
            return operands
        wanted = _asked_entries(asked.spec, operand)
        if equation.primitive.name == "reshard":  # speaks of Explicit axes only
            typed = explicit_axes(asked)
            pairs = zip(wanted, operand.entries, strict=True)
            out = tuple((*mine, *(axis for axis in held if axis not in typed)) for mine, held in pairs)
            if not typed:
                return operands
        else:
            left_open = set(equation.params.get("unconstrained_dims") or ())
            left_open |= {dim for dim, entry in enumerate(asked.spec) if entry is PartitionSpec.UNCONSTRAINED}
            pairs = enumerate(zip(wanted, operand.entries, strict=True))
            out = tuple(held if dim in left_open else mine for dim, (mine, held) in pairs)
        travels = tuple(bring(0, operand, out, self.sizes))
        if travels:
            self._record(equation, Outcome((out,), travels, "asked for"), operands, where, "asked")
        return [replace(operand, entries=out)]

    # ---- what is written down ---------------------------------------------------------------------------------------

    def _at(self, equation: Any, where: Where) -> Where:
        """The line of an equation: of the step itself, else that of the call it stands in, else of a library."""
        frames = [Source(*frame) for frame in equation_frames(equation)]
        if not frames or (where.place.file and not own_frames(frames)):
            return where
        return replace(where, place=recognisable(frames))

    def _refused(self, equation: Any, outcome: Outcome, operands: Sequence[Laid], where: Where) -> None:
        if outcome.travels:
            self._record(equation, outcome, operands, where)
        else:
            self.sites.append(_still(equation, outcome.why, self._at(equation, where)))

    def _record(
        self, equation: Any, outcome: Outcome, operands: Sequence[Laid], where: Where, cause: Cause | None = None
    ) -> None:
        name = equation.primitive.name
        chosen: Cause = cause or ("ambiguous" if outcome.ambiguous else "implied")
        if outcome.why == "the program's own":
            chosen = "asked"
        for travel in outcome.travels:
            moved = operands[travel.operand] if travel.operand is not None else None
            if moved is not None and self._again(moved, travel):
                continue
            dtype = moved.dtype if moved is not None else equation.outvars[0].aval.dtype
            path = moved.path if moved is not None else None
            self.add(travel, name, chosen, outcome.why, self._at(equation, where), str(dtype), path)

    def _again(self, operand: Laid, travel: Travel) -> bool:
        """Has this array travelled so before? A compiler does it once."""
        key = (operand.value, travel.move)
        known = key in self.moved
        self.moved.add(key)
        return known

    def add(
        self, travel: Travel, operation: str, cause: Cause, why: str, where: Where, dtype: str, path: str | None = None
    ) -> None:
        """Write down one collective."""
        move = travel.move
        axes = tuple(axis for axis in self.sizes if axis in move.axes)  # in the order of the mesh, as in a ledger
        size = move.among or math.prod(self.sizes[axis] for axis in axes)
        sent = round(wire(move.collective, move.payload_bytes, size) * where.times)
        self.sites.append(
            Site(
                move.collective, axes, where.times, move.payload_bytes, sent, dtype, operation, cause, why,
                where.phase, where.place.file, where.place.line, where.place.function, path=path, note=where.note,
            )
        )  # fmt: skip

    def _moved(self, operand: Laid, to: Entries, name: str, why: str, where: Where, cause: Cause = "implied") -> Laid:
        for travel in bring(0, operand, to, self.sizes):
            if self._again(operand, travel):
                continue
            self.add(travel, name, cause, why, where, str(operand.dtype), operand.path)
        return replace(operand, entries=to)

    # ---- calls ------------------------------------------------------------------------------------------------------

    def _call(self, equation: Any, inner: Any, operands: list[Laid], where: Where) -> list[Laid]:
        """A function in the function; a jit may ask for layouts of its own."""
        asked = equation.params.get("in_shardings") or (None,) * len(operands)
        ready = [
            self._moved(operand, _asked_entries(sharding.spec, operand), "jit", "its in_shardings", where, "asked")
            if isinstance(sharding, NamedSharding)
            else operand
            for operand, sharding in zip(operands, asked, strict=True)
        ]
        if equation.params.get("prevent_cse"):  # rematerialised: computed, and gathered, once more
            ready = [Laid(each.shape, each.dtype, each.entries, each.path) for each in ready]
        results = self.walk(inner, ready, where)
        wanted = equation.params.get("out_shardings") or (None,) * len(results)
        return [
            self._moved(result, _asked_entries(sharding.spec, result), "jit", "its out_shardings", where, "asked")
            if isinstance(sharding, NamedSharding)
            else result
            for result, sharding in zip(results, wanted, strict=True)
        ]

    def _shard_map(self, equation: Any, operands: list[Laid], where: Where) -> list[Laid]:
        """Inside, the manual axes are the program's; the others go on as outside."""
        params = equation.params
        inner = getattr(params["jaxpr"], "jaxpr", params["jaxpr"])
        manual = frozenset(params.get("newly_manual_axes", params.get("manual_axes", self.sizes)))
        ready: list[Laid] = []
        for operand, spec, var in zip(operands, params["in_specs"], inner.invars, strict=True):
            mine = entries(spec, len(operand.shape))
            kept = tuple(tuple(axis for axis in axes if axis not in manual) for axes in operand.entries)
            whole = tuple((*own, *rest) for own, rest in zip(mine, kept, strict=True))
            self._moved(operand, whole, "shard_map", "its in_specs", where, "asked")
            ready.append(Laid(tuple(var.aval.shape), operand.dtype, kept, operand.path))
        results = self.walk(inner, ready, where)
        return [
            Laid(
                tuple(var.aval.shape),
                result.dtype,
                tuple(
                    (*own, *rest) for own, rest in zip(entries(spec, len(result.shape)), result.entries, strict=True)
                ),
            )
            for result, spec, var in zip(results, params["out_specs"], equation.outvars, strict=True)
        ]

    # ---- loops and branches -----------------------------------------------------------------------------------------

    def _scan(self, equation: Any, operands: list[Laid], where: Where) -> list[Laid]:
        params = equation.params
        consts, carried = scan_counts(params)
        rows: list[Laid] = []
        for operand in operands[consts + carried :]:
            ready = self._moved(
                operand, ((), *operand.entries[1:]), "scan", "the scan goes along a sharded dimension", where
            )
            rows.append(Laid(ready.shape[1:], ready.dtype, ready.entries[1:], ready.path))
        fixed, carry = operands[:consts], operands[consts : consts + carried]
        inside = replace(where, times=where.times * params["length"])
        settled, results = self._loop(params["jaxpr"], fixed, carry, rows, inside)
        stacked = [
            Laid(tuple(var.aval.shape), result.dtype, ((), *result.entries))
            for result, var in zip(results[carried:], equation.outvars[carried:], strict=True)
        ]
        return [*settled, *stacked]

    def _while(self, equation: Any, operands: list[Laid], where: Where) -> list[Laid]:
        params = equation.params
        first, second = params["cond_nconsts"], params["body_nconsts"]
        inside = replace(where, note="in a loop: once for every turn")
        carry = operands[first + second :]
        settled, _ = self._loop(params["body_jaxpr"], operands[first : first + second], carry, [], inside)
        self.walk(params["cond_jaxpr"], [*operands[:first], *settled], inside)
        return settled

    def _loop(
        self, body: Any, fixed: Sequence[Laid], carry: Sequence[Laid], rows: Sequence[Laid], where: Where
    ) -> tuple[list[Laid], list[Laid]]:
        """The carry as it lies in every turn, and the results of the last walk, which is the one written down."""
        held = [replace(each, path=None) for each in carry]
        trial, results = self._turn(body, [*fixed, *held, *rows], where)
        for _ in range(_LONGEST):
            wider = [
                replace(each, entries=joined(each.entries, result.entries, each.shape, self.sizes))
                for each, result in zip(held, results, strict=False)
            ]
            if wider == held:
                break
            held = wider
            trial, results = self._turn(body, [*fixed, *held, *rows], where)
        self.sites += trial.sites
        self.operations += trial.operations
        self.unknown += trial.unknown
        self.met |= trial.met
        for each, result in zip(held, results, strict=False):
            self._moved(result, each.entries, "loop", "what a loop carries comes back in another layout", where)
        return held, results

    def _turn(self, body: Any, inputs: Sequence[Laid], where: Where) -> tuple[Propagation, list[Laid]]:
        """One turn of a loop, on a sheet of its own."""
        trial = Propagation(self.rules, self.refusals)
        return trial, trial.walk(body, inputs, where)

    def _cond(self, equation: Any, operands: list[Laid], where: Where) -> list[Laid]:
        branches = equation.params["branches"]
        inside = replace(where, note=where.note or "in a branch: at most this often")
        found = [self.walk(branch, operands[1:], inside) for branch in branches]
        for results in found[1:]:
            for result, first in zip(results, found[0], strict=True):
                self._moved(result, first.entries, "cond", "the branches give different layouts", inside)
        return [replace(result, path=None) for result in found[0]]


def refused_in(stack: str) -> int | None:
    """The number of the refusal in whose scope an equation stands; the transpose of a refused one is not refused.

    >>> refused_in("jvp(shardax_refused_2)"), refused_in("transpose(jvp(shardax_refused_2))/shardax_refused_3")
    (2, 3)
    """
    if SCOPE not in stack:
        return None
    while "transpose(" in stack:
        begin = stack.index("transpose(")
        depth, end = 0, begin
        for end in range(begin + len("transpose"), len(stack)):
            depth += {"(": 1, ")": -1}.get(stack[end], 0)
            if depth == 0:
                break
        stack = stack[:begin] + stack[end + 1 :]
    found = _REFUSED.search(stack)
    return None if found is None else int(found[1])


def never_met(jaxpr: Any, walk: Propagation) -> Iterator[Site]:
    """Refused operations whose results nothing uses: their traffic never is, and yet JAX stops at them."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        refused = refused_in(name_stack(equation))
        if refused is not None and refused not in walk.met and equation.primitive.name != "reshard":
            walk.met.add(refused)
            yield _still(equation, walk.refusals[refused], Where(place=recognisable(_frames(equation))))
        for inner in subjaxprs(equation):
            yield from never_met(inner, walk)


def _still(equation: Any, why: str, where: Where) -> Site:
    """A site at which nothing travels."""
    name, place = equation.primitive.name, where.place
    return Site(
        "", (), where.times, 0, 0, "", name, "ambiguous", why, where.phase, place.file, place.line, place.function,
        note=where.note,
    )  # fmt: skip


def _frames(equation: Any) -> list[Source]:
    return [Source(*frame) for frame in equation_frames(equation)] or [NOWHERE]


_SPECIAL = frozenset({"scan", "while", "cond", "shard_map"})


def _only_jaxpr(equation: Any) -> Any:
    found = [value for value in equation.params.values() if is_jaxpr(value)]
    takes = [each for each in found if len(getattr(each, "jaxpr", each).invars) == len(equation.invars)]
    return takes[0] if takes else None


def _asked_entries(spec: PartitionSpec, laid: Laid) -> Entries:
    plain = PartitionSpec(*(None if entry is PartitionSpec.UNCONSTRAINED else entry for entry in spec))
    return entries(plain, len(laid.shape))


def _results(equation: Any, outcome: Outcome, operands: Sequence[Laid]) -> list[Laid]:
    handed = operands[0].path if operands and equation.primitive.name in _HANDS_ON else None
    return [
        Laid(tuple(getattr(var.aval, "shape", ())), getattr(var.aval, "dtype", None), out, handed)
        for var, out in zip(equation.outvars, outcome.results, strict=True)
    ]
