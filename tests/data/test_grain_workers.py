"""Grain's worker processes in a process of its own: they are forked or spawned, and must not inherit ours."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import numpy as np

class Squares:
    def __len__(self): return 27
    def __getitem__(self, i): return {"x": np.array([i * i])}

def main():
    import os
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax, shardax as sx
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    plain = [b["x"].tolist() for b in sx.Feed(Squares(), sharding, 8, seed=1, policy="keep")]
    with sx.Feed(Squares(), sharding, 8, seed=1, policy="keep", workers=2) as feed:
        first = [next(feed)["x"].tolist() for _ in range(2)]
        state = feed.state()
    with sx.Feed(Squares(), sharding, 8, seed=1, policy="keep", workers=1) as feed:
        feed.restore(state)
        rest = [b["x"].tolist() for b in feed]
    assert first + rest == plain, (first, rest, plain)
    print("same")

if __name__ == "__main__":
    main()
"""


def test_workers_deliver_the_same_batches_and_resume(tmp_path):
    pytest.importorskip("grain")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0 and "same" in done.stdout, done.stderr[-3000:]
