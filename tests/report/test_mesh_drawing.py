"""Drawings of meshes: devices where they stand, hosts and slices outlined, and places that libtpu itself lists."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from importlib.util import find_spec

import numpy as np
import pytest
from jax.sharding import Mesh

import shardax as sx
from shardax.errors import UnknownAxisError
from shardax.proving.target import Target
from shardax.proving.worker import environment
from shardax.report.devices import devices_of_target, mesh_on
from shardax.report.mesh_drawing import MOST_SHOWN, draw_mesh
from shardax.report.palette import ramp

SVG = "{http://www.w3.org/2000/svg}"


def drawn(target, mesh):
    """Devices in the order of their ids: how jax orders them for the links differs between its versions."""
    spec, devices = sx.MeshSpec.of(mesh), sorted(devices_of_target(Target.of(target)), key=lambda device: device.id)
    return draw_mesh(Mesh(np.array(devices).reshape(spec.sizes), spec.names))


TEXTS = {
    ("tpu:v5e:4x4", "dp=4,tp=4"): """\
mesh dp=4,tp=4: each device shows its place along 'tp'
  0 1 │ 2 3
  0 1 │ 2 3
  ─────────
  0 1 │ 2 3
  0 1 │ 2 3
16 TPU v5 lite devices on 4 hosts""",
    ("tpu:v5p:2x2x2", "dp=2,fsdp=2,tp=2"): """\
mesh dp=2,fsdp=2,tp=2: each device shows its place along 'tp'
  z = 0  z = 1
  0 1    0 1
  0 1    0 1
8 TPU v5 devices on 2 hosts""",
    ("tpu:v5e:2x4*2", "dp=2,fsdp=4,tp=2"): """\
mesh dp=2,fsdp=4,tp=2: each device shows its place along 'tp'
  slice 0  slice 1
  0 1      0 1
  0 1      0 1
  0 1      0 1
  0 1      0 1
16 TPU v5 lite devices on 2 hosts in 2 slices""",
    ("gpu:h100:2x8", "dp=2,tp=8"): """\
mesh dp=2,tp=8: each device shows its place along 'tp'
  0 1 2 3 4 5 6 7
  ───────────────
  0 1 2 3 4 5 6 7
16 NVIDIA H100 80GB HBM3 devices on 2 hosts""",
}


@pytest.mark.parametrize("key", TEXTS, ids=str)
def test_exact_text(key):
    assert str(drawn(*key)) == TEXTS[key]


def test_the_mesh_of_a_proof_has_every_device_of_its_target_once():
    target = Target.of("tpu:v5p:2x2x2")
    mesh = mesh_on(target, "dp=2,fsdp=2,tp=2")
    assert sorted(device.id for device in mesh.devices.flat) == list(range(8))
    assert str(draw_mesh(mesh)).endswith("8 TPU v5 devices on 2 hosts")


def test_abstract_meshes_and_live_ones():
    assert str(sx.draw(sx.MeshSpec.of("dp=2,tp=2"))) == (
        "mesh dp=2,tp=2: each device shows its place along 'tp'\n  0 1\n  0 1\n4 abstract devices"
    )
    assert str(sx.draw(sx.make_mesh("dp=2,tp=4"))).endswith("  0 1 2 3 0 1 2 3\n8 cpu devices on 1 host")
    assert str(sx.draw(sx.MeshSpec.of("dp=1"))).endswith("  0\n1 abstract device")
    assert str(sx.draw(sx.make_mesh("dp=1"))).endswith("  0\n1 cpu device on 1 host")


def test_the_axis_of_the_colours_can_be_chosen():
    drawing = drawn("tpu:v5e:4x4", "dp=4,tp=4")
    lines = str(drawing.coloured_by("dp")).splitlines()
    assert lines[0].endswith("along 'dp'")
    assert [lines[row] for row in (1, 2, 4, 5)] == ["  0 0 │ 0 0", "  1 1 │ 1 1", "  2 2 │ 2 2", "  3 3 │ 3 3"]
    with pytest.raises(UnknownAxisError, match="no axis 'dpp' in mesh dp=4,tp=4; did you mean 'dp'"):
        drawing.coloured_by("dpp")
    assert sx.draw(sx.MeshSpec.of("dp=2,tp=1")).axis == "dp"  # an axis of one says nothing


def test_hosts_and_slices_are_outlined_and_seats_carry_their_coordinate():
    drawing = drawn("tpu:v5e:4x4*2", "dp=2,fsdp=4,tp=4")
    root = ET.fromstring(drawing.svg())
    frames = [rect for rect in root.iter(f"{SVG}rect") if rect.get("fill") == "none"]
    titles = sorted(frame.findtext(f"{SVG}title", "") for frame in frames)
    assert titles == sorted([*(f"host {host}" for host in range(8)), "slice 0", "slice 1"])
    seats = [group for group in root.iter(f"{SVG}g") if group.get("data-at")]
    assert sorted(seat.get("data-at", "") for seat in seats) == sorted(
        f"{a},{b},{c}" for a in range(2) for b in range(4) for c in range(4)
    )
    for seat in seats:  # colour, number and coordinate agree
        place = int(seat.get("data-at", "").split(",")[2])
        assert seat.find(f"{SVG}rect").get("fill") == ramp(place, 4)
        assert seat.findtext(f"{SVG}text") == str(place)
    assert [len(colours) for colours in json.loads(drawing.colours()).values()] == [2, 4, 4]


def test_seats_do_not_cover_each_other():
    for target, mesh in [*TEXTS, ("tpu:v4:4x4x4", "x=4,y=16"), ("tpu:v5e:16x16", "dp=16,tp=16")]:
        root = ET.fromstring(drawn(target, mesh).svg())
        places = [
            (rect.get("x"), rect.get("y")) for group in root.iter(f"{SVG}g") for rect in group.findall(f"{SVG}rect")
        ]
        assert len(set(places)) == len(places) == Target.of(target).devices


def test_what_is_too_large_to_draw_is_said():
    drawing = draw_mesh("dp=64,tp=64")
    assert len(drawing.seats) == MOST_SHOWN
    assert drawing.words == "4,096 abstract devices; the first 1,024 are drawn"


TARGETS = ["tpu:v5e:2x4", "tpu:v5e:4x4", "tpu:v5e:1x1", "tpu:v5p:2x2x2", "tpu:v4:2x2x4", "tpu:v6e:4x4", "tpu:v5e:4x4*2"]
ASK = """
import json, sys
from shardax.proving.compiler import devices_of
from shardax.proving.target import Target
found = {}
for text in json.loads(sys.argv[1]):
    found[text] = [
        [d.id, d.process_index, getattr(d, "slice_index", 0) or 0, list(d.coords), d.core_on_chip]
        for d in devices_of(Target.of(text).topology)
    ]
print(json.dumps(found))
"""


@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed: the TPU compiler cannot be asked")
def test_devices_stand_where_the_compiler_says():
    out = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(TARGETS)],
        env=environment("tpu"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert out.returncode == 0, out.stderr[-2000:]
    for text, listed in json.loads(out.stdout.splitlines()[-1]).items():
        ours = [
            [d.id, d.process_index, d.slice_index, list(d.coords), d.core_on_chip]
            for d in devices_of_target(Target.of(text))
        ]
        assert ours == listed, text
