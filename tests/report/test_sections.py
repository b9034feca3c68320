"""Sections hold the numbers of the value they are made from, all of them and no others."""

from dataclasses import replace

import jax
import pytest

import shardax as sx
from shardax.errors import LayoutError, Offence
from shardax.proving.check import check
from shardax.proving.collectives import Collective
from shardax.proving.proof import LostDonation, NotAsAsked
from shardax.report.code_lines import code_around, short_file
from shardax.report.layout_section import layout_section
from shardax.report.ledger_section import by_axis, by_line, ledger_section, sites
from shardax.report.proof_section import memory_bars, proof_section, roofline, time_bars, verdict_of
from shardax.report.sections import error_section, shown_as
from shardax.report.values import (
    Bars,
    Cell,
    Chart,
    CodeSites,
    Column,
    Grid,
    Pictures,
    Section,
    Stats,
    Verdict,
    Words,
    show_seconds,
)
from shardax.tables import show_bytes


def blocks(section, kind):
    return [block for block in section.walk() if isinstance(block, kind)]


def subsection(section, title):
    return next(part for part in section.blocks if isinstance(part, Section) and part.title == title)


def test_layout(layout):
    section = layout_section(layout)
    assert section.title == "Layout on mesh dp=2,fsdp=2,tp=2"
    stats = {stat.label: stat.text for stat in blocks(section, Stats)[0].stats}
    assert stats["on every device"] == show_bytes(layout.bytes_per_device)
    assert stats["leaves"] == "4"
    held = blocks(section, Bars)[0]
    assert sum(bar.size for bar in held.bars) == layout.bytes_per_device
    leaves = subsection(section, "Leaves").blocks[0]
    assert {row[0].text for row in leaves.rows} == set(layout.by_path)
    assert sum(row[3].sort for row in leaves.rows) == layout.bytes_per_device
    assert sum(row[3].share for row in leaves.rows) == pytest.approx(1)
    assert leaves.rows[0][3].sort == max(row[3].sort for row in leaves.rows)
    assert not any(part.title == "Corrections" for part in section.blocks if isinstance(part, Section))


def test_a_layout_draws_each_way_of_cutting_once(layout):
    cut = subsection(layout_section(layout), "How arrays are cut").blocks[0]
    assert isinstance(cut, Pictures)
    assert sorted(drawing.name for drawing in cut.drawings) == ["params/down", "params/scale", "params/up", "x"]
    many = sx.layout({f"w{n}": jax.ShapeDtypeStruct((8, 8), "float32") for n in range(5)}, [(".*", ["tp"])], "tp=2")
    (one,) = subsection(layout_section(many), "How arrays are cut").blocks[0].drawings
    assert one.name == "w0 and 4 others"


def test_corrections(adapted):
    grid = subsection(layout_section(adapted), "Corrections").blocks[0]
    (row,) = grid.rows
    (correction,) = adapted["a"].fit.corrections
    assert [cell.text for cell in row[:3]] == ["a", "0", "tp"]
    assert row[3].text == f"indivisible: {correction.detail}" and row[4].sort == correction.bytes_per_device
    assert row[5].text == "a dim of 12"


def test_proof_that_fits(fits):
    section = proof_section(fits)
    assert section.title == "step on tpu:v5e:2x4, mesh dp=2,fsdp=2,tp=2"
    verdict = verdict_of(fits)
    assert (verdict.tone, verdict.word) == ("good", "Fits") and show_bytes(fits.margin) in verdict.reason
    stats = {stat.label: stat.text for stat in blocks(section, Stats)[0].stats}
    assert stats["a step takes at least"] == show_seconds(fits.estimate.seconds)
    assert stats["sent by each device"] == show_bytes(fits.ledger.wire_bytes)
    (bar,) = memory_bars(fits.memory).bars
    assert bar.size == pytest.approx(fits.memory.peak) and memory_bars(fits.memory).limit == fits.memory.hbm
    assert not any(part.title.startswith("Not as") for part in section.blocks if isinstance(part, Section))


def test_proof_that_does_not_fit(refused):
    section = proof_section(refused)
    assert isinstance(section.blocks[0], Verdict) and section.blocks[0].tone == "bad"
    worries = subsection(section, "Not as it was meant to be")
    assert [row[0].text for row in blocks(worries, Grid)[0].rows] == [
        "params['down']",
        "params['up']",
    ]  # no results: who knows
    assert "RESOURCE_EXHAUSTED" in blocks(worries, Words)[0].lines[0]
    assert not any(part.title == "Collectives" for part in section.blocks if isinstance(part, Section))
    bars = memory_bars(refused.memory, refused.refusal)
    assert bars.scale == refused.memory.peak > bars.limit


