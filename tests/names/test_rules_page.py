"""The page on rules: its examples run."""

import doctest
import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "rules.md").read_text(encoding="utf-8")


def test_examples_print_what_the_page_says():
    session = "\n".join(re.findall(r"```pycon\n(.*?)```", PAGE, flags=re.DOTALL))
    test = doctest.DocTestParser().get_doctest(session, {}, "docs/rules.md", None, 0)
    assert len(test.examples) > 15
    runner, report = doctest.DocTestRunner(verbose=False), []
    runner.run(test, out=report.append)
    assert runner.failures == 0, "".join(report)
