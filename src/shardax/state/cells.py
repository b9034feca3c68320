"""Cells: places that hold an array (or a tree of arrays) and can be written inside a traced function.

`State` is our own cell. While a function is being traced by `shardax.jit` or `shard_map`, a `Scope` is open in that
thread: reads and writes of cells that the function closes over go to the scope, never to the cell, so an exception
leaves every cell as it was and other threads see nothing. What other frameworks call a cell is described by a `Family`.
"""

from __future__ import annotations

# pyright: reportPrivateUsage=false
import threading
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol
from weakref import WeakValueDictionary

import jax
from jax.core import Tracer

from shardax._compat import current_trace, is_live, is_staged, trace_of, trace_state_clean
from shardax.errors import ForeignTraceError, LeakedTracerError


class CellSpec:
    """What a State is besides its value: class and metadata. Equal specs are one object where hashing allows."""

    __slots__ = ("__weakref__", "cls", "metadata")
    _known: ClassVar[WeakValueDictionary[Any, CellSpec]] = WeakValueDictionary()

    cls: type
    metadata: Mapping[str, Any]

    @classmethod
    def of(cls, cell_class: type, metadata: Mapping[str, Any]) -> CellSpec:
        key = (cell_class, tuple((name, type(value), value) for name, value in sorted(metadata.items())))
        try:
            known = cls._known.get(key)
        except TypeError:  # metadata that does not hash: its own spec, compared by value
            key, known = None, None
        if known is not None:
            return known
        spec = object.__new__(cls)
        spec.cls, spec.metadata = cell_class, MappingProxyType(dict(metadata))
        if key is not None:
            spec = cls._known.setdefault(key, spec)
        return spec

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, CellSpec) and self.cls is other.cls and dict(self.metadata) == dict(other.metadata)

    def __hash__(self) -> int:
        return hash((self.cls, tuple(sorted(self.metadata))))

    def __repr__(self) -> str:
        return f"{self.cls.__name__}({', '.join(f'{name}={value!r}' for name, value in self.metadata.items())})"


class Slot:
    """What a scope knows of one cell that the function closes over."""

    __slots__ = ("cell", "read", "value", "written")

    def __init__(self, cell: Any, value: Any) -> None:
        self.cell, self.value, self.read, self.written = cell, value, False, False


class Scope:
    """One trace in progress: the cells it redirects, and those it met without having been told of them."""

    __slots__ = ("found", "parent", "slots", "trace")

    def __init__(self, parent: Scope | None, cells: Iterable[Any] = (), values: Iterable[Any] = ()) -> None:
        self.parent = parent
        self.trace = current_trace()
        self.slots = {id(cell): Slot(cell, value) for cell, value in zip(cells, values, strict=True)}
        self.found: list[Any] = []

    def slot(self, cell: Any) -> Slot:
        """The slot of a cell; one that nobody announced enters with its outer value and is remembered as found."""
        slot = self.slots.get(id(cell))
        if slot is None:
            value = cell._value if self.parent is None else _read(cell, self.parent)
            slot = self.slots[id(cell)] = Slot(cell, value)
            self.found.append(cell)
        return slot


class _Local(threading.local):
    scope: Scope | None = None


_local = _Local()
_open: list[None] = []  # one entry per open scope of any thread: a read outside every trace asks only this
_warned: dict[int, Any] = {}  # by `id`, with what tells that the cell is still the one that was warned of


class Busy(Exception):
    """Raised out of a trace that has to wait for one of another thread, with nothing of JAX's in its hands."""


in_place = threading.RLock()
"""Held while closed-over cells hold traced values themselves (frameworks'; our own stay as they are): who reads or
writes such cells outside a trace waits for the real ones."""


@contextmanager
def undisturbed() -> Generator[None]:
    """While it is open, no other thread's trace is in force in the cells; inside a trace nothing is waited for."""
    if not in_place.acquire(blocking=_local.scope is None):
        raise Busy
    try:
        yield
    finally:
        in_place.release()


def innermost_scope() -> Scope | None:
    """The scope that is open in this thread, if any."""
    return _local.scope


@contextmanager
def scope_of(cells: Sequence[Any] = (), values: Sequence[Any] = ()) -> Generator[Scope]:
    """Open a scope in which `cells` hold `values`."""
    outer = _local.scope
    scope = Scope(outer, cells, values)
    _local.scope = scope
    _open.append(None)
    try:
        yield scope
    finally:
        _open.pop()
        _local.scope = outer


