"""The error tree, and the one formatter that lists every offender.

An error carries data (`headline`, `offences`, `remedy`) and formats itself late, so that a caller can read which
leaves failed without parsing a message, and a person sees all of them at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Offence:
    """One thing that is wrong: where, what, the facts behind it, and what would work.

    >>> print(Offence("mlp/kernel", "dim 1 (10) does not divide by 'tp' (4)", shape=(8, 10), remedy="'tp' of size 2"))
    mlp/kernel: dim 1 (10) does not divide by 'tp' (4) [shape (8, 10)]; would work: 'tp' of size 2
    """

    where: str
    problem: str
    shape: tuple[int, ...] | None = None
    spec: object = None
    rule: str | None = None
    remedy: str | None = None

    def __str__(self) -> str:
        facts = [
            str(value) if str(value).startswith(name) else f"{name} {value}"
            for name, value in (("shape", self.shape), ("spec", self.spec), ("rule", self.rule))
            if value is not None
        ]
        text = f"{self.where}: {self.problem}" if self.where else self.problem
        if facts:
            text += f" [{', '.join(facts)}]"
        return f"{text}; would work: {self.remedy}" if self.remedy else text


class ShardaxError(Exception):
    """The root of everything shardax raises on purpose.

    >>> print(ShardaxError("2 leaves do not fit", [Offence("a", "no rule"), Offence("b", "no rule")], "add a rule"))
    2 leaves do not fit
      a: no rule
      b: no rule
    add a rule
    """

    def __init__(self, headline: str, offences: Iterable[Offence] = (), remedy: str = "") -> None:
        self.headline = headline
        self.offences = tuple(offences)
        self.remedy = remedy
        # args mirror the signature: the error survives pickling between processes.
        super().__init__(headline, self.offences, remedy)

    def __str__(self) -> str:
        lines = [self.headline, *(f"  {offence}" for offence in self.offences)]
        return "\n".join([*lines, self.remedy] if self.remedy else lines)


# ---- names: meshes, axes, specs, rules, layouts -------------------------------------------------------------------


class MeshError(ShardaxError, ValueError):
    """A mesh that cannot be: bad sizes, bad names, a product that is not the number of devices."""


class NoMeshError(MeshError, AssertionError):
    """Something needs a mesh and finds none: no argument, no `jax.set_mesh`, no `with mesh:`."""


class MeshConflictError(MeshError):
    """Two different meshes at once; neither is silently preferred."""


class UnknownAxisError(ShardaxError, KeyError, ValueError):
    """A name that is neither a mesh axis nor a semantic axis."""

    __str__ = ShardaxError.__str__  # KeyError would print the repr of the message


class AxisRuleError(ShardaxError, ValueError):
    """A semantic axis or its rule that makes no sense: blank, already registered, a cycle, an unknown mode."""


class AxisTypeError(AxisRuleError, TypeError):
    """Something of another kind where an axis, a rule, a PartitionAxis or a PartitionManager belongs."""


class NoManagerError(AxisRuleError):
    """Logical axes and no PartitionManager to read them by: none given, none current, none ever made."""


class HashingError(ShardaxError, ValueError):
    """A hash algorithm that is not there, or that has no digest of its own length."""


class SpecError(ShardaxError, ValueError):
    """A partition spec that does not fit its array: rank, divisibility, one mesh axis used twice."""


class RuleError(ShardaxError, ValueError):
    """Rules that do not parse, match nothing, or leave leaves unmatched."""


class LeafError(ShardaxError, TypeError, ValueError):
    """A leaf that is not an array where an array is needed, or a tree without leaves."""


class LayoutError(ShardaxError, ValueError):
    """A layout and a tree (or a file, or another layout) that do not belong together."""


class PlacementError(ShardaxError, ValueError):
    """Arrays that could not be put under a layout: wrong shape, too large for the device, not addressable."""


class CheckpointError(ShardaxError, ValueError):
    """A checkpoint that is not there, is not for this layout, or does not hold what was saved."""


class CheckpointerMissingError(CheckpointError, ImportError):
    """Checkpoints need orbax, which is not installed."""


# ---- state: jit, shard_map and the cells they thread --------------------------------------------------------------


class StateError(ShardaxError, ValueError):
    """A cell, or what was asked of the cells of a call, that cannot be: not an array, no sharding, two shardings."""


class ForeignTraceError(StateError):
    """A State written under a transformation that is not ours: the write would run once and be lost."""


class LeakedTracerError(StateError):
    """A State that was left holding a tracer of a trace that is over."""


class NonArrayStateError(StateError, TypeError):
    """A cell whose value is not an array (nor a tree of arrays) where arrays are passed to a compiled function."""


class StateShardingError(StateError):
    """Shardings of state that do not cover it, do not parse, or disagree about one cell."""


class ShardMapError(StateError, TypeError):
    """Specs, arguments and states of a `shard_map` that do not belong together."""


class DeviceMismatchError(StateError):
    """Arguments and state of one call that live on devices that no single program can use."""


class DonationError(StateError, RuntimeError):
    """An array that a call gives away and uses again, or that an earlier call was given."""


class ArgumentError(StateError, TypeError):
    """An argument of `jit` or `shard_map`, or of a call, that cannot be honoured."""


class CompiledCallError(StateError, TypeError):
    """A compiled function called with other structure, static values or types than it was lowered for."""


# ---- cluster: many processes ----------------------------------------------------------------------------------------


class ClusterError(ShardaxError, RuntimeError):
    """Several processes that cannot work together: one is missing, twice there, different, or gone."""


class RanksError(ClusterError):
    """A fault of certain processes; `ranks` are theirs."""

    def __init__(
        self, headline: str, offences: Iterable[Offence] = (), remedy: str = "", ranks: Iterable[int] = ()
    ) -> None:
        super().__init__(headline, offences, remedy)
        self.ranks = tuple(ranks)
        self.args = (headline, self.offences, remedy, self.ranks)


class PreflightError(RanksError):
    """The processes of a job did not meet: one missing or twice there, another size, version, flag, job or port."""


class BarrierError(RanksError):
    """A barrier that not every process reached in time; `ranks` are the absent."""


class DisagreementError(RanksError):
    """Processes that hold different values of what must be one; `ranks` are the odd ones."""


class ProcessesError(ClusterError, AssertionError):
    """A function that ran in several processes failed in some; every failing rank with its traceback and output."""


# ---- data: splitting and feeding ------------------------------------------------------------------------------------


class FeedError(ShardaxError, ValueError):
    """A feed or an epoch plan that cannot be, as it was asked for."""


class BatchSizeError(FeedError):
    """A global batch that does not divide over its shards, is not positive, or is larger than the data set allows."""


class SplitError(FeedError):
    """Rows that no process can know it must load: a split that the sharding alone does not settle."""


class SourceError(FeedError, TypeError):
    """A source of records that cannot be read: unknown kind, unequal columns, ragged or changing leaves."""


class SourceEndedError(SourceError):
    """An iterator that ended on some processes and went on in others."""


class TransformError(FeedError):
    """A transform that does not return one row for every row it was given."""


class FeedStateError(FeedError):
    """A state that belongs to another data set, policy, seed or batch; the feed stays where it was."""


class ReplicaError(FeedError):
    """Processes that must hold identical rows and do not."""


class SharderError(ShardaxError, ValueError):
    """A process sharder that is asked for what it cannot do; its state is unchanged."""


class SharderStateError(SharderError, TypeError):
    """A state that is not a sharder's."""


