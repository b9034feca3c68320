"""Do all processes that share a mesh read one stream of batches? Another seed on one of them is silent wrong data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardax.cluster.agree import disagreement
from shardax.cluster.fields import digest, fields_of
from shardax.cluster.ranks import group_ranks
from shardax.data.exchange import open_exchange

PATIENCE = 5.0
"""Seconds to listen for the others. Who comes later hears all who were here, so a difference is always heard by one of
two before it gives a batch, and a process that begins late is no error."""


def check_same_stream(folder: str, members: Sequence[int], mine: Mapping[str, Any]) -> None:
    """Raise a `DisagreementError` with what differs, and where, if the members do not all say the same."""
    exchange = open_exchange(folder, members, PATIENCE)
    if exchange is None:
        return
    said = {rank: fields_of(fields) for rank, fields in exchange.hear(dict(mine)).items()}
    groups = [ranks for _, ranks in group_ranks({rank: digest(fields) for rank, fields in said.items()})]
    if len(groups) > 1:
        raise disagreement("feed", groups, said)