def test_times_and_roofline_agree_with_the_estimate(fits):
    estimate = fits.estimate
    times = {bar.label: bar.size for bar in time_bars(estimate).bars}
    assert times["compute"] == estimate.compute_seconds and times["HBM"] == estimate.hbm_seconds
    assert [bar.label for bar in time_bars(estimate).bars if bar.tone == "warn"] == [estimate.bottleneck]
    together = sum(seconds for name, seconds in times.items() if name.startswith("ICI"))
    assert time_bars(estimate).notes[0] == f"all axes share ICI: {show_seconds(together)} together"
    assert together == pytest.approx(estimate.seconds)  # which is why a step takes longer than its longest bar
    roofs = roofline(estimate, fits.ledger)
    assert roofs.peak == pytest.approx(estimate.flops / estimate.compute_seconds)
    for roof in roofs.roofs:
        assert roof.intensity * roof.bandwidth == pytest.approx(roof.rate)
        assert roof.rate * roof.seconds == pytest.approx(estimate.flops)
        assert roof.seconds == pytest.approx(times[roof.name])
    slowest = min(roofs.roofs, key=lambda roof: roof.rate)
    assert slowest.name == estimate.bottleneck


def test_ledger_is_whole_by_axis_by_line_and_by_site(fits):
    ledger = fits.ledger
    assert sum(bar.size for bar in by_axis(ledger).bars) == ledger.wire_bytes
    lines = by_line(ledger)
    assert sum(site.size for site in lines.sites) == ledger.wire_bytes == lines.whole
    assert sum(site.times for site in lines.sites) == ledger.executions
    grid = sites(ledger)
    assert sum(row[2].sort for row in grid.rows) == ledger.executions
    assert sum(row[5].sort for row in grid.rows) == ledger.wire_bytes
    dearest = lines.sites[0]
    assert dearest.place.startswith("tests/report/step.py:") and dearest.text in {
        'hidden = jax.nn.gelu((x * params["scale"]) @ params["up"])',
        'return ((hidden @ params["down"]) ** 2).mean()',
    }
    assert all("over" in words for _, words in dearest.details)


def test_a_ledger_without_collectives():
    empty = sx.Ledger.from_json({"mesh_axes": {"tp": 2}, "rows": [], "notes": [], "warnings": []})
    assert ledger_section(empty).blocks == (Words(("none: no device sends anything",), "good"),)


def test_differences(fits, refused, layout):
    section = shown_as(sx.diff(refused, fits))
    numbers, other = section.blocks
    assert [row[0].text for row in numbers.rows][:2] == ["arguments per device", "peak per device"]
    assert other.title == "What else differs" and len(other.blocks[0].rows) == len(sx.diff(refused, fits).changes)
    same = shown_as(sx.diff(fits, fits))
    assert same.lead == "nothing differs" and len(same.blocks) == 1
    moved = layout.diff(layout.on("dp=1,fsdp=8,tp=1"))
    assert shown_as(moved).title == "Layouts: mesh dp=2,fsdp=2,tp=2 → dp=1,fsdp=8,tp=1"
    assert shown_as(layout.diff(layout)).blocks == (Words(("no leaf differs",), "good"),)


def matmul(x, y):
    return x @ y


def test_a_check(layout):
    x, y = (jax.ShapeDtypeStruct((64, 64), "float32") for _ in range(2))
    clear = check(matmul, x, y, mesh="dp=2,tp=2", in_specs=(jax.P("dp"), jax.P(None, "tp")))
    assert shown_as(clear).blocks[0] == Verdict("good", "Clear", "there is one way to do everything")
    doubtful = check(matmul, x, y, mesh="dp=2,tp=2", in_specs=(jax.P("dp", "tp"), jax.P("tp", "dp")))
    section = shown_as(doubtful)
    assert section.title == "matmul on mesh dp=2,tp=2"
    assert section.blocks[0] == Verdict("warn", "Not clear", "2 places are ambiguous")
    (row,) = subsection(section, "Ambiguous").blocks[0].rows
    (site,) = {(site.place, site.operation, site.why) for site in doubtful.ambiguous}
    assert (row[0].text, row[1].text, row[3].text) == site and site[0].startswith("test_sections.py:")
    stats = {stat.label: stat.text for stat in blocks(section, Stats)[0].stats}
    assert stats["sent by each device"] == show_bytes(doubtful.ledger.wire_bytes)
    assert blocks(section, Words)[-1].lines == (doubtful.how_far,)


def test_errors_show_every_offender_and_only_the_facts_there_are():
    offences = [Offence("a", "is wrong", shape=(2, 3)), Offence("b", "is worse", remedy="another")]
    section = error_section(LayoutError("two problems", offences, "look again"))
    verdict, grid, remedy = section.blocks
    assert (verdict.word, verdict.reason) == ("2 problems", "two problems")
    assert [column.name for column in grid.columns] == ["where", "problem", "shape", "would work"]
    assert [[cell.text for cell in row] for row in grid.rows] == [
        ["a", "is wrong", "(2, 3)", ""],
        ["b", "is worse", "", "another"],
    ]
    assert remedy == Words(("look again",))
    assert error_section(LayoutError("alone")).blocks == (Verdict("bad", "Error", "alone"),)


