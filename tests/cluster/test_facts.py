"""What is wrong with processes that have arrived: the pure judgement, as a table."""

import dataclasses

import pytest

from shardax.cluster.detect import Place
from shardax.cluster.facts import ProcessFacts, faults

BASE = ProcessFacts(
    rank=0,
    size=4,
    job=None,
    host="vm",
    machine="vm boot",
    address="10.0.0.1",
    pid=100,
    cpu=True,
    settings=(("jax", "0.12"), ("python", "3.13")),
)


def process(rank, **changes):
    return dataclasses.replace(BASE, **{"rank": rank, "pid": 100 + rank, **changes})


def others(*ranks):
    return [process(rank) for rank in ranks]


HOSTS = {"host": "n1", "machine": "n1 boot"}

TABLE = [
    (others(0, 1, 2, 3), []),
    (others(0, 2), []),
    ([*others(0, 1, 2), process(2, pid=777)], ["rank 2: two processes say they are rank 2: vm pid 102 and vm pid 777"]),
    ([*others(0, 1), process(7)], ["rank 7: is outside 0..3 (vm pid 107)"]),
    ([*others(0, 1, 2), process(3, size=5)], ["rank 3: num_processes is 5, but 4 on ranks 0, 1, 2"]),
    ([*others(0, 1, 2), process(3, settings=(("jax", "0.10"), ("python", "3.13")))], ["rank 3: jax is 0.10, but 0.12 on ranks 0, 1, 2"]),
    ([*others(1, 2, 3), process(0, settings=(*BASE.settings, ("--xla_x", "1")))], ["rank 0: --xla_x is 1, but not set on ranks 1, 2, 3"]),
    ([process(0), process(1, size=2), process(2, size=8)], ["rank 1: num_processes is 2, but 4 on rank 0", "rank 2: num_processes is 8, but 4 on rank 0"]),
    ([process(0, address=""), process(1)], ["rank 0: its host name 'vm' does not resolve"]),
    ([process(0, address="127.0.1.1"), process(1, address="127.0.1.1")], []),
    ([process(0, address="10.0.0.1"), process(1, **HOSTS, address="127.0.1.1")], ["rank 1: its host name 'n1' resolves to 127.0.1.1, where other hosts cannot reach it"]),
    ([process(0, cpu=False), process(1, **HOSTS, address="127.0.1.1", cpu=False)], []),
]  # fmt: skip


@pytest.mark.parametrize(("arrived", "expected"), TABLE)
def test_faults(arrived, expected):
    found = [str(fault.as_offence()) for fault in faults(arrived, 4)]
    assert len(found) == len(expected)
    for text, start in zip(found, expected, strict=True):
        assert text.startswith(start)


@pytest.mark.parametrize(("arrived", "expected"), TABLE)
def test_the_order_of_arrival_does_not_matter(arrived, expected):
    assert faults(list(reversed(arrived)), 4) == faults(arrived, 4)


def test_facts_survive_the_wire():
    import json

    facts = ProcessFacts.here(Place("127.0.0.1:1234", 4, 2, job="mine"))
    assert ProcessFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts
    assert {"jax", "jaxlib", "python", "shardax"} <= set(dict(facts.settings))


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ("--xla_force_host_platform_device_count=8 --xla_a=1", ("--xla_a", "1")),
        ("--xla_dump_to=/tmp/rank0 --xla_b", ("--xla_b", "true")),
    ],
)
def test_flags_that_may_differ_are_left_out(monkeypatch, flags, kept):
    monkeypatch.setenv("XLA_FLAGS", flags)
    settings = ProcessFacts.here(Place("127.0.0.1:1234", 4, 2)).settings
    assert [pair for pair in settings if pair[0].startswith("--")] == [kept]
