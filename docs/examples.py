"""griffe extension: docstrings and signatures as their reader wants them.

Examples of docstrings become code: to Markdown, `>>>` would be three quotations in each other. Private fields of a
dataclass are left out of its signature, and fields that a function of ours makes show the default that it gives.
"""

import ast
import re
from typing import Any

import griffe

_SESSION = re.compile(r"^( *)>>> .*(?:\n\1.*\S.*)*", re.MULTILINE)


def fenced(text: str) -> str:
    """The text with every doctest session, which ends at an empty line, between fences."""
    return _SESSION.sub(lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```", text)


def default_of(call: str) -> str | None:
    """The default of a field of `PartitionAxis`, as `_axis` gives it; None for what is no such field.

    >>> default_of('_axis(TENSOR_PARALLEL, "tp")'), default_of('_axis(HEAD, follows="x")'), default_of("_axis(HEAD)")
    ("'tp'", 'NOT_GIVEN', 'None')
    """
    if not call.startswith("_axis("):
        return None
    made = ast.parse(call, mode="eval").body
    assert isinstance(made, ast.Call)
    follows = any(keyword.arg == "follows" for keyword in made.keywords)
    return "NOT_GIVEN" if follows else ast.unparse(made.args[1]) if len(made.args) > 1 else "None"


class Examples(griffe.Extension):
    """Fences the examples of every docstring that is read, and tidies the fields of dataclasses."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        if (default := default_of(str(attr.value))) is not None:
            attr.value = default

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        if "dataclass" in cls.labels:
            for name in [name for name, member in cls.members.items() if name.startswith("_") and member.is_attribute]:
                if name != "_":  # the mark of what is given by name only
                    cls.del_member(name)
