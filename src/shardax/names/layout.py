"""`layout`: a tree, rules and a mesh → one `Decision` per leaf. The one resolver that everything else reads.

*rules* give each path a spec (or semantic axes, resolved through a `PartitionAxis`), *fit* meets it with the shape,
and the `Layout` keeps both, printable and comparable, without holding on to the arrays.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from shardax.errors import LayoutError, Offence, did_you_mean, plural
from shardax.names.analysis import LayoutAnalysis, analyse
from shardax.names.asking import ResolvesAxes, ask, decide, read_arrays, resolver
from shardax.names.decision import Decision, dtype_of
from shardax.names.layout_file import LayoutDiff, decisions_from_json, decisions_to_json, diff_decisions
from shardax.names.mesh import AnyMesh, MeshLike, MeshSpec, as_mesh, required_mesh
from shardax.names.paths import flatten, rebuild
from shardax.names.rules import Rules
from shardax.names.spec import OnMisfit, check_misfit_policy
from shardax.names.tokens import MODE_TRAIN
from shardax.tables import Reported, Table, show_bytes


@dataclass(frozen=True)
class Layout(Reported):
    """One decision per leaf on one mesh. `specs` and `shardings` have the structure of the tree it was made for."""

    mesh: AnyMesh
    decisions: tuple[Decision, ...]
    rules: Rules | None = field(default=None, compare=False, repr=False)
    skeleton: Any = field(default=None, compare=False, repr=False)  # the tree, with each leaf its index

    @property
    def by_path(self) -> dict[str, Decision]:
        """Path → decision."""
        return {decision.path: decision for decision in self.decisions}

    @property
    def specs(self) -> Any:
        """The tree with a PartitionSpec for every leaf (path → spec where the tree is not known, after `load`)."""
        return self._tree([decision.spec for decision in self.decisions])

    @property
    def shardings(self) -> Any:
        """The tree with a NamedSharding for every leaf."""
        made = {spec: NamedSharding(self.mesh, spec) for spec in {decision.spec for decision in self.decisions}}
        return self._tree([made[decision.spec] for decision in self.decisions])

    @property
    def abstract(self) -> Any:
        """The tree with a sharded `jax.ShapeDtypeStruct` for every leaf: what `jit.lower` and checkpoints want."""
        return self._tree([self._struct(decision) for decision in self.decisions])

    def _struct(self, decision: Decision) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(self.mesh, decision.spec)
        return jax.ShapeDtypeStruct(decision.shape, dtype_of(decision.dtype), sharding=sharding)

    def _tree(self, values: list[Any]) -> Any:
        if self.skeleton is None:
            return dict(zip((decision.path for decision in self.decisions), values, strict=True))
        return rebuild(self.skeleton, values)

    @property
    def mesh_spec(self) -> MeshSpec:
        """The mesh as a value."""
        return MeshSpec.of(self.mesh)

    @property
    def bytes_per_device(self) -> int:
        """What one device holds under this layout."""
        return sum(decision.bytes_per_device for decision in self.decisions)

    @property
    def nbytes(self) -> int:
        """The whole tree, once."""
        return sum(decision.nbytes for decision in self.decisions)

    def __getitem__(self, path: str) -> Decision:
        found = self.by_path.get(path)
        if found is None:
            raise LayoutError(f"no leaf {path!r} in this layout{did_you_mean(path, self.by_path)}")
        return found

    def on(self, mesh: MeshLike, on_misfit: OnMisfit = "error") -> Layout:
        """The same specs, asked of another mesh."""
        target = as_mesh(mesh)
        asked = [(d.path, d.shape, d.dtype, d.fit.asked, d.rule) for d in self.decisions]
        return Layout(target, decide(asked, target, on_misfit), self.rules, self.skeleton)

    def explain(self, path: str) -> str:
        """Rule by rule: which gave this leaf its spec, which lost and why, and each correction.

        >>> import shardax as sx
        >>> made = layout({"w": jax.ShapeDtypeStruct((8, 6), "float32")}, [("w", jax.P("tp")), (".*", None)], "tp=4")
        >>> print(made.explain("w"))
        w: float32[8, 6] → P('tp',), by rule 0 'w' → P('tp',)
          lost: rule 1 '.*' → replicated (rule 0 came first)
          on every device: 48 B of 192 B, 1 copy
        """
        decision = self[path]
        lines = [str(decision)]
        if self.rules is not None:
            won = self.rules.match(path)
            lines[1:1] = [
                f"  lost: {match!s} ({f'rule {won.index} came first' if won else decision.rule})"
                for match in self.rules.matches(path)
                if won is None or match.index != won.index or not decision.rule.startswith("rule ")
            ]
        share = f"{show_bytes(decision.bytes_per_device)} of {show_bytes(decision.nbytes)}"
        return "\n".join([*lines, f"  on every device: {share}, {plural(decision.copies, 'copy', 'copies')}"])

    def analysis(self) -> LayoutAnalysis:
        """Bytes per device, what is replicated, the worst offenders and how they could be sharded."""
        return analyse(self.decisions, self.mesh_spec)

    def table(self, most: int | None = None) -> Table:
        """One row per leaf, largest on a device first."""
        ordered = sorted(self.decisions, key=lambda d: (-d.bytes_per_device, d.path))
        shown = ordered if most is None else ordered[:most]
        rows = tuple(
            (
                d.path or "(root)",
                f"{d.dtype}[{','.join(map(str, d.shape))}]",
                str(d.spec),
                show_bytes(d.bytes_per_device),
                str(d.copies),
                d.rule + (" ⚠" if d.fit.corrections else ""),
            )
            for d in shown
        )
        left = f"… and {len(ordered) - len(shown)} more" if len(shown) < len(ordered) else None
        count = plural(len(ordered), "leaf", "leaves")
        total = f"{count}, {show_bytes(self.nbytes)}; on every device {show_bytes(self.bytes_per_device)}"
        columns = ("path", "array", "spec", "per device", "copies", "by")
        notes = tuple(filter(None, (left, total)))
        return Table(f"layout on mesh {self.mesh_spec}", columns, rows, ("per device", "copies"), notes)

    def __str__(self) -> str:
        return str(self.table(most=40))

    # ---- files ------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """A plain dict: mesh, rules and decisions; the same in every process."""
        spec = self.mesh_spec
        return {
            "shardax": "layout",
            "version": 1,
            "mesh": {"axes": str(spec), "types": [kind.name.lower() for kind in spec.axis_types]},
            "rules": None if self.rules is None else self.rules.to_json(),
            "decisions": decisions_to_json(self.decisions),
        }

    @classmethod
    def from_json(cls, data: Any, tree: Any = None, mesh: MeshLike | None = None) -> Layout:
        """The inverse of `to_json`; `tree` gives the structure back, `mesh` real devices."""
        try:
            if data["shardax"] != "layout" or data["version"] != 1:
                raise LayoutError(f"not a layout of version 1: {data['shardax']} {data['version']}")
            spec = MeshSpec.of(data["mesh"]["axes"], data["mesh"]["types"])
            rules = None if data["rules"] is None else Rules.from_json(data["rules"])
            decisions = decisions_from_json(data["decisions"], tuple(spec.shape.items()))
        except (KeyError, TypeError, IndexError) as error:
            raise LayoutError(f"not a saved layout: {type(error).__name__} {error}") from None
        made = cls(spec.abstract(), decisions, rules)
        if mesh is not None:
            if MeshSpec.of(mesh).shape != spec.shape:
                raise LayoutError(
                    f"the layout was saved for mesh {spec}, not {MeshSpec.of(mesh)}", remedy="use .on(mesh)"
                )
            made = cls(as_mesh(mesh), decisions, rules)
        return made if tree is None else made.like(tree)

    def like(self, tree: Any) -> Layout:
        """This layout with the structure of a tree that has exactly its leaves."""
        paths, leaves = flatten(tree)
        decisions = self._in_order_of(paths)
        shapes = [
            tuple(getattr(leaf, "shape", decision.shape)) for decision, leaf in zip(decisions, leaves, strict=True)
        ]
        if other := [
            Offence(decision.path, f"the layout was made for {list(decision.shape)}", shape=shape)
            for decision, shape in zip(decisions, shapes, strict=True)
            if shape != decision.shape
        ]:
            raise LayoutError("the layout and the tree have leaves of different shapes", other)
        return Layout(self.mesh, decisions, self.rules, _skeleton(tree, len(paths)))

    def _in_order_of(self, paths: Sequence[str]) -> tuple[Decision, ...]:
        """The decisions for exactly these paths; leaves of one path are told apart by their order."""
        if [decision.path for decision in self.decisions] == list(paths):
            return self.decisions
        here, there = Counter(paths), Counter(decision.path for decision in self.decisions)
        if here != there:
            missing = [Offence(path, "is in the tree, not in the layout") for path in here - there]
            extra = [Offence(path, "is in the layout, not in the tree") for path in there - here]
            raise LayoutError("the layout and the tree have different leaves", [*missing, *extra])
        twice = [Offence(path, f"is the path of {count} leaves") for path, count in here.items() if count > 1]
        if twice:
            raise LayoutError("the layout and the tree have their leaves in another order", twice)
        by_path = self.by_path
        return tuple(by_path[path] for path in paths)

    def save(self, path: str | Path) -> None:
        """Write the layout as JSON."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path, tree: Any = None, mesh: MeshLike | None = None) -> Layout:
        """Read a layout that `save` wrote."""
        try:
            data = json.loads(Path(path).read_text())
        except json.JSONDecodeError as error:
            raise LayoutError(f"{path} is not a saved layout: {error}") from None
        return cls.from_json(data, tree, mesh)

    def diff(self, other: Layout) -> LayoutDiff:
        """What differs in `other`, leaf by leaf; empty (and falsy) when nothing does."""
        return diff_decisions(self.decisions, other.decisions, *_told_apart(self.mesh_spec, other.mesh_spec))

    @property
    def hash(self) -> str:
        """A digest that is the same in every process and on every machine that decided the same."""
        plain = self.to_json()
        plain["decisions"] = sorted(plain["decisions"], key=lambda row: row["path"])
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def _told_apart(one: MeshSpec, other: MeshSpec) -> tuple[str, str]:
    """Two meshes in words, with their axis types where those differ."""
    if one.axis_types == other.axis_types or one.shape != other.shape:
        return str(one), str(other)
    kinds = [", ".join(dict.fromkeys(kind.name for kind in mesh.axis_types)) for mesh in (one, other)]
    return f"{one} ({kinds[0]})", f"{other} ({kinds[1]})"


