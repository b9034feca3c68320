"""The small step whose proofs are kept beside this file (`python tests/report/step.py` proves it again)."""

from pathlib import Path

import jax
import jax.numpy as jnp

import shardax as sx

RULES = [
    ("params/up", ["fsdp", "tp"]),
    ("params/down", ["tp", "fsdp"]),
    ("params/scale", None),
    ("x", [("dp", "fsdp")]),
]


def step(params, x):
    def loss(params):
        hidden = jax.nn.gelu((x * params["scale"]) @ params["up"])
        return ((hidden @ params["down"]) ** 2).mean()

    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))


def case(width=512, mesh="dp=2,fsdp=2,tp=2", donate=("params",)):
    shapes = {"up": (width, 4 * width), "down": (4 * width, width), "scale": (width,)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((64, width), jnp.float32)
    return sx.Case(step, (params, x), RULES, mesh=mesh, donate=donate)


def main():
    here = Path(__file__).parent
    for name, made in (("fits", case()), ("refused", case(65536))):
        proof = made.prove(target="tpu:v5e:2x4")
        proof.save(here / f"{name}.json")
        text = (here / f"{name}.json").read_text()
        (here / f"{name}.json").write_text(text.replace(f"{here}/", "tests/report/"))
        print(proof)


if __name__ == "__main__":
    main()
