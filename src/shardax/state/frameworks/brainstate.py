"""brainstate, unmodified: `State`s of every sort are cells, `graph.Node`s (`nn.Module`s among them) are nodes.

brainstate records which States a function touches on a stack of its own. While a function is traced, one
`StateTraceStack` of ours stands on it: it keeps brainstate's guards quiet, and it names the States that no walk over
the closure can see (the default random generator, above all), with the values that they are to have again.
"""

from __future__ import annotations

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import brainstate
import jax
from brainstate._state import TRACE_CONTEXT
from brainstate._state_global_hooks import GlobalHookRegistry
from brainstate._state_hook_manager import HookManager
from brainstate.util import StateJaxTracer
from jax.core import Tracer
from jax.extend import source_info_util

from shardax._compat import current_trace, is_staged, trace_state_clean
from shardax.errors import ForeignTraceError
from shardax.state.cells import Scope, Slot, in_place, undisturbed, warn_of_constant
from shardax.state.kinds import Frozen, Kind, Mode, Opened, discoverers, register

_INTERNAL = frozenset({"_value", "_level", "_source_info", "_trace_state", "_hooks_manager", "_been_writen"})
_RESTORED = ("_value", "_trace_state", "_been_writen")
_get_dict: Callable[[Any], dict[str, Any]] = attrgetter("__dict__")


class StateSpec:
    """The class and metadata of a State."""

    __slots__ = ("_key", "cls", "metadata")

    def __init__(self, state: Any) -> None:
        self.cls = type(state)
        self.metadata = {name: value for name, value in vars(state).items() if name not in _INTERNAL}
        tag = self.metadata.get("tag")
        if tag is not None:
            self.metadata["tag"] = set(tag)  # changed in place by `add_tag`
        named = ((name, Frozen(frozenset(tag) if name == "tag" and tag else value)) for name, value in self._sorted())
        self._key = (self.cls, tuple(named))

    def _sorted(self) -> list[tuple[str, Any]]:
        return sorted(self.metadata.items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StateSpec) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"{self.cls.__name__}({', '.join(f'{name}={value!r}' for name, value in self._sorted())})"


class Snapshot(NamedTuple):
    """The metadata of some States, laid out for comparison: columns of what all have, and the rest one by one."""

    lengths: list[int]
    names: list[str | None]
    tags: list[set[str] | None]  # copies: `add_tag` changes them in place
    others: list[tuple[int, str, Any]]
    careful: list[int]  # those that look after their value when they are read: random keys that were deleted

    def holds(self, dicts: list[dict[str, Any]]) -> bool:
        """Do the States have the metadata that they had?"""
        try:
            return (
                list(map(len, dicts)) == self.lengths
                and [attributes["_name"] for attributes in dicts] == self.names
                and [attributes["tag"] for attributes in dicts] == self.tags
                and all(dicts[place][name] is value for place, name, value in self.others)
            )
        except KeyError:  # an attribute that is gone
            return False


class Entered(NamedTuple):
    """What `enter` found and `leave` gives back."""

    stack: Any
    cells: Sequence[Any]
    before: list[dict[str, Any]]


