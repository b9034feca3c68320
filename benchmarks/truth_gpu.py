"""On a real GPU: is the predicted peak the measured one, and does the estimated time rank programs as the clock does?

`python -m benchmarks.truth_gpu [name…]` on a machine with an NVIDIA GPU, jax for CUDA, flax and optax; writes
`results/truth_gpu.json` and, where $OUT is set, a copy there, after every program. Every program has processes of its
own: one that compiles it into JAX's cache (autotuning allocates memory, which would count), one that proves it and runs
it. A program that fails is a row that says so.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks import timing

NAME = "truth_gpu"
MARK = "RESULT "
TIMEOUT = 240.0  # seconds of one process
MESH = "fsdp=1,tp=1"
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Case:
    """A step and its arguments as shapes; `stateful` ones hold their state themselves."""

    step: Any
    args: tuple[Any, ...]
    stateful: bool = False


# ---- programs whose memory is predicted and measured ----------------------------------------------------------------


def llama(quick: bool) -> Case:
    """A train step with scan, remat, bf16 parameters and fp32 Adam, donated."""
    from benchmarks._llama import Llama, train_step

    model = Llama(4, 512, 4, 2, 1408, 8192) if quick else Llama(16, 2048, 16, 8, 5632, 32000)
    batch, length = (2, 512) if quick else (4, 2048)
    return Case(train_step(model), (model.state(MESH), model.tokens(MESH, batch, length)))


def mlp(quick: bool) -> Case:
    """Gradient descent with momentum in f32, nothing donated: old and new state side by side, activations kept."""
    import jax
    import jax.numpy as jnp

    width, batch = (512, 1024) if quick else (8192, 16384)
    weights = {f"layer{at}": jax.ShapeDtypeStruct((width, width), jnp.float32) for at in range(6)}

    def loss(weights: Any, x: Any) -> Any:
        for name in sorted(weights):
            x = jnp.tanh(x @ weights[name])
        return jnp.mean(x**2)

    def step(weights: Any, momentum: Any, x: Any) -> Any:
        gradient = jax.grad(loss)(weights, x)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)
        return jax.tree.map(lambda w, m: w - 0.1 * m, weights, momentum), momentum

    return Case(jax.jit(step), (weights, weights, jax.ShapeDtypeStruct((batch, width), jnp.float32)))


def decode(quick: bool) -> Case:
    """One token against a donated cache of keys and values."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    layers, batch, length, heads, head = (4, 2, 512, 4, 64) if quick else (16, 32, 8192, 8, 128)
    cache = jax.ShapeDtypeStruct((layers, 2, batch, length, heads, head), jnp.bfloat16)
    weights = jax.ShapeDtypeStruct((layers, 4, heads * head, heads * head), jnp.bfloat16)

    def step(cache: Any, weights: Any, x: Any, at: Any) -> Any:
        def layer(x: Any, parts: Any) -> Any:
            kept, w = parts
            q, k, v = ((x @ w[i]).reshape(batch, 1, heads, head) for i in range(3))
            kept = lax.dynamic_update_slice(kept, jnp.stack([k, v]), (0, 0, at, 0, 0))
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, kept[0]).astype(jnp.float32) * head**-0.5
            found = jax.nn.softmax(jnp.where(jnp.arange(length) <= at, scores, -1e9)).astype(x.dtype)
            mixed = jnp.einsum("bhqk,bkhd->bqhd", found, kept[1]).reshape(batch, heads * head)
            return x + mixed @ w[3], kept

        x, cache = lax.scan(layer, x, (cache, weights))
        return cache, x

    x = jax.ShapeDtypeStruct((batch, heads * head), jnp.bfloat16)
    return Case(jax.jit(step, donate_argnums=0), (cache, weights, x, jax.ShapeDtypeStruct((), jnp.int32)))


def vocabulary(quick: bool) -> Case:
    """The gradient of a loss over a large vocabulary: logits are most of the memory."""
    import jax
    import jax.numpy as jnp
    import optax

    tokens, width, vocab = (1024, 256, 8192) if quick else (8192, 4096, 128256)

    def loss(table: Any, x: Any, labels: Any) -> Any:
        logits = (x @ table).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    args = (
        jax.ShapeDtypeStruct((width, vocab), jnp.bfloat16),
        jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
    )
    return Case(jax.jit(jax.grad(loss, argnums=(0, 1))), args)


