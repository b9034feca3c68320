"""`EpochPlan`: which record stands in which row of which global batch. Pure arithmetic, the same on every process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardax.data.order import LARGEST, shuffled
from shardax.errors import BatchSizeError, FeedError, FeedStateError, Offence, did_you_mean

Policy: TypeAlias = Literal["drop", "pad", "wrap", "keep"]
POLICIES: tuple[str, ...] = get_args(Policy)

STATE_KEYS = ("seed", "epoch", "global_step", "policy", "records")
"""What every saved state has; `global_batch` and `shuffle` are checked too where a state has them."""


@dataclass(frozen=True)
class EpochPlan:
    """The order of `records` in global batches, epoch after epoch, as a function of the global step alone.

    What happens to a remainder: `drop` leaves it out of this epoch, `pad` fills the last batch up with rows that are
    not valid, `wrap` fills it up with the first rows of the epoch, `keep` makes the last batch smaller.

    >>> plan = EpochPlan(records=10, global_batch=4, policy="pad", shuffle=False)
    >>> plan.steps_per_epoch, plan.records_at(2)[0].tolist(), plan.records_at(2)[1].tolist()
    (3, [8, 9, 0, 1], [True, True, False, False])
    >>> plan.records_at(3, rows=[1, 2])[0].tolist()  # the next epoch, two of its rows
    [1, 2]
    """

    records: int
    global_batch: int
    policy: Policy = "drop"
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        sizes = (("records", self.records), ("global_batch", self.global_batch))
        check_sizes(*sizes)
        if self.records > LARGEST:
            raise BatchSizeError(
                f"{self.records} records are more than can be put in an order",
                remedy="take `.repeat()` away from the source: the feed repeats it with epochs=None",
            )
        check_policy(self.policy)
        check_seed(self.seed)
        for name in ("records", "global_batch", "seed"):  # NumPy integers would not go into JSON
            object.__setattr__(self, name, int(getattr(self, name)))
        if self.policy == "drop" and self.records < self.global_batch:
            raise BatchSizeError(
                f"policy 'drop' leaves nothing: {self.records} records are fewer than one batch of {self.global_batch}",
                remedy=f"a global batch of at most {self.records}, or policy 'pad', 'wrap' or 'keep'",
            )

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one epoch."""
        whole, rest = divmod(self.records, self.global_batch)
        return whole + (rest > 0 and self.policy != "drop")

    @property
    def tail(self) -> int:
        """Rows of an epoch's last batch: the global batch, except under `keep`."""
        return (self.records - 1) % self.global_batch + 1 if self.policy == "keep" else self.global_batch

    def epoch_of(self, step: int) -> tuple[int, int]:
        """The epoch of a global step, and the step's place in it."""
        return divmod(step, self.steps_per_epoch)

    def size(self, step: int) -> int:
        """Rows of the global batch at a step."""
        return self.tail if self.epoch_of(step)[1] == self.steps_per_epoch - 1 else self.global_batch

    def records_at(self, step: int, rows: ArrayLike | None = None) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The record in each of these rows of the global batch (all, unless given), and whether it counts."""
        asked = np.arange(self.size(step)) if rows is None else np.asarray(rows, np.int64)
        records, valid = self.records_of_steps(step, 1, asked)
        return records[0], valid[0]

    def records_of_steps(
        self, first: int, count: int, rows: NDArray[np.integer[Any]]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """`records_at` for several steps of one epoch at once, one line each: a block costs little more than a step."""
        epoch, start = self.epoch_of(first)
        if start + count > self.steps_per_epoch:
            raise ValueError(f"steps {first} … {first + count - 1} are not of one epoch")
        steps = np.arange(start, start + count, dtype=np.int64)
        positions = steps[:, None] * self.global_batch + np.asarray(rows, np.int64)[None, :]
        valid = positions < self.records
        if self.policy == "keep" and not valid.all():
            raise ValueError(f"rows beyond the {self.size(first + count - 1)} of a kept last batch were asked for")
        if not valid.all():
            positions %= self.records
        if self.policy == "wrap":
            valid = np.ones_like(valid)
        return (shuffled(positions, self.records, self.seed, epoch) if self.shuffle else positions), valid

    def blocks(
        self, first: int, rows: NDArray[np.integer[Any]]
    ) -> Iterator[tuple[int, NDArray[Any], NDArray[np.bool_]]]:
        """`(step, records, valid)` from a step on, without end, computed in blocks of bounded memory.

        Only full batches are asked about; a kept tail is left to the caller, who knows which of its rows it loads.
        """
        step, ahead = first, 1  # one step at first, so that a resumed feed starts at once; then twice as many
        full = self.steps_per_epoch - (self.tail != self.global_batch)
        while True:
            count = min(full - self.epoch_of(step)[1], ahead, max(1, BLOCK // max(1, len(rows))))
            if count < 1:
                return
            ahead *= 2
            records, valid = self.records_of_steps(step, count, rows)
            for line in range(count):
                yield step + line, records[line], valid[line]
            step += count

    def state(self, step: int) -> dict[str, Any]:
        """Where the stream stands, as JSON: nothing about processes, devices or meshes.

        >>> EpochPlan(10, 4, seed=7).state(3)["epoch"]
        1
        """
        return {
            "seed": self.seed,
            "epoch": self.epoch_of(step)[0],
            "global_step": step,
            "policy": self.policy,
            "records": self.records,
            "global_batch": self.global_batch,
            "shuffle": self.shuffle,
        }

    def step_of(self, state: Mapping[str, Any]) -> int:
        """The global step of a saved state, after checking that the state is this plan's."""
        return read_state(plain_state(state), self.state(0), self.steps_per_epoch)


