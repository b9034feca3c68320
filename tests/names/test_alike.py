"""Leaves that are alike are said once, and nothing is lost in the sum."""

from shardax.names.alike import alike


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