# ---- proving: targets, compilers, HLO -------------------------------------------------------------------------------


class TargetError(ShardaxError, ValueError):
    """A proof target that does not exist, or a mesh that is not one for it."""


class HloParseError(ShardaxError, ValueError):
    """HLO text that is truncated, mangled, or says two things at once: no number is better than a wrong one."""


class CompilerMissingError(ShardaxError, ImportError):
    """The compiler of a target is not installed, too old, or not made for this machine."""


class CompilerError(ShardaxError, RuntimeError):
    """The compiler refused the program, or its process crashed."""


class CompilerTimeoutError(CompilerError, TimeoutError):
    """The compiler's process did not answer in time and was stopped."""


class ProofError(ShardaxError, ValueError):
    """A step that cannot be proved as it was given: it does not trace, or an argument has no layout."""


class ProofFailure(ShardaxError, AssertionError):
    """A proof, a tree or a lock file that is not what was asserted."""


# ---- the command line -----------------------------------------------------------------------------------------------


class CommandError(ShardaxError, ValueError):
    """A command line that cannot be carried out: no such file, module or function, or one that gives no Case."""


# ---- words for messages ---------------------------------------------------------------------------------------------


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """The close matches for a mistyped name, as the tail of a message (empty when nothing is close).

    >>> did_you_mean("fspd", ["dp", "fsdp", "tp"])
    "; did you mean 'fsdp'?"
    >>> did_you_mean("pt", ["dp", "tp"])
    "; did you mean 'tp'?"
    >>> did_you_mean("btach", ["__BATCH__", "__HEAD__"])
    "; did you mean '__BATCH__'?"
    >>> did_you_mean("zebra", ["dp", "fsdp"])
    ''
    """
    wanted = str(name).lower().strip("_")
    spelled = {str(candidate).lower().strip("_"): str(candidate) for candidate in known}
    # difflib misses two swapped letters in a short name ('pt' for 'tp'), the likeliest slip of all.
    close = [text for text in spelled if sorted(text) == sorted(wanted)]
    close += [text for text in difflib.get_close_matches(wanted, spelled, n=3, cutoff=0.6) if text not in close]
    if not close:
        return ""
    shown = [spelled[text] for text in close[:3]]
    return f"; did you mean {' or '.join(map(repr, shown))}?"


def plural(count: int, noun: str, many: str | None = None) -> str:
    """A count with its noun.

    >>> plural(1, "leaf", "leaves"), plural(3, "leaf", "leaves"), plural(0, "rule")
    ('1 leaf', '3 leaves', '0 rules')
    """
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"
