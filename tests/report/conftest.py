"""The values that reports are made of: two proofs by libtpu, kept beside this file, and layouts made here."""

from pathlib import Path

import pytest
from tests.report.step import case

import shardax as sx

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    """The kept proofs name their source from here."""
    monkeypatch.chdir(HERE.parents[1])


@pytest.fixture(scope="session")
def fits():
    return sx.Proof.load(HERE / "fits.json")


@pytest.fixture(scope="session")
def refused():
    return sx.Proof.load(HERE / "refused.json")


@pytest.fixture(scope="session")
def layout():
    return case().lay_out()


@pytest.fixture(scope="session")
def adapted():
    """A layout that could not be as it was asked."""
    import jax

    arrays = {"a": jax.ShapeDtypeStruct((10, 6), "float32"), "b": jax.ShapeDtypeStruct((8, 6), "float32")}
    return sx.layout(arrays, [(".*", ["tp"])], "tp=4", on_misfit="adapt")
