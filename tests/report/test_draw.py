"""Drawings of arrays: exact text of small cases, any rank, and the law that they show what JAX does."""

import xml.etree.ElementTree as ET
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import NamedSharding, SingleDeviceSharding

import shardax as sx
from shardax.errors import LeafError, SpecError
from shardax.report.blocks import blocks_of, devices_in_words
from shardax.report.draw import MOST_PANELS, draw_spec
from shardax.report.palette import DARK_INK, KINDS, LIGHT_INK, contrast, ink, kind, ramp


def mesh(text="dp=2,tp=4"):
    return sx.make_mesh(text)


def boxes(drawing):
    """The text without its first line, which has the words of JAX for a spec."""
    return str(drawing).split("\n", 1)[1]


CASES = {
    "scalar": (P(), (), "┌─────┐\n│ 0-7 │\n└─────┘"),
    "rank 1": (
        P("tp"),
        (8,),
        "┌─────┬─────┬─────┬─────┐\n│ 0,4 │ 1,5 │ 2,6 │ 3,7 │\n└─────┴─────┴─────┴─────┘",
    ),
    "rank 2": (
        P("dp", "tp"),
        (8, 16),
        "┌─────┬─────┬─────┬─────┐\n│  0  │  1  │  2  │  3  │\n├─────┼─────┼─────┼─────┤\n│  4  │  5  │  6  │  7  │\n"
        "└─────┴─────┴─────┴─────┘",
    ),
    "one axis of two": (P("dp"), (4, 6), "┌─────┐\n│ 0-3 │\n├─────┤\n│ 4-7 │\n└─────┘"),
    "rank 4": (
        P(None, "dp", None, "tp"),
        (2, 4, 6, 8),
        "┌─────┬─────┬─────┬─────┐\n│  0  │  1  │  2  │  3  │\n├─────┼─────┼─────┼─────┤\n│  4  │  5  │  6  │  7  │\n"
        "└─────┴─────┴─────┴─────┘",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_exact_text(name):
    spec, shape, text = CASES[name]
    assert boxes(sx.draw(NamedSharding(mesh(), spec), shape)) == text


def test_the_first_line_says_shape_spec_mesh_and_directions():
    first = str(sx.draw(NamedSharding(mesh(), P("dp", "tp")), (8, 16))).split("\n")[0]
    assert first == f"[8, 16] {P('dp', 'tp')} on dp=2, tp=4   dim 0 ↓ dp, dim 1 → tp"


def test_where_there_is_no_room_the_directions_have_a_line_of_their_own():
    drawn = sx.draw(NamedSharding(mesh("dp=2,tp=4"), P("dp", "tp")), (8, 16))
    lines = ["".join(span.text for span in line) for line in drawn.spans(50)]
    assert lines[:2] == [f"[8, 16] {P('dp', 'tp')} on dp=2, tp=4", "dim 0 ↓ dp, dim 1 → tp"]
    assert "dim 0 ↓ dp, dim 1 → tp</text>" in drawn.svg()


def test_rank_three_is_panels_along_the_dimension_cut_least():
    drawn = sx.draw(NamedSharding(mesh("a=2,b=2,c=2"), P("a", "b", "c")), (4, 4, 4))
    assert boxes(drawn) == (
        "block 0 of dim 2\n┌─────┬─────┐\n│  0  │  2  │\n├─────┼─────┤\n│  4  │  6  │\n└─────┴─────┘\n"
        "block 1 of dim 2\n┌─────┬─────┐\n│  1  │  3  │\n├─────┼─────┤\n│  5  │  7  │\n└─────┴─────┘"
    )


def test_many_blocks_leave_out_the_middle_and_many_panels_the_end():
    wide = draw_spec(P("dp", "tp"), sx.MeshSpec.of("dp=32,tp=20").abstract(), (64, 60))
    assert [len(wide.panels[0].rows), len(wide.panels[0].columns)] == [16, 16]
    assert wide.panels[0].columns[8] is None and wide.panels[0].columns[-1] == 19
    assert "…" in str(wide) and " 639 " in str(wide)
    deep = draw_spec(P("a", "b", "c"), sx.MeshSpec.of("a=2,b=3,c=16").abstract(), (2, 3, 16))
    assert len(deep.panels) == 2 and deep.left_out == 0  # rows and columns are the dimensions cut most
    many = draw_spec(P("a", "b", "c", "d"), sx.MeshSpec.of("a=4,b=4,c=4,d=3").abstract(), (4, 4, 4, 3))
    assert many.left_out == 12 - MOST_PANELS and str(many).endswith("… and 4 more panels")
    assert "… and 4 more panels" in many.svg()


SHARDINGS = [
    (text, spec, shape)
    for (text, axes), shape in product(
        [("dp=2,tp=4", ("dp", "tp")), ("a=2,b=2,c=2", ("a", "b"))], [(8, 16), (16, 8, 8), (8, 8, 8, 8)]
    )
    for spec in (P(), P(axes[0]), P(None, axes[1]), P(axes), P(axes[1], axes[0]), P((axes[1], axes[0]), None))
]


@pytest.mark.parametrize(("text", "spec", "shape"), SHARDINGS, ids=str)
def test_blocks_are_those_of_jax(text, spec, shape):
    sharding = NamedSharding(mesh(text), spec)
    blocks = blocks_of(sharding, shape)
    drawn = {
        device: tuple(slice(*bound) for bound in blocks.bounds(place))
        for place, holders in blocks.holders.items()
        for device in holders
    }
    told = {
        device.id: tuple(slice(*part.indices(size)[:2]) for part, size in zip(index, shape, strict=True))
        for device, index in sharding.devices_indices_map(shape).items()
    }
    assert drawn == told


def test_arrays_abstract_arrays_and_other_shardings():
    sharding = NamedSharding(mesh(), P("dp"))
    array = jax.device_put(jnp.ones((4, 2)), sharding)
    abstract = jax.ShapeDtypeStruct((4, 2), jnp.float32, sharding=sharding)
    assert str(sx.draw(array)) == str(sx.draw(abstract)) == str(sx.draw(sharding, (4, 2)))
    one = sx.draw(jnp.ones((3, 2)))
    assert boxes(one) == "┌─────┐\n│  0  │\n└─────┘"
    assert "SingleDeviceSharding on 1 device " in str(one)
    assert sx.draw(sharding).blocks.shape == (2,)  # without a shape, as many elements as blocks
    with pytest.raises(SpecError, match="needs the shape"):
        sx.draw(SingleDeviceSharding(jax.devices()[0]))
    with pytest.raises(LeafError, match="nothing to draw: ndarray has no sharding"):
        sx.draw(np.ones(3))


def test_every_drawing_is_one_svg_that_holds_every_block():
    for spec, shape, _ in CASES.values():
        drawn = sx.draw(NamedSharding(mesh(), spec), shape)
        root = ET.fromstring(drawn._repr_html_())
        assert root.tag.endswith("svg")
        tips = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
        shown = [tip for tip in tips if tip and tip.startswith("devices ")]
        assert sorted(shown) == sorted(f"devices {devices_in_words(h, 60)}" for h in drawn.blocks.holders.values())


def test_at_a_prompt_a_drawing_draws_itself():
    for drawing in (sx.draw(mesh()), sx.draw(NamedSharding(mesh(), P("dp")), (4, 4))):
        assert repr(drawing) == str(drawing)


def test_a_name_in_a_caption_is_escaped():
    drawn = draw_spec(P(), sx.MeshSpec.of("a=2").abstract(), (2,), name="<script>&")
    assert "<script>" not in drawn.svg() and "&lt;script&gt;&amp;" in drawn.svg()


def test_colours_can_be_read():
    for count in range(1, 40):
        for place in range(count):
            assert contrast(ramp(place, count), ink(place, count)) >= 4.5, (place, count)
    assert {ink(place, 9) for place in range(9)} == {DARK_INK, LIGHT_INK}
    for colour in KINDS:  # beside each other on white and on our dark
        assert contrast(colour, "#fdfdfc") >= 1.8 and contrast(colour, "#15181c") >= 3
    assert kind(len(KINDS)) == kind(0)
