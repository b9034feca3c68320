"""Small sharded programs whose collectives can be worked out with a pencil, and the compilers that compile them.

Run as a script it compiles programs for hardware that is not there, one process per target:
`python programs.py tpu v5e:2x4 OUT name…` writes `OUT/name.hlo`.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


@dataclass(frozen=True)
class Program:
    name: str
    axes: dict
    build: Callable

    def mesh(self, devices) -> Mesh:
        grid = np.array(list(devices)).reshape(tuple(self.axes.values()))
        return Mesh(grid, tuple(self.axes), axis_types=(AxisType.Auto,) * len(self.axes))

    def lower(self, devices):
        mesh = self.mesh(devices)
        fn, args = self.build(mesh)
        return fn.lower(*args)


PROGRAMS: dict[str, Program] = {}


def program(**axes):
    def register(build):
        PROGRAMS[build.__name__] = Program(build.__name__, axes, build)
        return build

    return register


def abstract(mesh, shape, dtype, *spec):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def constrain(mesh, x, *spec):
    return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


bf16, f32, i32 = jnp.bfloat16, jnp.float32, jnp.int32

# ---- data parallel -----------------------------------------------------------------------------------------------


@program(dp=8)
def data_parallel(mesh):
    """One gradient of a 256 x 512 f32 weight, batch over dp: all-reduce of the whole weight."""

    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w["kernel"]) ** 2)

    def step(w, x):
        gradient = jax.grad(loss)(w, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, gradient)

    weights = {"kernel": abstract(mesh, (256, 512), f32)}
    out = {"kernel": NamedSharding(mesh, P())}
    return jax.jit(step, out_shardings=out, donate_argnums=0), (weights, abstract(mesh, (64, 256), f32, "dp"))


# ---- FSDP with scan and remat ------------------------------------------------------------------------------------

LAYERS, WIDTH = 4, 256


@program(fsdp=8)
def fsdp_shard_map(mesh):
    """Gather each layer's bf16 weight by hand inside a rematerialised scan; its transpose is psum_scatter."""

    def local(w, x):
        @partial(jax.checkpoint, prevent_cse=False)
        def layer(h, w_shard):
            w_full = lax.all_gather(w_shard, "fsdp", axis=0, tiled=True)
            return jnp.tanh(h @ w_full), None

        h, _ = lax.scan(layer, x, w)
        return jnp.sum(h.astype(f32))[None]

    run = jax.shard_map(local, mesh=mesh, in_specs=(P(None, "fsdp", None), P("fsdp")), out_specs=P("fsdp"))
    step = jax.jit(jax.grad(lambda w, x: run(w, x).sum()))
    args = abstract(mesh, (LAYERS, WIDTH, WIDTH), bf16, None, "fsdp", None), abstract(mesh, (64, WIDTH), bf16, "fsdp")
    return step, args


@program(fsdp=8)
def fsdp_constraint(mesh):
    """The same model by sharding alone."""

    def loss(w, x):
        @partial(jax.checkpoint, prevent_cse=False)
        def layer(h, w_layer):
            h = jnp.tanh(h @ w_layer)
            return constrain(mesh, h, "fsdp", None), None

        h, _ = lax.scan(layer, x, w)
        return jnp.sum(h.astype(f32))

    weights = abstract(mesh, (LAYERS, WIDTH, WIDTH), bf16, None, "fsdp", None)
    step = jax.jit(jax.grad(loss), out_shardings=weights.sharding)
    return step, (weights, abstract(mesh, (64, WIDTH), bf16, "fsdp"))


@program(fsdp=8)
def gather_gradient(mesh):
    """One layer by hand, no loop and no remat: a gather, and its transpose."""

    def local(w, x):
        full = lax.all_gather(w, "fsdp", axis=0, tiled=True)
        return jnp.sum(jnp.tanh(x @ full).astype(f32))[None]

    run = jax.shard_map(local, mesh=mesh, in_specs=(P("fsdp"), P("fsdp")), out_specs=P("fsdp"))
    step = jax.jit(jax.grad(lambda w, x: run(w, x).sum()))
    return step, (abstract(mesh, (512, 256), bf16, "fsdp"), abstract(mesh, (64, 512), bf16, "fsdp"))


