"""Cases of a small MLP, good and bad."""

import jax
import jax.numpy as jnp

import shardax as sx

AXES = sx.PartitionAxis(hidden_state_axis="fsdp")
RULES = [("params/up", [sx.EMBED, sx.TP]), ("params/down", [sx.TP, sx.EMBED]), ("x", [sx.BATCH, None])]


def step(params, x):
    hidden = jax.nn.relu(x @ params["up"])
    return params, jnp.mean((hidden @ params["down"]) ** 2)


def make(width, rules=RULES, **options):
    shapes = {"up": (width, 4 * width), "down": (4 * width, width)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((32, width), jnp.float32)
    return sx.Case(step, (params, x), rules, axes=AXES, mesh="dp=2,fsdp=2,tp=2", **options)


def case():
    return make(64)


def talks():
    print("loading")  # what a program prints is not what was asked
    return make(64)


def typo():
    return make(64, [("params/pu", [sx.EMBED, sx.TP]), *RULES])


def odd():
    return make(63)


def huge():
    return make(2**17)


def needs(width):
    return make(width)


def number():
    return 3


def wrong():
    return sx.Case(lambda x: x @ x, (jax.ShapeDtypeStruct((8, 4), "float32"),), [("x", None)], mesh="dp=8")


async def later():
    return make(64)


def explodes():
    return 1 / 0


def alone():
    return sx.Case(step, (), RULES)


def doubtful():
    def product(x, w):
        return jnp.tanh(x @ w)

    args = (jax.ShapeDtypeStruct((64, 32), "float32"), jax.ShapeDtypeStruct((32, 64), "float32"))
    return sx.Case(product, args, [("x", jax.P("dp", None)), ("w", jax.P(None, "dp"))], mesh="dp=8")