def test_everything_has_a_form(fits, layout):
    mesh = sx.make_mesh("dp=2,tp=4")
    sharding = jax.NamedSharding(mesh, jax.P("dp"))
    assert isinstance(shown_as(mesh), Section) and len(shown_as(mesh).blocks) == 2
    assert len(shown_as(sx.MeshSpec.of("dp=2")).blocks) == 1
    assert isinstance(shown_as(sharding), Pictures) and isinstance(shown_as(sx.draw(mesh)), Pictures)
    assert isinstance(shown_as(jax.numpy.ones(3)), Pictures)
    assert isinstance(shown_as(layout.analysis()), Section) and isinstance(shown_as(fits.ledger), Section)
    assert shown_as(fits.estimate) == Grid.of(fits.estimate.table())  # whatever has a table
    assert shown_as(3) == Words(("3",))
    found = shown_as(sx.lint({"w": jax.ShapeDtypeStruct((8,), "float32")}, [("ww", ["tp"])], "tp=2"))
    assert found.title == "Rules: 2 problems" and {row[0].text for row in found.blocks[0].rows} >= {"unused"}


def test_a_grid_has_a_cell_under_every_column():
    with pytest.raises(ValueError, match="grid 'sizes': a row of 1 cells under 2 columns"):
        Grid("sizes", (Column("a"), Column("b")), ((Cell("1"),),))


def test_charts_of_heights_and_of_points():
    chart = Chart.of("t", {"a": [3.0, 2.0], "b": [(10, 3.0)]})
    assert [line.points for line in chart.lines] == [((0, 3.0), (1, 2.0)), ((10, 3.0),)]


def test_code_around_a_line(tmp_path):
    file = tmp_path / "a.py"
    file.write_text("\n\n    def f():\n\treturn 1\n\n\nx = 2\n")
    assert code_around(str(file), 3) == ((3, "def f():"), (4, "return 1"))
    assert code_around(str(file), 99) == code_around("", 1) == code_around(str(tmp_path / "b.py"), 1) == ()
    assert short_file(str(file)) == f"{tmp_path.name}/a.py"
    file.write_text("changed = 1\n")  # a report of an edited file shows the file as it is now
    assert code_around(str(file), 1) == ((1, "changed = 1"),)


def test_code_of_another_function_is_not_shown(tmp_path):
    file = tmp_path / "model.py"
    row = {"op": "all-reduce", "axes": ["tp"], "file": str(file), "line": 2, "function": "Model.loss"}

    def lines(source):
        file.write_text(source)
        rows = [Collective(row["op"], ("tp",), 1, 8, 8, "f32", "partitioner", "forward", *list(row.values())[2:])]
        return by_line(sx.Ledger(tuple(rows), (("tp", 2),))).sites[0].text

    assert lines("def loss(x):\n    return x.sum()\n") == "return x.sum()"
    assert lines("def other(x):\n    return x.sum()\n") == ""
    assert lines("def loss(x:\n    return\n") == ""  # someone is writing it


def test_code_sites_are_limited_and_say_so(fits):
    (lines,) = blocks(ledger_section(fits.ledger), CodeSites)
    assert lines.most == 8 and lines.unit == "sent by each device"


def test_every_leaf_is_listed_once_more_only_where_some_are_alike():
    leaf = jax.ShapeDtypeStruct((4, 4), "float32")
    for tree, listed in (({"up": leaf, "down": leaf}, [2]), ({"layers": [leaf, leaf]}, [1, 2])):
        section = layout_section(sx.layout(tree, [(".*", None)], "tp=2"))
        named = [part for part in section.blocks if isinstance(part, Section) and "lea" in part.title.lower()]
        assert [len(part.blocks[0].rows) for part in named] == listed


def test_very_many_leaves_keep_the_largest_and_say_how_many_there_are():
    tree = {f"w{n}": jax.ShapeDtypeStruct((n + 1, 4), "float32") for n in range(2100)}
    leaves = subsection(layout_section(sx.layout(tree, [(".*", None)], "tp=2")), "Leaves").blocks[0]
    assert (len(leaves.rows), leaves.total) == (2000, 2100)
    assert leaves.rows[0][0].text == "w2099" and leaves.rows[-1][0].text == "w100"


def test_what_is_not_as_it_was_meant_to_be_is_listed_with_its_costs(fits):
    lost = tuple(LostDonation(f"p['layers'][{n}]['w']", 1024) for n in range(3)) + (LostDonation("p['b']", 8192),)
    moved = NotAsAsked("result['x']", (8, 4), jax.P("dp"), jax.P(), 64)
    section = proof_section(replace(fits, lost_donations=lost, not_as_asked=(moved,)))
    asked, donations = blocks(subsection(section, "Not as it was meant to be"), Grid)
    assert [[cell.text for cell in row] for row in asked.rows] == [["result['x']", "[8,4]", "P('dp')", "P()", "64 B"]]
    assert [[cell.text for cell in row] for row in donations.rows] == [
        ["p['b']", "1", "8 KiB"],
        ["p['layers'][*]['w']", "3", "3 KiB"],
    ]
    assert donations.notes == ("11 KiB per device are held twice",)
