"""Answers of the compiler kept on disk, so that a second proof of an unchanged step takes a second.

JAX's own compilation cache cannot serve this: it writes entries for absent devices that it cannot read back.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

MOST_BYTES = 1 << 30
FORMAT = 1
_WHOLE = (frozenset({"seconds", "axes", "hlo", "header", "memory"}), frozenset({"seconds", "axes", "refused"}))


def cache_folder() -> Path | None:
    """Where answers are kept: `$SHARDAX_CACHE` (empty or "0": nowhere), else `~/.cache/shardax`."""
    chosen = os.environ.get("SHARDAX_CACHE")
    if chosen is not None:
        return None if chosen in ("", "0", "off") else Path(chosen).expanduser() / "proofs"
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "shardax" / "proofs"


def key_of(program: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """The name of an answer: the program as `identity.py` tells programs apart (its own lines included, so that an
    answer never shows stale ones), the target, the options, the versions and the flags that reach the compiler."""
    flags = {name: os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
    rest = {name: value for name, value in program.items() if name != "module"}
    digest = hashlib.sha256(program.get("identity", "").encode() or program["module"])
    digest.update(json.dumps([FORMAT, rest, facts, flags], sort_keys=True, default=str).encode())
    return digest.hexdigest()


def load(key: str) -> dict[str, Any] | None:
    """The kept answer, or None. A damaged entry is removed and counts as none."""
    folder = cache_folder()
    path = folder and folder / f"{key}.xz"
    if path is None or not path.exists():
        return None
    try:
        answer: Any = json.loads(lzma.decompress(path.read_bytes()))
        os.utime(path)
    except (OSError, EOFError, lzma.LZMAError, ValueError):
        answer = None
    if isinstance(answer, dict) and any(names <= set(cast("dict[str, Any]", answer)) for names in _WHOLE):
        return cast("dict[str, Any]", answer)
    with suppress(OSError):  # not ours to remove
        path.unlink(missing_ok=True)
    return None


def store(key: str, answer: Mapping[str, Any]) -> None:
    """Keep an answer; a folder that cannot be written keeps nothing."""
    folder = cache_folder()
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as handle:
            handle.write(lzma.compress(json.dumps(dict(answer)).encode(), preset=1))
        os.replace(handle.name, folder / f"{key}.xz")
    except OSError:
        return
    _forget_oldest(folder)


def _forget_oldest(folder: Path) -> None:
    entries: list[tuple[float, int, Path]] = []
    for path in folder.glob("*.xz"):
        with suppress(FileNotFoundError):  # another process forgets too
            facts = path.stat()
            entries.append((facts.st_mtime, facts.st_size, path))
    total = 0
    for _, size, path in sorted(entries, reverse=True):
        total += size
        if total > MOST_BYTES:
            path.unlink(missing_ok=True)
