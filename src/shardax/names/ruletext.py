"""Ordered rules as people write them: a list of pairs, a mapping, YAML text or the path of a YAML file.

One reader for path rules and logical-axis rules; what the pairs mean is theirs to say.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardax.errors import Offence, RuleError, plural

Pairs = list[tuple[Any, Any]]


def read_document(source: Any, key: str) -> tuple[Any, Mapping[str, Any]]:
    """The rules in a source, and the document they stand in.

    Text is YAML, or the name of a file of it. A document may hold the rules under `key` beside other settings, as
    MaxText's configurations do.

    >>> read_document("logical_axis_rules: [[mlp, tensor]]", "logical_axis_rules")[0]
    [['mlp', 'tensor']]
    """
    if isinstance(source, os.PathLike):
        source = _parse_yaml(Path(source).read_text(), str(source))  # pyright: ignore[reportUnknownArgumentType]
    elif isinstance(source, str):
        is_name = "\n" not in source and source.strip().endswith((".yml", ".yaml", ".json"))
        source = _parse_yaml(Path(source).read_text() if is_name else source, source if is_name else "the text")
    if isinstance(source, Mapping) and key in source:
        document: Mapping[str, Any] = source
        return document[key], document
    return source, {}


def read_pairs(source: Any, what: str) -> Pairs:
    """The rules of a list or mapping as pairs, in their order; everything that is no pair is listed.

    >>> read_pairs({"kernel": "tp"}, "rules"), read_pairs([["kernel", "tp"]], "rules")
    ([('kernel', 'tp')], [('kernel', 'tp')])
    """
    if isinstance(source, Mapping):
        return list(source.items())
    if isinstance(source, set | frozenset):
        raise RuleError(
            f"{what} have an order, and a set has none: hosts would disagree", remedy="give a list of pairs"
        )
    if isinstance(source, str | bytes) or not isinstance(source, Iterable):
        raise RuleError(f"{what} are a list of pairs or a mapping, not {source!r}")
    entries: list[Any] = list(source)
    offences = [
        Offence(f"rule {place}", f"not a pair: {entry!r}", remedy="(name, target)")
        for place, entry in enumerate(entries)
        if isinstance(entry, str | bytes) or not isinstance(entry, Sequence) or len(entry) != 2
    ]
    if offences:
        raise RuleError(f"{plural(len(offences), 'rule')} cannot be read", offences)
    return [(entry[0], entry[1]) for entry in entries]


def _parse_yaml(text: str, where: str) -> Any:
    try:
        import yaml  # pyright: ignore[reportMissingModuleSource]
    except ImportError:
        raise RuleError(
            "rules as text need PyYAML", remedy="pip install 'shardax[yaml]', or give a list or a mapping"
        ) from None

    class Loader(yaml.SafeLoader):
        """A repeated key is an error: the second would silently replace the first, which is no fallback."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            repeated = [key for place, key in enumerate(keys) if key in keys[:place]]
            if repeated:
                names = ", ".join(map(repr, dict.fromkeys(repeated)))
                raise RuleError(
                    f"{where} repeats the key {names}", remedy="write rules with fallbacks as a list of pairs"
                )
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise RuleError(f"{where} is not YAML: {error}") from None
