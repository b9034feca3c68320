"""A mixture of experts: every token goes to the device of its expert and back, and no collective is written down.

python examples/moe.py                                    train it on eight simulated devices
shardax prove examples/moe.py:case --target tpu:v5e:2x4   what would travel on a TPU
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardax as sx

EXPERTS, WIDTH, HIDDEN, BATCH, LENGTH = 8, 32, 64, 16, 32
CAPACITY = 2 * LENGTH // EXPERTS  # tokens that an expert takes of one row; what is too much passes by unchanged
MESH, STEPS = "dp=2,ep=4", 101

# Data lies over both axes, experts over one. So tokens lie by row outside the experts and by expert inside.
AXES = sx.PartitionAxis(batch_axis=("dp", "ep"))
BY_ROW = [sx.BATCH, None, None]
BY_EXPERT = [sx.EXPERT, sx.DP, None, None]
RULES = [
    ("router", None),
    ("up|down", [sx.EXPERT, None, None]),
    ("step", None),
    ("inputs|targets", BY_ROW),
]
OPTIMIZER = optax.adam(1e-2)


def make(seed: int = 0) -> dict:
    """Parameters and the state of the optimiser."""
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = {"router": (WIDTH, EXPERTS), "up": (EXPERTS, WIDTH, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH)}
    params = {
        name: jax.random.normal(key, shape) * shape[-2] ** -0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return {"params": params, "optimizer": OPTIMIZER.init(params)}


def route(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where each token goes: [row, token, expert, slot], zero or one; and the same weighted by the router's trust."""
    trust = jax.nn.softmax(logits)
    chosen = jax.nn.one_hot(trust.argmax(-1), EXPERTS)
    slot = (jnp.cumsum(chosen, axis=1) - 1) * chosen  # of the tokens of its row that this expert gets
    kept = chosen * (slot < CAPACITY)
    sent = kept[..., None] * jax.nn.one_hot(slot.sum(-1).astype(int), CAPACITY)[:, :, None, :]
    return sent, sent * trust[..., None]


def experts(params: dict, x: jax.Array) -> jax.Array:
    """The layer, around a residual."""
    sent, weights = route(x @ params["router"])
    inside = at_experts(jnp.einsum("btd,btes->ebsd", x, sent))  # tokens travel to their experts
    inside = at_experts(jax.nn.gelu(jnp.einsum("ebsd,edh->ebsh", inside, params["up"])))
    inside = at_experts(jnp.einsum("ebsh,ehd->ebsd", inside, params["down"]))
    inside = sx.constrain(inside, [None, sx.BATCH, None, None], axes=AXES)  # and back to their rows
    return x + jnp.einsum("ebsd,btes->btd", inside, weights)


def at_experts(inside: jax.Array) -> jax.Array:
    """[expert, row, slot, feature] on the devices of the experts.

    Held there from the way in to the way out, each device sends 110 KiB a step; with the way in and the way out alone
    it is 630 KiB, because the gradients find no direct way back. `shardax prove` says both.
    """
    return sx.constrain(inside, BY_EXPERT, axes=AXES)


def train_step(state: dict, inputs: jax.Array, targets: jax.Array) -> tuple[dict, jax.Array]:
    """One step of Adam on the squared error."""

    def loss_of(params: dict) -> jax.Array:
        return jnp.mean((experts(params, inputs) - targets) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}, loss


def case() -> sx.Case:
    """The step with abstract arguments."""
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.float32)
    return sx.Case(train_step, (jax.eval_shape(make), tokens, tokens), RULES, axes=AXES, mesh=MESH, donate="state")


def batches(seed: int = 0):
    """Tokens from eight clusters, each with a map of its own: one for each expert to find."""
    rng = np.random.default_rng(seed)
    centres, maps = rng.normal(size=(EXPERTS, WIDTH)), rng.normal(size=(EXPERTS, WIDTH, WIDTH)) / WIDTH**0.5
    while True:
        kind = rng.integers(EXPERTS, size=(BATCH, LENGTH))
        x = centres[kind] + 0.3 * rng.normal(size=(BATCH, LENGTH, WIDTH))
        yield x.astype("float32"), np.einsum("btd,btde->bte", x, maps[kind]).astype("float32")


def main() -> None:
    """Prove it, then train it."""
    sx.simulate(8)
    print(case().prove(target="cpu:8").ledger.table(6))
    mesh = sx.make_mesh(MESH)
    layout = sx.layout(jax.eval_shape(make), RULES, mesh, axes=AXES)
    state = sx.init(make, layout=layout)
    rows = AXES.resolve_spec(BY_ROW, sx.MODE_TRAIN)
    step = jax.jit(train_step, donate_argnums=0)
    with jax.set_mesh(mesh):
        for number, (inputs, targets) in zip(range(STEPS), batches(), strict=False):
            placed = [jax.device_put(array, jax.NamedSharding(mesh, rows)) for array in (inputs, targets)]
            state, loss = step(state, *placed)
            if number % 20 == 0 or number == STEPS - 1:
                print(f"step {number:3}  loss {float(loss):.4f}")
    print("each device holds", state["params"]["up"].sharding.shard_shape((EXPERTS, WIDTH, HIDDEN)), "of the experts")


if __name__ == "__main__":
    main()
