"""Ordered rules as people write them: a list of pairs, a mapping, YAML text or the path of a YAML file.

One reader for path rules and logical-axis rules; what the pairs mean is theirs to say.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardax.errors import Offence, RuleError, did_you_mean, plural

Pairs = list[tuple[Any, Any]]


def read_document(source: Any, key: str) -> tuple[Any, Mapping[str, Any]]:
    """The rules in a source, and the rest of the document they stand in.

    Text is YAML; a document may hold the rules under `key`, beside other settings, as MaxText's configurations do.

    >>> read_document("logical_axis_rules: [['mlp', 'tensor']]", "logical_axis_rules")[0]
    [['mlp', 'tensor']]
    """
    if isinstance(source, os.PathLike):
        source = _parse_yaml(Path(source).read_text(), str(source))  # pyright: ignore[reportUnknownArgumentType]
    elif isinstance(source, str):
        one_line = "\n" not in source and source.strip().endswith((".yml", ".yaml", ".json"))
        source = _parse_yaml(Path(source).read_text(), source) if one_line else _parse_yaml(source, "the text")
    else:
        return source, {}
    if not isinstance(source, Mapping):
        return source, {}
    document: Mapping[str, Any] = source
    if key in document:
        return document[key], document
    close = did_you_mean(key, [name for name in document if "rule" in str(name)])
    if close:
        raise RuleError(f"no {key!r} in the document{close}")
    return document, {}


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
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RuleError(f"{where} is not YAML: {error}") from None
