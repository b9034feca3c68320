"""The sharding lock: the facts of a proof that a change should not change unseen, in a small file for CI.

A site is an operation, its mesh axes and the function it comes from; line numbers and file contents may move.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from jax.sharding import PartitionSpec

from shardax.errors import Offence, ProofFailure, plural
from shardax.names.spec import axes_of
from shardax.proving.placing import UNKNOWN
from shardax.proving.rewriting import is_rewriting, note_written
from shardax.tables import show_bytes

Proof = Any  # proof.py stands above this file: a proof knows how to lock itself
VERSION = 1
TOLERANCE = 0.05
_PARTS = {"memory": dict, "layout": dict, "collectives": list}
_SITE = {"op", "axes", "dtype", "where", "phase", "times", "wire"}


class Lock(dict[str, Any]):
    """The facts as a plain dict; as text they are the lock file: JSON, one fact per line, so that a diff reads well."""

    def __str__(self) -> str:
        body = dict(self)
        sites = [json.dumps(site) for site in body.pop("collectives")]
        text = json.dumps(body, indent=1)[:-2]
        listed = ",\n  ".join(sites)
        return text + f',\n "collectives": [{f"{chr(10)}  {listed}{chr(10)} " if sites else ""}]\n}}\n'


def lock_of(proof: Proof) -> Lock:
    """A small, stable, readable dict: the same program gives the same lock in every process."""
    facts: dict[str, Any] = {
        "shardax": "lock",
        "version": VERSION,
        "step": proof.name,
        "target": str(proof.target),
        "mesh": str(proof.mesh),
        "jax": proof.versions.get("jax", ""),  # said, not compared: another version may lay out otherwise
        "fits": proof.fits,
        "memory": {
            "arguments": proof.memory.arguments,
            "outputs": proof.memory.outputs,
            "peak": _rounded(proof.memory.peak),
        },
        "layout": {
            "inputs": {leaf.path: spec_text(leaf.spec) for leaf in proof.inputs},
            "outputs": {leaf.path: spec_text(leaf.spec) for leaf in proof.outputs if leaf.source != UNKNOWN},
        },
        "collectives": _collectives(proof),
        "lost_donations": sorted(lost.path for lost in proof.lost_donations),
        "not_as_asked": sorted(f"{each.shape} asked {spec_text(each.asked)}" for each in proof.not_as_asked),
    }
    return Lock(facts)


def _rounded(count: int) -> int:
    """Three digits: the compiler's allocator moves by less than anyone cares about."""
    digits = max(len(str(count)) - 3, 0)
    return round(count, -digits)


def spec_text(spec: PartitionSpec) -> str:
    """A spec as short text: "fsdp+dp,-,tp"; "-" for a dimension that is not sharded, "" for a replicated array.

    >>> import jax
    >>> spec_text(jax.P(("fsdp", "dp"), None, "tp"))
    'fsdp+dp,-,tp'
    """
    return ",".join("+".join(axes_of(entry)) or "-" for entry in spec)


def _collectives(proof: Proof) -> list[dict[str, Any]]:
    sites: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in proof.ledger:
        where = f"{row.file.rpartition('/')[2]}:{row.function.rpartition('<locals>.')[2]}" if row.file else ""
        key = (row.op, ",".join(row.axes), row.dtype, where, row.phase)
        site = sites.setdefault(
            key,
            {"op": row.op, "axes": ",".join(row.axes), "dtype": row.dtype, "where": where, "phase": row.phase}
            | {"times": 0, "payload": 0, "wire": 0},
        )
        site["times"] += row.count
        site["payload"] += row.payload_bytes * row.count
        site["wire"] += row.wire_bytes
    return [sites[key] for key in sorted(sites)]


