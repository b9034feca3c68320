"""`agree`: is a value the same in all processes? Before first use, when a difference is an error and not yet a hang."""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping

from shardax.cluster.barrier import barrier, check_wait
from shardax.cluster.fields import Fields, digest, fields_of
from shardax.cluster.kv import job_store
from shardax.cluster.ranks import group_ranks, show_ranks
from shardax.errors import DisagreementError, Offence, plural

SHOWN = 5
"""How many differing fields an error shows."""


def agree(tag: str, value: object, timeout: float = 60.0) -> str:
    """Compare a value over all processes; the same short hash in each, or `DisagreementError` with what differs first.

    The value is a layout, rules, a mesh, a (nested) dict, a dataclass, an array, a text, or a lowered program
    (`jitted.lower(*args)`), which catches other arithmetic, a time or a set's order baked into it. Every process calls
    this with the same `tag`.

    >>> agree("config", {"batch": 32, "seed": 0}) == agree("config", {"seed": 0, "batch": 32})
    True
    """
    check_wait(tag, timeout)
    fields = fields_of(value)
    mine = digest(fields)
    store = job_store()
    if store is None:
        return mine
    store.put(f"agree/{tag}/hash/{store.rank}", mine)
    barrier(f"agree on {tag}", timeout)
    groups = group_ranks(store.by_rank(f"agree/{tag}/hash"))
    if len(groups) > 1 and store.rank in (ranks[0] for _, ranks in groups):
        store.put(f"agree/{tag}/fields/{store.rank}", _pack(fields))
    barrier(f"agreed on {tag}", timeout)  # all have read: the keys can be used again
    if len(groups) > 1:
        said = {rank: _unpack(text) for rank, text in store.by_rank(f"agree/{tag}/fields").items()}
        raise disagreement(tag, [ranks for _, ranks in groups], said)
    return mine


def disagreement(tag: str, groups: list[list[int]], said: Mapping[int, Fields]) -> DisagreementError:
    """The error for groups of ranks, the usual one first, of which the first rank of each has said its fields."""
    usual, many = said[groups[0][0]], groups[0]
    offences: list[Offence] = []
    count = 0
    for ranks in groups[1:]:
        differing = list(_differences(usual, said[ranks[0]]))
        count = max(count, len(differing))
        offences += [
            Offence(f"{show_ranks(ranks)}, {name or tag}", f"{theirs}, but {ours} on {show_ranks(many)}")
            for name, ours, theirs in differing[:SHOWN]
        ]
    odd = sorted(rank for ranks in groups[1:] for rank in ranks)
    more = f"the first of {plural(count, 'differing field')}" if count > SHOWN else ""
    return DisagreementError(f"the processes disagree on {tag!r}: {show_ranks(odd)}", offences, more, odd)


def _differences(usual: Fields, odd: Fields) -> list[tuple[str, str, str]]:
    names = [*usual, *(name for name in odd if name not in usual)]
    return [(name, _show(usual.get(name)), _show(odd.get(name))) for name in names if usual.get(name) != odd.get(name)]


def _show(text: str | None) -> str:
    if text is None:
        return "absent"
    return text.strip() if len(text) <= 160 else f"{text.strip()[:157]}..."


def _pack(fields: Fields) -> str:
    return b64encode(zlib.compress(json.dumps(fields).encode(), 1)).decode()


def _unpack(text: str) -> Fields:
    return json.loads(zlib.decompress(b64decode(text)))