# ---- tensor and sequence parallel --------------------------------------------------------------------------------


@program(tp=8)
def tensor_parallel(mesh):
    """Megatron MLP, three layers, forward and backward of the input: one all-reduce each way per layer."""

    def forward(ws, x):
        for up, down in ws:
            x = x + jnp.tanh(x @ up) @ down
            x = constrain(mesh, x, None, None)
        return jnp.sum(x.astype(f32) ** 2)

    layer = abstract(mesh, (128, 512), bf16, None, "tp"), abstract(mesh, (512, 128), bf16, "tp", None)
    step = jax.jit(jax.grad(forward, argnums=0))
    return step, ([layer] * 3, abstract(mesh, (64, 128), bf16))


@program(tp=8)
def sequence_parallel(mesh):
    """Gather the sequence before the MLP, scatter-sum after it."""

    def local(up, down, x):
        full = lax.all_gather(x, "tp", axis=0, tiled=True)
        y = jnp.tanh(full @ up) @ down
        return lax.psum_scatter(y, "tp", scatter_dimension=0, tiled=True)

    run = jax.shard_map(local, mesh=mesh, in_specs=(P(None, "tp"), P("tp"), P("tp")), out_specs=P("tp"))
    args = (
        abstract(mesh, (128, 512), bf16, None, "tp"),
        abstract(mesh, (512, 128), bf16, "tp", None),
        abstract(mesh, (256, 128), bf16, "tp", None),
    )
    return jax.jit(run), args


# ---- mixture of experts ------------------------------------------------------------------------------------------

EXPERTS, CAPACITY, MODEL = 8, 64, 128


@program(ep=8)
def moe_shard_map(mesh):
    """Dispatch and combine by all_to_all: [experts, capacity, model] of each device."""

    def local(w, x):
        sent = lax.all_to_all(x, "ep", split_axis=0, concat_axis=1, tiled=True)
        y = jnp.tanh(jnp.einsum("ecm,emh->ech", sent, w))
        return lax.all_to_all(y, "ep", split_axis=1, concat_axis=0, tiled=True)

    run = jax.shard_map(local, mesh=mesh, in_specs=(P("ep"), P(None, "ep")), out_specs=P(None, "ep"))
    args = (
        abstract(mesh, (EXPERTS, MODEL, MODEL), bf16, "ep"),
        abstract(mesh, (EXPERTS, 8 * CAPACITY, MODEL), bf16, None, "ep"),
    )
    return jax.jit(run), args


@program(ep=8)
def moe_constraint(mesh):
    """The same, asked for by constraints: tokens sharded by capacity, then by expert, then back."""

    def step(w, x):
        sent = constrain(mesh, x, "ep", None, None)
        y = jnp.tanh(jnp.einsum("ecm,emh->ech", sent, w))
        y = constrain(mesh, y, "ep", None, None)
        return constrain(mesh, y, None, "ep", None)

    args = (
        abstract(mesh, (EXPERTS, MODEL, MODEL), bf16, "ep"),
        abstract(mesh, (EXPERTS, 8 * CAPACITY, MODEL), bf16, None, "ep"),
    )
    return jax.jit(step), args


# ---- pipeline and ring -------------------------------------------------------------------------------------------


