"""`Case`: a step, its arguments and where they lie, in one value that can be laid out, linted, proved and locked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from shardax.errors import ProofError
from shardax.names.asking import ResolvesAxes
from shardax.names.layout import Layout, layout
from shardax.names.lint import LintReport, lint
from shardax.names.mesh import MeshLike, MeshSpec, as_mesh, current_mesh
from shardax.names.rules import Rules
from shardax.names.spec import OnMisfit
from shardax.names.tokens import MODE_TRAIN
from shardax.proving.check import Check, check
from shardax.proving.proof import Proof
from shardax.proving.prove import prove
from shardax.proving.step import Names, Step
from shardax.proving.target import Target


@dataclass(frozen=True)
class Case:
    """What `shardax layout`, `prove`, `check` and `lock` are told about a program: a function that returns it will do.

    `rules` speak of every argument at once: a path begins with the name of its argument. Instead of rules there may be
    a `layout` (a Layout, or a function of the mesh that makes one); what neither places carries its own sharding.

    >>> import jax, jax.numpy as jnp, shardax as sx
    >>> def step(params, x):
    ...     return jnp.tanh(x @ params["up"]).sum()
    >>> params = {"up": jax.ShapeDtypeStruct((64, 256), jnp.float32)}
    >>> x = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    >>> case = sx.Case(step, (params, x), [("params/up", [None, sx.TP]), ("x", [sx.BATCH])], mesh="fsdp=2,dp=2,tp=2")
    >>> case.lay_out()["params/up"].spec
    P(None, 'tp')
    >>> list(case.prove(target="cpu:8").ledger.by_op())
    ['all-reduce']
    """

    step: Callable[..., Any]
    args: tuple[Any, ...] = ()
    rules: Any = None
    _: KW_ONLY
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    layout: Layout | Callable[[MeshSpec], Layout] | None = None
    axes: ResolvesAxes | None = None
    mode: str = MODE_TRAIN
    on_misfit: OnMisfit = "error"
    mesh: MeshLike | None = None
    target: str | Target | None = None
    donate: Names = None
    static: Names = None

    def __post_init__(self) -> None:
        if not callable(self.step):
            raise ProofError(f"the step of a Case is a function, not {type(self.step).__name__}")
        if not isinstance(self.args, tuple):
            raise ProofError(
                f"the args of a Case are a tuple, not {type(self.args).__name__}", remedy="one argument: (batch,)"
            )
        if isinstance(self.rules, Layout) and self.layout is None:  # Case(step, args, layout)
            object.__setattr__(self, "layout", self.rules)
            object.__setattr__(self, "rules", None)
        if self.rules is not None and self.layout is not None:
            raise ProofError("a Case has rules or a layout, not both")
        if self.rules is not None:
            object.__setattr__(self, "rules", Rules.of(self.rules))

    @property
    def name(self) -> str:
        """The name of the step."""
        return getattr(self.step, "__name__", type(self.step).__name__)

    @property
    def arguments(self) -> dict[str, Any]:
        """Every argument by its name: the tree that the rules speak of."""
        named = Step.of(self.step, self.args, self.kwargs, self.donate, self.static).arguments
        listed = [self.static] if isinstance(self.static, (int, str)) else list(self.static or ())
        static = {at % len(self.args) if isinstance(at, int) else at for at in listed}
        return {name: tree for at, (name, tree) in enumerate(named) if at not in static and name not in static}

    def mesh_on(self, target: str | Target | None = None, mesh: MeshLike | None = None) -> MeshSpec:
        """The mesh that is given, in force, or the case's own; a -1 in it is inferred from the target's devices."""
        chosen = current_mesh(mesh) if mesh is None else mesh
        chosen = self.mesh if chosen is None else chosen
        if chosen is None and isinstance(self.layout, Layout):
            chosen = self.layout.mesh_spec
        if chosen is None:
            raise ProofError(f"no mesh is given for {self.name}", remedy='mesh="dp=2,fsdp=-1", here or in the Case')
        goal = target or self.target
        spec = MeshSpec.of(chosen)
        return spec if goal is None and -1 not in spec.sizes else Target.of(goal or "cpu:8").mesh(spec)

    def lay_out(self, mesh: MeshLike | None = None) -> Layout:
        """One decision for every array of every argument."""
        on = mesh if mesh is not None and not isinstance(mesh, str) else self.mesh_on(mesh=mesh)
        if self.rules is not None:
            return layout(
                self.arguments, self.rules, as_mesh(on), axes=self.axes, mode=self.mode, on_misfit=self.on_misfit
            )
        if isinstance(self.layout, Layout):
            return self.layout.on(on, self.on_misfit)
        if self.layout is not None:
            return self.layout(MeshSpec.of(on))
        raise ProofError(f"{self.name} has neither rules nor a layout", remedy="Case(step, args, rules)")

    def lint(self, mesh: MeshLike | None = None) -> LintReport:
        """Everything that is wrong between the arguments, the rules and the mesh."""
        if self.rules is None:
            raise ProofError(f"{self.name} has no rules to lint", remedy="Case(step, args, rules)")
        return lint(self.arguments, self.rules, self.mesh_on(mesh=mesh), self.axes, mode=self.mode)

    def prove(self, mesh: MeshLike | None = None, target: str | Target | None = None, **options: Any) -> Proof:
        """`sx.prove` of the step under this layout; the options are its."""
        goal = Target.of(target or self.target or "cpu:8")
        spec = self.mesh_on(goal, mesh)
        return prove(
            self.step,
            *self.args,
            **self.kwargs,
            mesh=spec,
            target=goal,
            layout=self._per_argument(spec),
            donate=self.donate,
            static=self.static,
            **options,
        )

    def check(self, mesh: MeshLike | None = None, **options: Any) -> Check:
        """`sx.check` of the step under this layout: what travels, without compiling; the options are its."""
        spec = self.mesh_on(mesh=mesh)
        return check(
            self.step,
            *self.args,
            **self.kwargs,
            mesh=spec,
            layout=self._per_argument(spec),
            donate=self.donate,
            static=self.static,
            **options,
        )

    def _per_argument(self, mesh: MeshSpec) -> Any:
        """Rules speak of every argument; a layout may be one of all arguments, or of a tree that is in one of them."""
        if self.rules is None and self.layout is None:
            return None
        whole = self.lay_out(mesh)
        parts = {name: _below(name, whole) for name in self.arguments}
        return whole if self.rules is None and not any(part.decisions for part in parts.values()) else parts


def _below(name: str, whole: Layout) -> Layout:
    """The part of a layout that speaks of one argument: by its paths inside the argument, and by its whole paths."""
    mine = [d for d in whole.decisions if d.path == name or d.path.startswith(f"{name}/")]
    inside = [replace(d, path=d.path.removeprefix(name).removeprefix("/")) for d in mine]
    return Layout(whole.mesh, tuple(inside + [d for d in mine if d.path == name]))
