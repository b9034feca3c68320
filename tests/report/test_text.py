"""The same blocks in a terminal: exact text of small ones, no line wider than the screen, colour only where there is."""

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

import shardax as sx
from shardax.errors import LayoutError, Offence
from shardax.report.grid_text import cut, cut_apart, fit_columns
from shardax.report.text import print_report, renderable
from shardax.report.values import (
    Bar,
    Bars,
    Cell,
    Chart,
    Column,
    Grid,
    Part,
    Roof,
    Roofline,
    Section,
    Stat,
    Stats,
    Words,
)


def printed(*values, width=80, colour=None):
    console = Console(width=width, record=True, file=io.StringIO(), color_system=colour, force_terminal=bool(colour))
    print_report(*values, console=console)
    return console.export_text(styles=bool(colour))


def test_a_grid():
    columns = (Column("path", code=True, cut="middle", least=6), Column("bytes", right=True))
    grid = Grid("sizes", columns, ((Cell("a/b"), Cell("8 B")), (Cell("c"), Cell("16 KiB"))), ("a note",))
    assert printed(grid) == "sizes\npath   bytes\na/b      8 B\nc     16 KiB\na note\n"


def test_a_grid_shows_its_first_rows_and_says_what_is_left():
    grid = Grid("", (Column("n"),), tuple((Cell(str(n)),) for n in range(5)), most=2)
    assert printed(grid) == "n\n0\n1\n… and 3 more\n"
    assert printed(Grid("", (Column("n"),), ((Cell("0"),),), total=9)) == "n\n0\n… and 8 more\n"


COLUMNS = (
    Column("path", keep=10, cut="middle", least=8),
    Column("why", keep=6, cut="wrap", least=10),
    Column("rule", keep=1, least=6),
    Column("bytes", right=True, keep=8),
)
ROW = ((Cell("layers/attention/kernel"), Cell("does not divide by four"), Cell("rule 0 'kernel'"), Cell("64 KiB")),)


@pytest.mark.parametrize(
    ("room", "widths"),
    [(80, [23, 23, 15, 6]), (60, [17, 16, 15, 6]), (40, [9, 10, 9, 6]), (30, [10, 10, 0, 6]), (16, [8, 0, 0, 6]), (4, [8, 0, 0, 0])],
)  # fmt: skip
def test_columns_are_cut_and_then_leave(room, widths):
    assert fit_columns(COLUMNS, ROW, room) == widths


def test_words_that_matter_are_wrapped_not_cut():
    assert printed(Grid("", COLUMNS, ROW), width=30) == (
        "path        why          bytes\nlaye…ernel  does not    64 KiB\n            divide by\n            four\n"
    )


def test_an_empty_column_is_left_out():
    assert printed(Grid("", (Column("a"), Column("b")), ((Cell("1"), Cell("")),))) == "a\n1\n"


def test_cut():
    assert cut("abcdef", 6) == "abcdef" and cut("abcdef", 4) == "abc…" and cut("abcdef", 1) == "…"
    assert cut("abcdefghij", 5, "middle") == "ab…ij"


def test_paths_that_are_cut_still_differ():
    moments = [
        f"optimizer/opt_state/0/{kind}/blocks/*/{part}/kernel" for kind in ("mu", "nu") for part in ("up", "down")
    ]
    for width in (16, 20, 28, 40):
        shown = cut_apart(["model/up", *moments], width)
        assert len(set(shown.values())) == 5 and max(map(len, shown.values())) <= width
        assert shown["model/up"] == "model/up"
        assert all(found.endswith(path[-7:]) for path, found in shown.items())
    rows = tuple((Cell(path), Cell("x" * 20)) for path in moments)
    lines = [
        line.split()[0]
        for line in printed(Grid("", (Column("path", cut="middle"), Column("rule")), rows), width=50).splitlines()[1:]
    ]
    assert len(set(lines)) == 4


def test_bars_without_colour_are_told_apart_by_their_marks():
    bars = Bars("", (Bar("a", (Part("x", 1, "1 B", 0), Part("y", 1, "1 B", 1)), "2 B"), Bar("bb", (Part("x", 1, "1 B", 0),), "1 B")), limit=4, limit_text="device 4 B", legend=True)  # fmt: skip
    text = printed(bars, width=40)
    lines = text.splitlines()
    room = 40 - 2 - 3 - 4
    assert lines[0] == "a   " + "█" * 8 + "▓" * 8 + "·" * (room - 16) + "  2 B"
    assert lines[1].startswith("bb  ████████·")
    assert lines[2].endswith("device 4 B ┘") and lines[3] == "█ x   ▓ y"
    coloured = printed(bars, width=40, colour="truecolor")
    assert "▓" not in coloured and "\x1b[38;2;" in coloured