# ---- making one -----------------------------------------------------------------------------------------------------


def layout(
    tree: Any,
    rules: Any,
    mesh: MeshLike | None = None,
    *,
    axes: ResolvesAxes | None = None,
    mode: str = MODE_TRAIN,
    on_misfit: OnMisfit = "error",
    min_size: int = 0,
) -> Layout:
    """Decide where every leaf of a tree goes: arrays, abstract arrays, framework states, dataclass pytrees.

    Scalars and leaves with fewer than `min_size` elements are replicated. Everything that is wrong is listed at once.

    >>> up, bias = jax.ShapeDtypeStruct((16, 64), "bfloat16"), jax.ShapeDtypeStruct((64,), "bfloat16")
    >>> rules = [("up", jax.P("fsdp", "tp")), ("bias", jax.P("tp"))]
    >>> print(layout({"mlp": {"up": up, "bias": bias}}, rules, "fsdp=2,tp=4"))
    layout on mesh fsdp=2,tp=4
    path      array            spec             per device  copies  by
    --------  ---------------  ---------------  ----------  ------  -----------------------------
    mlp/up    bfloat16[16,64]  P('fsdp', 'tp')       256 B       1  rule 0 'up' → P('fsdp', 'tp')
    mlp/bias  bfloat16[64]     P('tp',)               32 B       2  rule 1 'bias' → P('tp',)
    2 leaves, 2.1 KiB; on every device 288 B
    """
    check_misfit_policy(on_misfit)
    target_mesh = required_mesh(mesh, "layout")
    parsed = Rules.of(rules)
    arrays = read_arrays(tree)
    asked = ask(arrays, parsed, resolver(axes, mode), min_size)
    return Layout(target_mesh, decide(asked, target_mesh, on_misfit), parsed, _skeleton(tree, len(arrays)))


def _skeleton(tree: Any, count: int) -> Any:
    return rebuild(tree, list(range(count)))
