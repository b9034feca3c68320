"""`init`: parameters that are born sharded, after the compiler has said that they fit.

*trace* (abstract shapes) → *lay out* → *compile* with those shardings → compare the compiler's memory number with what
the device has → run. No device ever holds an unsharded parameter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, Sharding

from shardax.arrays.targets import read_target
from shardax.errors import Offence, PlacementError
from shardax.names.decision import itemsize_of
from shardax.names.layout import layout as lay_out
from shardax.names.mesh import MeshSpec
from shardax.names.paths import flatten, rebuild
from shardax.names.rules import Rules
from shardax.tables import parse_bytes, show_bytes


def init(fn: Callable[..., Any], *args: Any, layout: Any, device_memory: int | str | None = None, **kwargs: Any) -> Any:
    """Call `fn(*args, **kwargs)` so that each array of its result is made in place, under its sharding.

    `layout` is a Layout, rules (on the mesh in force), `(rules, mesh)`, or a tree of shardings or specs. Arrays among
    the arguments are traced; everything else (sizes, configurations) is passed as it is. Any pytree may be returned, an
    `nnx.Module` too. What does not fit into the memory of a device (`device_memory`, where the device does not say) is
    an error before anything runs.

    >>> import jax, jax.numpy as jnp, shardax as sx
    >>> def make(key, width):
    ...     return {"w": jax.random.normal(key, (width, 16)), "b": jnp.zeros(16)}
    >>> rules = {"w": jax.P("fsdp", "tp"), "b": jax.P("tp")}
    >>> mesh = sx.make_mesh("fsdp=2,tp=4")
    >>> init(make, jax.random.key(0), 64, layout=(rules, mesh))["w"].addressable_shards[0].data.shape
    (32, 4)
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    arrays = [leaf for leaf in leaves if _is_array(leaf)]

    def call(given: Sequence[Any]) -> Any:
        left = iter(given)
        all_args, all_kwargs = structure.unflatten([next(left) if _is_array(leaf) else leaf for leaf in leaves])
        return fn(*all_args, **all_kwargs)

    abstract = jax.eval_shape(call, arrays)
    paths, shapes, shardings = read_target(abstract, _chosen(abstract, layout))
    compiled = jax.jit(lambda given: _in_jax_order(call(given)), out_shardings=shardings).lower(arrays).compile()
    _check_memory(compiled, device_memory, list(zip(paths, shapes, shardings, strict=True)))
    return rebuild(abstract, compiled(arrays))


def _in_jax_order(tree: Any) -> list[Any]:
    """The leaves in the order of an abstract result: JAX sorts dicts."""
    return flatten(jax.tree.map(lambda leaf: leaf, tree))[1]


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def _chosen(abstract: Any, layout: Any) -> Any:
    """A Layout where rules were given; what else a target may be is for `read_target`."""
    if isinstance(layout, Rules) or (isinstance(layout, list) and all(map(_is_rule, layout))):
        return lay_out(abstract, layout)
    if isinstance(layout, tuple) and len(layout) == 2 and isinstance(layout[1], (Mesh, AbstractMesh, MeshSpec, str)):
        return lay_out(abstract, *layout)
    return layout


def _is_rule(entry: Any) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], (str, re.Pattern))


# ---- does it fit ----------------------------------------------------------------------------------------------------


def _check_memory(compiled: Any, device_memory: int | str | None, leaves: Sequence[tuple[str, Any, Sharding]]) -> None:
    memory = compiled.memory_analysis()
    room = _room(leaves) if device_memory is None else parse_bytes(device_memory)
    if memory is None or room is None:
        return
    results, arguments = memory.output_size_in_bytes, memory.argument_size_in_bytes
    scratch = memory.temp_size_in_bytes + memory.generated_code_size_in_bytes - memory.alias_size_in_bytes
    needed = results + arguments + scratch
    if needed > room:
        raise PlacementError(
            f"init needs {show_bytes(needed)} on every device, and there are {show_bytes(room)}",
            _largest(leaves, 5),
            f"{show_bytes(results)} of results, {show_bytes(arguments)} of arguments, {show_bytes(scratch)} while it "
            "runs; shard the largest over more axes or more devices",
        )


def _room(leaves: Sequence[tuple[str, Any, Sharding]]) -> int | None:
    """Free bytes on the fullest of this process's devices; None where the devices do not say (CPU)."""
    devices = {device for _, _, sharding in leaves for device in sharding.addressable_devices}
    stats = [device.memory_stats() for device in devices]
    return min((s["bytes_limit"] - s.get("bytes_in_use", 0) for s in stats if s and "bytes_limit" in s), default=None)


def _largest(leaves: Sequence[tuple[str, Any, Sharding]], most: int) -> list[Offence]:
    sized = [
        (math.prod(sharding.shard_shape(leaf.shape)) * itemsize_of(leaf.dtype), path, leaf, sharding)
        for path, leaf, sharding in leaves
    ]
    return [
        Offence(
            path,
            f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]: {show_bytes(local)} of "
            f"{show_bytes(leaf.size * itemsize_of(leaf.dtype))} on every device",
            shape=leaf.shape,
            spec=getattr(sharding, "spec", None),
        )
        for local, path, leaf, sharding in sorted(sized, key=lambda row: -row[0])[:most]
    ]
