"""The page: well-formed, whole in one file, and showing the numbers of the values it was made from."""

import re
from html.parser import HTMLParser

import jax
import pytest

import shardax as sx
from shardax.errors import LayoutError, Offence
from shardax.proving.check import check
from shardax.report.html import fragment, page, write_report
from shardax.report.markup import VOID, Markup, join, tag
from shardax.report.values import Cell, Chart, Column, Grid, Section, Words
from shardax.tables import Table, show_bytes


class Reader(HTMLParser):
    """Elements with their attributes, the text between them, and what is not closed as it was opened."""

    def __init__(self, text):
        super().__init__()
        self.open, self.wrong, self.elements, self.words = [], [], [], []
        self.feed(text)
        self.close()
        self.wrong += [f"{name} is never closed" for name in self.open]

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        names = [name for name, _ in attrs]
        if len(set(names)) != len(names):
            self.wrong.append(f"{tag} has an attribute twice")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"{tag} at {self.getpos()} closes something else")

    def handle_data(self, data):
        if self.open and self.open[-1] not in {"style", "script"}:
            self.words.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", "".join(self.words))


@pytest.fixture(scope="module")
def everything(fits, refused, layout, adapted):
    error = LayoutError("two problems", [Offence("a", "is wrong", remedy="other")], "look again")
    grid = Table("proofs", ("", "cpu:8"), (("peak", "2 MiB"), ("  of which", "1 MiB")), ("cpu:8",), ("a note",))
    losses = Chart.of("Training", {"one process": [4.0, 3.0, 2.5], "two": [4.0, 3.0, 2.5]}, "step", "loss")
    mesh = sx.make_mesh("dp=2,tp=4")
    values = [grid, layout, adapted, fits, refused, fits.ledger, sx.diff(refused, fits), error, mesh, losses, "Words."]
    return page(*values, title="Everything <here>", lead="All & more.")


def test_it_is_well_formed(everything):
    reader = Reader(everything)
    assert not reader.wrong
    assert everything.startswith("<!doctype html>\n<html lang=")
    ids = [attrs["id"] for _, attrs in reader.elements if "id" in attrs]
    assert len(set(ids)) == len(ids)
    links = [attrs["href"] for name, attrs in reader.elements if name == "a"]
    assert links == [f"#{name}" for name in ids] and len(links) == 10


def test_it_is_whole_in_one_file(everything):
    reader = Reader(everything)
    for name, attrs in reader.elements:
        for key in ("src", "href", "srcset", "action", "data", "poster", "xlink:href"):
            assert key not in attrs or attrs[key].startswith(("#", "data:")), (name, attrs)
        assert "url(" not in (attrs.get("style") or "") and not any(key.startswith("on") for key in attrs)
    assert "@import" not in everything and "url(" not in everything
    hosts = set(re.findall(r"https?://[^\s\"'<>]+", everything))
    assert hosts <= {"http://www.w3.org/2000/svg"}, hosts  # the name of SVG, which no one fetches
    policy = [attrs["content"] for name, attrs in reader.elements if attrs.get("http-equiv")]
    assert len(policy) == 1 and policy[0].startswith("default-src 'none';")


def test_it_shows_the_numbers_of_its_values(everything, fits, refused, layout):
    text = Reader(everything).text
    for count in (
        fits.memory.peak,
        fits.memory.hbm,
        fits.ledger.wire_bytes,
        refused.memory.peak,
        -refused.margin,
        layout.bytes_per_device,
    ):
        assert show_bytes(count) in text
    for word in ("ICI (fsdp)", "all-reduce", "reduce-scatter", "params/up", "101 MFLOP", "62 µs", "RESOURCE_EXHAUSTED"):
        assert word in text
    assert "Everything <here>" in text and "All & more." in text and "proofs" in text and "a note" in text
    assert 'hidden = jax.nn.gelu((x * params["scale"]) @ params["up"])' in text  # the line of code itself


def test_cells_sort_by_their_values(fits):
    reader = Reader(page(fits.ledger))
    sent = [float(attrs["data-sort"]) for name, attrs in reader.elements if name == "td" and "share" in attrs["class"]]
    assert sum(sent) == fits.ledger.wire_bytes and sent == sorted(sent, reverse=True)


