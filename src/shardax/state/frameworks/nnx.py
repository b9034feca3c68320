"""Flax NNX, unmodified: `Variable`s are cells, `Module`s (and every other `Pytree`) are nodes.

Only names that flax documents or that its own sub-packages share are used; what the fast path reads directly
(`_raw_value`, `_var_metadata`) are the slots of `Variable`.
"""

from __future__ import annotations

# pyright: reportPrivateUsage=false
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

from flax import errors, nnx
from flax.nnx import graphlib, pytreelib, tracers, variablelib

from shardax._compat import current_trace, is_staged, trace_state_clean
from shardax.errors import ForeignTraceError
from shardax.state.cells import Attributes, Scope, in_place, undisturbed, warn_of_constant
from shardax.state.kinds import BOX, Frozen, Kind, Mode, Opened, called, register

_set_raw: Any = nnx.Variable.__dict__["_raw_value"].__set__
_INTERNAL = frozenset({"_pytree__state", "_pytree__nodes"})


class VariableSpec:
    """The class and metadata of a Variable."""

    __slots__ = ("_key", "cls", "metadata")

    def __init__(self, variable: Any) -> None:
        self.cls = type(variable)
        self.metadata: dict[str, Any] = dict(variable._var_metadata)
        self._key = (self.cls, tuple((name, Frozen(value)) for name, value in sorted(self.metadata.items())))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VariableSpec) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"{self.cls.__name__}({self.metadata})"


class Variables:
    """The family of `nnx.Variable`."""

    name = "flax.nnx"
    reads = Attributes("_var_metadata", "_raw_value", locked=True)

    def spec(self, cell: Any) -> VariableSpec:
        return VariableSpec(cell)

    def is_rng(self, spec: VariableSpec) -> bool:
        """Does a Variable with this spec hold a random key?"""
        return issubclass(spec.cls, nnx.RngKey)

    def get(self, cell: Any) -> Any:
        if not trace_state_clean() and not cell._trace_state.is_valid() and is_staged(current_trace()):
            warn_of_constant(cell, type(cell).__name__, cell._trace_state)
        with undisturbed():
            return cell._raw_value

    def set(self, cell: Any, value: Any) -> None:
        try:
            cell.set_raw_value(value)  # flax's own check of the trace level
        except errors.TraceContextError as error:
            raise ForeignTraceError(
                f"{type(cell).__name__} is written under a jax transformation that does not know it "
                f"({type(current_trace()).__name__}): {error}",
                remedy="use shardax.jit or nnx's own transforms; or return the value and write it after",
            ) from error

    def make(self, spec: VariableSpec, value: Any) -> Any:
        return spec.cls._new(value, dict(spec.metadata))

    def respec(self, cell: Any, spec: VariableSpec) -> None:
        cell._var_metadata.clear()
        cell._var_metadata.update(spec.metadata)

    def snapshot(self, cells: Sequence[Any]) -> list[dict[str, Any]]:
        known: dict[Any, dict[str, Any]] = {}  # like metadata is one dict here: half as much memory to compare with
        return [
            known.setdefault(tuple((name, id(value)) for name, value in metadata.items()), dict(metadata))
            for metadata in (cell._var_metadata for cell in cells)
        ]

    def marks(self, cells: Sequence[Any]) -> list[Any]:
        """An object that every cell holds alone, for it can be neither hashed nor referred to weakly itself."""
        return [cell._trace_state for cell in cells]

    def write_all(self, cells: Iterable[Any], values: Iterable[Any]) -> None:
        with in_place:
            any(map(_set_raw, cells, values))  # the slot's setter returns None: `any` only drives the loop

    def enter(self, scope: Scope, cells: Sequence[Any], values: Sequence[Any]) -> list[tuple[Any, Any, Any]]:
        token = [(cell, cell._raw_value, cell._trace_state) for cell in cells]
        for cell, value in zip(cells, values, strict=True):
            object.__setattr__(cell, "_raw_value", value)
            object.__setattr__(cell, "_trace_state", tracers.TraceState())
        return token

    def leave(self, scope: Scope, token: list[tuple[Any, Any, Any]]) -> list[Any]:
        last = [cell._raw_value for cell, _, _ in token]
        for cell, raw, state in token:
            object.__setattr__(cell, "_raw_value", raw)
            object.__setattr__(cell, "_trace_state", state)
        return last


def _rank(key: str) -> tuple[bool, int, str]:
    return (False, int(key), "") if key.isdigit() else (True, 0, key)  # the numbers of a List, then names