def convolutions(quick: bool) -> Case:
    """A residual network's stage and its gradient: cuDNN brings workspaces of its own."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    batch, side, width = (8, 32, 64) if quick else (256, 56, 256)
    kernels = [jax.ShapeDtypeStruct((3, 3, width, width), jnp.bfloat16) for _ in range(8)]

    def loss(kernels: Any, x: Any) -> Any:
        for kernel in kernels:
            y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = x + jax.nn.relu(y)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(kernels: Any, x: Any) -> Any:
        return jax.tree.map(lambda k, g: k - 0.1 * g, kernels, jax.grad(loss)(kernels, x))

    return Case(
        jax.jit(step, donate_argnums=0), (kernels, jax.ShapeDtypeStruct((batch, side, side, width), jnp.bfloat16))
    )


def nnx_module(quick: bool) -> Case:
    """A Flax NNX module and its optimizer under `shardax.jit`, state donated."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    import shardax as sx

    width, batch, depth = (256, 512, 3) if quick else (8192, 8192, 6)

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(depth)])

        def __call__(self, x: Any) -> Any:
            for layer in self.layers:
                x = jax.nn.gelu(layer(x))
            return x

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @functools.partial(sx.jit, donate="state")
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        value, gradient = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
        optimizer.update(model, gradient)
        return value

    return Case(step, (model, optimizer, jax.ShapeDtypeStruct((batch, width), jnp.float32)), stateful=True)


MEMORY: Mapping[str, Callable[[bool], Case]] = {
    each.__name__: each for each in (llama, mlp, decode, vocabulary, convolutions, nnx_module)
}

# ---- programs whose time is ranked: the same arithmetic as few large, many thin and very many tiny products ----------


def _products(size: int, columns: int, times: int) -> Case:
    """`times` products of a size × size matrix with `columns` columns, one after the other."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    def step(w: Any, x: Any) -> Any:
        return lax.fori_loop(0, times, lambda _, x: (w @ x).astype(jnp.bfloat16), x)

    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    return Case(jax.jit(step), (shape((size, size)), shape((size, columns))))


def _sweeps(gib: float, times: int) -> Case:
    """`times` passes over an array."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    def step(x: Any) -> Any:
        return lax.fori_loop(0, times, lambda at, x: x * 0.5 + at, x)

    return Case(jax.jit(step, donate_argnums=0), (jax.ShapeDtypeStruct((int(gib * 2**28),), jnp.float32),))


# name: (what it should be bound by, the program); the first three do the same 1.1e12 FLOPs.
TIMED: Mapping[str, tuple[str, Callable[[], Case]]] = {
    "1 product of 8192³": ("compute", lambda: _products(8192, 8192, 1)),
    "512 products of 8192² × 16": ("HBM", lambda: _products(8192, 16, 512)),
    "32,768 products of 256³": ("dispatch", lambda: _products(256, 256, 32768)),
    "32 products of 8192³": ("compute", lambda: _products(8192, 8192, 32)),
    "1 pass over 1 GiB": ("HBM", lambda: _sweeps(1.0, 1)),
    "40 passes over 4 GiB": ("HBM", lambda: _sweeps(4.0, 40)),
    "1,000 passes over 4 KiB": ("dispatch", lambda: _sweeps(2**-18, 1000)),
}


# ---- inside one process ---------------------------------------------------------------------------------------------


def _arrays(tree: Any) -> Any:
    """Zeros for shapes; their making holds no more than themselves."""
    import jax
    import jax.numpy as jnp

    return jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf, tree
    )


def _real(case: Case) -> Case:
    return Case(case.step, tuple(_arrays(arg) if not case.stateful or _is_shape(arg) else arg for arg in case.args))


def _is_shape(value: Any) -> bool:
    import jax

    return isinstance(value, jax.ShapeDtypeStruct)


def _targets() -> dict[str, str]:
    """The tiers that can predict for this GPU: the one that asks it, and the one that needs none."""
    import jax

    from shardax.proving.chips import chips

    kind = jax.devices()[0].device_kind
    named = [name for name, found in chips().items() if found.platform == "gpu" and found.device_kind == kind]
    named = named or [name for name, found in chips().items() if found.platform == "gpu" and name in kind.lower()]
    return {"local": "gpu:local:1"} | {name: f"gpu:{name}:1" for name in named}


def _attempt(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:2000]}


