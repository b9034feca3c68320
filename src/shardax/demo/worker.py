"""One process of the demo's job: it trains the GPT, from the last checkpoint if there is one, and says what it does.

A line of JSON for each step; whatever else stands in the output comes from libraries.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import jax

import shardax as sx
from shardax.demo import example


def say(**facts: object) -> None:
    """One line, at once and whole: libraries write to the same pipe, and not always to the end of a line."""
    os.write(1, f"\n{json.dumps(facts)}\n".encode())


def main(mesh: str, sizes: dict[str, int], steps: int, folder: Path) -> None:
    """Join the job and train."""
    gpt = example.load()
    cluster = sx.initialize()
    say(pid=os.getpid(), rank=cluster.rank)
    with jax.set_mesh(sx.make_mesh(mesh)), sx.guard() as guard:
        for step, loss in gpt.train(steps, folder, gpt.Config(**sizes)):
            guard.step(step)
            say(step=step, loss=loss)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