def _read(cell: State, scope: Scope | None) -> Any:
    if scope is not None and cell._home is not scope:
        slot = scope.slot(cell)
        slot.read = True
        return slot.value
    value = cell._value
    if scope is not None and cell._born is None:
        return value
    if isinstance(value, Tracer) and not is_live(value):
        raise LeakedTracerError(
            f"{cell!r} holds a tracer of a trace that is over",
            remedy="return the State from the traced function instead of storing it outside",
        )
    if cell._born is None and not trace_state_clean() and is_staged(current_trace()):
        warn_of_constant(cell, repr(cell))
    return value


def warn_of_constant(cell: Any, described: str, mark: Any = None) -> None:
    """Say, once per cell, that a transformation that does not know cells takes what it holds for a constant.

    `mark` is an object that the cell alone holds, for cells that cannot be referred to weakly.
    """
    known = _warned.get(id(cell))
    if known is not None and (known is mark if mark is not None else known() is cell):
        return
    _warned[id(cell)] = weakref.ref(cell) if mark is None else mark
    warnings.warn(
        f"{described} is read under a jax transformation that is not shardax's: its value is baked in as a constant "
        "and later writes will not be seen; use shardax.jit",
        stacklevel=5,
    )


def _birthplace(scope: Scope | None) -> weakref.ref[Any] | None:
    """The trace of a foreign transformation, if one is open here: in it, and only in it, a new cell may be written."""
    if trace_state_clean():
        return None
    trace = current_trace()
    return None if scope is not None and trace is scope.trace else weakref.ref(trace)


def _write(cell: State, value: Any, scope: Scope | None) -> None:
    elsewhere = scope if scope is not None and cell._home is not scope else None
    if elsewhere is not None or cell._born is None or cell._born() is not current_trace():
        _refuse_foreign_write(cell, value, scope)
    if elsewhere is None:
        _set_value(cell, value)
        return
    slot = elsewhere.slot(cell)
    slot.value, slot.written = value, True


def _refuse_foreign_write(cell: State, value: Any, scope: Scope | None) -> None:
    trace = current_trace()
    home = scope.trace if scope is not None else None
    if scope is None and trace_state_clean():
        _refuse_tracer(cell, value)
        return
    if trace is home:
        return
    inner = [leaf for leaf in jax.tree.leaves(value) if isinstance(leaf, Tracer) and not _outer(leaf, scope)]
    if inner or is_staged(trace, home):
        raise ForeignTraceError(
            f"{type(cell).__name__} is written under a jax transformation that does not know it "
            f"({type(trace).__name__}): the write would be lost or leave a tracer behind",
            remedy="use shardax.jit, not jax.jit; inside scan, cond, grad or vmap, return the value and write it after",
        )


def _refuse_tracer(cell: State, value: Any) -> None:
    if isinstance(value, Tracer):
        raise LeakedTracerError(
            f"{type(cell).__name__} was given a tracer outside every trace", remedy="store arrays, not tracers"
        )


def _outer(tracer: Any, scope: Scope | None) -> bool:
    while scope is not None:
        if trace_of(tracer) is scope.trace:
            return True
        scope = scope.parent
    return False


