"""The pages of the documentation: every `pycon` block runs, page by page, and prints what the page says."""

import doctest
import re
from pathlib import Path

import pytest

import shardax as sx

PAGES = Path(__file__).parents[1] / "docs"
SESSIONS = {
    page.name: blocks
    for page in sorted(PAGES.glob("*.md"))
    if (blocks := re.findall(r"```pycon\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL))
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", SESSIONS)
def test_examples_print_what_the_page_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what a page saves stays out of the checkout
    test = doctest.DocTestParser().get_doctest("\n".join(SESSIONS[page]), {}, page, None, 0)
    runner, report = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS), []
    runner.run(test, out=report.append)
    sx.PartitionAxis.clear_registered_axes()  # pages that register axes do so for themselves
    assert runner.failures == 0, "".join(report)


def test_the_pages_that_promise_examples_have_them():
    assert {"axes.md", "rules.md", "layout.md"} <= set(SESSIONS)
