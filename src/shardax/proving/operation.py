"""`Operations`: the outcome of any one operation under layouts, by our rules or by JAX's own sharding types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, use_abstract_mesh

from shardax._compat import FFT_BY_ROWS, DuplicateSpecError, ShardingTypeError, abstract_result, laid_type
from shardax.proving.contraction import convolution, dot_general
from shardax.proving.implied import OWN, concatenated, implied, own_collective
from shardax.proving.indexing import dynamic_update_slice, gather, scatter
from shardax.proving.moves import Entries, Move, as_spec, entries, replicated
from shardax.proving.outcomes import Laid, Outcome, Travel, bring
from shardax.proving.refusals import agree, least_gathered
from shardax.proving.reshaping import reshape

RULES = {
    "dot_general": dot_general,
    "gather": gather,
    "dynamic_update_slice": dynamic_update_slice,
    "concatenate": concatenated,
    "reshape": reshape,
}
_PLACED = ("out_sharding", "sharding")  # parameters by which a program says how a result lies
_UNSUITED = frozenset({"sort", "top_k"})  # operands of one shape, and yet not elementwise


@dataclass(frozen=True)
class _Typed:
    aval: Any


@dataclass(frozen=True)
class _Equation:
    """As much of an equation as rules look at."""

    primitive: Any
    params: Mapping[str, Any]
    invars: tuple[_Typed, ...]
    outvars: tuple[_Typed, ...]


class Operations:
    """What operations do on one mesh; the same operation on the same layouts is worked out once."""

    def __init__(self, mesh: AbstractMesh) -> None:
        self.sizes: Mapping[str, int] = dict(mesh.shape)
        self.mesh = AbstractMesh(
            mesh.axis_sizes, mesh.axis_names, axis_types=(AxisType.Explicit,) * len(mesh.axis_names)
        )
        self._known: dict[Any, Outcome] = {}

    def outcome(self, equation: Any, operands: Sequence[Laid]) -> Outcome:
        """The layouts of the results and what travels."""
        name, params = equation.primitive.name, equation.params
        asked = _asked(params)
        if asked is None and name not in OWN and not any(operand.axes for operand in operands):
            return Outcome(tuple(replicated(_rank(var.aval)) for var in equation.outvars))
        try:
            key = name, tuple((o.shape, o.dtype, o.entries, o.path is None) for o in operands), tuple(params.items())
            found = self._known.get(key)
        except TypeError:  # a parameter that has no hash
            return self._fresh(equation, operands, asked)
        if found is None:
            found = self._known[key] = self._fresh(equation, operands, asked)
        return found

    def of_types(self, primitive: Any, types: Sequence[Any], params: Mapping[str, Any]) -> Outcome:
        """The outcome for operands of certain types, while a program is traced."""
        whole = [laid_type(aval, NamedSharding(self.mesh, PartitionSpec())) for aval in types]
        with use_abstract_mesh(self.mesh):
            results = abstract_result(primitive, whole, params)
            equation = _Equation(primitive, params, tuple(map(_Typed, types)), tuple(map(_Typed, results)))
            operands = [replace(Laid.whole(aval), entries=_entries_of(aval)) for aval in types]
            return self._fresh(equation, operands, _asked(params))

    def _fresh(self, equation: Any, operands: Sequence[Laid], asked: Any) -> Outcome:
        natural = self._natural(equation, operands)
        if asked is None:
            return natural
        result = Laid.whole(equation.outvars[0].aval)
        own = entries(asked.spec, len(result.shape))
        typed = explicit_axes(asked)
        rest = [tuple(axis for axis in axes if axis not in typed) for axes in natural.results[0]]
        wanted = tuple((*mine, *left) for mine, left in zip(own, rest, strict=True))
        return _as_asked(natural, result, wanted, self.sizes)

    def _natural(self, equation: Any, operands: Sequence[Laid]) -> Outcome:
        """Before the program's own word about the result."""
        name, params = equation.primitive.name, equation.params
        results = [Laid.whole(var.aval) for var in equation.outvars]
        if name in OWN:
            outs = [operands[at].entries if at < len(operands) else None for at in range(len(results))]
            laid = [_with(result, out) for result, out in zip(results, outs, strict=True)]
            travels = own_collective(name, operands, laid, params, self.sizes)
            return Outcome(tuple(each.entries for each in laid), travels, "the program's own")
        if name == "conv_general_dilated" and (found := convolution(operands, results[0], params, self.sizes)):
            return found
        if name == "fft":
            return _transformed(operands[0], results[0], params, self.sizes)
        if name in RULES:
            return RULES[name](operands, results[0], params, self.sizes)
        if name.startswith("scatter") and len(operands) == 3:
            return scatter(name, operands, results[0], params, self.sizes)
        return self._typed(equation, operands, results)

    def _typed(self, equation: Any, operands: Sequence[Laid], results: Sequence[Laid]) -> Outcome:
        """By JAX's own rule; where it refuses, the least is gathered."""
        name = equation.primitive.name
        types = [var.aval for var in equation.invars]
        refused: list[str] = []

        def accepts(found: Sequence[Entries]) -> tuple[Entries, ...] | None:
            return self._types(equation, types, found, refused)

        accepted = accepts([operand.entries for operand in operands])
        if accepted is not None:
            laid = [_with(result, out) for result, out in zip(results, accepted, strict=True)]
            return Outcome(accepted, *implied(name, operands, laid, equation.params, self.sizes))
        shapes = {operand.shape for operand in operands if operand.shape}
        if shapes == {results[0].shape} and len(results) == 1 and name not in _UNSUITED and len(operands) > 1:
            return agree(operands, results[0].shape, self.sizes)
        found = least_gathered(operands, accepts, refused[0], self.sizes)
        return found if found is not None else self.opaque(operands, results, refused[0])

    def opaque(self, operands: Sequence[Laid], results: Sequence[Laid], why: str) -> Outcome:
        """An operation that nobody can see into: whole operands, whole results."""
        travels = [
            travel
            for at, operand in enumerate(operands)
            for travel in bring(at, operand, replicated(len(operand.shape)), self.sizes)
        ]
        return Outcome(tuple(each.entries for each in results), tuple(travels), why, bool(travels), opaque=True)

    def _types(
        self, equation: Any, types: Sequence[Any], found: Sequence[Entries], refused: list[str]
    ) -> tuple[Entries, ...] | None:
        params = {name: None if name in _PLACED else value for name, value in equation.params.items()}
        given = [
            laid_type(aval, NamedSharding(self.mesh, as_spec(each))) if hasattr(aval, "sharding") else aval
            for aval, each in zip(types, found, strict=True)
        ]
        try:
            results = abstract_result(equation.primitive, given, params)
        except (ShardingTypeError, DuplicateSpecError, NotImplementedError) as error:
            refused.append(_words(equation.primitive.name, error))
            return None
        except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
            # the type rule of a primitive that knows no sharding may stumble over one in any way
            refused.append(f"{equation.primitive.name} cannot be typed under a sharding ({type(error).__name__})")
            return None
        if any(getattr(result, "ndim", 0) and result.sharding.mesh.empty for result in results):
            refused.append(f"{equation.primitive.name} does not say how its results lie")
            return None
        return tuple(_entries_of(result) for result in results)