BLOCK = 16_384
"""Rows whose records are computed together: 128 KiB of index, and 1,024 rows cost about as much as 16,384."""


def is_count(value: object, least: int) -> bool:
    """A whole number, Python's or NumPy's, of at least so much."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and int(value) >= least


def check_sizes(*sizes: tuple[str, object]) -> None:
    """Every size must be a positive whole number."""
    wrong = [Offence(name, f"{size!r} is not a positive whole number") for name, size in sizes if not is_count(size, 1)]
    if wrong:
        raise BatchSizeError("there is nothing to batch", wrong)


def check_seed(seed: object) -> None:
    """A seed is any whole number."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise FeedError(f"seed {seed!r} is not a whole number", remedy="the same int on every process")


def check_policy(policy: object) -> None:
    """An unknown remainder policy is an error that lists the known ones."""
    if policy not in POLICIES:
        raise FeedError(
            f"unknown policy {policy!r}{did_you_mean(policy, POLICIES)}",
            remedy=f"it is one of {', '.join(map(repr, POLICIES))}: what to do with the rows after the last full batch",
        )


def read_state(state: Mapping[str, Any], mine: Mapping[str, Any], steps_per_epoch: int | None) -> int:
    """The global step of a state, or one error that lists every field in which it belongs to another stream."""
    missing = [Offence(key, "is missing") for key in STATE_KEYS if key not in state]
    if missing:
        raise FeedStateError("this is not a feed's state", missing, f"a state has {', '.join(STATE_KEYS)}")
    step = state["global_step"]
    wrong = [
        Offence(key, f"the state has {state[key]!r}, this feed {mine[key]!r}")
        for key in ("seed", "policy", "records", "global_batch", "shuffle")
        if key in state and state[key] != mine[key]
    ]
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        wrong.append(Offence("global_step", f"{step!r} is not a step"))
    elif not wrong and steps_per_epoch and state["epoch"] != step // steps_per_epoch:
        wrong.append(
            Offence(
                "epoch", f"step {step} lies in epoch {step // steps_per_epoch} here, the state says {state['epoch']!r}"
            )
        )
    if wrong:
        raise FeedStateError(
            "this state belongs to another stream of batches",
            wrong,
            "build the feed as it was when the state was saved; processes and meshes may differ, these may not",
        )
    return int(step)


def plain_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with Python's own numbers: a checkpoint of arrays gives NumPy's back.

    >>> plain_state({"global_step": np.int64(3), "policy": "pad", "shuffle": np.bool_(True)})
    {'global_step': 3, 'policy': 'pad', 'shuffle': True}
    """
    if not isinstance(state, Mapping):
        raise FeedStateError(f"a feed's state is a mapping, not a {type(state).__name__}", remedy="see feed.state()")
    return {
        key: value.item() if hasattr(value, "item") and getattr(value, "shape", None) == () else value
        for key, value in state.items()
    }
