"""The compiler's side of the process border: one job in, one answer out, until the caller hangs up.

Runs as `python -c "from shardax.proving.compiler import serve; serve(fd)"` in an environment made by `worker.py`.
Bad shapes and old libraries abort, divide by zero or segfault inside the compilers; only this process dies of it.
"""

from __future__ import annotations

import os
import resource
import tempfile
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from shardax._compat import compile_program, output_specs
from shardax.names.mesh_build import make_mesh
from shardax.names.spec import axes_of

PARTITIONED = ".*spmd-partitioning.*"


def serve(descriptor: int) -> None:
    """Answer jobs on this file descriptor until it closes."""
    os.dup2(2, 1)  # the caller reads stderr: nothing of a compiler reaches the terminal
    threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()
    with Connection(descriptor) as line:
        while True:
            try:
                job = line.recv()
            except (EOFError, ConnectionResetError):
                return
            try:
                answer = answer_job(job)
            except Exception as error:  # noqa: BLE001 (the border: the caller raises it, with the job's context)
                answer = {"error": f"{type(error).__name__}: {error}"}
            line.send(answer)


def _follow(parent: int) -> None:
    """A compile can run for minutes: do not outlive a caller who was killed."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)


def answer_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Compile one program for one topology; everything the caller wants to know, as plain data."""
    topology = job["topology"]
    began = time.perf_counter()
    devices = devices_of(topology)
    mesh = make_mesh(job["mesh"], devices=devices)
    facts = {
        "axes": axis_facts(mesh),
        "slice_of": tuple(getattr(device, "slice_index", 0) or 0 for device in mesh.devices.flat),
        "device_kind": devices[0].device_kind,
        "topology_seconds": time.perf_counter() - began,
    }
    with tempfile.TemporaryDirectory(prefix="shardax-") as folder:
        options: dict[str, Any] = dict(job["options"]) | {"xla_dump_to": folder}
        if topology["platform"] == "cpu":
            options["xla_dump_hlo_pass_re"] = PARTITIONED
        wall, busy = time.perf_counter(), time.process_time()
        try:
            executable = compile_program(job["program"], list(mesh.devices.flat), options)
        except jax.errors.JaxRuntimeError as error:
            refusal = {"refused": str(error), "memory_report": _dumped(folder, "*memory-usage-report.txt")}
            return facts | refusal | _seconds(wall, busy)
        return facts | _seconds(wall, busy) | _findings(executable, mesh, folder, topology["platform"])


def _seconds(wall: float, busy: float) -> dict[str, float]:
    return {
        "seconds": time.perf_counter() - wall,
        "cpu_seconds": time.process_time() - busy,
        "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _findings(executable: Any, mesh: Mesh, folder: str, platform: str) -> dict[str, Any]:
    final = executable.hlo_modules()[0].to_string()
    partitioned = _dumped(folder, "*after_spmd-partitioning*") if platform == "cpu" else ""
    specs = output_specs(executable, mesh)
    stats = executable.get_compiled_memory_stats()
    return {
        # XLA:CPU's own rewrites (bf16 widened, no reduce-scatter) are no news about an accelerator.
        "hlo": partitioned or final,
        "header": final.split("\n", 1)[0],
        "memory": {
            name: int(value)
            for name in dir(stats)
            if not name.startswith("_") and isinstance(value := getattr(stats, name), int)
        },
        "output_specs": None if specs is None else [_plain(spec) for spec in specs],
        "memory_report": _dumped(folder, "*memory-usage-report.txt"),
    }


def _plain(spec: Any) -> list[list[str]] | None:
    return None if spec is None else [list(axes_of(entry)) for entry in spec]


def _dumped(folder: str, pattern: str) -> str:
    found = sorted(Path(folder).glob(pattern), key=lambda path: path.stat().st_size)
    return found[-1].read_text(errors="replace") if found else ""


def devices_of(topology: Mapping[str, Any]) -> list[Any]:
    """The devices of a topology: simulated on the CPU, described only for a TPU or GPU."""
    if topology["platform"] == "cpu":
        return jax.devices()[: topology["devices"]]
    return list(topologies.get_topology_desc(topology["name"], topology["platform"], **topology["options"]).devices)


def axis_facts(mesh: Mesh) -> dict[str, dict[str, Any]]:
    """For every mesh axis: does it cross slices or hosts, and along which physical dimensions does it run."""
    facts: dict[str, dict[str, Any]] = {}
    for index, name in enumerate(mesh.axis_names):

        def varies(read: Any, axis: int = index) -> bool:
            values = np.vectorize(read, otypes=[int])(mesh.devices)
            return bool((np.diff(values, axis=axis) != 0).any())

        coordinates = len(getattr(mesh.devices.flat[0], "coords", None) or ())
        facts[str(name)] = {
            "slices": varies(lambda device: getattr(device, "slice_index", 0) or 0),
            "hosts": varies(lambda device: device.process_index),
            "dimensions": [k for k in range(coordinates) if varies(lambda device, k=k: device.coords[k])],
        }
    return facts
