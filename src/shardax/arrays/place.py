"""Trees of arrays under a layout: `put`, `reshard`, `init`, and the pairs of functions that other code asks for.

*read* (which sharding for which leaf, everything that is wrong listed at once) → *move* (one batched transfer; what has
to pass through the host goes in batches of bounded size).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from shardax.arrays.constrain import constrain
from shardax.arrays.host import is_key, to_host
from shardax.arrays.targets import bind, check_values, mesh_of_devices, read_target
from shardax.errors import LayoutError, Offence
from shardax.names.decision import warn_outside
from shardax.names.layout import Layout
from shardax.names.mesh import MeshLike, as_mesh, required_mesh
from shardax.names.paths import flatten, rebuild

BATCH_BYTES = 256 << 20
"""What `reshard` has under way at once."""

WORTH_COMPILING = 4 << 20
"""An array of so many bytes is resharded on its devices, by a compiled program; a smaller one through the host."""

MOST_SCRATCH = 2
"""A compiled reshard may use so many times the bytes of its blocks: where XLA knows no way, it replicates first."""


def put(tree: Any, layout: Any) -> Any:
    """Place a tree in one batched transfer; every leaf is checked first.

    `layout` is a Layout, a tree (or prefix) of shardings or specs, or a single one. Leaves are scalars, NumPy arrays,
    memory maps, or jax Arrays on any mesh. As with `jax.device_put`, a CPU device may share a NumPy array's memory. In
    traced code it is a constraint.

    >>> import shardax as sx
    >>> tree = {"w": np.ones((8, 4)), "b": np.ones(4)}
    >>> placed = put(tree, sx.layout(tree, {"w": jax.P("dp", "tp"), "b": jax.P("tp")}, sx.make_mesh("dp=2,tp=4")))
    >>> placed["w"].sharding.spec, placed["w"].addressable_shards[0].data.shape
    (P('dp', 'tp'), (4, 1))
    """
    paths, leaves, shardings = read_target(tree, layout)
    check_values(paths, leaves)
    return rebuild(tree, _move(paths, leaves, shardings))


def reshard(tree: Any, layout: Any, *, donate: bool = False) -> Any:
    """Bring a tree to another layout, also on another mesh, with a bounded amount under way at a time.

    With `donate` the old arrays are given up batch by batch, so both trees never exist at once. A move to fewer devices
    is done, with a warning.

    >>> import shardax as sx
    >>> tree = {"w": np.ones((8, 4))}
    >>> wide = put(tree, sx.layout(tree, {"w": jax.P("dp")}, sx.make_mesh("dp=8")))
    >>> reshard(wide, sx.layout(tree, {"w": jax.P("dp", "tp")}, sx.make_mesh("dp=2,tp=4")))["w"].sharding.spec
    P('dp', 'tp')
    """
    paths, leaves, shardings = read_target(tree, layout)
    check_values(paths, leaves)
    _warn_if_fewer_devices(leaves, shardings)
    placed: list[Any] = []
    for batch in _batches(leaves):
        placed += _move(paths[batch], leaves[batch], shardings[batch])
        if donate:
            _give_up(leaves[batch], placed[batch])
    return rebuild(tree, placed)


def make_shard_and_gather_fns(partition_specs: Any, mesh: MeshLike | None = None) -> tuple[Any, Any]:
    """Two trees of functions: leaf → array under its spec, and leaf → whole NumPy array.

    A leaf that does not fit its spec is an error. For a whole tree, `put` and `gather` do the same in one go.

    >>> import shardax as sx
    >>> shard_fns, gather_fns = make_shard_and_gather_fns({"w": jax.P("dp")}, sx.make_mesh("dp=8"))
    >>> w = shard_fns["w"](np.arange(8.0))
    >>> w.sharding.spec, gather_fns["w"](w).sum()
    (P('dp',), np.float32(28.0))
    """
    tree = partition_specs.shardings if isinstance(partition_specs, Layout) else partition_specs
    marked = jax.tree.map(lambda spec: _REPLICATED if spec is None else spec, tree, is_leaf=lambda node: node is None)
    paths, specs = flatten(marked)
    strange = [
        Offence(path, f"is {type(spec).__name__} {spec!r}, not a partition spec")
        for path, spec in zip(paths, specs, strict=True)
        if not isinstance(spec, (PartitionSpec, Sharding))
    ]
    if strange:
        raise LayoutError("there is no partition spec where one is needed", strange, "give a tree of PartitionSpecs")
    bound: Mesh | None = None
    if any(isinstance(spec, PartitionSpec) for spec in specs):
        asked = None if mesh is None else as_mesh(mesh)
        bound = mesh_of_devices(required_mesh(asked, "make_shard_and_gather_fns"))
    shardings = bind(paths, specs, bound)
    shard_fns = [_shard_fn(path, sharding) for path, sharding in zip(paths, shardings, strict=True)]
    return rebuild(marked, shard_fns), rebuild(marked, [_gather_fn(path) for path in paths])


_REPLICATED = PartitionSpec()


def _shard_fn(path: str, sharding: Any) -> Callable[[Any], Any]:
    def shard(leaf: Any) -> Any:
        """The leaf under its sharding; None stays None."""
        return leaf if leaf is None else put({path: leaf}, sharding)[path]

    return shard


def _gather_fn(path: str) -> Callable[[Any], Any]:
    def gather_leaf(leaf: Any) -> Any:
        """The whole leaf as a NumPy array."""
        return to_host([leaf], [path])[0]

    return gather_leaf


# ---- moving ---------------------------------------------------------------------------------------------------------


def _move(paths: Sequence[str], leaves: Sequence[Any], shardings: Sequence[Sharding]) -> list[Any]:
    """Every leaf under its sharding: one batched transfer, and batches for what must pass through the host."""
    placed = list(leaves)
    routes: dict[_Route, list[int]] = {route: [] for route in _Route}
    for place, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True)):
        routes[_route(leaf, sharding)].append(place)
    for place in routes[_Route.ON_DEVICES]:
        program = _program(leaves[place].aval, leaves[place].sharding, shardings[place])
        if program is None:
            routes[_Route.THROUGH_HOST].append(place)
        else:
            placed[place] = program(leaves[place])

    def transfer(places: list[int], values: list[Any]) -> None:
        for place, value in zip(places, _transfer(values, [shardings[p] for p in places]), strict=True):
            placed[place] = value

    for place in routes[_Route.TRACED]:
        placed[place] = _constrain(leaves[place], shardings[place])
    transfer(routes[_Route.TRANSFER], [leaves[p] for p in routes[_Route.TRANSFER]])
    staged = routes[_Route.THROUGH_HOST]
    for batch in _batches([leaves[place] for place in staged]):
        part = staged[batch]
        transfer(part, to_host([leaves[p] for p in part], [paths[p] for p in part]))
    return placed


class _Route(Enum):
    """How a leaf travels."""

    STAY = "it is where it should be"
    TRACED = "nowhere: the program says where its result is to be"
    TRANSFER = "jax.device_put"
    ON_DEVICES = "a compiled program, unless it would hold the whole array on a device"
    THROUGH_HOST = "whole on the host, a batch at a time"


def _route(leaf: Any, sharding: Sharding) -> _Route:
    """`jax.device_put` alone would leave a host copy cached on every array whose blocks change."""
    if isinstance(leaf, np.ndarray):  # first: to ask whether something is one of JAX's takes microseconds
        return _Route.TRANSFER
    if isinstance(leaf, Tracer):
        return _Route.TRACED
    if not isinstance(leaf, jax.Array):
        return _Route.TRANSFER
    one, other = leaf.sharding, sharding
    if one == other and leaf.committed:
        return _Route.STAY
    if one.is_fully_addressable and (one.num_devices == 1 or _same_blocks(one, other, leaf.shape)):
        return _Route.TRANSFER
    large = leaf.nbytes >= WORTH_COMPILING or not one.is_fully_addressable
    return _Route.ON_DEVICES if large and _same_order(one, other) else _Route.THROUGH_HOST


@lru_cache(maxsize=4096)
def _same_blocks(one: Sharding, other: Sharding, shape: tuple[int, ...]) -> bool:
    """Does each device have its block already, or can all be copied, device by device, to others?"""
    if one.num_devices != other.num_devices:
        return False
    blocks = [list(sharding.devices_indices_map(shape).values()) for sharding in (one, other)]
    return blocks[0] == blocks[1] and (one.device_set.isdisjoint(other.device_set) or _same_order(one, other))


def _same_order(one: Sharding, other: Sharding) -> bool:
    meshes = [sharding.mesh for sharding in (one, other) if isinstance(sharding, NamedSharding)]
    orders = [list(mesh.devices.flat) for mesh in meshes if isinstance(mesh, Mesh)]
    return len(orders) == 2 and orders[0] == orders[1]


@lru_cache(maxsize=1024)
def _program(aval: Any, one: Sharding, other: Sharding) -> Callable[[Any], Any] | None:
    """The compiled move, unless the compiler says that it would first bring the whole array to every device."""
    abstract = jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=one)
    compiled = jax.jit(_identity, out_shardings=other).lower(abstract).compile()
    memory = compiled.memory_analysis()
    if memory is None:
        return compiled
    apart = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return compiled if memory.temp_size_in_bytes <= MOST_SCRATCH * apart else None


def _constrain(x: Any, sharding: Sharding) -> Any:
    """A value of a program under its sharding: XLA takes a `device_put` on Auto axes for no more than a hint."""
    return constrain(x, sharding) if isinstance(sharding, NamedSharding) else jax.device_put(x, sharding)


def _identity(x: Any) -> Any:
    return x


def _transfer(leaves: Sequence[Any], shardings: Sequence[Sharding]) -> list[Any]:
    if all(sharding.is_fully_addressable for sharding in set(shardings)):
        return jax.device_put(list(leaves), list(shardings)) if leaves else []
    return [_put_own_part(leaf, sharding) for leaf, sharding in zip(leaves, shardings, strict=True)]


def _put_own_part(leaf: Any, sharding: Sharding) -> jax.Array:
    """One leaf on devices of several processes: each puts its own blocks (`device_put` would compare all the bytes)."""
    if sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    if isinstance(leaf, jax.Array):
        if is_key(leaf):
            return _put_keys(leaf, sharding)
        leaf = to_host([leaf], [""])[0]
    dtype = jax.dtypes.canonicalize_dtype(jax.dtypes.result_type(leaf))
    whole = np.asarray(leaf)
    return jax.make_array_from_callback(
        whole.shape, sharding, lambda index: np.asarray(whole[index], dtype), dtype=dtype
    )


def _put_keys(keys: jax.Array, sharding: Sharding) -> jax.Array:
    data = jax.random.key_data(keys)
    if isinstance(sharding, NamedSharding):
        entries = [*sharding.spec, *([None] * (data.ndim - len(sharding.spec)))]
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*entries))
    return jax.random.wrap_key_data(_put_own_part(data, sharding), impl=jax.random.key_impl(keys))


# ---- batches --------------------------------------------------------------------------------------------------------


def _batches(leaves: Sequence[Any]) -> Iterator[slice]:
    """Runs of leaves of at most `BATCH_BYTES` (one leaf at least)."""
    start, held = 0, 0
    for place, leaf in enumerate(leaves):
        size = int(getattr(leaf, "nbytes", 8))
        if held and held + size > BATCH_BYTES:
            yield slice(start, place)
            start, held = place, 0
        held += size
    if start < len(leaves):
        yield slice(start, len(leaves))


def _give_up(old: Sequence[Any], new: Sequence[Any]) -> None:
    """Free the arrays that have been copied; one that shares memory with its copy costs nothing and stays."""
    jax.block_until_ready(list(new))
    for leaf, placed in zip(old, new, strict=True):
        if _is_held(leaf) and leaf is not placed and not _share_memory(leaf, placed):
            leaf.delete()


def _is_held(leaf: Any) -> bool:
    """Is this an array with memory of its own, and no value of a program?"""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)


def _share_memory(one: jax.Array, other: jax.Array) -> bool:
    pointers = [{shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards} for array in (one, other)]
    return not pointers[0].isdisjoint(pointers[1])


def _warn_if_fewer_devices(leaves: Sequence[Any], shardings: Sequence[Sharding]) -> None:
    arrays = filter(_is_held, leaves)
    before = {device for sharding in {array.sharding for array in arrays} for device in sharding.device_set}
    after = {device for sharding in set(shardings) for device in sharding.device_set}
    if len(after) < len(before):
        warn_outside(f"reshard moves arrays from {len(before)} devices to {len(after)}; the others are left empty")