def test_a_page_is_the_same_each_time(fits):
    assert page(fits) == page(fits)


def test_what_is_written_in_values_is_text_not_html():
    evil = '<script>alert("x")</script>'
    grid = Grid(evil, (Column(evil, code=True),), ((Cell(evil, sort=evil),),), (evil,))
    text = page(grid, Words((evil,)), Section(evil, (Words((evil,)),), evil), title=evil, lead=evil)
    assert text.count("<script>") == 1  # ours
    assert not Reader(text).wrong


def test_markup():
    assert tag("td", "a<b", class_="x y", hidden=False, data_sort=1.5) == '<td class="x y" data-sort="1.5">a&lt;b</td>'
    assert tag("input", type="search") == '<input type="search">'
    assert isinstance(join("a", tag("b")), Markup) and join("<", Markup("<i>")) == "&lt;<i>"


def test_anchors_are_given_once(fits):
    ids = [attrs["id"] for _, attrs in Reader(page(fits, fits)).elements if "id" in attrs]
    assert ids == ["step-on-tpu-v5e-2x4-mesh-dp-2-fsdp-2-tp-2", "step-on-tpu-v5e-2x4-mesh-dp-2-fsdp-2-tp-2-2"]


def test_write_report_makes_its_folder_and_returns_the_place(tmp_path, layout):
    place = write_report(tmp_path / "new" / "index.html", layout, title="Ours")
    assert place == tmp_path / "new" / "index.html" and "<h1>Ours</h1>" in place.read_text(encoding="utf-8")
    assert sx.write_report is write_report


def test_long_grids_keep_all_rows_for_the_script_and_for_paper():
    rows = tuple((Cell(str(n), sort=n),) for n in range(40))
    reader = Reader(page(Grid("", (Column("n"),), rows, most=12, total=99)))
    found = [attrs for name, attrs in reader.elements if name == "tr"]
    assert len(found) == 41 and sum(attrs.get("class") == "more" for attrs in found) == 28
    (box,) = [attrs for name, attrs in reader.elements if attrs.get("class") == "grid"]
    assert box["data-most"] == "12" and "data-search" in box and "the first 40 of 99" in reader.text


# ---- notebooks ------------------------------------------------------------------------------------------------------


def test_values_show_themselves_in_a_notebook(fits, layout):
    x = jax.ShapeDtypeStruct((8, 8), "float32")
    checked = check(lambda x: x @ x, x, mesh="tp=2", in_specs=jax.P("tp"))
    values = fits, layout, fits.ledger, checked, layout.analysis(), layout.diff(layout), sx.diff(fits, fits)
    for value in (*values, sx.lint({"x": x}, [("x", jax.P("tp"))], "tp=2")):
        shown = value._repr_html_()
        assert shown == fragment(value)
        reader = Reader(shown)
        assert not reader.wrong and reader.elements[0][1]["class"] == "shardax"
        assert not {"html", "body", "script"} & {name for name, _ in reader.elements}
        assert not [attrs for _, attrs in reader.elements if "id" in attrs]  # a notebook may show it twice
    assert show_bytes(fits.memory.peak) in Reader(fits._repr_html_()).text
    assert "<details><summary>Every array</summary>" in fits._repr_html_()


def test_styles_stay_inside_the_fragment():
    style = re.search(r"<style>(.*?)</style>", fragment("x"), re.S).group(1)
    without = re.sub(r"/\*.*?\*/", "", style, flags=re.S)
    depth, selector = 0, ""
    for character in without:
        if character == "{":
            if depth == 0:
                assert selector.strip().startswith((".shardax", "@media", "html:has(> .shardax.page)")), selector
            depth += 1
        elif character == "}":
            depth -= 1
            selector = ""
        elif depth == 0:
            selector += character
    assert depth == 0


def test_arrays_draw_themselves_in_a_notebook():
    mesh = sx.make_mesh("dp=2,tp=4")
    assert sx.draw(mesh)._repr_html_().startswith("<svg")
    assert sx.draw(jax.NamedSharding(mesh, jax.P("dp")), (4, 4))._repr_html_().startswith("<svg")
