"""Proving: a Llama-like train step on absent TPUs, how fast compiled text is read, what `prove` adds to the compiler.

The truth it is held to: ten resident bytes a parameter, FLOPs of the closed form. The TPU rows need libtpu.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import benchmarks.timing as timing
from benchmarks.timing import Facts, Result, once

timing.simulate_devices(8)

import jax  # noqa: E402 (the devices are counted when jax is imported)

import shardax as sx  # noqa: E402
from benchmarks._llama import LLAMA_8B, LLAMA_70B, LLAMA_405B, Llama, train_step  # noqa: E402
from shardax.proving.buffers import largest_buffers  # noqa: E402
from shardax.proving.chips import chip  # noqa: E402
from shardax.proving.cost import estimate  # noqa: E402

LENGTH = 8192
SMALL = Llama(4, 512, 8, 4, 1408, vocab=8192, head=64)


@dataclass(frozen=True)
class Run:
    """One model on one target, a sequence on every device that holds its own rows of the batch."""

    name: str
    model: Llama
    mesh: str
    target: str
    batch: int
    length: int = LENGTH

    @property
    def shards(self) -> int:
        """Over how many devices the state is cut (`dp` holds copies)."""
        sizes = sx.MeshSpec.of(self.mesh).shape
        return sizes.get("fsdp", 1) * sizes.get("tp", 1)

    @property
    def arguments(self) -> tuple[Any, Any]:
        return self.model.state(self.mesh), self.model.tokens(self.mesh, self.batch, self.length)


FULL = (
    Run("8B", LLAMA_8B, "fsdp=16,tp=4", "tpu:v5p:4x4x4", 16),
    Run("8B", LLAMA_8B, "fsdp=64,tp=1", "tpu:v5p:4x4x4", 64),
    Run("8B", LLAMA_8B, "dp=64,fsdp=64,tp=1", "tpu:v5p:16x16x16", 4096),
    Run("70B", LLAMA_70B, "fsdp=64,tp=1", "tpu:v5p:4x4x4", 64),
    Run("405B", LLAMA_405B, "fsdp=128,tp=8", "tpu:v5p:8x8x16", 128),
)
QUICK = (
    Run("small", SMALL, "fsdp=4,tp=2", "tpu:v5e:2x4", 8, 256),
    Run("small", SMALL, "fsdp=4,tp=4", "tpu:v5e:4x4", 8, 256),
)


@dataclass(frozen=True)
class Proved:
    """A run with its proof, and the seconds it took this process: tracing as anyone must, and all that `prove` does."""

    run: Run
    proof: sx.Proof
    wall: float
    own: float
    lowering: float
    again: float


def proved(run: Run) -> Proved:
    """Prove it, trace and lower it by hand, prove it again from the kept answer."""
    state, tokens = run.arguments
    step = train_step(run.model)

    def prove() -> sx.Proof:
        return sx.prove(step, state, tokens, mesh=run.mesh, target=run.target)

    busy, began = time.process_time(), time.perf_counter()
    proof = prove()
    wall, own = time.perf_counter() - began, time.process_time() - busy
    jax.clear_caches()
    lowering = once(lambda: train_step(run.model).trace(state, tokens).lower(lowering_platforms=("tpu",)), "cpu")
    return Proved(run, proof, wall, own, lowering, once(prove, "wall"))


def truth(found: list[Proved]) -> Facts:
    """What the compiler says against what paper says."""
    rows = [
        (
            f"{each.run.name} on {each.run.target}",
            each.run.mesh,
            f"{each.proof.memory.arguments * each.run.shards / each.run.model.parameters:.4f}",
            f"{each.proof.total_flops / each.run.model.flops(each.run.batch, each.run.length):.4f}",
            f"{each.proof.memory.peak / 2**30:.1f} GiB",
            str(each.proof.estimate.bottleneck if each.proof.estimate else ""),
            f"{each.proof.ledger.wire_bytes / 2**30:.1f} GiB",
        )
        for each in found
    ]
    columns = ("model", "mesh", "bytes/parameter", "FLOPs/closed form", "peak", "bound by", "sent by a device")
    goal = "ten resident bytes a parameter within 0.1 % (and the tokens), FLOPs within 2 %"
    return Facts("A train step: scan, remat, bf16 parameters, fp32 Adam", columns, tuple(rows), goal)


def effort(found: list[Proved]) -> Facts:
    """What it costs to know."""
    rows = [
        (
            f"{each.run.name} on {each.proof.mesh.size:,} devices",
            f"{each.proof.compile_cpu_seconds:.0f}",
            f"{each.proof.compile_seconds:.0f}",
            f"{each.lowering:.2f}",
            f"{each.own - each.lowering:.2f}",
            f"{(each.own - each.lowering) / each.proof.compile_cpu_seconds:.1%}",
            f"{each.again:.2f}",
        )
        for each in found
    ]
    columns = (
        "model",
        "compile CPU-s",
        "compile s",
        "trace + lower CPU-s",
        "prove adds CPU-s",
        "share",
        "kept proof s",
    )
    goal = "8B and 70B on 64 chips under 100 CPU-s each, 8B on 4,096 at most 1.5× of 64; prove adds under 5 %"
    return Facts("What a proof costs", columns, tuple(rows), goal)


def reading(found: list[Proved], rounds: int) -> Facts:
    """Compiled text to values: the module alone, with its ledger, with everything that a proof wants of it."""

    def everything(text: str, axes: dict[str, int]) -> None:
        module = sx.parse_hlo(text)
        ledger = sx.Ledger.of(module, axes)
        sx.flops(module)
        largest_buffers(module, 200)
        estimate(module, ledger, chip("v5p"))

    rows: list[tuple[str | float, ...]] = []
    for each in found:
        text, axes = each.proof.hlo, dict(each.proof.mesh.shape)
        tasks = (
            lambda t=text: sx.parse_hlo(t),
            lambda t=text, a=axes: sx.Ledger.of(sx.parse_hlo(t), a),
            lambda t=text, a=axes: everything(t, a),
        )
        size = len(text) / 1e6
        seconds = [min(once(task, "cpu") for _ in range(rounds)) for task in tasks]
        speeds = [f"{took * 1e3:.0f} ms ({size / took:.0f} MB/s)" for took in seconds]
        rows.append((f"{each.run.name} on {each.proof.mesh.size:,}", f"{size:.2f} MB", *speeds))
    goal = "at least 20 MB/s; the 405B module under 0.1 s"
    return Facts(
        "Reading compiled text", ("module", "text", "read", "with its ledger", "all of a proof"), tuple(rows), goal
    )


def checking(quick: bool) -> Facts:
    """No compiler at all: a hundred layers, as a scan and one by one, on 1,024 devices."""
    model, mesh = Llama(10 if quick else 100, 1024, 8, 8, 4096, vocab=32000), "fsdp=128,tp=8"
    state, tokens = model.state(mesh), model.tokens(mesh, 128, 2048)
    rows: list[tuple[str | float, ...]] = []
    for name, scan in (("scan over layers", True), ("layer after layer", False)):
        step = train_step(model, scan)
        busy, began = time.process_time(), time.perf_counter()
        found = sx.check(step, state, tokens, mesh=mesh)
        seconds = f"{time.perf_counter() - began:.2f}", f"{time.process_time() - busy:.2f}"
        rows.append((name, f"{found.operations:,}", f"{found.ledger.executions:,}", *seconds))
    columns = ("model", "operations walked", "collectives found", "seconds", "CPU-s")
    return Facts(
        f"check of {model.layers} layers on 1,024 devices, forward and backward", columns, tuple(rows), "under 5 s"
    )


def run(quick: bool) -> list[Result]:
    runs = QUICK if quick else FULL
    checked = checking(quick)
    why = sx.Target.of(runs[0].target).missing
    if why is not None:
        print(f"no TPU compiler here ({why}): results of an earlier run stay as they are")
        raise SystemExit(0)
    with tempfile.TemporaryDirectory(prefix="shardax-bench-") as folder:
        os.environ.setdefault("SHARDAX_CACHE", folder)
        found = [proved(each) for each in runs]
    return [truth(found), effort(found), checked, reading(found, 3 if quick else 9)]
