"""`Decision`: what one array got, by which rule, and what it lost; and the log that collects decisions.

Nothing is replicated, dropped or moved without one of these.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from shardax.errors import plural
from shardax.names.alike import alike
from shardax.names.spec import Fit, shard_count_of
from shardax.tables import show_bytes

WARN_ABOVE_BYTES = 1 << 20
"""Corrections that together cost more than this on every device are warned about, once per place."""


@dataclass(frozen=True)
class Decision:
    """One leaf: where it is, what it is, the spec it got, the rule that gave it, and what it lost on the way."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec
    rule: str
    fit: Fit

    @property
    def size(self) -> int:
        """Elements of the whole array."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return self.size * itemsize_of(self.dtype)

    @property
    def shards(self) -> int:
        """Distinct blocks on the mesh."""
        return shard_count_of(self.spec, dict(self.fit.mesh))

    @property
    def copies(self) -> int:
        """Devices that hold the same block."""
        return math.prod(size for _, size in self.fit.mesh) // self.shards

    @property
    def bytes_per_device(self) -> int:
        """Bytes of one device's block."""
        return self.nbytes // self.shards

    def __str__(self) -> str:
        lines = [f"{self.path or '(root)'}: {self.dtype}{list(self.shape)} → {self.spec}, by {self.rule}"]
        lines += [f"  corrected: {correction}" for correction in self.fit.corrections]
        return "\n".join(lines)


def itemsize_of(dtype: Any) -> int:
    """Bytes of one element; a JAX extended dtype (a PRNG key) counts what its base array holds."""
    if isinstance(dtype, np.dtype):
        return dtype.itemsize
    try:
        return dtype_of(dtype).itemsize
    except TypeError:  # a key of an implementation that is not one of JAX's
        return getattr(dtype, "itemsize", 8)


def dtype_of(name: Any) -> Any:
    """The dtype that a decision names: one of NumPy's, or that of a PRNG key.

    >>> dtype_of("bfloat16").itemsize, dtype_of("key<rbg>").itemsize
    (2, 16)
    """
    keys = _key_dtypes() if str(name).startswith("key<") else {}
    return keys[str(name)] if str(name) in keys else np.dtype(name)


@cache
def _key_dtypes() -> dict[str, Any]:
    """JAX's PRNG keys by the names of their dtypes, which no public name leads back from."""
    made = [
        jax.eval_shape(lambda impl=impl: jax.random.key(0, impl=impl)) for impl in ("threefry2x32", "rbg", "unsafe_rbg")
    ]
    return {str(key.dtype): key.dtype for key in made}


# ---- the log --------------------------------------------------------------------------------------------------------

_logs: ContextVar[tuple[list[Decision], ...]] = ContextVar("shardax_corrections", default=())


@contextmanager
def corrections() -> Generator[list[Decision]]:
    """Collect every decision that corrected something inside the block, also those taken while tracing.

    >>> import jax, jax.numpy as jnp, shardax as sx
    >>> with jax.set_mesh(sx.make_mesh("tp=4")), sx.corrections() as log:
    ...     _ = sx.with_sharding_constraint(jnp.ones((6, 4)), jax.P("tp"))
    >>> [str(correction) for correction in log[0].fit.corrections]
    ["dim 0 loses 'tp' (indivisible: 6 does not divide by 'tp' (4), 72 B more per device)"]
    """
    log: list[Decision] = []
    token = _logs.set((*_logs.get(), log))
    try:
        yield log
    finally:
        _logs.reset(token)


def record(*decisions: Decision, warn: bool = False) -> None:
    """Put decisions into every open log; warn when asked to, when they cost much, or when every move is logged."""
    for log in _logs.get():
        log.extend(decisions)
    corrected = [decision for decision in decisions if decision.fit.corrections]
    if corrected and (warn or _deserves_a_warning(*(decision.fit for decision in corrected))):
        warn_outside(_in_words(corrected))


def _in_words(corrected: Sequence[Decision]) -> str:
    """Every correction, those of leaves that are alike (layer after layer) said once."""
    groups = alike(corrected, lambda decision: decision.path, lambda decision: (decision.shape, decision.fit))
    lines: list[str] = []
    for path, found in groups.items():
        many = f" ({plural(len(found), 'leaf', 'leaves')})" if len(found) > 1 else ""
        what = f"{path}{many}: " if path else ""
        fit = found[0].fit
        lines += [f"{what}{fit.asked} on shape {fit.shape}: {correction}" for correction in fit.corrections]
    if len(lines) == 1:
        return lines[0]
    cost = sum(decision.fit.bytes_per_device for decision in corrected)
    leaves = plural(len(corrected), "leaf is", "leaves are")
    return "\n  ".join([f"{leaves} corrected, {show_bytes(cost)} more per device", *lines])


def is_noticed(fit: Fit) -> bool:
    """Does `record` do anything with a correction that nobody asked to be warned about?"""
    return bool(_logs.get()) or _deserves_a_warning(fit)


def _deserves_a_warning(*fits: Fit) -> bool:
    return sum(fit.bytes_per_device for fit in fits) >= WARN_ABOVE_BYTES or every_move_is_logged()


def every_move_is_logged() -> bool:
    """`LOG_SHARDING_MOVE` in the environment, read when used."""
    return os.environ.get("LOG_SHARDING_MOVE", "").lower() in ("1", "true", "yes", "on")


# ---- the user's place -----------------------------------------------------------------------------------------------

_PACKAGE = str(Path(__file__).parent.parent)


def warn_outside(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user that called into shardax (so Python shows it once per place)."""
    frame, level = _first_outside()
    warnings.warn(message, category, stacklevel=level if frame else 2)


def place_outside() -> str:
    """`file:line` of the user's line that called into shardax."""
    frame, _ = _first_outside()
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else "unknown place"


def _first_outside() -> tuple[FrameType | None, int]:
    frame: FrameType | None = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    level = 2
    while frame is not None and _is_inner(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return frame, level


def _is_inner(filename: str) -> bool:
    return filename.startswith((_PACKAGE, "<frozen")) or f"{os.sep}jax{os.sep}" in filename