class State:
    """A mutable cell that `shardax.jit` and `shard_map` thread through compiled functions.

    >>> import shardax as sx
    >>> count = sx.State(0)
    >>> @sx.jit
    ... def bump(by):
    ...     count.value += by
    >>> bump(2); bump(3)
    >>> int(count.value)
    5

    Keyword arguments are metadata: part of the structure (changing them re-traces), never traced themselves.
    """

    __slots__ = ("__weakref__", "_born", "_home", "_spec", "_value")
    __shardax_box__: ClassVar[bool] = True  # to layouts: what I hold is called what I am called

    def __init__(self, value: Any, **metadata: Any) -> None:
        self._settle(CellSpec.of(type(self), metadata), value)
        if self._home is None and self._born is None:
            _refuse_tracer(self, value)

    def _settle(self, spec: CellSpec, value: Any) -> None:
        """Begin to exist, here: in a scope, in a trace of another transformation, or outside both."""
        self._spec, self._value = spec, value
        self._home = _local.scope
        self._born = _birthplace(self._home)

    @property
    def value(self) -> Any:
        """The array (or tree of arrays) that the cell holds now; inside a traced function, its traced value."""
        return _read(self, _local.scope if _open else None)

    @value.setter
    def value(self, value: Any) -> None:
        _write(self, value, _local.scope if _open else None)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What was said of the cell when it was made; read-only."""
        return self._spec.metadata

    def __repr__(self) -> str:
        value, metadata = self._value, "".join(f", {name}={item!r}" for name, item in self.metadata.items())
        shape = getattr(value, "shape", None)
        shown = f"{value.dtype}{list(shape)}" if shape is not None and hasattr(value, "dtype") else repr(value)
        return f"{type(self).__name__}({shown}{metadata})"

    def __getstate__(self) -> tuple[Any, dict[str, Any]]:
        return self.value, dict(self.metadata)

    def __setstate__(self, state: tuple[Any, dict[str, Any]]) -> None:
        value, metadata = state
        self._settle(CellSpec.of(type(self), metadata), value)


class RngState(State):
    """A cell that holds a random key and hands out fresh ones.

    >>> import jax, shardax as sx
    >>> rng = sx.RngState(0)
    >>> first, second = rng.split(), rng.split()
    >>> bool((jax.random.key_data(first) == jax.random.key_data(second)).all())
    False
    >>> rng.split(3).shape
    (3,)

    Inside `shard_map` every shard draws its own numbers: the shard's index is folded into the key, unless
    `fold=False` was given here.
    """

    __slots__ = ()

    def __init__(self, key: Any, *, fold: bool = True, **metadata: Any) -> None:
        if isinstance(key, int):
            key = jax.random.key(key)
        super().__init__(key, fold=fold, **metadata)

    def split(self, count: int | None = None) -> Any:
        """One fresh key, or `count` of them; the cell moves on."""
        keys = jax.random.split(self.value, 1 + (count or 1))
        self.value = keys[0]
        return keys[1] if count is None else keys[1:]


class Attributes(NamedTuple):
    """Where a cell has what `Family.snapshot` lists, and where its raw value: a program reads them itself."""

    described: str
    value: str
    locked: bool  # is the value that of a trace while another thread traces over the cell?


Reads = Attributes | Callable[[Sequence[Any], Any], Sequence[Any] | None]
"""Attributes; or from cells and their snapshot to a list of values, None where the snapshot no longer holds."""


class Family(Protocol):
    """How the cells of one framework are described, read, written and made; see `lift.py` for where each is used."""

    name: str

    @property
    def reads(self) -> Reads:
        """How raw values are read outside every trace."""
        ...

    def spec(self, cell: Any) -> Any:
        """What the cell is besides its value (class, metadata); hashable, and all that `make` needs."""
        ...

    def get(self, cell: Any) -> Any:
        """The raw value, by the framework's own rules for the current trace."""
        ...

    def set(self, cell: Any, value: Any) -> None:
        """Replace the raw value, by the framework's own rules for the current trace."""
        ...

    def make(self, spec: Any, value: Any) -> Any:
        """A new cell: the stand-in of an argument's cell inside a trace, or a cell born inside, outside."""
        ...

    def respec(self, cell: Any, spec: Any) -> None:
        """Give a cell the metadata that was changed inside."""
        ...

    def snapshot(self, cells: Sequence[Any]) -> Any:
        """What is compared before values are read: everything `spec` depends on that may change in place."""
        ...

    def write_all(self, cells: Iterable[Any], values: Iterable[Any]) -> None:
        """Store raw values outside every trace."""
        ...

    def enter(self, scope: Scope, cells: Sequence[Any], values: Sequence[Any]) -> Any:
        """Make closed-over `cells` hold `values` while a function is traced; returns a token for `leave`."""
        ...

    def leave(self, scope: Scope, token: Any) -> list[Any]:
        """Undo `enter`, whatever happened inside; returns what the cells held last."""
        ...


_set_value = State.__dict__["_value"].__set__


class OwnCells:
    """The family of `State`: redirected by the scope, so nothing has to be entered or left."""

    name = "shardax"
    reads = Attributes("_spec", "_value", locked=False)

    def spec(self, cell: State) -> CellSpec:
        return cell._spec

    def get(self, cell: State) -> Any:
        return cell.value

    def set(self, cell: State, value: Any) -> None:
        cell.value = value

    def make(self, spec: CellSpec, value: Any) -> State:
        cell: State = object.__new__(spec.cls)
        cell._settle(spec, value)
        return cell

    def respec(self, cell: State, spec: CellSpec) -> None:
        cell._spec = spec

    def snapshot(self, cells: Sequence[State]) -> list[CellSpec]:
        return [cell._spec for cell in cells]

    def write_all(self, cells: Iterable[State], values: Iterable[Any]) -> None:
        for cell, value in zip(cells, values):  # noqa: B905  at every call: saying `strict` costs more than a cell
            cell._value = value

    def enter(self, scope: Scope, cells: Sequence[State], values: Sequence[Any]) -> Sequence[State]:
        scope.slots.update((id(cell), Slot(cell, value)) for cell, value in zip(cells, values, strict=True))
        return cells

    def leave(self, scope: Scope, token: Sequence[State]) -> list[Any]:
        return [scope.slots[id(cell)].value for cell in token]


OWN = OwnCells()
