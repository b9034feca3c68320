"""An Equinox classifier on any mesh: plain `equinox` code, a layout by rules, and a cell for what is counted.

    python examples/equinox_mlp.py                                    train it on eight simulated devices
    shardax prove examples/equinox_mlp.py:case --target tpu:v5e:2x4   what it would do on a TPU

`sx.jit` takes modules as they are: nothing is filtered by hand, and what a cell in a module counts is counted.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import shardax as sx

CLASSES, WIDTH, BATCH = 3, 256, 1024
OPTIMIZER = optax.adam(3e-3)

# The hidden dimension is cut over "tp": the first layer by rows, the last by columns. The moments of Adam end in the
# same paths. A leaf that no rule finds is an error, not a copy on every device.
RULES = [
    ("layers/0/(weight|bias)", P("tp")),
    ("layers/1/weight", P(None, "tp")),
    ("layers/1/bias", P()),
    ("^[xy]$", P("dp")),  # the batch: two arguments of the step
]


class Classifier(eqx.Module):
    """Two layers, and how many points they have been trained on."""

    layers: list[eqx.nn.Linear]
    seen: sx.State

    def __init__(self, key: jax.Array):
        first, last = jax.random.split(key)
        self.layers = [eqx.nn.Linear(2, WIDTH, key=first), eqx.nn.Linear(WIDTH, CLASSES, key=last)]
        self.seen = sx.State(jnp.zeros((), int))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layers[1](jax.nn.gelu(self.layers[0](x)))


def loss_of(model: Classifier, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean cross-entropy and accuracy."""
    logits = jax.vmap(model)(x)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    return loss, (logits.argmax(-1) == y).mean()


@sx.jit(donate_argnums=(1,))
def train_step(model: Classifier, moments: tuple, x: jax.Array, y: jax.Array) -> tuple:
    """One step of Adam; the cell counts along."""
    gradient_of = eqx.filter_value_and_grad(loss_of, has_aux=True)
    (loss, accuracy), gradients = gradient_of(model, x, y)
    updates, moments = OPTIMIZER.update(gradients, moments)
    model.seen.value += len(x)
    return eqx.apply_updates(model, updates), moments, loss, accuracy


def spirals(steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Batches of points on three interleaved spirals, and which one each is on."""
    rng = np.random.default_rng(0)
    y = rng.integers(CLASSES, size=(steps, BATCH))
    radius = rng.uniform(0.1, 1.0, size=y.shape)
    angle = 4 * radius + 2 * np.pi * y / CLASSES + rng.normal(scale=0.05, size=y.shape)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], -1).astype(np.float32), y


def case() -> sx.Case:
    """The step and its arguments: what `shardax layout`, `prove`, `check` and `lock` look at."""
    model = Classifier(jax.random.key(0))
    moments = OPTIMIZER.init(eqx.filter(model, eqx.is_array))
    x, y = jax.ShapeDtypeStruct((BATCH, 2), jnp.float32), jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    return sx.Case(train_step, (model, moments, x, y), RULES, mesh="dp=4,tp=2")


def main() -> None:
    """Lay the parameters over the mesh, then train."""
    sx.simulate(8)  # leave this out where there are real ones
    with jax.set_mesh(sx.make_mesh("dp=4,tp=2")):
        model = Classifier(jax.random.key(0))
        arrays, rest = eqx.partition(model, eqx.is_array)
        layout = sx.layout(arrays, RULES)
        print(layout.table())
        arrays = sx.put(arrays, layout)
        model, moments = eqx.combine(arrays, rest), OPTIMIZER.init(arrays)
        x, y = sx.put(spirals(200), P(None, "dp"))
        for step in range(200):
            model, moments, loss, accuracy = train_step(model, moments, x[step], y[step])
            if step % 40 == 39:
                print(f"step {step + 1:3}  loss {float(loss):.4f}  accuracy {float(accuracy):.3f}")
        kept = model.layers[0].weight.sharding.spec
        print(f"seen {int(model.seen.value)} points; the first layer still lies as {kept}")


if __name__ == "__main__":
    main()