@program(pp=8)
def pipeline(mesh):
    """Eight stages, four microbatches: eleven ticks, the activation handed on at each."""

    ticks = 8 + 4 - 1

    def local(w, x):
        def tick(carry, t):
            y = jnp.tanh(carry @ w[0])
            handed = lax.ppermute(y, "pp", [(i, i + 1) for i in range(7)])
            first = lax.dynamic_index_in_dim(x, jnp.minimum(t, 3), keepdims=False)
            return jnp.where(lax.axis_index("pp") == 0, first, handed), None

        out, _ = lax.scan(tick, lax.pcast(x[0], "pp", to="varying"), jnp.arange(ticks))
        return out[None]

    run = jax.shard_map(local, mesh=mesh, in_specs=(P("pp"), P()), out_specs=P("pp"))
    return jax.jit(run), (abstract(mesh, (8, 128, 128), bf16, "pp"), abstract(mesh, (4, 32, 128), bf16))


@program(sp=8)
def ring_attention(mesh):
    """Keys and values travel the ring: seven hops of both."""

    def local(q, k, v):
        def hop(carry, _):
            k, v, top, total, out = carry
            scores = jnp.einsum("qhd,khd->hqk", q, k).astype(f32)
            high = jnp.maximum(top, scores.max(-1))
            p = jnp.exp(scores - high[..., None])
            scale = jnp.exp(top - high)
            out = out * scale[..., None] + jnp.einsum("hqk,khd->hqd", p, v.astype(f32))
            total = total * scale + p.sum(-1)
            ring = [(i, (i + 1) % 8) for i in range(8)]
            return (lax.ppermute(k, "sp", ring), lax.ppermute(v, "sp", ring), high, total, out), None

        heads, block = q.shape[1], q.shape[0]
        vary = partial(lax.pcast, axis_name="sp", to="varying")
        carry = (
            k,
            v,
            vary(jnp.full((heads, block), -1e30, f32)),
            vary(jnp.zeros((heads, block), f32)),
            vary(jnp.zeros((heads, block, q.shape[2]), f32)),
        )
        carry, _ = lax.scan(hop, carry, None, length=8)
        *_, total, out = carry
        return jnp.swapaxes(out / total[..., None], 0, 1).astype(q.dtype)

    run = jax.shard_map(local, mesh=mesh, in_specs=P("sp"), out_specs=P("sp"))
    return jax.jit(run), tuple(abstract(mesh, (256, 4, 64), bf16, "sp") for _ in range(3))


# ---- embedding and loss ------------------------------------------------------------------------------------------


@program(tp=8)
def embedding_gather(mesh):
    """A table sharded by vocabulary: masked local look-up, then an all-reduce of the rows."""

    def step(table, tokens):
        return constrain(mesh, jnp.take(table, tokens, axis=0), None, None, None)

    return jax.jit(step), (abstract(mesh, (4096, 128), bf16, "tp", None), abstract(mesh, (8, 32), i32))


@program(tp=8)
def vocab_parallel_loss(mesh):
    """Cross entropy over a sharded vocabulary: max, sum of exponents and the target's logit, each [tokens]."""

    def local(unembed, x, targets):
        logits = (x @ unembed).astype(f32)
        top = lax.pmax(lax.stop_gradient(logits.max(-1)), "tp")
        total = lax.psum(jnp.exp(logits - top[:, None]).sum(-1), "tp")
        width = logits.shape[1]
        offset = targets - lax.axis_index("tp") * width
        mine = (offset >= 0) & (offset < width)
        own = jnp.take_along_axis(logits, jnp.clip(offset, 0, width - 1)[:, None], 1)[:, 0]
        target = lax.psum(jnp.where(mine, own, 0.0), "tp")
        return jnp.log(total) + top - target

    run = jax.shard_map(local, mesh=mesh, in_specs=(P(None, "tp"), P(), P()), out_specs=P())
    args = abstract(mesh, (128, 4096), bf16, None, "tp"), abstract(mesh, (256, 128), bf16), abstract(mesh, (256,), i32)
    return jax.jit(run), args


# ---- microbatches ------------------------------------------------------------------------------------------------


def microbatched(mesh, split):
    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    def step(w, x):
        def one(total, part):
            return total + jax.grad(loss)(w, part), None

        total, _ = lax.scan(one, jnp.zeros_like(w), split(x))
        return w - total

    w = abstract(mesh, (256, 256), f32)
    return jax.jit(step, out_shardings=w.sharding), (w, abstract(mesh, (128, 256), f32, "dp"))


