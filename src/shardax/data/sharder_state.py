"""What of a process sharder goes into a checkpoint: counters, statistics, rules, random streams. No topology."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast

import jax

from shardax.errors import Offence, SharderStateError

KEYS = ("applied_count", "skipped_count", "statistics", "statistics_reset", "sharding_rules", "rngs")
OPTIONAL = ("sharding_rules", "rngs")
TOPOLOGY = ("process_index", "process_count", "local_device_count")


def check_state(state: Any) -> Mapping[str, Any]:
    """The state, if it is a sharder's; else one error that lists every key that is wrong."""
    if not isinstance(state, dict):
        raise SharderStateError(f"State must be a dict, got {type(state).__name__}", remedy="see get_state()")
    found = cast("dict[str, Any]", state)
    wrong = [Offence(key, "is missing") for key in KEYS if key not in found and key not in OPTIONAL]
    for key in found:
        if key in TOPOLOGY:
            wrong.append(Offence(key, "is topology: it would make every process read the saver's rows"))
        elif key not in KEYS:
            wrong.append(Offence(str(key), "is not part of a sharder's state"))
    for key in ("applied_count", "skipped_count"):
        count = found.get(key, 0)
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            wrong.append(Offence(key, f"{count!r} is not a count"))
    if not isinstance(found.get("statistics", None), (dict, type(None))):
        wrong.append(Offence("statistics", f"a {type(found['statistics']).__name__} is not a dict"))
    if not isinstance(found.get("statistics_reset", False), bool):
        wrong.append(Offence("statistics_reset", f"{found['statistics_reset']!r} is not true or false"))
    if wrong:
        raise SharderStateError(
            "this state is not this sharder's; nothing was restored", wrong, f"a state has {', '.join(KEYS)}"
        )
    return found


def copied(tree: Any) -> Any:
    """The containers anew, the arrays shared: they do not change."""
    if isinstance(tree, dict):
        return {key: copied(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [copied(value) for value in tree]
    if isinstance(tree, tuple) and not hasattr(tree, "_fields"):
        return tuple(copied(value) for value in tree)
    return tree


def save_rngs(rngs: Any) -> Any:
    """Random streams as plain arrays: an `nnx.Rngs` by stream, a key as its data; None where there are none."""
    if rngs is None:
        return None
    if isinstance(rngs, jax.Array):
        return _key_data(rngs)
    streams = _nnx_streams(rngs)
    return None if streams is None else jax.tree.map(_key_data, streams)


def load_rngs(rngs: Any, saved: Any) -> Any:
    """New random streams of the kind of `rngs` that go on where the saved ones stood."""
    if saved is None or rngs is None:
        return rngs
    if isinstance(rngs, jax.Array):
        return _as_key(rngs, saved)
    streams = _nnx_streams(rngs)
    if streams is None or jax.tree.structure(streams) != jax.tree.structure(saved):
        raise SharderStateError(
            "this state is not this sharder's; nothing was restored",
            [Offence("rngs", "the state has other random streams than this sharder")],
            "build the sharder with the rngs that it was saved with",
        )
    from flax import nnx

    fresh = copy.deepcopy(rngs)
    state = nnx.state(fresh)
    nnx.replace_by_pure_dict(state, jax.tree.map(_as_key, streams, saved))
    nnx.update(fresh, state)
    return fresh


def _nnx_streams(rngs: Any) -> Any:
    """The variables of an `nnx.Rngs` as a dict; None for anything else. It cannot be one if flax is not loaded."""
    import sys

    nnx = sys.modules.get("flax.nnx")
    return nnx.to_pure_dict(nnx.state(rngs)) if nnx is not None and isinstance(rngs, nnx.Rngs) else None


def _key_data(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _as_key(now: Any, saved: Any) -> Any:
    return jax.random.wrap_key_data(jax.numpy.asarray(saved), impl=jax.random.key_impl(now)) if _is_key(now) else saved


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
