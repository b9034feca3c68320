"""Compiled texts of the programs, each made once per test run: after the partitioner here, for accelerators in a process."""

import os
import subprocess
import sys
import tempfile
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import jax
import pytest
from tests.proving.programs import PROGRAMS, partitioned_text

import shardax as sx

SCRIPT = Path(__file__).with_name("programs.py")
# A Python with the CUDA plugin and nvcc beside the same JAX, when this one has none.
CUDA_PYTHON = "SHARDAX_TEST_CUDA_PYTHON"
TARGETS = {"v5e": ("tpu", "v5e:2x4"), "v5p": ("tpu", "v5p:2x2x2"), "h100": ("cuda", "h100")}


@lru_cache
def lowered(name):
    return PROGRAMS[name].lower(jax.devices()[:8])


@lru_cache
def partitioned(name):
    with tempfile.TemporaryDirectory() as folder:
        return partitioned_text(lowered(name), Path(folder))


@lru_cache
def python_for(platform):
    """The interpreter that can compile for a platform, or a skip that says why there is none."""
    if platform == "tpu":
        if find_spec("libtpu") is None:
            pytest.skip("libtpu is not installed (pip install shardax[tpu])")
        return sys.executable
    if find_spec("jax_plugins") is not None and find_spec("jax_plugins.xla_cuda13") is not None:
        return sys.executable
    if CUDA_PYTHON in os.environ:
        return os.environ[CUDA_PYTHON]
    pytest.skip(f"the CUDA plugin is not installed (pip install shardax[cuda], or name such a Python in {CUDA_PYTHON})")


@lru_cache
def folder_for(platform, topology):
    """Compile every program for a topology in one process of its own."""
    out = Path(tempfile.mkdtemp(prefix="shardax-hlo-"))
    keep = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run(
        [python_for(platform), str(SCRIPT), platform, topology, str(out)],
        capture_output=True,
        text=True,
        timeout=280,
        env=keep,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return out


def compiled(target, name):
    platform, topology = TARGETS.get(target, ("tpu", target))
    return (folder_for(platform, topology) / f"{name}.hlo").read_text()


def text_of(tier, name):
    return partitioned(name) if tier == "partitioner" else compiled(tier, name)


@lru_cache
def module_of(tier, name):
    return sx.parse_hlo(text_of(tier, name))


@lru_cache
def ledger_of(tier, name, slices=1):
    axes = PROGRAMS[name].axes
    count = 8 // slices
    slice_of = [position // count for position in range(8)] if slices > 1 else None
    return sx.Ledger.of(module_of(tier, name), axes, slice_of=slice_of)