def _prove(case: Case, target: str) -> dict[str, Any]:
    import jax

    import shardax as sx

    proof = sx.prove(case.step, *case.args, mesh=MESH, target=target, in_specs=jax.P(), cache=False)
    memory, estimate = proof.memory, proof.estimate
    facts = {name: getattr(memory, name) for name in ("arguments", "outputs", "aliased", "temporaries", "code", "peak")}
    facts |= {"together": memory.arguments + memory.outputs - memory.aliased + memory.temporaries, "hbm": memory.hbm}
    facts |= {"flops": proof.flops, "compile_seconds": proof.compile_seconds, "versions": dict(proof.versions)}
    if estimate is not None:
        facts |= {"seconds": estimate.seconds, "bottleneck": estimate.bottleneck, "estimate": estimate.to_json()}
    return facts


def _stats() -> dict[str, int]:
    import jax

    return dict(jax.devices()[0].memory_stats() or {})


def _compiled(case: Case) -> Any:
    return case.step.lower(*case.args).compile()


def _own_analysis(compiled: Any) -> dict[str, int]:
    stats = compiled.memory_analysis()
    stats = stats[0] if isinstance(stats, (list, tuple)) else stats
    names = ("argument", "output", "alias", "temp", "generated_code")
    sizes = {name: int(getattr(stats, f"{name}_size_in_bytes")) for name in names}
    return sizes | {
        "together": sizes["argument"] + sizes["output"] - sizes["alias"] + sizes["temp"],
        "peak": int(getattr(stats, "peak_memory_in_bytes", 0)),
    }


def _memory_here(name: str, quick: bool, only_compile: bool) -> dict[str, Any]:
    """Compile (to fill the cache), or prove, run and measure."""
    import jax

    case = MEMORY[name](quick)
    if only_compile:
        began = time.perf_counter()
        _compiled(_real(case) if case.stateful else case)
        return {"compile_seconds": time.perf_counter() - began}
    found: dict[str, Any] = {"device": jax.devices()[0].device_kind}
    found["predicted"] = {tier: _attempt(lambda t=target: _prove(case, t)) for tier, target in _targets().items()}
    real = _real(case)
    compiled = _compiled(real)
    found["own"] = _attempt(lambda: _own_analysis(compiled))
    before = _stats()
    out = real.step(*real.args) if case.stateful else compiled(*real.args)
    jax.block_until_ready(out)
    after = _stats()
    found |= {"before": before, "after": after, "measured": after.get("peak_bytes_in_use", 0)}
    # Only a peak that the step itself has set is one of the step.
    found["valid"] = after.get("peak_bytes_in_use", 0) > before.get("peak_bytes_in_use", 0)
    return found


def _time_here(name: str) -> dict[str, Any]:
    import jax

    bound, make = TIMED[name]
    case = make()
    found: dict[str, Any] = {"device": jax.devices()[0].device_kind, "bound": bound}
    found["predicted"] = {tier: _attempt(lambda t=target: _prove(case, t)) for tier, target in _targets().items()}
    compiled = _compiled(case)
    samples: list[float] = []
    for _ in range(8):
        args = jax.block_until_ready(_real(case).args)
        began = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        samples.append(time.perf_counter() - began)
        del args
    return found | {"samples": samples, "measured": statistics.median(samples[2:])}


# ---- the caller's side ----------------------------------------------------------------------------------------------


