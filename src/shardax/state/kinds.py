"""What an object is to a lift: a cell, a node that holds others, a leaf that is traced, or a static value.

A `Kind` opens one sort of node into its children and builds it again. Roles are found once per class. Frameworks add
theirs with `register`; their adapters are imported when the framework has been, never before.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from shardax.state.cells import OWN, Family, State

Mode = Literal["data", "auto", "static"]
"""How a child that is no node is taken: "data" traces Python scalars too, "auto" only arrays, "static" nothing."""


def _autos(count: int) -> Sequence[Mode]:
    return ("auto",) * count


_HEAP_TYPE = 1 << 9  # the flag of classes made by Python code


class Opened(NamedTuple):
    """A node laid open. `extra` is what rebuilding needs besides the children; it is part of the structure."""

    keys: tuple[Any, ...]
    values: Sequence[Any]
    modes: Sequence[Any]  # of Mode
    extra: Hashable

    def in_order(self, keys: tuple[Any, ...]) -> Opened:
        """The same children, the keys in this order."""
        places = [self.keys.index(key) for key in keys]
        return Opened(keys, [self.values[n] for n in places], [self.modes[n] for n in places], self.extra)


class Kind:
    """One sort of node.

    `mutable` nodes have an identity: sharing and cycles among them are kept, and changes made inside a call are carried
    out on the node itself. `mapping` gives the dict that holds the children under their keys, where there is one: it
    is what the steady state verifies. Kinds without it are opened again on every call, unless they are sequences.
    """

    name = "node"
    mutable = False
    mapping: Callable[[Any], dict[Any, Any]] | None = None
    sequence = False
    ignored: frozenset[str] = frozenset()  # keys of `mapping` that are no children
    guarded: tuple[str, ...] = ()  # those of them on which the structure depends: compared in the steady state
    rank: Callable[[Any], Any] | None = None  # where a framework sorts the children of what it merges: by this of keys
    whole = False  # where a function closes over such a node: is each attribute structure, as it is in an argument?

    def open(self, node: Any, mode: Mode) -> Opened:
        raise NotImplementedError

    def create(self, cls: type, extra: Any) -> Any:
        """An empty node (mutable kinds), to be filled when its children exist."""
        raise NotImplementedError

    def fill(self, node: Any, keys: tuple[Any, ...], values: Sequence[Any], extra: Any) -> None:
        """Make the node hold exactly these children, in place."""
        raise NotImplementedError

    def make(self, cls: type, keys: tuple[Any, ...], values: Sequence[Any], extra: Any) -> Any:
        """The node with its children (immutable kinds)."""
        raise NotImplementedError

    def enter(self, node: Any) -> Any:
        """Make a closed-over node belong to the trace that begins; returns a token for `leave`."""

    def leave(self, node: Any, token: Any) -> None:
        """Undo `enter`."""

    def step(self, key: Any) -> str:
        """How a child is written in a path."""
        return f"[{key!r}]"

    def part(self, cls: type, key: Any) -> Any:
        """The child's part of a path as filters see it: a name or a number."""
        return key


class ListKind(Kind):
    name, mutable, sequence = "list", True, True

    def open(self, node: list[Any], mode: Mode) -> Opened:
        return Opened(tuple(range(len(node))), node, (mode,) * len(node), None)

    def create(self, cls: type, extra: Any) -> Any:
        return []

    def fill(self, node: Any, keys: tuple[Any, ...], values: Sequence[Any], extra: Any) -> None:
        node[:] = values


class DictKind(Kind):
    name, mutable = "dict", True

    def open(self, node: dict[Any, Any], mode: Mode) -> Opened:
        return Opened(tuple(node), list(node.values()), (mode,) * len(node), None)

    def create(self, cls: type, extra: Any) -> Any:
        return {}

    def fill(self, node: Any, keys: tuple[Any, ...], values: Sequence[Any], extra: Any) -> None:
        node.clear()
        node.update(zip(keys, values, strict=True))


