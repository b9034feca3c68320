"""Leaves that are alike are said once, and nothing is lost in the sum."""

import jax

import shardax as sx
from shardax.report.alike import alike
from shardax.report.layout_section import alike_grid, copies_grid


def paths(*given, look=lambda path: ""):
    return alike(given, lambda path: path, look)


def test_numbers_of_layers_are_starred_where_they_differ():
    assert paths("blocks/0/w", "blocks/1/w") == {"blocks/*/w": ["blocks/0/w", "blocks/1/w"]}
    assert list(paths("opt/0/mu/layer_3/w", "opt/0/mu/layer_12/w")) == ["opt/0/mu/layer_*/w"]
    assert list(paths("0/w", "1/w", "w")) == ["*/w", "w"]
    assert list(paths("blocks/0/w")) == ["blocks/0/w"]


def test_paths_of_every_spelling():
    assert list(paths("p['layers'][0]['w1']", "p['layers'][1]['w1']")) == ["p['layers'][*]['w1']"]
    assert list(paths("model.blocks.0.w", "model.blocks.10.w")) == ["model.blocks.*.w"]
    assert list(paths("p['w1']", "p['w3']")) == ["p['w1']", "p['w3']"]


def test_names_that_end_in_a_digit_are_not_numbers():
    assert list(paths("mlp/w1", "mlp/w3", "conv2/w", "conv3/w")) == ["mlp/w1", "mlp/w3", "conv2/w", "conv3/w"]


def test_layers_of_another_look_stand_apart():
    found = paths("a/0/w", "a/1/w", "a/2/w", "a/3/w", look=lambda path: path in {"a/2/w", "a/3/w"})
    assert found == {"a/*/w": ["a/0/w", "a/1/w"], "a/*/w′": ["a/2/w", "a/3/w"]}


def test_a_layout_of_many_layers_is_a_few_rows_with_the_same_sums():
    layer = {"up": jax.ShapeDtypeStruct((64, 256), "float32"), "scale": jax.ShapeDtypeStruct((64,), "float32")}
    layout = sx.layout({"layers": [layer] * 30}, [("up", ["fsdp", "tp"]), ("scale", None)], "dp=2,fsdp=2,tp=2")
    rows = [[cell.text for cell in row] for row in alike_grid(layout.decisions).rows]
    assert [row[:2] for row in rows] == [["layers/*/up", "30"], ["layers/*/scale", "30"]]
    assert sum(row[4].sort for row in alike_grid(layout.decisions).rows) == layout.bytes_per_device
    copies = copies_grid(layout.decisions, layout.mesh_spec)
    assert sum(row[4].sort for row in copies.rows) == layout.analysis().replicated_bytes
    assert copies.rows[0][5].text == "on 'dp' beside 'fsdp': dim 0 (64) divides; saves 240 KiB"


def test_without_copies_there_is_no_grid():
    layout = sx.layout({"w": jax.ShapeDtypeStruct((8,), "float32")}, [("w", ["tp"])], "tp=2")
    assert copies_grid(layout.decisions, layout.mesh_spec) is None