class PytreeKind(Kind):
    """An instance of a subclass of `nnx.Pytree` (Modules, Optimizers, Rngs, Lists, Dicts): its attributes."""

    name, mutable = "nnx", True
    mapping: Callable[[Any], dict[Any, Any]] | None = attrgetter("__dict__")
    ignored = _INTERNAL
    guarded = ("_pytree__nodes",)
    rank: Callable[[Any], Any] | None = staticmethod(_rank)
    whole = True

    def open(self, node: Any, mode: Mode) -> Opened:
        attributes = {name: value for name, value in vars(node).items() if name not in _INTERNAL}
        if node._pytree__is_pytree:
            nodes = node._pytree__nodes
            modes: list[Mode] = ["data" if nodes.get(name, False) else "static" for name in attributes]
        else:
            modes = ["auto"] * len(attributes)
        state = node._pytree__state
        extra = (node._pytree__nodes, state.initializing, state.is_setup)
        return Opened(tuple(attributes), list(attributes.values()), modes, extra)

    def create(self, cls: type, extra: Any) -> Any:
        return object.__new__(cls)

    def fill(self, node: Any, keys: tuple[Any, ...], values: Sequence[Any], extra: Any) -> None:
        attributes = vars(node)
        state = attributes.get("_pytree__state")
        attributes.clear()
        if state is None:
            state = pytreelib.PytreeState(initializing=extra[1], is_setup=extra[2])
        attributes.update({"_pytree__state": state, "_pytree__nodes": extra[0]}, **dict(zip(keys, values, strict=True)))

    def enter(self, node: Any) -> Any:
        token = node._pytree__state
        vars(node)["_pytree__state"] = pytreelib.PytreeState(token.initializing, token.is_setup)  # of this trace
        return token

    def leave(self, node: Any, token: Any) -> None:
        vars(node)["_pytree__state"] = token

    def step(self, key: Any) -> str:
        return f".{key}"

    def part(self, cls: Any, key: Any) -> Any:
        return int(key) if cls._pytree__has_int_keys and key.isdigit() else key


class RegisteredKind(Kind):
    """A graph node type that was registered with flax by hand."""

    name, mutable = "nnx graph node", True

    def __init__(self, implementation: Any) -> None:
        self.implementation = implementation

    def open(self, node: Any, mode: Mode) -> Opened:
        items, metadata = self.implementation.flatten(node)
        keys, values, modes = [], [], []
        for key, value in items:
            keys.append(key)
            values.append(getattr(value, "value", value) if isinstance(value, _ELEMENTS) else value)
            modes.append("static" if isinstance(value, graphlib.StaticElem) else "auto")
        return Opened(tuple(keys), values, modes, Frozen(metadata))

    def create(self, cls: type, extra: Any) -> Any:
        return self.implementation.create_empty(extra.value)

    def fill(self, node: Any, keys: tuple[Any, ...], values: Sequence[Any], extra: Any) -> None:
        self.implementation.clear(node)
        self.implementation.init(node, list(zip(keys, values, strict=True)))


class StateKind(Kind):
    """An `nnx.State`: a mapping."""

    name, mutable = "nnx.State", True
    mapping: Callable[[Any], dict[Any, Any]] | None = attrgetter("_mapping")

    def open(self, node: Any, mode: Mode) -> Opened:
        return Opened(tuple(node._mapping), list(node._mapping.values()), (mode,) * len(node._mapping), None)

    def create(self, cls: type, extra: Any) -> Any:
        return cls({})

    def fill(self, node: Any, keys: tuple[Any, ...], values: Sequence[Any], extra: Any) -> None:
        node._mapping.clear()
        node._mapping.update(zip(keys, values, strict=True))


_ELEMENTS = (graphlib.DataElem, graphlib.StaticElem)
VARIABLES, PYTREE, STATE = Variables(), PytreeKind(), StateKind()


def _find(cls: type) -> Any:
    if isinstance(cls, type(nnx.Variable)) and issubclass(cls, nnx.Variable):
        return VARIABLES
    if cls is variablelib.HijaxVariable:
        return BOX
    if issubclass(cls, nnx.Pytree):
        return PYTREE
    if cls is nnx.State:
        return STATE
    implementation = graphlib.GRAPH_REGISTRY.get(cls)
    return RegisteredKind(implementation) if implementation is not None else None


register(_find)


def _take_cache() -> None:
    """`nnx.cached_partial` offers its cache to whoever is called and insists that it is taken; plans need none."""
    if graphlib.GRAPH_CONTEXT.tmp_static_cache is not None:
        graphlib.GRAPH_CONTEXT.tmp_static_cache = None


called.append(_take_cache)
