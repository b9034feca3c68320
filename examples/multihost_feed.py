"""Feed many hosts: each process reads the rows that its devices hold, and a run goes on with another number of them.

shardax launch -n 2 --devices 4 examples/multihost_feed.py place.json   two processes, 12 steps
shardax launch -n 4 --devices 2 examples/multihost_feed.py place.json   four go on where two stopped
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import shardax as sx

RECORDS, FEATURES, BATCH, STEPS = 1000, 16, 48, 12
TRUTH = np.sin(np.arange(FEATURES, dtype=np.float32))


class Records:
    """A data set that is read one record at a time, as from files; it counts what was read here."""

    def __init__(self) -> None:
        self.read: set[int] = set()

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        self.read.add(number)
        x = np.random.default_rng(number).normal(size=FEATURES).astype(np.float32)
        return {"x": x, "y": np.float32(x @ TRUTH), "number": np.int32(number)}


@jax.jit
def train_step(weights: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Least squares over the rows that count: the last batch of an epoch is filled up, and the mask says with what."""

    def loss_of(weights: jax.Array) -> jax.Array:
        return sx.masked_mean((batch["x"] @ weights - batch["y"]) ** 2, batch["mask"])

    loss, gradient = jax.value_and_grad(loss_of)(weights)
    return weights - 0.1 * gradient, loss


def main(place: Path | None = None) -> None:
    """Join the job, train from the place in the data that the file names, and write the new place."""
    sx.simulate(8)  # leave this out where there are real ones
    cluster = sx.initialize()
    mesh = sx.make_mesh("dp=4,tp=2")
    before = json.loads(place.read_text()) if place and place.exists() else None
    weights = jnp.asarray(before["weights"]) if before else jnp.zeros(FEATURES)
    weights = sx.put(weights, jax.NamedSharding(mesh, jax.P("tp")))
    records = Records()
    with (
        sx.guard(),
        jax.set_mesh(mesh),
        sx.Feed(records, jax.P("dp"), BATCH, seed=0, policy="pad", epochs=None) as feed,
    ):
        if before:
            feed.restore(before["feed"])
        for batch in feed:
            weights, loss = train_step(weights, batch)
            first = sx.gather(batch["number"])[:4].tolist()
            if cluster.rank == 0:
                print(f"step {feed.global_step:2}  loss {float(loss):.4f}  rows {first} …", flush=True)
            if feed.global_step % STEPS == 0 or sx.should_stop(feed.global_step):
                break
        after = {"feed": feed.state(), "weights": sx.gather(weights).tolist()}
    print(f"rank {cluster.rank} of {cluster.size} has read {len(records.read)} records", flush=True)
    if place and cluster.rank == 0:
        place.write_text(json.dumps(after))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