def _process(arguments: list[str], cache: str) -> dict[str, Any]:
    own = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "SHARDAX_CACHE": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))),
    }
    env = {
        key: value for key, value in os.environ.items() if key not in ("JAX_PLATFORMS", "XLA_PYTHON_CLIENT_ALLOCATOR")
    }
    command = [sys.executable, "-m", "benchmarks.truth_gpu", "--here", *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT, cwd=ROOT, env=env | own, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {TIMEOUT:g} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        return {"error": f"exit code {done.returncode}: {(done.stderr or done.stdout)[-3000:]}"}
    return json.loads(lines[-1].removeprefix(MARK))


def has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None or Path("/dev/nvidia0").exists()


def measure(names: list[str], quick: bool) -> dict[str, Any]:
    """Everything, written after every program."""
    record: dict[str, Any] = {"versions": timing.versions(), "memory": {}, "time": {}}
    flags = ["--quick"] if quick else []
    with tempfile.TemporaryDirectory(prefix="shardax-truth-") as cache:
        chosen = [name for name in MEMORY if not names or name in names]
        with ThreadPoolExecutor(3) as several:  # a failure shows itself again below
            list(several.map(lambda name: _process(["--compile", *flags, name], cache), chosen))
        for name in chosen:
            record["memory"][name] = found = _process([*flags, name], cache)
            print(f"{name}: {_memory_line(name, found)}", flush=True)
            _write(record)
        for name in (name for name in TIMED if not names or "time" in names):
            record["time"][name] = found = _process([name], cache)
            print(f"{name}: {_time_line(name, found)}", flush=True)
            _write(record)
    return record


def _write(record: Mapping[str, Any]) -> None:
    if "OUT" in os.environ:
        text = json.dumps(record, indent=1, ensure_ascii=False)
        Path(os.environ["OUT"], f"{NAME}_raw.json").write_text(text + "\n", encoding="utf-8")


def _gib(count: float) -> str:
    return f"{count / 2**30:.3f} GiB"


def _memory_line(name: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    if "error" in found:
        return (name, "failed", found["error"][-300:], "", "", "")
    measured = found["measured"]

    def against(facts: Mapping[str, Any], key: str = "peak") -> str:
        if "error" in facts:
            return f"failed: {facts['error'][:120]}"
        return f"{_gib(facts[key])} ({facts[key] / measured - 1:+.2%})" if measured else _gib(facts[key])

    tiers = found["predicted"]
    named = next((facts for tier, facts in tiers.items() if tier != "local"), {"error": "no such chip is known"})
    note = "" if found["valid"] else "not the step's own peak"
    return name, _gib(measured), against(tiers["local"]), against(named), against(found["own"], "together"), note


def _time_line(name: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    facts = {} if "error" in found else _timed_facts(found)
    if "seconds" not in facts:
        return (name, "failed", str(found.get("error") or found.get("predicted"))[-300:], "", "", "")
    measured, estimated = found["measured"], facts["seconds"]
    shown = (f"{measured * 1e3:.3g} ms", f"{estimated * 1e3:.3g} ms", f"{measured / estimated:.2f}")
    return (name, *shown, facts["bottleneck"], found["bound"])


def _timed_facts(found: Mapping[str, Any]) -> Mapping[str, Any]:
    return next((facts for facts in found["predicted"].values() if "seconds" in facts), {})


def results(record: Mapping[str, Any]) -> list[timing.Result]:
    """The record as tables."""
    memory = tuple(_memory_line(name, found) for name, found in record["memory"].items())
    timed = tuple(_time_line(name, found) for name, found in record["time"].items())
    whole = {
        name: (found["measured"], _timed_facts(found)["seconds"])
        for name, found in record["time"].items()
        if "error" not in found and "seconds" in _timed_facts(found)
    }
    pairs = list(combinations(whole, 2))
    wrong = [f"{a} / {b}" for a, b in pairs if (whole[a][0] - whole[b][0]) * (whole[a][1] - whole[b][1]) <= 0]
    ranks = (f"{len(pairs) - len(wrong)} of {len(pairs)} pairs in the right order", "; ".join(wrong))
    device = next((found["device"] for found in record["memory"].values() if "device" in found), "no GPU")
    return [
        timing.Facts(
            f"Peak memory on {device}: predicted against the device's own peak_bytes_in_use",
            ("program", "measured", "proof, this GPU", "proof, no GPU", "compiled in place", "note"),
            memory,
            "predicted within 5 % for at least four programs",
        ),
        timing.Facts(
            f"Time on {device}: the roofline against the clock",
            ("program", "measured", "at least", "measured / at least", "bound by (proof)", "made to be bound by"),
            timed,
            "ranked correctly",
        ),
        timing.Facts("Ranking", ("order", "wrong pairs"), (ranks,)),
    ]


def run(quick: bool, names: list[str] | None = None) -> list[timing.Result]:
    if not has_gpu():
        print("no GPU here: results of an earlier run stay as they are")
        raise SystemExit(0)
    return results(measure(names or [], quick))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.truth_gpu", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"all, or some of {', '.join(MEMORY)}, time")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.here:
        (name,) = asked.names
        found = _time_here(name) if name in TIMED else _memory_here(name, asked.quick, asked.compile)
        print(MARK + json.dumps(found), flush=True)
        return
    unknown = sorted(set(asked.names) - set(MEMORY) - {"time"})
    if unknown:
        parser.error(f"no program {', '.join(unknown)}")
    found = run(asked.quick, asked.names)
    for table in found:
        print(timing.markdown(table), flush=True)
    path = timing.save(NAME, found, asked.quick)
    if "OUT" in os.environ:
        shutil.copy(path, os.environ["OUT"])


if __name__ == "__main__":
    main()
