"""The only file that knows JAX versions (0.10 … 0.12) or a private JAX name.

Each name here says what it stands for and why the public one is not enough.
"""

from __future__ import annotations

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
from typing import Any

import jax
from jax._src import core as _core
from jax._src import mesh as _mesh

JAX_VERSION: tuple[int, ...] = jax.__version_info__


def context_manager_mesh() -> Any:
    """The mesh of `with mesh:`, or an empty one. No public name reads it, and `jax.set_mesh` does not set it."""
    return _mesh.thread_resources.env.physical_mesh


def backend_initialised() -> bool:
    """Has any device been touched in this process? `jax.devices()` would answer by touching them."""
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())


trace_state_clean = _core.trace_state_clean
"""True when no trace is active in this thread (backed by C++; nothing public answers this)."""
