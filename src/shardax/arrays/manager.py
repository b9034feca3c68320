"""PartitionManager: a PartitionAxis that is in force, and arrays laid out by what their axes mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, Self, final

import jax
import numpy as np
from jax.sharding import PartitionSpec

from shardax.arrays.ambient import Ambient
from shardax.arrays.constrain import constrain
from shardax.errors import AxisRuleError, AxisTypeError, NoManagerError, Offence, SpecError, UnknownAxisError, plural
from shardax.names.axes import PartitionAxis
from shardax.names.dynamic_axes import DynamicShardingAxes, checked_mode, is_dynamic, mode_for
from shardax.names.paths import flatten, rebuild
from shardax.names.registry import REGISTRY
from shardax.names.spec import OnMisfit
from shardax.names.tokens import NOT_GIVEN, Axis, NotGiven

_Axes = Sequence[Axis] | DynamicShardingAxes | type[DynamicShardingAxes] | NotGiven | None
_Dynamic = DynamicShardingAxes | type[DynamicShardingAxes] | NotGiven | None
_Mode = str | int | NotGiven | None


@final
class PartitionManager:
    """A PartitionAxis to lay arrays out by; in force inside `with manager:`, nested and in any thread.

    As a static argument of `jax.jit` it is compared by value, and a change of the registered axes traces again.

    >>> import jax, jax.numpy as jnp, shardax as sx
    >>> manager = sx.PartitionManager(sx.PartitionAxis())
    >>> with jax.set_mesh(sx.make_mesh("fsdp=2,tp=4")), manager:
    ...     x = sx.apply_logical_sharding(jnp.ones((8, 16)), axes=[sx.BATCH, sx.EMBED], mode=sx.MODE_TRAIN)
    >>> x.sharding.spec
    P('fsdp', 'tp')
    """

    def __init__(self, paxis: PartitionAxis) -> None:
        if not isinstance(paxis, PartitionAxis):
            raise AxisTypeError(f"Expected PartitionAxis, got {type(paxis).__name__}: {paxis!r}")
        self._paxis = paxis
        _AMBIENT.made(self, hash(paxis))

    @property
    def paxis(self) -> PartitionAxis:
        """Which mesh axes each semantic axis is laid over."""
        return self._paxis

    # ---- in force ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        _AMBIENT.enter(self, hash(self._paxis))
        return self

    def __exit__(self, *exception: object) -> None:
        _AMBIENT.leave(self)

    # ---- laying out --------------------------------------------------------------------------------------------------

    def shard(
        self,
        x: Any,
        axes: _Axes = NOT_GIVEN,
        mode: _Mode = NOT_GIVEN,
        dynamic_axes: _Dynamic = NOT_GIVEN,
        auto_correct: bool = True,
    ) -> Any:
        """Constrain an array, or every array of a tree, to what its axes mean in this mode.

        What does not fit the array or the mesh is corrected and recorded; with `auto_correct=False` it is an error.
        Two dimensions over one mesh axis are an error either way.

        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> manager = sx.PartitionManager(sx.PartitionAxis())
        >>> with jax.set_mesh(sx.make_mesh("fsdp=2,tp=4")):
        ...     manager.shard(jnp.ones((8, 128, 64)), sx.HiddenStateSharding).sharding.spec
        P('fsdp', None, 'tp')
        """
        axes, mode = _axes_and_mode(axes, mode, dynamic_axes)
        on_misfit: OnMisfit = "adapt" if auto_correct else "error"
        paxis = self._paxis

        def lay_out(leaf: Any) -> Any:
            spec = paxis.resolve_spec(axes, mode_for(mode, leaf.shape), leaf.shape)
            return constrain(leaf, spec, on_misfit=on_misfit)

        if not isinstance(mode, str):
            return lay_out(x) if isinstance(x, jax.Array) else _each_leaf(x, lay_out)
        spec = paxis.resolve_spec(axes, mode)
        if auto_correct or hasattr(x, "shape"):
            return constrain(x, spec, on_misfit=on_misfit)
        return _each_leaf(x, lay_out)

    def resolve(
        self,
        axes: _Axes = NOT_GIVEN,
        mode: _Mode = NOT_GIVEN,
        dynamic_axes: _Dynamic = NOT_GIVEN,
        shape: Sequence[int] | NotGiven | None = NOT_GIVEN,
    ) -> PartitionSpec:
        """The PartitionSpec of these axes: given with a mode, or both as one DynamicShardingAxes (class or instance).

        >>> import shardax as sx
        >>> manager = sx.PartitionManager(sx.PartitionAxis(decode_batch_axis="dp"))
        >>> manager.resolve([sx.BATCH, None, sx.HEAD], sx.MODE_TRAIN)
        P(('fsdp', 'dp'), None, 'tp')
        >>> manager.resolve([sx.BATCH, None, sx.HEAD], mode=1, shape=(8, 1, 16))
        P('dp', None, 'tp')
        """
        axes, mode = _axes_and_mode(axes, mode, dynamic_axes)
        known = None if isinstance(shape, NotGiven) else shape
        return self._paxis.resolve_spec(axes, mode_for(mode, known), known)

    # ---- a value -----------------------------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PartitionManager) and self._paxis == other._paxis

    def __hash__(self) -> int:
        return hash((hash(self._paxis), REGISTRY.table.fingerprint))

    def __repr__(self) -> str:
        return f"PartitionManager({self._paxis!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return PartitionManager, (self._paxis,)


def _axes_and_mode(axes: Any, mode: Any, dynamic_axes: Any) -> tuple[Sequence[Axis], str | int]:
    """What was asked: axes and mode where both are given, else the pair of a DynamicShardingAxes."""
    if type(axes) in (list, tuple) and isinstance(mode, str):  # asked at every constraint of a program
        return axes, mode
    if is_dynamic(axes):
        if dynamic_axes is not NOT_GIVEN and dynamic_axes is not None:
            raise AxisRuleError("Two DynamicShardingAxes, one as axes and one as dynamic_axes", remedy="give one")
        axes, dynamic_axes = None, axes
    missing = [name for name, part in (("axes", axes), ("mode", mode)) if part is NOT_GIVEN or part is None]
    if not missing:
        return axes, checked_mode(mode)
    if is_dynamic(dynamic_axes):
        return dynamic_axes.axes, checked_mode(dynamic_axes.mode)
    if dynamic_axes is NOT_GIVEN or dynamic_axes is None:
        raise AxisRuleError(
            f"Nothing to lay out by: {' and '.join(missing)} missing, and no dynamic axes",
            remedy="give axes and a mode, or dynamic_axes (a DynamicShardingAxes, class or instance)",
        )
    raise AxisTypeError(f"dynamic_axes is a DynamicShardingAxes, class or instance, not {dynamic_axes!r}")


def _each_leaf(tree: Any, lay_out: Callable[[Any], Any]) -> Any:
    """The tree with its arrays laid out one by one; every one that cannot be is listed, with its path."""
    if isinstance(tree, (jax.Array, np.ndarray)):
        return lay_out(tree)
    offences: list[Offence] = []
    results: list[Any] = []
    for path, leaf in zip(*flatten(tree), strict=True):
        try:
            results.append(lay_out(leaf) if hasattr(leaf, "shape") else leaf)
        except (SpecError, UnknownAxisError) as error:
            listed = error.offences or (Offence("", error.headline),)
            offences += [replace(offence, where=path) for offence in listed]
    if offences:
        leaves = len({offence.where for offence in offences})
        raise SpecError(f"{plural(leaves, 'leaf does', 'leaves do')} not fit their axes", offences)
    return rebuild(tree, results)


# ---- the manager in force -------------------------------------------------------------------------------------------

_AMBIENT: Final = Ambient[PartitionManager]("partition manager")

jax.tree_util.register_static(PartitionManager)


def get_current_partition_manager() -> PartitionManager | None:
    """The innermost manager entered in this context (thread or task), or None.

    >>> import shardax as sx
    >>> with sx.PartitionManager(sx.PartitionAxis()) as manager:
    ...     get_current_partition_manager() is manager
    True
    """
    return _AMBIENT.current()


def get_partition_manager() -> PartitionManager | None:
    """The last manager made in this process, whether in force or not, or None.

    >>> import shardax as sx
    >>> manager = sx.PartitionManager(sx.PartitionAxis())
    >>> get_partition_manager() is manager
    True
    """
    return _AMBIENT.last()


def apply_logical_sharding(
    x: Any,
    partition_manager: PartitionManager | NotGiven | None = NOT_GIVEN,
    axes: _Axes = NOT_GIVEN,
    mode: _Mode = NOT_GIVEN,
    dynamic_axes: _Dynamic = NOT_GIVEN,
    auto_correct: bool = True,
) -> Any:
    """`PartitionManager.shard` by the manager given, else the current one, else the last one made.

    >>> import jax, jax.numpy as jnp, shardax as sx
    >>> manager = sx.PartitionManager(sx.PartitionAxis())
    >>> with jax.set_mesh(sx.make_mesh("fsdp=2,tp=4")):
    ...     tree = sx.apply_logical_sharding({"w": jnp.ones((8, 4))}, manager, dynamic_axes=sx.ColumnWise)
    >>> tree["w"].sharding.spec
    P('fsdp', 'tp')
    """
    manager = None if partition_manager is NOT_GIVEN else partition_manager
    if manager is None:
        manager = get_current_partition_manager() or get_partition_manager()
    if manager is None:
        raise NoManagerError(
            "No PartitionManager is available",
            remedy="pass partition_manager=…, or enter `with PartitionManager(PartitionAxis()):`",
        )
    if not isinstance(manager, PartitionManager):
        raise AxisTypeError(f"Expected PartitionManager, got {type(manager).__name__}: {manager!r}")
    return manager.shard(x=x, axes=axes, mode=mode, dynamic_axes=dynamic_axes, auto_correct=auto_correct)
