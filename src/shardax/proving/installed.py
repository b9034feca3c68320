"""Which compilers are on this machine, in which version, and what to install where one is missing."""

from __future__ import annotations

import importlib.metadata
import os
import platform as machine
import re
import shutil
from collections.abc import Mapping

OLDEST_LIBTPU = (0, 0, 36)  # 0.0.17 kills its process; 0.0.36 is the oldest that was tried and works


def install_command(platform: str) -> str:
    """The remedy for a missing compiler."""
    extra = {"tpu": "tpu", "gpu": "cuda"}.get(platform)
    return f'pip install "shardax[{extra}]" (Linux x86-64 only; no accelerator needed)' if extra else ""


def missing(platform: str) -> str | None:
    """Why targets of a platform cannot be compiled on this machine, or None."""
    if platform == "cpu":
        return None
    system = f"{machine.system()} {machine.machine()}"
    if system not in ("Linux x86_64", "Linux AMD64"):
        return f"its compiler exists for Linux x86-64 only, this is {system}"
    return _missing_libtpu() if platform == "tpu" else _missing_cuda()


def _missing_libtpu() -> str | None:
    override = chosen_libtpu()
    if override:
        return None if os.path.exists(override) else f"TPU_LIBRARY_PATH={override!r} does not exist"
    found = package_version("libtpu")
    if found is None:
        return "libtpu is not installed"
    if _numbers(found) < OLDEST_LIBTPU:
        return f"libtpu {found} is too old; it needs {'.'.join(map(str, OLDEST_LIBTPU))} or newer"
    return None


def chosen_libtpu() -> str:
    """Another libtpu than the installed one, when `$TPU_LIBRARY_PATH` names one (jax sets it to the installed one)."""
    path = os.environ.get("TPU_LIBRARY_PATH", "")
    return "" if path.endswith(os.path.join("site-packages", "libtpu", "libtpu.so")) else path


def _missing_cuda() -> str | None:
    if not any(package_version(f"jax-cuda{major}-plugin") for major in (13, 12)):
        return "the CUDA plugin of JAX (jax-cuda13-plugin) is not installed"
    if any(map(package_version, ("nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12"))) or _own_ptxas():
        return None
    return "nvidia-cuda-nvcc (ptxas) is not installed"


def _own_ptxas() -> bool:
    """A CUDA toolkit of the machine serves as well as the wheel."""
    toolkits = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    return bool(shutil.which("ptxas")) or any(os.path.exists(f"{home}/bin/ptxas") for home in toolkits if home)


def package_version(name: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def compiler_version(platform: str) -> Mapping[str, str]:
    """The versions that decide what the compiler says."""
    names = {"cpu": (), "tpu": ("libtpu",), "gpu": ("jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cuda-nvcc")}
    found = {name: package_version(name) for name in ("jax", "jaxlib", *names[platform])}
    if platform == "tpu" and chosen_libtpu():
        found["libtpu"] = chosen_libtpu()
    return {name: version for name, version in found.items() if version}