class States:
    """The family of `brainstate.State`."""

    name = "brainstate"

    def spec(self, cell: Any) -> StateSpec:
        return StateSpec(cell)

    def is_rng(self, spec: StateSpec) -> bool:
        """Does a State with this spec hold a random key?"""
        return issubclass(spec.cls, brainstate.random.RandomState)

    def get(self, cell: Any) -> Any:
        if TRACE_CONTEXT.state_stack:
            return cell.value  # recorded by whoever traces
        with undisturbed():
            value = cell._read_value()
        if not trace_state_clean() and not cell._trace_state.is_valid() and is_staged(current_trace()):
            warn_of_constant(cell, _described(cell))
        return value

    def set(self, cell: Any, value: Any) -> None:
        foreign = not TRACE_CONTEXT.state_stack and not cell._trace_state.is_valid()
        if foreign and any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value)):
            raise ForeignTraceError(
                f"{_described(cell)} is written under a jax transformation that does not know it "
                f"({type(current_trace()).__name__}): the write would be lost or leave a tracer behind",
                remedy="use shardax.jit or brainstate's own transforms; or return the value and write it after",
            )
        cell.value = value

    def make(self, spec: StateSpec, value: Any) -> Any:
        cell = object.__new__(spec.cls)
        metadata = dict(spec.metadata)
        if metadata.get("tag") is not None:
            metadata["tag"] = set(metadata["tag"])
        vars(cell).update(
            metadata,
            _value=value,
            _level=TRACE_CONTEXT.get_trace_stack_level(),
            _trace_state=StateJaxTracer(),
            _source_info=source_info_util.current(),
            _hooks_manager=HookManager(),
            _been_writen=False,
        )
        return cell

    def respec(self, cell: Any, spec: StateSpec) -> None:
        attributes = vars(cell)
        for name in [name for name in attributes if name not in _INTERNAL]:
            del attributes[name]
        attributes.update(spec.metadata)

    # ---- outside every trace ----------------------------------------------------------------------------------------

    def snapshot(self, cells: Sequence[Any]) -> Snapshot:
        dicts = list(map(_get_dict, cells))
        return Snapshot(
            lengths=list(map(len, dicts)),
            names=[attributes["_name"] for attributes in dicts],
            tags=[tag and set(tag) for tag in map(itemgetter("tag"), dicts)],
            others=[
                (place, name, value)
                for place, attributes in enumerate(dicts)
                for name, value in attributes.items()
                if name not in _INTERNAL and name not in ("_name", "tag")
            ],
            careful=[
                place
                for place, cell in enumerate(cells)
                if type(cell).check_if_deleted is not brainstate.State.check_if_deleted
            ],
        )

    def reads(self, cells: Sequence[Any], snapshot: Snapshot) -> Sequence[Any] | None:
        """The raw values, where nobody wants to know of every read."""
        if TRACE_CONTEXT.state_stack:
            return None  # somebody wants to know of every read
        with in_place:
            for place in snapshot.careful:
                cells[place].check_if_deleted()
            dicts = list(map(_get_dict, cells))
            return [attributes["_value"] for attributes in dicts] if snapshot.holds(dicts) else None

    def write_all(self, cells: Iterable[Any], values: Iterable[Any]) -> None:
        cells = list(cells)
        with in_place:
            hooked = True in [cell._hooks_manager._has_hooks for cell in cells]
            if hooked or TRACE_CONTEXT.state_stack or GlobalHookRegistry.instance().has_hooks():
                for cell, value in zip(cells, values, strict=True):
                    cell.value = value
                return
            for attributes, value in zip(map(_get_dict, cells), values, strict=True):
                attributes["_value"] = value
                attributes["_been_writen"] = True

    # ---- while a function is traced ---------------------------------------------------------------------------------

    def enter(self, scope: Scope, cells: Sequence[Any], values: Sequence[Any]) -> Entered:
        before = [{name: vars(cell)[name] for name in _RESTORED} for cell in cells]
        for cell, value in zip(cells, values, strict=True):
            vars(cell).update(_value=value, _trace_state=StateJaxTracer())
            scope.slots[id(cell)] = Slot(cell, value)
        stack: Any = brainstate.StateTraceStack(name="shardax")
        stack.__enter__()
        return Entered(stack, cells, before)

    def leave(self, scope: Scope, token: Entered) -> list[Any]:
        stack = token.stack
        del TRACE_CONTEXT.state_stack[TRACE_CONTEXT.state_stack.index(stack) :]  # and what an exception left on it
        last = [vars(cell)["_value"] for cell in token.cells]
        for cell, before in zip(token.cells, token.before, strict=True):
            vars(cell).update(before)
        for cell, original, written in zip(stack.states, stack.original_state_values, stack.been_writen, strict=True):
            slot = scope.slots.get(id(cell))
            if slot is not None:
                slot.read, slot.written = True, written
            elif not cell._trace_state.is_valid():  # else it was born in this very trace
                vars(cell)["_value"] = original
                scope.found.append(cell)
        return last


def _described(cell: Any) -> str:
    name = f" {cell.name!r}" if cell.name else ""
    return f"{type(cell).__name__}{name}"


class NodeKind(Kind):
    """An instance of a subclass of `brainstate.graph.Node` (every `nn.Module`): its attributes."""

    name, mutable, whole = "brainstate node", True, True
    mapping: Callable[[Any], dict[Any, Any]] | None = attrgetter("__dict__")

    def open(self, node: Any, mode: Mode) -> Opened:
        attributes = vars(node)
        return Opened(tuple(attributes), list(attributes.values()), ("auto",) * len(attributes), None)

    def create(self, cls: type, extra: Any) -> Any:
        return object.__new__(cls)

    def fill(self, node: Any, keys: tuple[Any, ...], values: Sequence[Any], extra: Any) -> None:
        attributes = vars(node)
        attributes.clear()
        attributes.update(zip(keys, values, strict=True))

    def step(self, key: Any) -> str:
        return f".{key}"


STATES, NODE = States(), NodeKind()


def _find(cls: type) -> Any:
    if issubclass(cls, brainstate.State):
        return STATES
    return NODE if issubclass(cls, brainstate.graph.Node) else None


register(_find)
discoverers.append(STATES)
