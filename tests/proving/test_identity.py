"""A second proof of an unchanged step is the kept answer, wherever it is asked for; a changed one never is."""

import textwrap

import pytest

SCRIPT = """
import jax, jax.numpy as jnp, shardax as sx

def step(x):
    return jnp.{function}(x).sum()

{gap}
def ask():
    x = jax.ShapeDtypeStruct((64, 8), jnp.float32)
    return sx.prove(step, x, mesh="dp=8", in_specs=jax.P("dp"))

proof = ask()
"""


def run(path, gap="", function="tanh", before=""):
    text = before + textwrap.dedent(SCRIPT).format(gap=gap, function=function)
    path.write_text(text)
    names = {}
    exec(compile(text, str(path), "exec"), names)
    return names["proof"]


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("SHARDAX_CACHE", str(tmp_path / "cache"))


def test_lines_outside_the_step_do_not_matter(tmp_path):
    path = tmp_path / "train.py"
    first = run(path)
    again = run(path, gap="# a remark\n\n")
    assert (first.cached, again.cached) == (False, True)
    assert [row.place for row in again.ledger] == [row.place for row in first.ledger] == ["train.py:5 (step)"]


def test_the_steps_own_lines_do_so_that_none_is_stale(tmp_path):
    path = tmp_path / "train.py"
    run(path)
    moved = run(path, before="# a remark\n")
    assert not moved.cached
    assert [row.place for row in moved.ledger] == ["train.py:6 (step)"]
    assert not run(path, function="sin").cached
