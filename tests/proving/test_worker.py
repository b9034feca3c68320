"""Compiler processes: quiet, reused, two at once, and harmless when they crash or hang."""

import os
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax._compat import lowered_program, only_abstract_mesh
from shardax.errors import CompilerError, CompilerTimeoutError
from shardax.proving.installed import missing
from shardax.proving.worker import POOL, Worker, WorkerPool, environment

needs_tpu = pytest.mark.skipif(missing("tpu") is not None, reason=f"no TPU compiler: {missing('tpu')}")


def job(target="cpu:4", mesh="x=4", fn=lambda x: x.sum(), size=64, **changes):
    goal = sx.Target.of(target)
    spec = goal.mesh(mesh)
    abstract = spec.abstract()
    x = jax.ShapeDtypeStruct((size,), jnp.float32, sharding=NamedSharding(abstract, P("x")))
    with only_abstract_mesh(abstract):
        lowered = jax.jit(fn).trace(x).lower(lowering_platforms=(goal.platform,))
    made = {"topology": goal.topology, "mesh": spec, "program": lowered_program(lowered), "options": {}}
    return made | changes


def test_answers_and_stays_warm():
    pool = WorkerPool()
    with pool.worker("cpu", 4) as worker:
        first = worker.ask(job())
        pid = worker.pid
    with pool.worker("cpu", 200) as worker:  # the same kind: up to 256 devices
        assert worker.pid == pid
        second = worker.ask(job(mesh="x=4"))
    assert "all-reduce" in first["hlo"] and first["hlo"] == second["hlo"]
    assert first["output_specs"] == [[]]
    assert first["memory"]["argument_size_in_bytes"] == 64
    pool.close()
    assert not worker.alive


def test_two_at_once_do_not_wait_for_each_other():
    pool = WorkerPool()
    with pool.worker("cpu", 4) as one, pool.worker("cpu", 4) as other:
        assert one.pid != other.pid
        answers = []
        threads = [threading.Thread(target=lambda w=w: answers.append(w.ask(job()))) for w in (one, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=200)
    assert len(answers) == 2 and answers[0]["hlo"] == answers[1]["hlo"]
    pool.close()


def test_what_the_compiler_refuses_comes_back_as_words():
    pool = WorkerPool()
    with pool.worker("cpu", 4) as worker:
        answer = worker.ask(job(options={"xla_no_such_option": True}))
        assert "no_such_option" in (answer.get("error", "") + answer.get("refused", ""))
        assert "hlo" in worker.ask(job())  # and the worker lives on
    pool.close()


def test_a_crash_is_an_error_with_its_signal():
    pool = WorkerPool()
    with pool.worker("cpu", 4) as worker:
        worker.ask(job())
        os.kill(worker.pid, signal.SIGABRT)
        with pytest.raises(CompilerError, match="the cpu compiler's process was killed by SIGABRT"):
            worker.ask(job())
        assert not worker.alive
    with pool.worker("cpu", 4) as fresh:
        assert fresh.pid != worker.pid and "hlo" in fresh.ask(job())
    pool.close()


def test_a_hang_is_stopped_in_time():
    pool = WorkerPool()
    with pool.worker("cpu", 4) as worker:
        worker.ask(job())
        os.kill(worker.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(CompilerTimeoutError, match="did not answer within 1 s") as failure:
            worker.ask(job(), timeout=1)
        assert time.monotonic() - began < 30
        assert not worker.alive
        assert isinstance(failure.value, TimeoutError)
    pool.close()


def test_a_worker_does_not_outlive_a_killed_caller():
    code = (
        "import os, time\n"
        "from shardax.proving.worker import Worker\n"
        "worker = Worker('cpu', 4)\n"
        "print(worker.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    caller = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(caller.stdout.readline())
    caller.kill()
    caller.wait()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and os.path.exists(f"/proc/{pid}") and not _is_zombie(pid):
        time.sleep(0.2)
    assert not os.path.exists(f"/proc/{pid}") or _is_zombie(pid)


def _is_zombie(pid):
    try:
        with open(f"/proc/{pid}/stat") as handle:
            return handle.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_the_environment_keeps_flags_and_drops_device_counts(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_force_host_platform_device_count=3 --xla_dump_to=/nowhere")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/nowhere")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "4")
    cpu = environment("cpu", 256)
    assert cpu["XLA_FLAGS"] == "--xla_a=1 --xla_force_host_platform_device_count=256"
    assert "JAX_COMPILATION_CACHE_DIR" not in cpu and "JAX_NUM_CPU_DEVICES" not in cpu
    assert environment("tpu")["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"
    assert environment("tpu")["TPU_SKIP_MDS_QUERY"] == "1"


@needs_tpu
def test_a_wrong_topology_kills_only_its_process():
    pool = WorkerPool()
    made = job("tpu:v5e:16x16", "x=256", size=1024)
    # What Target.of refuses: this shape is accepted by the topology and then aborts the compiler.
    broken = made["topology"] | {"name": "v5e:16x32"}
    with pool.worker("tpu") as worker, pytest.raises(CompilerError):
        answer = worker.ask(made | {"topology": broken, "mesh": sx.MeshSpec.of("x=512")}, timeout=200)
        raise CompilerError(str(answer.get("error") or answer.get("refused")))
    pool.close()


@needs_tpu
def test_the_tpu_compiler_says_nothing_on_the_terminal(tmp_path):
    code = (
        "import jax, jax.numpy as jnp, shardax as sx\n"
        "x = jax.ShapeDtypeStruct((64,), jnp.float32)\n"
        "proof = sx.prove(lambda x: x.sum(), x, mesh='x=4', target='tpu:v5e:2x2', in_specs=jax.P('x'))\n"
        "assert proof.fits\n"
    )
    env = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")} | {
        "SHARDAX_CACHE": str(tmp_path)
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and done.stderr == ""


def test_the_pool_is_shared_and_closes():
    assert isinstance(POOL, WorkerPool)
    worker = Worker("cpu", 1)
    assert worker.alive
    worker.close()
    assert not worker.alive
