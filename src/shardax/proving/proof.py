"""`Proof`: what a real compiler says of one step on one target; a frozen value, printable and comparable."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from jax.sharding import PartitionSpec

from shardax.errors import Offence, ProofError
from shardax.names.mesh import MeshSpec
from shardax.names.spec import as_spec, axes_of
from shardax.proving.cost import Estimate
from shardax.proving.ledger import Ledger
from shardax.proving.lock import TOLERANCE, Lock, check_lock, lock_of
from shardax.proving.memory import Memory
from shardax.proving.placing import Placed, Replicated
from shardax.proving.proof_text import proof_text
from shardax.proving.target import Target
from shardax.tables import Reported

VERSION = 1


@dataclass(frozen=True)
class LostDonation:
    """A buffer that was offered and not reused: the step holds it and its successor at once."""

    path: str
    bytes: int  # on every device


@dataclass(frozen=True)
class NotAsAsked:
    """A result or constraint whose sharding is not the one that was asked for (jax#26946: a jit says nothing)."""

    where: str
    shape: tuple[int, ...]
    asked: PartitionSpec
    got: PartitionSpec
    bytes_per_device: int  # what it costs


@dataclass(frozen=True)
class Proof(Reported):
    """The answer: memory, fit, collectives, work, and everything that is not as it was meant to be.

    `print(proof)` is one screen; `proof.ledger`, `proof.memory`, `proof.estimate` print their own tables.
    """

    name: str
    target: Target
    mesh: MeshSpec
    memory: Memory
    ledger: Ledger
    flops: int  # per device
    estimate: Estimate | None
    inputs: tuple[Placed, ...]
    outputs: tuple[Placed, ...]
    lost_donations: tuple[LostDonation, ...]
    replicated: tuple[Replicated, ...]
    not_as_asked: tuple[NotAsAsked, ...]
    refusal: str  # the compiler's own words when it ran out of memory
    compile_seconds: float
    compile_cpu_seconds: float
    versions: Mapping[str, str] = field(hash=False)
    blind_spots: tuple[str, ...]
    cached: bool = field(default=False, compare=False)
    hlo: str = field(default="", compare=False, repr=False)  # not saved

    @property
    def fits(self) -> bool | None:
        """Does it fit the device? None where the tier has no device to fit."""
        if self.refusal:
            return False
        return None if self.memory.margin is None else self.memory.margin >= 0

    @property
    def margin(self) -> int | None:
        """Bytes left on the device (negative: missing)."""
        return self.memory.margin

    @property
    def total_flops(self) -> int:
        """FLOPs of the step over all devices."""
        return self.flops * self.mesh.size

    def lock(self, path: str | Path | None = None) -> Lock:
        """The facts worth locking in CI: small, stable, independent of line numbers; `path` is where to write them."""
        if path is not None:
            check_lock(self, path, update=True)
        return lock_of(self)

    def check_lock(self, path: str | Path, *, tolerance: float = TOLERANCE, update: bool | None = None) -> None:
        """Fail with a readable diff when this proof is not what the lock file says."""
        __tracebackhide__ = True
        check_lock(self, path, tolerance=tolerance, update=update)

    def __str__(self) -> str:
        return proof_text(self)

    # ---- files ------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """A plain dict, without the HLO text."""
        return {
            "shardax": "proof",
            "version": VERSION,
            "name": self.name,
            "target": str(self.target),
            "mesh": {"axes": str(self.mesh), "types": [kind.name.lower() for kind in self.mesh.axis_types]},
            "memory": self.memory.to_json(),
            "ledger": self.ledger.to_json(),
            "flops": self.flops,
            "estimate": None if self.estimate is None else self.estimate.to_json(),
            "inputs": [_plain(leaf) for leaf in self.inputs],
            "outputs": [_plain(leaf) for leaf in self.outputs],
            "lost_donations": [asdict(lost) for lost in self.lost_donations],
            "replicated": [_plain(each) for each in self.replicated],
            "not_as_asked": [_plain(each) for each in self.not_as_asked],
            "refusal": self.refusal,
            "compile_seconds": self.compile_seconds,
            "compile_cpu_seconds": self.compile_cpu_seconds,
            "versions": dict(self.versions),
            "blind_spots": list(self.blind_spots),
            "cached": self.cached,
        }

    def save(self, path: str | Path) -> None:
        """Write the proof to a JSON file."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Proof:
        """Read a proof from a file that `save` wrote."""
        try:
            return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except OSError as error:
            why = [] if isinstance(error, FileNotFoundError) else [Offence(str(path), error.strerror or str(error))]
            raise ProofError(f"there is no proof in {path}", why, "write one with proof.save(path)") from None
        except ValueError as error:
            raise ProofError(f"{path} holds no proof", [Offence(str(path), str(error).splitlines()[0])]) from error

    @classmethod
    def from_json(cls, data: Any) -> Proof:
        """The inverse of `to_json`."""
        try:
            if data["shardax"] != "proof" or data["version"] != VERSION:
                raise ProofError(f"not a proof of version {VERSION}: {data['shardax']} {data['version']}")
            return cls(
                name=data["name"],
                target=Target.of(data["target"]),
                mesh=MeshSpec.of(data["mesh"]["axes"], data["mesh"]["types"]),
                memory=Memory.from_json(data["memory"]),
                ledger=Ledger.from_json(data["ledger"]),
                flops=data["flops"],
                estimate=None if data["estimate"] is None else Estimate.from_json(data["estimate"]),
                inputs=tuple(_read(Placed, leaf) for leaf in data["inputs"]),
                outputs=tuple(_read(Placed, leaf) for leaf in data["outputs"]),
                lost_donations=tuple(LostDonation(**lost) for lost in data["lost_donations"]),
                replicated=tuple(_read(Replicated, each) for each in data["replicated"]),
                not_as_asked=tuple(_read(NotAsAsked, each) for each in data["not_as_asked"]),
                refusal=data["refusal"],
                compile_seconds=data["compile_seconds"],
                compile_cpu_seconds=data["compile_cpu_seconds"],
                versions=data["versions"],
                blind_spots=tuple(data["blind_spots"]),
                cached=data.get("cached", True),
            )
        except (KeyError, TypeError) as error:
            raise ProofError(f"not a saved proof: {type(error).__name__} {error}") from error

    def without_hlo(self) -> Proof:
        """The proof as a file would give it back."""
        return replace(self, hlo="")


def plain_spec(spec: PartitionSpec) -> list[list[str]]:
    """A spec as lists of axis names."""
    return [list(axes_of(entry)) for entry in spec]


def read_spec(entries: Any) -> PartitionSpec:
    """The inverse of `plain_spec`."""
    return as_spec([None if not axes else axes[0] if len(axes) == 1 else tuple(axes) for axes in entries])


def _plain(value: Any) -> dict[str, Any]:
    fields = {name: getattr(value, name) for name in value.__dataclass_fields__}
    return {
        name: plain_spec(found)
        if isinstance(found, PartitionSpec)
        else list(found)
        if isinstance(found, tuple)
        else found
        for name, found in fields.items()
    }


def _read(kind: Any, data: Mapping[str, Any]) -> Any:
    def value(name: str, found: Any) -> Any:
        if name in ("spec", "asked", "got"):
            return read_spec(found)
        return tuple(found) if isinstance(found, list) else found

    return kind(**{name: value(name, found) for name, found in data.items()})
