"""A lowered program in, the compiler's answer out: from the cache, or from a worker."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardax._compat import backend_initialised
from shardax.errors import CompilerError, Offence
from shardax.proving import compile_cache
from shardax.proving.installed import compiler_version
from shardax.proving.rebind import Program
from shardax.proving.target import Target
from shardax.proving.worker import DEFAULT_TIMEOUT, POOL, QUIET_TPU

# Of what a compiler writes to its terminal, these lines are worth keeping.
TELLING = ("Involuntary full rematerialization", "spmd_partitioner", "remat", "exceeds", "out of memory")


def compile_for(
    program: Program,
    target: Target,
    *,
    options: Mapping[str, Any] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    cache: bool = True,
) -> dict[str, Any]:
    """What the target's compiler says of a program: plain data; "cached" tells whether it was asked just now."""
    facts = {
        "target": str(target),
        "topology": target.topology,
        "mesh": list(program.mesh.shape.items()),
        "options": dict(options or {}),
        "versions": compiler_version(target.platform),
    }
    key = compile_cache.key_of(program.data, facts)
    known = compile_cache.load(key) if cache else None
    if known is not None:
        return known | {"cached": True}
    job = {"topology": target.topology, "mesh": program.mesh, "program": program.data, "options": facts["options"]}
    with POOL.worker(target.topology["platform"], target.devices) as worker:
        answer = worker.ask(job, timeout)
    if "error" in answer:
        raise CompilerError(f"{target} cannot be compiled for", [Offence(program.name, str(answer["error"])[:1500])])
    said = [line[:2000] for line in answer.pop("stderr").splitlines() if any(word in line for word in TELLING)]
    answer = json.loads(json.dumps(answer | {"said": "\n".join(said[:200])}))
    if cache:
        compile_cache.store(key, answer)
    return answer | {"cached": False}


_ACCELERATORS = ("/dev/accel0", "/dev/vfio/0", "/dev/nvidiactl", "/dev/dxg")
# What an installed libtpu and CUDA plugin complain of where no device of theirs is.
_QUIET = {name: QUIET_TPU[name] for name in ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES", "TPU_SKIP_MDS_QUERY")} | {
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"  # "Unable to load cuDNN": its compiler needs none
}


@contextmanager
def quiet_start(devices: tuple[str, ...] = _ACCELERATORS) -> Generator[None]:
    """Tracing may wake this process's own backend; installed compilers then complain of missing devices on stderr."""
    if backend_initialised() or any(Path(device).exists() for device in devices):
        yield
        return
    added = [name for name in _QUIET if name not in os.environ]
    os.environ.update({name: _QUIET[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
