"""A Llama-like train step in plain JAX: scan over layers, remat, bf16 parameters, fp32 Adam. Used to prove, not to train.

Ten bytes a parameter stay resident: two for itself, eight for Adam's moments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import shardax as sx

RULES = sx.Rules.of(
    [
        ("^embed", P("tp", "fsdp")),
        ("^unembed", P("fsdp", "tp")),
        ("layers/(q|k|v|gate|up)$", P(None, "fsdp", "tp")),
        ("layers/(o|down)$", P(None, "tp", "fsdp")),
        ("layers/norm", P(None, "fsdp")),
        ("^norm", P("fsdp")),
    ]
)
BATCH = ("dp", "fsdp")


@dataclass(frozen=True)
class Llama:
    """The sizes of a model."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int = 128256
    head: int = 128

    @property
    def shapes(self) -> dict[str, Any]:
        """Every parameter as a shape; layers are stacked."""
        n, d, f = self.layers, self.width, self.hidden
        q, kv = self.heads * self.head, self.kv_heads * self.head
        stacked = {
            "q": (n, d, q),
            "k": (n, d, kv),
            "v": (n, d, kv),
            "o": (n, q, d),
            "gate": (n, d, f),
            "up": (n, d, f),
            "down": (n, f, d),
            "norm_attention": (n, d),
            "norm_mlp": (n, d),
        }
        tree = {"embed": (self.vocab, d), "layers": stacked, "norm": (d,), "unembed": (d, self.vocab)}
        return jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16), tree, is_leaf=lambda node: isinstance(node, tuple)
        )

    @property
    def parameters(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.shapes))

    def flops(self, batch: int, length: int) -> int:
        """Matrix multiplications of one step, in closed form: forward, backward (twice that), and the forward of every
        layer again for remat, less its last product, which the backward pass does not need."""
        d, q, kv = self.width, self.heads * self.head, self.kv_heads * self.head
        down = 2 * self.hidden * d
        token = 2 * d * (2 * q + 2 * kv) + 2 * down + down + 2 * 2 * length * q
        return batch * length * (self.layers * (4 * token - down) + 3 * 2 * d * self.vocab)

    def state(self, mesh: str) -> Any:
        """Parameters and optimiser state as shapes that know where they lie on a mesh."""
        parameters = sx.layout(self.shapes, RULES, mesh)
        optimizer = sx.optimizer_layout(jax.eval_shape(ADAM.init, self.moments), parameters)
        return {"params": parameters.abstract, "opt": optimizer.abstract}

    @property
    def moments(self) -> Any:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), self.shapes)

    def tokens(self, mesh: str, batch: int, length: int) -> jax.ShapeDtypeStruct:
        axes = tuple(name for name in BATCH if name in sx.MeshSpec.of(mesh).names)
        found = sx.layout({"tokens": jax.ShapeDtypeStruct((batch, length), jnp.int32)}, [("tokens", P(axes))], mesh)
        return found.abstract["tokens"]

    def create(self, key: jax.Array) -> Any:
        """A state of real arrays."""
        leaves, tree = jax.tree.flatten(self.shapes)
        keys = jax.random.split(key, len(leaves))
        made = [jax.random.normal(k, leaf.shape, jnp.float32) * 0.02 for k, leaf in zip(keys, leaves, strict=True)]
        moments = jax.tree.unflatten(tree, made)
        parameters = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), moments)
        return {"params": parameters, "opt": ADAM.init(moments)}


ADAM = optax.adamw(3e-4)
LLAMA_8B = Llama(32, 4096, 32, 8, 14336)
LLAMA_70B = Llama(80, 8192, 64, 8, 28672)
LLAMA_405B = Llama(126, 16384, 128, 8, 53248)


def train_step(model: Llama, scan: bool = True) -> Any:
    """`step(state, tokens) -> (state, loss)`, the old state donated; without `scan` layer after layer is traced."""

    def shard(x: jax.Array, *spec: Any) -> jax.Array:
        mesh = jax.sharding.get_abstract_mesh()
        here = P(*(_here(entry, mesh.axis_names) for entry in spec))
        return x if mesh.empty else lax.with_sharding_constraint(x, here)

    def attention(x: jax.Array, layer: Any) -> jax.Array:
        batch, length, _ = x.shape
        groups = model.heads // model.kv_heads
        q = (x @ layer["q"]).reshape(batch, length, model.kv_heads, groups, model.head)
        k, v = ((x @ layer[name]).reshape(batch, length, model.kv_heads, model.head) for name in "kv")
        q, k = _rotate(q), _rotate(k)
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k) * model.head**-0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        weights = jax.nn.softmax(scores, axis=-1)
        mixed = jnp.einsum("bhgqk,bkhd->bqhgd", weights, v).reshape(batch, length, model.heads * model.head)
        return mixed @ layer["o"]

    @jax.checkpoint
    def block(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        x = shard(x, BATCH, None, None)
        x = x + shard(attention(_norm(x, layer["norm_attention"]), layer), BATCH, None, None)
        h = _norm(x, layer["norm_mlp"])
        h = shard(jax.nn.silu(h @ layer["gate"]) * (h @ layer["up"]), BATCH, None, "tp")
        return x + h @ layer["down"], None

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = shard(params["embed"][tokens], BATCH, None, None)
        if scan:
            x, _ = lax.scan(block, x, params["layers"])
        else:
            for at in range(model.layers):
                x, _ = block(x, jax.tree.map(lambda stacked, at=at: stacked[at], params["layers"]))
        logits = shard(_norm(x, params["norm"]) @ params["unembed"], BATCH, None, "tp")
        targets = jnp.roll(tokens, -1, axis=1)
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets).mean()

    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(state["params"], tokens)
        gradients = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
        updates, moments = ADAM.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": moments}, value

    return jax.jit(step, donate_argnums=0)


def _here(entry: Any, names: Any) -> Any:
    """The part of a spec's entry that the mesh in force has."""
    if isinstance(entry, tuple):
        return tuple(name for name in entry if name in names) or None
    return entry if entry in names else None


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)).astype(x.dtype) * (1 + scale)


def _rotate(x: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * (500_000.0 ** (-jnp.arange(half) / half))
    angles = angles.reshape(x.shape[1], *([1] * (x.ndim - 3)), half)
    wide = x.astype(jnp.float32)
    a, b = wide[..., :half], wide[..., half:]
    turned = jnp.concatenate([a * jnp.cos(angles) - b * jnp.sin(angles), a * jnp.sin(angles) + b * jnp.cos(angles)], -1)
    return turned.astype(x.dtype)
