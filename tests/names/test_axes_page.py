"""The page on semantic axes: its examples run, and its table of fields is the real one."""

import doctest
import re
from pathlib import Path

import shardax as sx
from shardax.names.axes import FIELDS

PAGE = (Path(__file__).parents[2] / "docs" / "axes.md").read_text(encoding="utf-8")


def test_examples_print_what_the_page_says():
    session = "\n".join(re.findall(r"```pycon\n(.*?)```", PAGE, flags=re.DOTALL))
    test = doctest.DocTestParser().get_doctest(session, {}, "docs/axes.md", None, 0)
    assert len(test.examples) > 15
    runner, report = doctest.DocTestRunner(verbose=False), []
    runner.run(test, out=report.append)
    sx.PartitionAxis.clear_registered_axes()
    assert runner.failures == 0, "".join(report)


def test_every_field_is_in_the_table():
    rows = [line for line in PAGE.split("## The fields")[1].split("##")[0].splitlines() if line.startswith("| `")]
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(listed) == sorted(FIELDS)