@program(dp=8)
def microbatch_apart(mesh):
    """Each microbatch takes rows from every device: only the gradient moves, once per microbatch."""
    return microbatched(mesh, lambda x: x.reshape(-1, 4, x.shape[1]).swapaxes(0, 1))


@program(dp=8)
def microbatch_blocks(mesh):
    """Each microbatch is a block of rows, so it lives on two devices: the batch moves too."""
    return microbatched(mesh, lambda x: x.reshape(4, -1, x.shape[1]))


# ---- three axes --------------------------------------------------------------------------------------------------


@program(a=2, b=2, c=2)
def three_axes(mesh):
    """psums over (a, c), over b, over (b, c)."""

    def local(x):
        u = lax.psum(x * 2, ("a", "c"))
        v = lax.psum(jnp.tanh(x), "b")
        w = lax.psum(jnp.sin(x), ("b", "c"))
        return u, v, w

    specs = (P(None, "b"), P("a", "c"), P("a"))
    run = jax.shard_map(local, mesh=mesh, in_specs=P(("a", "b", "c")), out_specs=specs, check_vma=False)
    return jax.jit(run), (abstract(mesh, (1024, 128), f32, ("a", "b", "c")),)


@program(dp=2, tp=4)
def two_axes_branches(mesh):
    """A collective in one branch of a cond, another in a called and in a nested loop."""

    def local(x, flag):
        y = lax.cond(flag[0] > 0, lambda z: lax.psum(z, "tp"), lambda z: z * 4.0, x)

        def outer(i, z):
            return lax.fori_loop(0, 3, lambda j, s: lax.ppermute(jnp.sin(s), "dp", [(0, 1), (1, 0)]), z * 2.0)

        return lax.fori_loop(0, 5, outer, y)

    run = jax.shard_map(local, mesh=mesh, in_specs=(P("dp", "tp"), P()), out_specs=P("dp", "tp"), check_vma=False)
    return jax.jit(run), (abstract(mesh, (64, 64), f32, "dp", "tp"), abstract(mesh, (1,), i32))


# ---- compilers ---------------------------------------------------------------------------------------------------


def partitioned_text(lowered, folder: Path) -> str:
    """The program right after the SPMD partitioner: the same on every backend (XLA:CPU rewrites it further)."""
    options = {"xla_dump_to": str(folder), "xla_dump_hlo_pass_re": ".*spmd-partitioning.*"}
    lowered.compile(compiler_options=options)
    (path,) = folder.glob("*after_spmd-partitioning*.txt")
    return path.read_text()


QUIET = {
    "JAX_PLATFORMS": "cpu",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
    "TPU_SKIP_MDS_QUERY": "1",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # else the CUDA plugin wants cuDNN to compile for an absent GPU
}


def topology_devices(platform: str, name: str):
    from jax.experimental import topologies

    if platform == "tpu":
        shape, _, slices = name.partition("*")
        extra = {"num_slices": int(slices)} if slices else {}
        wrap = {"wrap": (True,) * 3} if "4x4x4" in name else {}
        topology = topologies.get_topology_desc(platform="tpu", topology_name=shape, **wrap, **extra)
        return sorted(topology.devices, key=lambda d: (getattr(d, "slice_index", 0), d.id))
    config = Path(__file__).with_name("h100.txt").read_text()
    return topologies.get_topology_desc(name, "cuda", target_config=config, topology="1x1x8").devices


def main(platform: str, topology: str, out: str, names: list[str]) -> None:
    devices = topology_devices(platform, topology)
    for name in names or PROGRAMS:
        text = PROGRAMS[name].lower(devices).compile().as_text()
        (Path(out) / f"{name}.hlo").write_text(text)


if __name__ == "__main__":
    os.environ |= QUIET
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
