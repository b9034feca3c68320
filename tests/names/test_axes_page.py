"""The page on semantic axes: its table of fields is the real one."""

import re
from pathlib import Path

from shardax.names.axes import FIELDS

PAGE = (Path(__file__).parents[2] / "docs" / "axes.md").read_text(encoding="utf-8")


def test_every_field_is_in_the_table():
    rows = [line for line in PAGE.split("## The fields")[1].split("##")[0].splitlines() if line.startswith("| `")]
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(listed) == sorted(FIELDS)