def write_lock(lock: Mapping[str, Any], path: str | Path) -> None:
    """Write a lock file, and the folders above it."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(str(Lock(lock)), encoding="utf-8")


def read_lock(path: str | Path) -> dict[str, Any]:
    """Read a lock file; one that is absent or damaged is a failure with the remedy."""
    remedy = "write it with pytest --shardax-update, or check_lock(…, update=True)"
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ProofFailure(f"there is no sharding lock {os.fspath(path)}", remedy=remedy) from None
    except ValueError as error:
        raise ProofFailure(f"{os.fspath(path)} is not JSON", [Offence(str(path), str(error))], remedy) from error
    if not isinstance(data, dict) or data.get("shardax") != "lock" or data.get("version") != VERSION:
        raise ProofFailure(f"{os.fspath(path)} is no sharding lock of version {VERSION}", remedy=remedy)
    lock = cast("dict[str, Any]", data)
    lacking = [name for name, kind in _PARTS.items() if not isinstance(lock.get(name), kind)]
    sites: list[Any] = [] if "collectives" in lacking else lock["collectives"]
    whole = [isinstance(site, dict) and set(cast("dict[str, Any]", site)) >= _SITE for site in sites]
    lacking += [f"collectives[{at}]" for at, is_whole in enumerate(whole) if not is_whole]
    if lacking:
        offences = [Offence(name, "is missing, or is not what a lock has there") for name in lacking]
        raise ProofFailure(f"{os.fspath(path)} is a damaged sharding lock", offences, remedy)
    return lock


def check_lock(
    proof: Proof | str | Path,
    path: Proof | str | Path,
    *,
    tolerance: float = TOLERANCE,
    update: bool | None = None,
) -> None:
    """Fail, with a diff a person can read, when a proof is not what its lock file says.

    More collectives, other shardings, lost donations always fail; bytes fail past `tolerance` (a share). What got
    better fails too, so that the file stays the truth: rewrite it with `update=True` or `pytest --shardax-update`.

    >>> import jax, tempfile, shardax as sx
    >>> x = jax.ShapeDtypeStruct((64, 32), "float32")
    >>> proof = sx.prove(lambda x: x.sum(), x, mesh="dp=2", in_specs=jax.P("dp"), target="cpu:2")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sx.check_lock(proof, f"{folder}/sharding.lock", update=True)
    ...     sx.check_lock(proof, f"{folder}/sharding.lock")
    """
    __tracebackhide__ = True
    if isinstance(proof, (str, Path)):  # either order reads well
        proof, path = path, proof
    if isinstance(proof, (str, Path)) or not isinstance(path, (str, Path)):
        raise TypeError("check_lock takes a proof and the path of its lock file")
    if not hasattr(proof, "versions"):
        raise TypeError(f"check_lock takes a proof, not a {type(proof).__name__}: what it locks, a compiler has to say")
    lock = lock_of(proof)
    if is_rewriting() if update is None else update:
        write_lock(_beside(path) | lock, path)
        note_written(os.fspath(path))
        return
    old = read_lock(path)
    differences = list(lock_differences(old, json.loads(json.dumps(lock)), tolerance))
    if differences:
        remedy = "if this is meant: pytest --shardax-update, and look at the diff of the file"
        if old.get("jax", lock["jax"]) != lock["jax"]:
            remedy = f"it was written with jax {old['jax']}, this is {lock['jax']}; {remedy}"
        raise ProofFailure(
            f"{proof.name} is not what {os.fspath(path)} says: {plural(len(differences), 'difference')}",
            differences,
            remedy,
        )


def _beside(path: str | Path) -> dict[str, Any]:
    """What others keep in a lock file (the command line: which program it is about) stays when it is rewritten."""
    try:
        return read_lock(path)
    except ProofFailure:
        return {}


def lock_differences(old: Mapping[str, Any], new: Mapping[str, Any], tolerance: float) -> Iterator[Offence]:
    """What a person wants to hear about two locks."""
    for name in ("step", "target", "mesh", "fits"):
        if old.get(name) != new[name]:
            yield Offence(name, f"was {old.get(name)}, is {new[name]}")
    for name in ("arguments", "outputs", "peak"):
        yield from _grown(f"memory {name}", old["memory"].get(name, 0), new["memory"][name], tolerance)
    for side in ("inputs", "outputs"):
        yield from _layout(side, old["layout"].get(side, {}), new["layout"][side])
    yield from _sites(old["collectives"], new["collectives"], tolerance)
    for name, word in (("lost_donations", "donation"), ("not_as_asked", "sharding not as asked")):
        for item in sorted(set(new[name]) - set(old.get(name, []))):
            yield Offence(item, f"{word} lost" if word == "donation" else word)
        for item in sorted(set(old.get(name, [])) - set(new[name])):
            yield Offence(item, f"{word}: no longer a problem")


def _grown(what: str, old: int, new: int, tolerance: float) -> Iterator[Offence]:
    if abs(new - old) > tolerance * max(old, 1):
        change = f" ({(new - old) / old:+.0%})" if old else ""
        yield Offence(what, f"was {show_bytes(old)}, is {show_bytes(new)}{change}")


def _layout(side: str, old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[Offence]:
    for path in sorted(old.keys() | new.keys()):
        if path not in new:
            yield Offence(path, f"is gone from the {side} (was {old[path] or 'replicated'})")
        elif path not in old:
            yield Offence(path, f"is new among the {side} ({new[path] or 'replicated'})")
        elif old[path] != new[path]:
            lost = "loses its sharding" if not new[path].strip(",-") else "changes its sharding"
            yield Offence(path, f"{lost}: was {old[path] or 'replicated'}, is {new[path] or 'replicated'}")


def _sites(old: Any, new: Any, tolerance: float) -> Iterator[Offence]:
    def keyed(sites: Any) -> dict[tuple[str, ...], Any]:
        return {tuple(site[name] for name in ("op", "axes", "dtype", "where", "phase")): site for site in sites}

    before, after = keyed(old), keyed(new)
    for key in sorted(before.keys() | after.keys()):
        op, axes, dtype, where, phase = key
        name = f"{op} over {axes or 'no axis'} ({dtype}, {phase}) in {where or 'no known place'}"
        if key not in before:
            yield Offence(name, f"is new: {_times(after[key])}")
        elif key not in after:
            yield Offence(name, f"is gone (was {_times(before[key])})")
        elif before[key]["times"] != after[key]["times"]:
            yield Offence(name, f"was {_times(before[key])}, is {_times(after[key])}")
        else:
            yield from _grown(f"{name}, on the wire", before[key]["wire"], after[key]["wire"], tolerance)


def _times(site: Mapping[str, Any]) -> str:
    return f"{site['times']:,}×, {show_bytes(site['wire'])} sent by each device"
