"""A small GPT in Flax NNX: its axes are named once, and it trains on any mesh.

python examples/gpt.py                                       train it on eight simulated devices
shardax prove examples/gpt.py:case --target tpu:v5e:2x4      what it would do on a TPU
shardax launch -n 2 --devices 4 examples/gpt.py runs/gpt     in two processes, with checkpoints; again: goes on
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import shardax as sx


@dataclass(frozen=True)
class Config:
    """Sizes of the model, and of a batch; a token is a byte."""

    vocab: int = 128
    width: int = 128
    heads: int = 4
    layers: int = 2
    length: int = 64
    batch: int = 32


# Where every parameter lies, by the names of its axes. The optimiser's moments end in the same paths, so the same rules
# find them; a parameter that no rule finds is an error, not a copy on every device.
AXES = sx.PartitionAxis(hidden_state_axis="fsdp")
RULES = [
    ("embed/embedding", [sx.VOCAB, None]),
    ("(query|key|value|up)/kernel", [sx.EMBED, sx.TP]),
    ("(out|down)/kernel", [sx.TP, sx.EMBED]),
    ("position/embedding|scale", None),
    ("tokens", [sx.BATCH, None]),
]


class Attention(nnx.Module):
    """Causal self-attention."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.heads = config.heads
        self.query, self.key, self.value, self.out = (
            nnx.Linear(config.width, config.width, use_bias=False, rngs=rngs) for _ in range(4)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = (part(x).reshape(*x.shape[:2], self.heads, -1) for part in (self.query, self.key, self.value))
        return self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))


class Block(nnx.Module):
    """Attention, then a two-layer MLP, each around a residual."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.norm1, self.norm2 = (nnx.RMSNorm(config.width, rngs=rngs) for _ in range(2))
        self.attention = Attention(config, rngs)
        self.up = nnx.Linear(config.width, 4 * config.width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * config.width, config.width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = sx.constrain(x + self.attention(self.norm1(x)), [sx.BATCH, None, None])
        return sx.constrain(x + self.down(jax.nn.gelu(self.up(self.norm2(x)))), [sx.BATCH, None, None])


class GPT(nnx.Module):
    """Tokens in, logits of the next token out."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.embed = nnx.Embed(config.vocab, config.width, rngs=rngs)
        self.position = nnx.Embed(config.length, config.width, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


@sx.jit(donate="state")
def train_step(model: GPT, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    """One step of AdamW on the loss of the next token, which it returns."""
    inputs, targets = tokens[:, :-1].astype(jnp.int32), tokens[:, 1:].astype(jnp.int32)

    def loss_of(model: GPT) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(inputs), targets).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def make(config: Config) -> dict:
    """What a run carries from step to step."""
    model = GPT(config, nnx.Rngs(0))
    return {"model": model, "optimizer": nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)}


def case(config: Config = Config()) -> sx.Case:
    """The step with abstract arguments: what `shardax layout`, `prove`, `check` and `lock` look at."""
    state = nnx.eval_shape(lambda: make(config))
    tokens = jax.ShapeDtypeStruct((config.batch, config.length + 1), jnp.uint8)
    return sx.Case(train_step, (*state.values(), tokens), RULES, axes=AXES, mesh="dp=2,fsdp=2,tp=2")


def train(steps: int, folder: Path | None = None, config: Config = Config()) -> Iterator[tuple[int, float]]:
    """Train up to a step, from the last checkpoint in the folder if there is one; yields steps and losses."""
    layout = sx.layout(nnx.eval_shape(lambda: make(config)), RULES, axes=AXES)
    text = np.frombuffer(Path(__file__).with_name("sonnets.txt").read_bytes(), np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(text, config.length + 1)[::8]
    saved = folder is not None and any(path.name.isdigit() for path in folder.glob("*"))
    state = sx.restore_checkpoint(folder, layout) if saved else sx.init(make, config, layout=layout)
    with sx.Feed(windows, AXES.resolve_spec([sx.BATCH], sx.MODE_TRAIN), config.batch, seed=0, epochs=None) as feed:
        if saved:
            feed.restore(json.loads((folder / f"feed-{int(state['optimizer'].step[...])}.json").read_text()))
        for tokens in feed:
            yield feed.global_step, float(train_step(**state, tokens=tokens))
            if folder is not None and feed.global_step % 20 == 0:
                folder.mkdir(parents=True, exist_ok=True)
                if jax.process_index() == 0:  # the place in the data first: a checkpoint that is complete has one
                    (folder / f"feed-{feed.global_step}.json").write_text(json.dumps(feed.state()))
                sx.save_checkpoint(folder, state, layout=layout, step=feed.global_step)
            if feed.global_step == steps:
                return


def main() -> None:
    """Join the job, if there is one; lay a mesh over the devices; train."""
    sx.simulate(8)  # leave this out where there are real ones
    cluster = sx.initialize(show=True)
    with jax.set_mesh(sx.make_mesh("dp=-1,fsdp=2,tp=2")):
        for step, loss in train(60, *map(Path, sys.argv[1:])):
            if cluster.rank == 0:
                print(f"step {step:3}  loss {loss:.7f}", flush=True)


if __name__ == "__main__":
    main()
