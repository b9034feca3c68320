"""Checkpoints: thin over orbax, restored under a `Layout` on any mesh, and verified.

Orbax restores a flipped bit without a word, so beside the arrays stands a content hash of every chunk of every global
array, whatever the number of processes that wrote or read it. A leaf is stored under its path.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from shardax.arrays.exchange import all_gather_bytes
from shardax.arrays.fingerprint import fingerprint, rows_of_chunk
from shardax.arrays.host import is_key
from shardax.arrays.targets import check_leaves, check_values, dtype_text, mesh_of_devices, read_target
from shardax.errors import CheckpointerMissingError, CheckpointError, LeafError, Offence, plural
from shardax.names.layout import Layout
from shardax.names.mesh import required_mesh
from shardax.names.paths import flatten, rebuild

ARRAYS, NOTES = "arrays", "shardax"
VISIBLE_WITHIN_SECONDS = 10.0
"""So long may a network file system take to show a directory to all processes."""


def save_checkpoint(path: str | Path, tree: Any, *, layout: Layout | None = None, step: int | None = None) -> Path:
    """Write a tree of arrays, atomically; all processes call it, and it returns when the checkpoint is complete.

    `layout` is kept beside it, so that `restore_checkpoint` needs none. A checkpoint is never overwritten.

    >>> import tempfile, shardax as sx
    >>> tree = {"w": np.arange(8.0)}
    >>> made = sx.layout(tree, {"w": jax.P("dp")}, sx.make_mesh("dp=8"))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     where = save_checkpoint(folder, sx.put(tree, made), step=3)
    ...     back = restore_checkpoint(folder, made.on(sx.make_mesh("dp=2")))
    >>> where.name, back["w"].sharding.mesh.size, sx.gather(back)["w"].sum()
    ('3', 2, np.float32(28.0))
    """
    orbax = _orbax()
    if step is not None and step < 0:
        raise CheckpointError(f"step {step} is negative, and would never be found again")
    target = Path(path).absolute() / str(step) if step is not None else Path(path).absolute()
    paths, leaves = flatten(tree)
    if not leaves:
        raise LeafError("the tree has no leaves to save", remedy="give a tree of arrays")
    check_leaves(paths, leaves)
    check_values(paths, leaves)
    if layout is not None:
        read_target(tree, layout)
    if len(set(paths)) < len(paths):
        twice = [Offence(found, "is the path of two leaves") for found in sorted(set(paths)) if paths.count(found) > 1]
        raise CheckpointError("a checkpoint stores a leaf under its path", twice)
    _check_shared(target.parent)
    if target.exists():
        raise CheckpointError(f"there is something at {target.name!r} already", remedy="another step, or delete it")
    stored = dict(zip(paths, map(_storable, leaves), strict=True))
    notes = {
        "version": 1,
        "leaves": {found: _describe(leaf, stored[found]) for found, leaf in zip(paths, leaves, strict=True)},
        "layout": None if layout is None else layout.to_json(),
    }
    arrays = {found: leaf for found, leaf in stored.items() if 0 not in leaf.shape}  # orbax stores no empty arrays
    with orbax.Checkpointer(orbax.CompositeCheckpointHandler()) as checkpointer:
        parts = {NOTES: orbax.args.JsonSave(notes)}
        if arrays:
            parts[ARRAYS] = orbax.args.StandardSave(arrays)
        checkpointer.save(target, orbax.args.Composite(**parts))
    return target


def restore_checkpoint(path: str | Path, layout: Any = None, *, step: int | None = None, verify: bool = True) -> Any:
    """Read a checkpoint under a Layout, or a tree of sharded abstract arrays, on whatever mesh that is.

    Without a layout, the one that was saved is used on the mesh in force. Without a step, the latest is read. Every
    leaf that is missing, of another shape or dtype, or not what was saved is listed.

    >>> import tempfile, shardax as sx
    >>> made = sx.layout({"w": np.arange(8.0)}, {"w": jax.P("dp")}, sx.make_mesh("dp=8"))
    >>> with tempfile.TemporaryDirectory() as folder, jax.set_mesh(sx.make_mesh("dp=4")):
    ...     _ = save_checkpoint(folder, sx.put({"w": np.arange(8.0)}, made), layout=made, step=3)
    ...     restore_checkpoint(folder)["w"].sharding.shard_shape((8,))  # the mesh in force has four devices
    (2,)
    """
    orbax = _orbax()
    target = _find(Path(path).absolute(), step)
    with orbax.Checkpointer(orbax.CompositeCheckpointHandler()) as checkpointer:
        notes = checkpointer.restore(target, orbax.args.Composite(**{NOTES: orbax.args.JsonRestore()}))[NOTES]
        if layout is None:
            layout = _saved_layout(notes)
        places, skeleton = _wanted(layout)
        _check_leaves_match(places, notes["leaves"], target.name)
        wanted = {name: place.stored(notes["leaves"][name]) for name, place in places.items()}
        arrays = {name: leaf for name, leaf in wanted.items() if 0 not in leaf.shape}
        parts = {ARRAYS: orbax.args.StandardRestore(arrays)} if arrays else {}
        try:
            found = dict(checkpointer.restore(target, orbax.args.Composite(**parts))[ARRAYS]) if parts else {}
        except Exception as error:
            if type(error) not in (Exception, ValueError, OSError):  # orbax puts a bare Exception around a failed read
                raise
            said = str(error.__cause__ or error)
            raise CheckpointError(f"the arrays of checkpoint {target.name!r} cannot be read: {said}") from error
    for name, leaf in wanted.items():
        if name not in found:
            found[name] = jax.make_array_from_callback(
                leaf.shape, leaf.sharding, lambda index, leaf=leaf: np.zeros(leaf.shape, leaf.dtype)[index], leaf.dtype
            )
    if verify:
        _verify(found, notes["leaves"], target.name)
    values = [_unstored(found[name], notes["leaves"][name]) for name in places]
    return dict(zip(places, values, strict=True)) if skeleton is None else rebuild(skeleton, values)


# ---- leaves as they are stored --------------------------------------------------------------------------------------


_STORED_AS = {"uint4": "uint8", "uint2": "uint8", "int2": "int8", "float4_e2m1fn": "float32"}
"""Dtypes that tensorstore has no name for, and wider ones that hold all their values."""


def _storable(leaf: Any) -> Any:
    """Key arrays as their data; everything else as JAX would hold it, wider where orbax cannot."""
    if is_key(leaf):
        return jax.random.key_data(leaf)
    if not isinstance(leaf, jax.Array):
        leaf = np.asarray(leaf, jax.dtypes.canonicalize_dtype(jax.dtypes.result_type(leaf)))
    wider = _STORED_AS.get(str(leaf.dtype))
    return leaf.astype(wider) if wider else leaf


def _describe(leaf: Any, stored: Any) -> dict[str, Any]:
    shown = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    note: dict[str, Any] = {
        "shape": list(shown.shape),
        "dtype": dtype_text(shown.dtype, {}),
        "chunks": fingerprint(stored),
    }
    if [note["shape"], note["dtype"]] != (held := [list(stored.shape), str(stored.dtype)]):
        note["stored"] = held
    return {**note, "keys": _key_name(leaf)} if is_key(leaf) else note


def _key_name(keys: Any) -> str:
    return str(jax.random.key_impl(keys))


def _unstored(value: jax.Array, note: Mapping[str, Any]) -> jax.Array:
    if "keys" in note:
        return jax.random.wrap_key_data(value, impl=note["keys"])
    return value.astype(note["dtype"]) if "stored" in note else value


@dataclass(frozen=True, slots=True)
class _Place:
    """What is wanted of one leaf."""

    shape: tuple[int, ...]
    dtype: str
    sharding: Sharding

    def stored(self, note: Mapping[str, Any]) -> jax.ShapeDtypeStruct:
        """The abstract array to ask orbax for."""
        shape, dtype = note.get("stored", (note["shape"], note["dtype"]))
        sharding = self.sharding
        if "keys" in note and isinstance(sharding, NamedSharding):
            padding = [None] * (len(shape) - len(sharding.spec))
            sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec, *padding))
        return jax.ShapeDtypeStruct(tuple(shape), np.dtype(dtype), sharding=sharding)


def _wanted(layout: Any) -> tuple[dict[str, _Place], Any]:
    """Path → place, and the tree to build around the values (None: a dict of paths)."""
    if isinstance(layout, Layout):
        mesh = mesh_of_devices(layout.mesh)
        places = {d.path: _Place(d.shape, d.dtype, NamedSharding(mesh, d.spec)) for d in layout.decisions}
        return places, layout.skeleton
    paths, leaves = flatten(layout)
    bare = [
        Offence(path, f"is {type(leaf).__name__}, without a sharding")
        for path, leaf in zip(paths, leaves, strict=True)
        if not isinstance(getattr(leaf, "sharding", None), Sharding)
    ]
    if bare or not leaves:
        problem = plural(len(bare), "leaf has", "leaves have") + " no sharding to be restored under"
        raise CheckpointError(problem, bare, "give a Layout, or a tree of jax.ShapeDtypeStruct(…, sharding=…)")
    return {
        p: _Place(leaf.shape, str(leaf.dtype), leaf.sharding) for p, leaf in zip(paths, leaves, strict=True)
    }, layout


def _saved_layout(notes: Mapping[str, Any]) -> Layout:
    if notes["layout"] is None:
        raise CheckpointError(
            "no layout was saved with this checkpoint", remedy="pass a Layout or sharded abstract arrays"
        )
    return Layout.from_json(notes["layout"]).on(required_mesh(None, "a checkpoint restored under its own layout"))


# ---- checks ---------------------------------------------------------------------------------------------------------


def _check_leaves_match(places: Mapping[str, _Place], notes: Mapping[str, Any], name: str) -> None:
    known: dict[str, str] = {}
    problems = [
        Offence(path, "is not in the checkpoint", shape=p.shape) for path, p in places.items() if path not in notes
    ]
    problems += [Offence(path, "is in the checkpoint, and not wanted") for path in notes if path not in places]
    for path, place in places.items():
        if path in notes:
            saved = (tuple(notes[path]["shape"]), dtype_text(notes[path]["dtype"], known))
            if saved != (place.shape, dtype_text(place.dtype, known)):
                text = f"is {saved[1]}{list(saved[0])} in the checkpoint, {place.dtype}{list(place.shape)} is wanted"
                problems.append(Offence(path, text))
    if problems:
        raise CheckpointError(f"checkpoint {name!r} does not have the leaves of this layout", problems)


def _verify(found: Mapping[str, jax.Array], notes: Mapping[str, Any], name: str) -> None:
    problems = [offence for path, value in found.items() for offence in _changed(path, value, notes[path]["chunks"])]
    if problems:
        leaves = plural(len(problems), "leaf is", "leaves are")
        raise CheckpointError(
            f"{leaves} not what was saved in checkpoint {name!r}: its files have changed since",
            problems,
            "restore another step; verify=False reads what is there",
        )


def _changed(path: str, value: jax.Array, chunks: list[str]) -> Iterator[Offence]:
    now = fingerprint(value)
    bad = [place for place, (one, other) in enumerate(zip(chunks, now, strict=True)) if one != other]
    if bad:
        first, last = rows_of_chunk(value.shape, bad[0])[0], rows_of_chunk(value.shape, bad[-1])[1]
        where = f"between rows {first} and {last}, " if value.ndim else ""
        yield Offence(path, f"differs {where}in {len(bad)} of {plural(len(chunks), 'chunk')}", shape=value.shape)


def _find(path: Path, step: int | None) -> Path:
    """The directory of one checkpoint: of the step, of the path itself, or of the latest step below it."""
    steps = sorted(int(p.name) for p in path.iterdir() if p.name.isdigit()) if path.is_dir() else []
    if step is None and (path / NOTES).is_dir():
        return path
    chosen = step if step is not None else (steps[-1] if steps else None)
    if chosen is not None and (path / str(chosen) / NOTES).is_dir():
        return path / str(chosen)
    what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    there = f"there are steps {', '.join(map(str, steps))}" if steps else ""
    raise CheckpointError(f"{what} in {path.name!r}", remedy=there)


def _check_shared(folder: Path) -> None:
    """All processes must see one directory: orbax waits for ever where they do not."""
    if jax.process_count() == 1:
        return
    name = np.frombuffer(secrets.token_bytes(16), np.uint8)
    token = folder / f".shardax-{all_gather_bytes(name)[0].tobytes().hex()}"
    if jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        token.touch()
    all_gather_bytes(name)  # the token is there
    end = time.monotonic() + VISIBLE_WITHIN_SECONDS
    while not (seen := token.exists()) and time.monotonic() < end:  # network file systems are late
        time.sleep(0.1)
    blind = np.flatnonzero(all_gather_bytes(np.array([seen], np.uint8))[:, 0] == 0).tolist()
    if jax.process_index() == 0:
        token.unlink()
    if blind:
        raise CheckpointError(
            f"processes {blind} do not see the directory that process 0 sees at {folder.name!r}",
            remedy="a checkpoint needs one directory that all processes share",
        )


def _orbax() -> Any:
    try:
        import orbax.checkpoint
    except ImportError:
        raise CheckpointerMissingError(
            "checkpoints need orbax", remedy="pip install 'shardax[orbax]' (or orbax-checkpoint)"
        ) from None
    return orbax.checkpoint
