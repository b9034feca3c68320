"""A layer of experts, one per device, as a plain function over states: tokens travel by all_to_all, loads are counted.

    python examples/stateful_shard_map.py

The function closes over its states, of whatever framework: weights are brainstate's, counters are shardax's own. What
each of them is on the mesh is said where it is mapped, once: the experts' weights and counters are cut, one slice per
device; the router is whole on every device; the random state is folded with the device's index, so that every device
draws its own noise. Calling the mapped function eagerly compiles once.
"""

import time

import brainstate
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import shardax as sx

EXPERTS, WIDTH, TOKENS, CAPACITY = 8, 32, 64, 16  # tokens per device; at most so many of them per expert


class Experts:
    """The states of the layer."""

    def __init__(self, key: jax.Array):
        router, first, second = jax.random.split(key, 3)
        self.router = brainstate.ParamState(jax.random.normal(router, (WIDTH, EXPERTS)))
        self.up = brainstate.ParamState(jax.random.normal(first, (EXPERTS, WIDTH, 4 * WIDTH)) / WIDTH**0.5)
        self.down = brainstate.ParamState(jax.random.normal(second, (EXPERTS, 4 * WIDTH, WIDTH)) / (4 * WIDTH) ** 0.5)
        self.load = sx.State(jnp.zeros(EXPERTS, int))
        self.dropped = sx.State(jnp.zeros((), int))
        self.rng = sx.RngState(1)

    def route(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The expert of every token here, and its place in that expert's queue."""
        noise = jax.random.gumbel(self.rng.split(), (len(tokens), EXPERTS))
        chosen = jax.nn.one_hot(jnp.argmax(tokens @ self.router.value + noise, axis=-1), EXPERTS, dtype=int)
        place = (jnp.cumsum(chosen, axis=0) * chosen).sum(-1) - 1
        self.dropped.value += jax.lax.psum((place >= CAPACITY).sum(), "expert")
        return chosen, place

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """What every token's expert makes of it; runs on one device, with that device's tokens."""
        chosen, place = self.route(tokens)
        seats = chosen[:, :, None] * jax.nn.one_hot(place, CAPACITY)[:, None, :]  # (token, expert, place in the queue)
        queues = jnp.einsum("tw,tec->ecw", tokens, seats)
        here = jax.lax.all_to_all(queues, "expert", 0, 1, tiled=True).reshape(-1, WIDTH)  # all devices' for my expert
        made = jax.nn.gelu(here @ self.up.value[0]) @ self.down.value[0]  # local: this device's one expert
        self.load.value += jax.lax.psum_scatter(seats.sum((0, 2)).astype(int), "expert", tiled=True)
        back = jax.lax.all_to_all(made.reshape(1, -1, WIDTH), "expert", 1, 0, tiled=True)
        return jnp.einsum("ecw,tec->tw", back, seats)


def main() -> None:
    """Map it over eight devices and look at what came of the states."""
    sx.simulate(8)  # leave this out where there are real ones
    mesh = sx.make_mesh("expert=8")
    experts = Experts(jax.random.key(0))
    layer = sx.shard_map(
        experts.__call__,
        mesh,
        in_specs=P("expert"),
        out_specs=P("expert"),
        state_in_specs={experts.up: P("expert"), experts.down: P("expert"), experts.load: P("expert")},
    )
    tokens = jax.random.normal(jax.random.key(2), (EXPERTS * TOKENS, WIDTH))
    for call in range(3):
        start = time.perf_counter()
        out = jax.block_until_ready(layer(tokens))
        print(f"call {call}: {(time.perf_counter() - start) * 1e3:7.2f} ms  |out| {float(jnp.abs(out).mean()):.4f}")
    print("load per expert:", experts.load.value, " dropped:", int(experts.dropped.value))
    print(
        "one expert's weights per device:",
        experts.up.value.sharding.spec,
        experts.up.value.addressable_shards[0].data.shape,
    )
    routed = int(experts.load.value.sum()) + int(experts.dropped.value)
    print(f"every token went somewhere: {routed} of {3 * len(tokens)}")


if __name__ == "__main__":
    main()
