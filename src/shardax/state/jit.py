"""`shardax.jit`: `jax.jit` for functions whose arguments, closures and results hold cells."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, Literal

import jax

from shardax.errors import ArgumentError, StateShardingError
from shardax.state.aliasing import refuse_returned, refuse_shared
from shardax.state.building import JitOptions, build, mesh_key
from shardax.state.forms import chosen
from shardax.state.kinds import Kind, called, role_of
from shardax.state.lift import Gathered, Lift, Options
from shardax.state.lifted import Lifted
from shardax.state.prefixes import has_graph_node, odd_leaves, refuse_odd_entries
from shardax.state.retrace import Retraces
from shardax.state.stages import Lowered, Traced, out_info, stage
from shardax.state.wrapping import Wrapped


class JitWrapped(Wrapped):
    """A function ready to be called, traced, lowered and compiled; made by `jit`."""

    _options: JitOptions

    def __init__(self, function: Callable[..., Any], options: JitOptions) -> None:
        super().__init__(function, options)
        static = chosen(function, "static", options.static_argnums, options.static_argnames)
        donate = chosen(function, "donate", options.donate_argnums, options.donate_argnames)
        self.in_shardings, self.out_shardings, self.kwarg_shardings = options.in_shardings, options.out_shardings, None
        self.static_argnums = static.positions
        title = getattr(function, "__qualname__", None) or repr(function)
        graph = (options.graph, options.graph_updates)
        key = mesh_key if options.needs_mesh else None
        self._lift = Lift(function, Options(title, static, donate, graph, key), self._compile)
        self._call = self._lift.__call__  # bound once: a call of an object costs one look-up more
        self._retraces = Retraces(self._lift)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for take_note in called:
            take_note()
        return self._call(args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else BoundJit(self, instance)

    def __repr__(self) -> str:
        return f"shardax.jit({self._lift.options.title})"

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """What the call would return, as shapes; nothing runs and no cell changes."""
        return out_info(*self._stage(args, kwargs))

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """Trace without lowering."""
        traced, gathered = self._stage(args, kwargs)
        return Traced(traced, self._lift, gathered, out_info(traced, gathered))

    def lower(self, *args: Any, lowering_platforms: tuple[str, ...] | None = None, **kwargs: Any) -> Lowered:
        """Trace and lower without compiling."""
        return self.trace(*args, **kwargs).lower(lowering_platforms=lowering_platforms)

    def why_retraced(self) -> str:
        """Why the function was traced last: which attribute, argument, static value or context was not as before.

        >>> import shardax as sx
        >>> @sx.jit
        ... def double(x):
        ...     return 2 * x
        >>> double(1), double(1.0)
        (Array(2, dtype=int32, weak_type=True), Array(2., dtype=float32, weak_type=True))
        >>> print(double.why_retraced())
        x: int32[] → float32[]
        """
        return self._retraces.last

    def clear_cache(self) -> None:
        """Forget everything that was traced and compiled."""
        self._lift.clear()

    def _stage(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Gathered]:
        return stage(self._lift, args, kwargs)

    def _compile(self, lifted: Lifted, gathered: Gathered) -> Callable[..., Any]:
        lifted.on_trace = self._retraces.record
        if self._options.graph is False:
            paths = self._lift.cell_paths(lifted)
            refuse_shared(lifted.graph, self._lift.root_names(lifted.form), "jit")
            lifted.on_recipe = lambda recipe: refuse_returned(recipe, paths.__getitem__, "jit")
        return build(self._lift, lifted, gathered, self._options)


class BoundJit:
    """A jitted method of one instance."""

    def __init__(self, wrapped: JitWrapped, instance: Any) -> None:
        self.__func__, self.__self__ = wrapped, instance
        self.__doc__, self.__module__ = wrapped.__doc__, wrapped.__module__

    @property
    def __wrapped__(self) -> Any:
        return MethodType(self.__func__.__wrapped__, self.__self__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__qualname__"):  # how it is copied is its own affair
            raise AttributeError(name)
        member = getattr(self.__func__, name)
        if name in ("eval_shape", "trace", "lower"):
            return functools.partial(member, self.__self__)
        return member

    def __reduce__(self) -> Any:
        return BoundJit, (self.__func__, self.__self__)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BoundJit) and self.__func__ is other.__func__ and self.__self__ is other.__self__

    def __hash__(self) -> int:
        return hash((id(self.__func__), id(self.__self__)))

    def __repr__(self) -> str:
        return f"<{self.__func__!r} of {type(self.__self__).__name__}>"


def jit(
    fun: Callable[..., Any] | None = None,
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    keep_unused: bool = False,
    device: Any = None,
    backend: str | None = None,
    inline: bool = False,
    abstracted_axes: Any = None,
    compiler_options: dict[str, Any] | None = None,
    donate: Literal["state"] | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Compile a function whose arguments, closure and results may hold cells, in any framework.

    >>> import jax.numpy as jnp, shardax as sx
    >>> weight = sx.State(jnp.ones(3))
    >>> @sx.jit(donate="state")
    ... def step(gradient):
    ...     weight.value -= 0.1 * gradient
    >>> step(jnp.ones(3))
    >>> weight.value
    Array([0.9, 0.9, 0.9], dtype=float32)

    Everything `jax.jit` takes means the same here. Shardings are prefixes of the arguments, with `StateSharding` for
    the state of one; a bare PartitionSpec is on the current mesh. `donate="state"` donates the cells that the function
    writes, and only those. `graph=False` and `graph_updates=False` are flax's restrictions: no shared cells, and no
    change of structure carried out.
    """
    options = JitOptions(
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
        keep_unused=keep_unused,
        device=device,
        backend=backend,
        inline=inline,
        abstracted_axes=abstracted_axes,
        compiler_options=compiler_options,
        donate=donate,
        graph=graph,
        graph_updates=graph_updates,
    )
    _check(options)
    if fun is None:
        return lambda function: _wrap(function, options)
    return _wrap(fun, options)


def _wrap(function: Any, options: JitOptions) -> JitWrapped:
    if not callable(function):
        raise ArgumentError(f"jit needs a function, not {type(function).__name__}")
    if isinstance(function, MethodType) and isinstance(role_of(type(function.__self__)), Kind):
        owner = type(function.__self__).__name__
        raise ArgumentError(
            f"jit does not take bound methods of modules ({owner}.{function.__name__})",
            remedy=f"decorate the method, or call jit({owner}.{function.__name__})(instance, ...)",
        )
    return JitWrapped(function, options)


def _check(options: JitOptions) -> None:
    if options.donate not in (None, "state"):
        raise ArgumentError(f"donate={options.donate!r} is unknown", remedy='donate="state", or donate_argnums')
    for argument in ("in_shardings", "out_shardings"):
        prefix = getattr(options, argument)
        if options.graph_updates is not False and has_graph_node(prefix):
            raise StateShardingError(
                f"Graph nodes are not allowed as prefixes: {argument} holds a module",
                remedy="a StateSharding says which cell gets which sharding",
            )
        refuse_odd_entries(prefix, argument)
        odd = odd_leaves(prefix, argument, "sharding")
        if odd:
            remedy = "NamedSharding(mesh, spec), or a PartitionSpec on the mesh in force"
            raise StateShardingError(f"{argument} takes shardings and trees of them", odd, remedy)
    if options.abstracted_axes is not None:
        raise ArgumentError(
            f"abstracted_axes is not available in jax {jax.__version__}",
            remedy="leave it out; shapes are specialised at each call",
        )