class NamedDictKind(DictKind):
    """A `collections.OrderedDict` or `defaultdict`: a dict in everything that matters here."""

    def open(self, node: Any, mode: Mode) -> Opened:
        return super().open(node, mode)._replace(extra=getattr(node, "default_factory", None))

    def create(self, cls: type, extra: Any) -> Any:
        return cls() if extra is None else cls(extra)


class TupleKind(Kind):
    name, sequence = "tuple", True

    def open(self, node: tuple[Any, ...], mode: Mode) -> Opened:
        return Opened(tuple(range(len(node))), node, (mode,) * len(node), None)

    def make(self, cls: type, keys: tuple[Any, ...], values: Sequence[Any], extra: Any) -> Any:
        return tuple.__new__(cls, values)  # namedtuples too, without their `__new__`


class SetKind(Kind):
    """Static, but changed in place: opened again on every call."""

    name = "set"

    def open(self, node: Any, mode: Mode) -> Opened:
        return Opened((), (), (), frozenset(node))

    def make(self, cls: type, keys: tuple[Any, ...], values: Sequence[Any], extra: Any) -> Any:
        return cls(extra)


class ObjectKind(Kind):
    """An instance of a plain class that holds cells: its attributes are its children."""

    name, mutable = "object", True
    mapping = attrgetter("__dict__")

    def open(self, node: Any, mode: Mode) -> Opened:
        attributes = vars(node)
        return Opened(tuple(attributes), list(attributes.values()), _autos(len(attributes)), None)

    def create(self, cls: type, extra: Any) -> Any:
        base: Any = next(base for base in cls.__mro__ if not base.__flags__ & _HEAP_TYPE)
        return base.__new__(cls)  # `object` for a plain class, whatever its own `__new__` asks for

    def fill(self, node: Any, keys: tuple[Any, ...], values: Sequence[Any], extra: Any) -> None:
        attributes = vars(node)
        attributes.clear()
        attributes.update(zip(keys, values, strict=True))

    def step(self, key: Any) -> str:
        return f".{key}"


class PytreeKind(Kind):
    """A class registered with JAX (dataclasses, Equinox modules, optimiser states): opened by its flattening."""

    name = "pytree"

    def __init__(self, scalars: Mode | None = None) -> None:
        self.scalars = scalars

    def open(self, node: Any, mode: Mode) -> Opened:
        pairs, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)
        values = [child for _, child in pairs]
        data = treedef.node_data()
        extra = (treedef, Frozen(data[1]) if data is not None else None)
        keys = tuple(_plain_key(path[0]) for path, _ in pairs)
        return Opened(keys, values, (self.scalars or mode,) * len(values), extra)

    def make(self, cls: type, keys: tuple[Any, ...], values: Sequence[Any], extra: Any) -> Any:
        return jax.tree_util.tree_unflatten(extra[0], values)

    def step(self, key: Any) -> str:
        return f".{key}" if isinstance(key, str) else f"[{key!r}]"


def _plain_key(entry: Any) -> Any:
    for name in ("name", "key", "idx"):
        if hasattr(entry, name):
            return getattr(entry, name)
    return str(entry)


