"""Leaves that are alike are one row of a report, and nothing is lost in the sum."""

import jax

import shardax as sx
from shardax.report.layout_section import alike_grid, copies_grid


def test_a_layout_of_many_layers_is_a_few_rows_with_the_same_sums():
    layer = {"up": jax.ShapeDtypeStruct((64, 256), "float32"), "scale": jax.ShapeDtypeStruct((64,), "float32")}
    layout = sx.layout({"layers": [layer] * 30}, [("up", ["fsdp", "tp"]), ("scale", None)], "dp=2,fsdp=2,tp=2")
    rows = [[cell.text for cell in row] for row in alike_grid(layout.decisions).rows]
    assert [row[:2] for row in rows] == [["layers/*/up", "30"], ["layers/*/scale", "30"]]
    assert sum(row[4].sort for row in alike_grid(layout.decisions).rows) == layout.bytes_per_device
    copies = copies_grid(layout.decisions, layout.mesh_spec)
    assert sum(row[4].sort for row in copies.rows) == layout.analysis().replicated_bytes
    assert copies.rows[0][5].text == "on 'dp' beside 'tp': dim 1 (256) divides; saves 240 KiB"


def test_without_copies_there_is_no_grid():
    layout = sx.layout({"w": jax.ShapeDtypeStruct((8,), "float32")}, [("w", ["tp"])], "tp=2")
    assert copies_grid(layout.decisions, layout.mesh_spec) is None
