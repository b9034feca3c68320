"""griffe extension: the examples of docstrings as code. To Markdown, `>>>` would be three quotations in each other."""

import re
from typing import Any

import griffe

_SESSION = re.compile(r"^( *)>>> .*(?:\n\1.*\S.*)*", re.MULTILINE)


def fenced(text: str) -> str:
    """The text with every doctest session, which ends at an empty line, between fences."""
    return _SESSION.sub(lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```", text)


class Examples(griffe.Extension):
    """Fences the examples of every docstring that is read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