class Frozen:
    """A static value as part of a structure: equal to values of the same type only, unhashable ones to themselves.

    >>> Frozen(1) == Frozen(1), Frozen(1) == Frozen(1.0), Frozen((1, 2)) == Frozen((1, True))
    (True, False, False)
    """

    __slots__ = ("_hash", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        try:
            self._hash = hash((type(value), value))
        except TypeError:
            self._hash = id(value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frozen) and self._hash == other._hash and same(self.value, other.value)

    def __repr__(self) -> str:
        return repr(self.value)


def same(a: Any, b: Any) -> bool:  # noqa: PLR0911  one return per sort of value
    """Are two static values one to every program? Types must agree, all the way down, and so must the sign of zero."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (float, complex)):
        return repr(a) == repr(b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(same, a.values(), b.values()))
    if isinstance(a, np.ndarray):
        return False
    try:
        return bool(a == b)
    except (TypeError, ValueError):
        return False


# ---- roles ----------------------------------------------------------------------------------------------------------

STATIC = object()
SCALAR = object()
ARRAY = object()
BOX = object()  # a mutable array of a framework: traced like an array, but with an identity, as a `jax.Ref` has
UNKNOWN = object()  # a plain class: a node if it holds cells or may be changed in place, static otherwise

NAMED_DICT = NamedDictKind()
LIST, DICT, TUPLE, SET, OBJECT, PYTREE = ListKind(), DictKind(), TupleKind(), SetKind(), ObjectKind(), PytreeKind()
EAGER_PYTREE = PytreeKind("auto")  # Equinox: Python scalars in a module are configuration, as in its `filter_jit`

_roles: dict[type, Any] = {
    State: OWN,
    list: LIST,
    dict: DICT,
    tuple: TUPLE,
    OrderedDict: NAMED_DICT,
    defaultdict: NAMED_DICT,
    types.SimpleNamespace: UNKNOWN,
    set: SET,
    bool: SCALAR,
    int: SCALAR,
    float: SCALAR,
    complex: SCALAR,
    type(None): STATIC,
    str: STATIC,
    bytes: STATIC,
    np.ndarray: ARRAY,
    jax.ShapeDtypeStruct: ARRAY,
}
_finders: list[Callable[[type], Any]] = []
discoverers: list[Family] = []  # families that can tell which cells a function touches: entered for every trace
called: list[Callable[[], None]] = []  # what frameworks want to know of every call of `jit`
_adapters = {"flax.nnx": "nnx", "brainstate": "brainstate"}
LIBRARIES = frozenset(
    {
        "jax",
        "jaxlib",
        "numpy",
        "flax",
        "brainstate",
        "equinox",
        "optax",
        "orbax",
        "scipy",
        "pytest",
        "_pytest",
        "shardax",
    }
    | set(sys.stdlib_module_names)
)


def register(find: Callable[[type], Any]) -> None:
    """Teach the lift a framework: `find` answers for a class with its family (cells), kind (nodes), BOX, or None."""
    _finders.append(find)
    for cls, role in list(_roles.items()):
        if (role is UNKNOWN or role is STATIC or isinstance(role, PytreeKind)) and find(cls) is not None:
            del _roles[cls]


def role_of(cls: type) -> Any:
    """The role of a class: a Family, a Kind, or one of ARRAY, SCALAR, STATIC, UNKNOWN."""
    if _adapters:
        load_adapters()
    role = _roles.get(cls)
    if role is None:
        role = _roles[cls] = _find_role(cls)
    return role


def load_adapters() -> None:
    """Import the adapter of every framework that has been imported."""
    for framework, module in list(_adapters.items()):
        if framework in sys.modules and getattr(sys.modules[framework], "__spec__", None) is not None:
            if getattr(sys.modules[framework].__spec__, "_initializing", False):
                continue  # half imported: nothing of it can be in use yet
            path = f"shardax.state.frameworks.{module}"
            if importlib.util.find_spec(path) is not None:  # pyright: ignore[reportAttributeAccessIssue]
                importlib.import_module(path)
            _adapters.pop(framework, None)


def _find_role(cls: type) -> Any:  # noqa: PLR0911  one return per role
    for find in _finders:
        role = find(cls)
        if role is not None:
            return role
    if issubclass(cls, State):
        return OWN
    if issubclass(cls, (jax.Array, np.ndarray, np.generic, Tracer)) or _is_ref(cls):
        return ARRAY
    if issubclass(cls, tuple):
        return TUPLE
    if is_registered(cls):
        return EAGER_PYTREE if _is_equinox(cls) else PYTREE
    if cls.__module__.split(".")[0] in LIBRARIES or issubclass(cls, (type, types.ModuleType, BaseException)):
        return STATIC
    return UNKNOWN if getattr(cls, "__dictoffset__", 0) else STATIC


def has_identity(value: Any) -> bool:
    """Is this an array that may be changed in place, so that sharing it means something?"""
    return _is_ref(type(value)) or role_of(type(value)) is BOX


def _is_ref(cls: type) -> bool:
    return issubclass(cls, getattr(jax, "Ref", ())) if hasattr(jax, "Ref") else False


def _is_equinox(cls: type) -> bool:
    equinox = sys.modules.get("equinox")
    return equinox is not None and issubclass(cls, equinox.Module)


def is_registered(cls: type) -> bool:
    """Is the class a pytree to JAX?"""
    try:
        probe = object.__new__(cls)
    except TypeError:
        return False
    try:
        return not jax.tree_util.all_leaves([probe])
    except Exception:  # noqa: BLE001  an empty instance may not flatten: then it was registered, which is the question
        return True


def holds_cells(value: Any, seen: set[int] | None = None, kinds: bool = True) -> bool:
    """Does a value hold a cell, or a node of a framework, anywhere?"""
    seen = set() if seen is None else seen
    role = role_of(type(value))
    if isinstance(role, Kind) and not isinstance(role, (ListKind, DictKind, TupleKind, SetKind, PytreeKind)):
        if kinds:
            return True
    elif role is UNKNOWN:
        role = OBJECT
    elif not isinstance(role, Kind):
        return not (role is STATIC or role is SCALAR or role is ARRAY)
    if id(value) in seen:
        return False
    if kinds and role is EAGER_PYTREE and not all(role_of(type(leaf)) is ARRAY for leaf in jax.tree.leaves(value)):
        return True  # functions and settings among its leaves, which `jax.jit` would refuse
    seen.add(id(value))
    return any(holds_cells(child, seen, kinds) for child in role.open(value, "auto").values)


def role_in(value: Any, mode: Mode) -> Any:
    """What a value is in its place: a Family, a Kind, ARRAY (traced) or STATIC."""
    role = role_of(type(value))
    if role is SCALAR:
        return ARRAY if mode == "data" else STATIC
    if role is BOX:
        return ARRAY
    if role is UNKNOWN:
        return OBJECT if (mode != "static" and _is_open(type(value))) or holds_cells(value) else STATIC
    if mode != "data" and (role is TUPLE or isinstance(role, PytreeKind)) and _inert(value):
        return STATIC
    return role


@functools.cache
def _is_open(cls: type) -> bool:
    """Is an instance nothing but its attributes, so that it may be looked into and built again?

    A class that says what equal means (a frozen dataclass, an Enum) is a value: static, compared by that. Of any other
    class an instance could be changed in place, or be given a cell inside a call: it is a node of the structure.
    """
    bases = cls.__mro__[:-1]
    if not all(base.__flags__ & _HEAP_TYPE or base is types.SimpleNamespace for base in bases):
        return False
    if any("__new__" in vars(base) for base in bases if base.__flags__ & _HEAP_TYPE):
        return False
    if any(vars(base).get("__slots__") for base in bases):
        return False
    return cls.__hash__ is None or (cls.__eq__ is object.__eq__ and cls.__hash__ is object.__hash__)


def holds_tracers(value: Any, seen: set[int] | None = None) -> bool:
    """Does a value hold something that exists only while a trace is open?"""
    seen = set() if seen is None else seen
    if isinstance(value, Tracer):
        return True
    role = role_of(type(value))
    role = OBJECT if role is UNKNOWN else role
    if not isinstance(role, Kind) or id(value) in seen:
        return False
    seen.add(id(value))
    return any(holds_tracers(child, seen) for child in role.open(value, "auto").values)


def _inert(value: Any) -> bool:
    """Is an immutable container static through and through, so that its identity says all?"""
    role = role_of(type(value))
    if role is STATIC or role is SCALAR:
        return True
    if role is UNKNOWN:
        return not _is_open(type(value)) and not holds_cells(value)
    if role is TUPLE or isinstance(role, PytreeKind):
        return all(map(_inert, role.open(value, "auto").values))
    return False
