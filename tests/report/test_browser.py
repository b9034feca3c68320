"""The page in a real browser: no message on its console, no request, tables that sort, nothing wider than the window."""

import html
import json
import re
import shutil
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import count

import pytest

import shardax as sx
from shardax.report.html import page
from shardax.report.values import Cell, Chart, Column, Grid, Words

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (apt-get install chromium)")

FLAGS = [
    "--headless",
    "--no-sandbox",  # the tests of a container run as root
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # what the browser asks of its own is not our matter
    "--virtual-time-budget=2000",
    "--enable-logging=stderr",
]


class Visit:
    """A page as the browser left it, what its console said, and what was asked of the server."""

    def __init__(self, dom, console, requests):
        self.dom, self.console, self.requests = dom, console, requests

    @property
    def result(self):
        """What a script of ours wrote into the page."""
        found = re.search(r'<output id="result">(.*?)</output>', self.dom, re.S)
        assert found, self.console
        return json.loads(html.unescape(found.group(1)))


@pytest.fixture(scope="module")
def visit(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    profile = tmp_path_factory.mktemp("profile")
    asked = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format, *args):
            asked.append(self.path)

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()

    numbers = count()

    def run(text, script="", flags=()):
        asked.clear()
        name = f"page-{next(numbers)}.html"  # a new one each time: browsers remember
        ours = f"<script>{script}</script></body>"
        (folder / name).write_text(text.replace("</body>", ours) if script else text, encoding="utf-8")
        url = f"http://127.0.0.1:{server.server_port}/{name}"
        out = subprocess.run(
            [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", *flags, "--dump-dom", url],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert out.returncode == 0, out.stderr[-2000:]
        return Visit(out.stdout, re.findall(r"CONSOLE[^\n]*", out.stderr), list(asked))

    yield run
    server.shutdown()
    server.server_close()


RESULT = """
const output = document.createElement("output");
output.id = "result";
output.textContent = JSON.stringify(%s);
document.body.append(output);
"""


@pytest.fixture
def everything(fits, refused, layout, adapted):
    losses = Chart.of("Training", {"one process": [4.0, 3.0, 2.5], "two": [4.0, 3.0, 2.5]}, "step", "loss")
    mesh = sx.make_mesh("dp=2,tp=4")
    return page(layout, adapted, fits, refused, fits.ledger, sx.diff(refused, fits), mesh, losses, title="Everything")


def test_it_opens_without_a_message_or_a_request(visit, everything):
    found = visit(everything, RESULT % "performance.getEntriesByType('resource').map(entry => entry.name)")
    assert found.console == []
    assert len(found.requests) == 1 and found.requests[0].startswith("/page-")
    assert found.result == []
    assert '<body class="shardax page live">' in found.dom and "<title>Everything</title>" in found.dom


def test_a_bad_page_is_found_out(visit):
    """The test above can fail: what it looks for is seen where it is."""
    bad = page("x").replace("</main>", '<img src="/picture.png"><script>console.log("said"); gone()</script></main>')
    found = visit(bad)
    assert any("said" in line for line in found.console) and any(
        "gone is not defined" in line for line in found.console
    )
    assert any("Content Security Policy" in line for line in found.console) and len(found.requests) == 1
    allowed = re.sub(r"<meta http-equiv[^>]*>", "", bad)
    assert "/picture.png" in visit(allowed).requests


SORTING = """
const grid = document.querySelector(".grid"), heads = [...grid.querySelectorAll("th")];
const shown = () => [...grid.querySelectorAll("tbody tr")].filter(row => row.offsetHeight).map(row => row.cells[0].textContent);
const click = (column) => { heads[column].querySelector("button").click(); return [heads[column].getAttribute("aria-sort"), shown()]; };
const tools = grid.nextElementSibling, search = tools.querySelector("input"), all = tools.querySelector("button");
const found = { first: shown(), down: click(1), up: click(1), names: click(0), back: click(0) };
found.others = heads[1].getAttribute("aria-sort");
all.click(); found.all = [shown().length, all.textContent];
all.click(); found.fewer = [shown().length, all.textContent];
search.value = "row 2 even"; search.dispatchEvent(new Event("input")); found.search = shown();
search.value = ""; search.dispatchEvent(new Event("input")); found.cleared = shown().length;
"""


def test_tables_sort_show_all_and_search(visit):
    sizes = [3, 200, 10, 1000, 40, 7, *range(100, 118)]
    rows = tuple(
        (Cell(f"row {n}"), Cell(f"{size} B", sort=size), Cell("even" if n % 2 == 0 else "odd"))
        for n, size in enumerate(sizes)
    )
    columns = Column("name"), Column("size", right=True), Column("kind")
    found = visit(page(Grid("", columns, rows, most=4)), SORTING + RESULT % "found")
    assert found.console == []
    got = found.result
    assert got["first"] == ["row 0", "row 1", "row 2", "row 3"]
    by_size = [f"row {n}" for n in sorted(range(len(sizes)), key=lambda n: -sizes[n])]
    assert got["down"] == ["descending", by_size[:4]]  # numbers: the largest first, as numbers and not as text
    assert got["up"] == ["ascending", by_size[::-1][:4]]
    assert got["names"] == ["ascending", ["row 0", "row 1", "row 2", "row 3"]]  # row 2 before row 10
    assert got["back"] == ["descending", ["row 23", "row 22", "row 21", "row 20"]]
    assert got["others"] is None
    assert got["all"] == [24, "show fewer"] and got["fewer"] == [4, "show all 24 rows"]
    alike = [f"row {n}" for n, size in enumerate(sizes) if n % 2 == 0 and "2" in f"row {n}{size} B"]
    assert sorted(got["search"]) == sorted(alike) and got["cleared"] == 4


RECOLOUR = """
const figure = document.querySelector("figure.mesh");
const state = () => [...figure.querySelectorAll("g[data-at]")].map(
  seat => [seat.dataset.at, seat.querySelector("rect").getAttribute("fill"), seat.querySelector("text").textContent]);
const pressed = () => [figure.querySelector('[aria-pressed="true"]').textContent, figure.querySelector(".way b").textContent];
const found = { before: [pressed(), state()] };
figure.querySelector(".choices button").click();
found.after = [pressed(), state()];
"""


def test_meshes_are_coloured_along_any_axis(visit):
    mesh = sx.make_mesh("dp=2,tp=4")
    found = visit(page(mesh), RECOLOUR + RESULT % "found").result
    for moment, axis in (("before", "tp"), ("after", "dp")):
        pressed, seats = found[moment]
        drawing = sx.draw(mesh).coloured_by(axis)
        fills = [colours[0] for colours in json.loads(drawing.colours())[axis]]
        assert pressed == [axis, axis] and len(seats) == 8
        for at, fill, label in seats:
            place = int(at.split(",")[drawing.spec.names.index(axis)])
            assert (fill, label) == (fills[place], str(place))


FRAMES = """
const widths = [1200, 800, 400, 320], found = {};
Promise.all(widths.map(width => new Promise(done => {
  const frame = document.createElement("iframe");
  frame.width = width; frame.height = 900; frame.srcdoc = document.querySelector("#page").textContent;
  frame.onload = () => {
    const inner = frame.contentDocument, root = inner.documentElement;
    const scrolled = node => node.closest(".grid, .scroll, pre, svg");
    const wide = [...inner.querySelectorAll("body *")].filter(
      node => !scrolled(node) && node.getBoundingClientRect().right > width + 1 && node.offsetHeight > 0);
    found[width] = [root.scrollWidth, wide.map(node => node.outerHTML.slice(0, 90))];
    done();
  };
  document.body.append(frame);
}))).then(() => { RESULT });
"""


def test_nothing_is_wider_than_the_window(visit, everything):
    escaped = everything.replace("</script>", "<\\/script>")
    wrapper = f'<!doctype html><body><script type="text/plain" id="page">{escaped}</script></body>'
    script = FRAMES.replace("RESULT", RESULT % "found")
    found = visit(wrapper.replace("</body>", f"<script>{script}</script></body>"), flags=["--virtual-time-budget=8000"])
    assert found.result.keys() == {"1200", "800", "400", "320"}
    for width, (scrolls, wide) in found.result.items():
        assert (width, wide) == (width, [])
        assert scrolls <= int(width)


CONTRAST = """
const channel = c => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d");
const rgb = colour => { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); return [...canvas.getImageData(0, 0, 1, 1).data]; };
const light = ([r, g, b]) => 0.2126 * channel(r / 255) + 0.7152 * channel(g / 255) + 0.0722 * channel(b / 255);
const paper = getComputedStyle(document.body).backgroundColor;
const contrast = node => {
  rgb(paper);  // what is mixed with transparent is drawn over the paper
  const [one, other] = [light(rgb(getComputedStyle(node).color)), light(rgb(paper))];
  return (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
};
const found = { dark: matchMedia("(prefers-color-scheme: dark)").matches, paper: rgb(paper), poor: [], seen: 0 };
for (const node of document.querySelectorAll("h1, h2, p, a, th, td, dt, dd, li, code, figcaption, .good, .warn, .bad, footer")) {
  found.seen += 1;
  if (contrast(node) < 4.5) found.poor.push([node.outerHTML.slice(0, 80), contrast(node)]);
}
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_words_can_be_read(visit, everything, dark):
    tones = page(*(Words((tone,), tone) for tone in ("good", "warn", "bad", "quiet")))
    words = re.search(r"<main>(.*)</main>", tones, re.S).group(1)
    text = everything.replace("</main>", f"{words}</main>")
    flags = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []
    found = visit(text, CONTRAST + RESULT % "found", flags).result
    assert found["dark"] is dark and (found["paper"][0] < 60) is dark
    assert found["seen"] > 100 and found["poor"] == []


def test_without_our_script_every_row_is_seen_and_no_button_is_dead(visit, everything):
    silent = re.sub(r"<script>.*</script>", "", everything, flags=re.S)
    seen = """[[...document.querySelectorAll("tr")].filter(row => !row.offsetHeight).length,
        [...document.querySelectorAll("button")].filter(button => button.offsetHeight).length]"""
    assert visit(silent, RESULT % seen).result == [0, 0]


def test_it_prints(visit, everything, tmp_path):
    visit(everything, flags=["--no-pdf-header-footer", f"--print-to-pdf={tmp_path}/page.pdf"])
    printed = (tmp_path / "page.pdf").read_bytes()
    assert printed.startswith(b"%PDF") and 3 <= len(re.findall(rb"/Type\s*/Page\b", printed)) <= 30


def test_on_paper_a_table_says_how_many_rows_it_leaves_out(visit):
    rows = tuple((Cell(f"row {n}"),) for n in range(60))
    text = page(Grid("Short", (Column("name"),), rows, most=4), Grid("Whole", (Column("name"),), rows[:4], most=4))
    seen = "[...document.querySelectorAll('.rest')].map(each => [each.textContent, each.offsetHeight > 0])"
    assert visit(text, RESULT % seen).result == [["… and 56 more rows", False]]  # a screen has a button
    on_paper = text.replace("@media print", "@media all")
    assert visit(on_paper, RESULT % seen).result == [["… and 56 more rows", True]]
    asked = "document.querySelector('.tools button').click();"
    assert visit(on_paper, asked + RESULT % seen).result == [["… and 56 more rows", False]]