def _transformed(operand: Laid, result: Laid, params: Mapping[str, Any], sizes: Mapping[str, int]) -> Outcome:
    """A Fourier transform is done on whole arrays, and comes out as it went in; newer partitioners leave alone what is
    sharded over rows only."""
    first = len(operand.shape) - len(params["fft_lengths"])
    whole = replicated(len(operand.shape))
    untouched = FFT_BY_ROWS and not any(operand.entries[first:])
    kept = zip(operand.entries, operand.shape, result.shape, strict=True)
    out = tuple(axes if size == made else () for axes, size, made in kept)
    travels = () if untouched else tuple(bring(0, operand, whole, sizes))
    return Outcome((out,), travels, "fft is done on whole arrays")


def _with(result: Laid, out: Entries | None) -> Laid:
    fits = out is not None and len(out) == len(result.shape)
    return Laid(result.shape, result.dtype, out) if fits and out is not None else result


def _rank(aval: Any) -> int:
    return len(getattr(aval, "shape", ()))


def _entries_of(aval: Any) -> Entries:
    sharding = getattr(aval, "sharding", None)
    return entries(sharding.spec, aval.ndim) if sharding is not None else replicated(_rank(aval))


def _asked(params: Mapping[str, Any]) -> NamedSharding | None:
    """The layout that a program gives a result; on Auto axes JAX fills the parameter in and means nothing by it."""
    found = next((params[name] for name in _PLACED if isinstance(params.get(name), NamedSharding)), None)
    return found if found is not None and explicit_axes(found) else None


def explicit_axes(sharding: NamedSharding) -> set[str]:
    """The axes of its mesh on which a sharding is a type, and so a word of the program."""
    mesh = sharding.mesh
    return {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}


def _as_asked(natural: Outcome, result: Laid, wanted: Entries, sizes: Mapping[str, int]) -> Outcome:
    """Partial sums that are wanted in parts are scattered while they are summed; other differences are moves."""
    held = {axis for axes in wanted for axis in axes}
    out: list[Travel] = []
    for travel in natural.travels:
        move = travel.move
        scattered = travel.operand is None and move.collective == "all-reduce" and set(move.axes) <= held
        if scattered:
            kept = tuple(tuple(axis for axis in axes if axis not in move.axes) for axes in wanted)
            full = Laid(result.shape, result.dtype, kept).bytes_on(sizes)
            out.append(Travel(None, Move("reduce-scatter", move.axes, full)))
        else:
            out.append(travel)
    lies = Laid(result.shape, result.dtype, natural.results[0])
    moved = [Travel(None, travel.move) for travel in bring(0, lies, wanted, sizes)]
    return Outcome((wanted,), (*out, *moved), natural.why or "the result is asked for in another layout")


def _words(name: str, error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{name}: {text[:200]}" if text else f"{name} is refused on an Explicit mesh"
