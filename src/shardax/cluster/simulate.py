"""`simulate`: CPU devices that stand for the machine you do not have."""

from __future__ import annotations

import os

import jax

from shardax._compat import backend_initialised
from shardax.cluster.detect import PROCESSES
from shardax.errors import ClusterError, plural


def simulate(devices: int = 8) -> None:
    """Give this process simulated CPU devices; call it before anything touches a device.

    In a process of `shardax launch`, which has its devices already, it does nothing.

    >>> import shardax as sx
    >>> sx.simulate(8)
    >>> len(jax.devices())
    8
    """
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise ClusterError(f"{devices!r} is no number of simulated devices", remedy="at least 1")
    if PROCESSES in os.environ:
        return
    if not backend_initialised():
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
    elif len(jax.devices("cpu")) < devices:
        raise ClusterError(
            f"{plural(devices, 'simulated device')} asked for, and JAX has started with {len(jax.devices('cpu'))}",
            remedy="call sx.simulate() first: before jax.devices(), arrays, and imports that make arrays",
        )