def test_a_bar_is_as_long_as_its_size_and_what_is_there_is_seen():
    bars = Bars("", (Bar("a", (Part("big", 1000, "", 0), Part("tiny", 0.001, "", 1)), ""),))
    (line,) = printed(bars, width=30).splitlines()
    assert line.count("█") + line.count("▓") == 30 - 1 - 4 and line.count("▓") <= 1
    hair = Bars("", (Bar("a", (Part("hair", 1, "", 0),), "1"),), limit=1e9)
    assert printed(hair, width=30).splitlines()[0].count("█") == 1


def test_stats_words_chart_and_roofline():
    assert printed(Stats((Stat("peak", "2 MiB", "8 devices"), Stat("bound by", "HBM")))) == (
        "peak      2 MiB  8 devices\nbound by  HBM\n"
    )
    assert printed(Words(("[not markup] stays",)), width=20) == "[not markup] stays\n"
    chart = printed(Chart.of("loss", {"a": [4.0, 2.0, 1.0, 1.0], "none": []}, "step", "loss"), width=40)
    assert chart.splitlines()[0] == "loss" and "█" in chart and chart.splitlines()[1].endswith("4 → 1")
    assert "none  no points" in chart and "loss by step" in chart
    roof = Roofline(1e12, (Roof("HBM", 2.0**30, 100.0, 1.07e11, 0.001),), "HBM")
    assert printed(roof) == "peak 1 TFLOP/s, bound by HBM\nHBM: 1 GiB/s × 100 FLOP per byte = 107 GFLOP/s, 1 ms\n"


def test_sections_are_titled_spaced_and_leave_out_what_is_for_pages():
    inner = Section("inner", (Words(("b",)),), "lead")
    page = Section("page", (Words(("c",)),), page_only=True)
    assert printed(Section("top", (Words(("a",)), inner, page))) == "top\n\na\n\ninner\nlead\nb\n"
    assert printed(page) == "page\n\nc\n"  # asked for by itself


def test_several_values_have_air_between_them():
    assert printed("a", "b") == "a\n\nb\n"


def every(fits, refused, layout, adapted):
    error = LayoutError("two", [Offence("a" * 40, "is wrong " * 12, remedy="other"), Offence("b", "no")], "look again")
    return [
        fits,
        refused,
        layout,
        adapted,
        fits.ledger,
        sx.diff(refused, fits),
        layout.analysis(),
        error,
        sx.make_mesh("dp=2,tp=4"),
        sx.draw(sx.make_mesh("dp=2,tp=4")),
        sx.draw(layout.mesh),
        Chart.of("t", {"a": range(90)}, "x", "y"),
    ]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_the_terminal(width, fits, refused, layout, adapted):
    for value in every(fits, refused, layout, adapted):
        wide = [line for line in printed(value, width=width).splitlines() if cell_len(line) > width]
        assert not wide, (type(value), wide)


def test_wide_drawings_leave_out_their_middle():
    mesh = sx.MeshSpec.of("dp=2,tp=16").abstract()
    from shardax.report.draw import draw_spec

    drawing = draw_spec(["dp", "tp"], mesh, (2, 16))
    text = printed(drawing, width=60)
    assert "…" in text and all(len(line) <= 60 for line in text.splitlines()[1:])
    assert " 31 " in text


def test_the_numbers_of_a_proof_are_on_the_screen(fits, refused):
    text = printed(fits, width=100)
    for number in ("2 MiB of 15.8 GiB", "62 µs", "3.7 MiB", "101 MFLOP", "9 collectives a step"):
        assert number in text
    assert 'hidden = jax.nn.gelu((x * params["scale"]) @ params["up"])' in text
    assert "Does not fit  80 GiB of 15.8 GiB per device, 64.3 GiB too much" in printed(refused)


def test_rich_prints_a_renderable(layout):
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(renderable(layout))
    assert console.export_text().startswith("Layout on mesh dp=2,fsdp=2,tp=2\n")


def test_values_show_themselves_where_rich_prints_them(fits, layout):
    for value in (fits, fits.ledger, layout, layout.analysis(), layout.diff(layout), sx.diff(fits, fits)):
        console = Console(width=80, record=True, file=io.StringIO())
        console.print(value)
        assert console.export_text() == printed(value) != f"{value}\n"
