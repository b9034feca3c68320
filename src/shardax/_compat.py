"""The only file that knows JAX versions (0.10 … 0.12) or a private JAX name.

Each name here says what it stands for and why the public one is not enough.
"""

from __future__ import annotations

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.experimental.layout
from jax._src import core as _core
from jax._src import mesh as _mesh
from jax._src import named_sharding as _named_sharding
from jax._src.interpreters.partial_eval import DynamicJaxprTrace as _StagedTrace

JAX_VERSION: tuple[int, ...] = jax.__version_info__
FFT_BY_ROWS = JAX_VERSION >= (0, 12)  # the partitioner gathers nothing where only rows are sharded


def context_manager_mesh() -> Any:
    """The mesh of `with mesh:`, or an empty one. No public name reads it, and `jax.set_mesh` does not set it."""
    return _mesh.thread_resources.env.physical_mesh


def backend_initialised() -> bool:
    """Has any device been touched in this process? `jax.devices()` would answer by touching them."""
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())


trace_state_clean = _core.trace_state_clean
"""True when no trace is active in this thread (backed by C++; nothing public answers this)."""


def auto_constraint(sharding: Any, context: Any, free_dims: frozenset[int]) -> Callable[[Any], Any]:
    """What `jax.lax.with_sharding_constraint` does to a traced array on Auto axes, once its checks have passed.

    The checks of the public function cost as much as the rest of it, at every call; a plan makes them once. A test
    compares the two equation by equation; a JAX that is newer than this file gets the public function.
    """
    if JAX_VERSION >= (0, 13):
        return lambda x: jax.lax.with_sharding_constraint(x, sharding)
    from jax._src.pjit import sharding_constraint_p

    return partial(
        sharding_constraint_p.bind,
        sharding=sharding,
        layout=None,
        context_mesh=context,
        unconstrained_dims=free_dims,
    )


# ---- traces (state) -------------------------------------------------------------------------------------------------


def current_trace() -> Any:
    """The innermost trace of this thread. `jax.core` exports tracers, not the trace in force."""
    return _core.trace_ctx.trace


def trace_of(tracer: Any) -> Any:
    """The trace that a tracer belongs to."""
    return tracer._trace


def is_live(tracer: Any) -> bool:
    """Does a tracer belong to the trace in force, or to one that it stands on?"""
    trace = current_trace()
    while trace is not None and trace is not tracer._trace:
        trace = getattr(trace, "parent_trace", None)
    return trace is not None


def is_staged(trace: Any, outer: Any = None) -> bool:
    """Does a trace, or one it stands on down to `outer`, only record (jit, scan, cond), so that Python runs once?"""
    while trace is not None and trace is not outer:
        if isinstance(trace, _StagedTrace):
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


def compilations_of(jitted: Any) -> Callable[[], int]:
    """Counts the signatures that a jitted function has compiled: it grows when a call was not a repeated one."""
    return jitted._cache_size


# ---- lowering here, compiling elsewhere (proving) -------------------------------------------------------------------


class _StandIn:
    """A device that is not there: enough for code that reads the mesh of `with mesh:` while it is traced."""

    process_index = 0
    client = None

    def __init__(self, number: int, platform: str, kind: str) -> None:
        self.id, self.platform, self.device_kind = number, platform, kind

    def __repr__(self) -> str:
        return f"{self.device_kind or self.platform}({self.id}, not present)"


@contextmanager
def mesh_to_prove(mesh: Any, platform: str, kind: str) -> Generator[None]:
    """Make an abstract mesh the current one, in every way a program can ask, whatever mesh is in force outside."""
    import numpy as np

    devices = np.empty(mesh.size, dtype=object)
    devices[:] = [_StandIn(number, platform, kind) for number in range(mesh.size)]
    stand_in = jax.sharding.Mesh(devices.reshape(mesh.axis_sizes), mesh.axis_names, axis_types=mesh.axis_types)
    outside = _mesh.thread_resources.env
    with jax.set_mesh(None), jax.sharding.use_abstract_mesh(mesh):  # pyright: ignore[reportArgumentType]
        _mesh.thread_resources.env = _mesh.ResourceEnv(stand_in)
        try:
            yield
        finally:
            _mesh.thread_resources.env = outside


@contextmanager
def only_abstract_mesh(mesh: Any) -> Generator[None]:
    """An abstract mesh and no other: lowering looks at every mesh in force and wants devices from a concrete one."""
    outside = _mesh.thread_resources.env
    with jax.set_mesh(None), jax.sharding.use_abstract_mesh(mesh):  # pyright: ignore[reportArgumentType]
        _mesh.thread_resources.env = _mesh.EMPTY_ENV
        try:
            yield
        finally:
            _mesh.thread_resources.env = outside


def traced_shardings(traced: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The shardings that a `jax.jit` asked for: one per argument leaf and result leaf, None where it left it open."""
    from jax._src.named_sharding import UnspecifiedValue

    def plain(shardings: Any) -> tuple[Any, ...]:
        return tuple(None if isinstance(sharding, UnspecifiedValue) else sharding for sharding in shardings)

    return plain(traced._params["in_shardings"]), plain(traced._params["out_shardings"])


def argument_shardings(traced: Any) -> list[Any]:
    """The sharding that every array argument of a traced program came with (None: a shape without one)."""
    return [argument.sharding for argument in traced._meta_tys_flat]


def rebind_traced(
    traced: Any,
    paths: Sequence[str],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    rebind: Callable[[Any, Any], Any],
) -> None:
    """Put other shardings into a traced program: of its arguments, its results, and (by `rebind(value, equation)`)
    every NamedSharding and Mesh that its equations mention. There is no public way to lower for another mesh.

    `paths` become the names that the compiler prints for the arguments.
    """
    from jax._src.named_sharding import UNSPECIFIED

    params = dict(traced._params)
    nowhere = jax.experimental.layout.Format(None, None)
    traced._meta_tys_flat = [
        argument.replace(sharding=None, committed=True, format=nowhere) for argument in traced._meta_tys_flat
    ]
    params["in_shardings"] = tuple(UNSPECIFIED if sharding is None else sharding for sharding in inputs)
    params["out_shardings"] = tuple(UNSPECIFIED if sharding is None else sharding for sharding in outputs)
    params["jaxpr"] = _named(rewrite_jaxpr(params["jaxpr"], rebind), paths)
    traced._params = params


def _named(jaxpr: Any, paths: Sequence[str]) -> Any:
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    info = inner.debug_info
    if info.arg_names is None or len(info.arg_names) != len(paths) or tuple(info.arg_names) == tuple(paths):
        return jaxpr
    named = inner.replace(debug_info=info._replace(arg_names=tuple(paths)))
    return named if inner is jaxpr else jaxpr.replace(jaxpr=named)


def rewrite_jaxpr(jaxpr: Any, rebind: Callable[[Any, Any], Any]) -> Any:
    """The jaxpr with `rebind` applied to every sharding and mesh in its equations; itself when nothing changes."""

    def rewrite(value: Any, equation: Any) -> Any:
        if is_jaxpr(value):
            return rewrite_jaxpr(value, rebind)
        if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
            found = [rewrite(item, equation) for item in value]
            return value if all(a is b for a, b in zip(found, value, strict=True)) else type(value)(found)
        if isinstance(value, (jax.sharding.NamedSharding, jax.sharding.Mesh)):
            return rebind(value, equation)
        return value

    inner = getattr(jaxpr, "jaxpr", jaxpr)  # a ClosedJaxpr holds one; in 0.12 it is one
    equations: list[Any] = []
    for equation in inner.eqns:
        params = {name: rewrite(value, equation) for name, value in equation.params.items()}
        same = all(params[name] is equation.params[name] for name in params)
        equations.append(equation if same else equation.replace(params=params))
    if all(a is b for a, b in zip(equations, inner.eqns, strict=True)):
        return jaxpr
    changed = inner.replace(eqns=equations)
    return changed if inner is jaxpr else jaxpr.replace(jaxpr=changed)


def is_jaxpr(value: Any) -> bool:
    """Is this a jaxpr, closed or open?"""
    return isinstance(value, (_core.Jaxpr, getattr(_core, "ClosedJaxpr", _core.Jaxpr)))


def subjaxprs(equation: Any) -> Iterator[Any]:
    """The open jaxprs among an equation's parameters."""
    for value in equation.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if is_jaxpr(item):
                yield getattr(item, "jaxpr", item)


def equation_frames(equation: Any) -> list[tuple[str, int, str]]:
    """File, line and function of every Python frame outside JAX that an equation comes from, the innermost first."""
    from jax._src import source_info_util

    frames = source_info_util.user_frames(equation.source_info.traceback)
    return [(frame.file_name, frame.start_line, frame.function_name) for frame in frames]


def name_stack(equation: Any) -> str:
    """The name stack of an equation, e.g. "transpose(jvp(layer))"."""
    return str(equation.source_info.name_stack)


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many of a scan's operands are constants, and how many are carried; 0.12 says it by a tree."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = map(len, params["ft_in"].unpack())
    return constants, carried


def laid_type(aval: Any, sharding: Any) -> Any:
    """The type of an array under a sharding, free of what a `shard_map` around it says of manual axes."""
    return _core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding)


def abstract_result(primitive: Any, arguments: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """The types that a primitive gives for argument types, shardings included; its ShardingTypeError where it refuses.

    No public name applies one primitive's typing rule; `jax.eval_shape` of a whole function stops at the first error.
    """
    found, _ = primitive.abstract_eval(*arguments, **params)
    return list(found) if primitive.multiple_results else [found]


ShardingTypeError = _core.ShardingTypeError
"""What an Explicit mesh says to an operation whose sharding it cannot tell; not exported by jax."""
DuplicateSpecError = _named_sharding.DuplicateSpecError
"""What it says when one axis would shard two dimensions of a result; not exported either."""


def abstract_mesh_of_a_kind(sizes: Sequence[int], names: Sequence[str], types: Any, kind: str) -> Any:
    """An abstract mesh equal to no other: what is traced under it is cached apart from what the user traces."""
    device = _mesh.AbstractDevice(device_kind=kind, num_cores=None, platform="cpu")
    return jax.sharding.AbstractMesh(tuple(sizes), tuple(names), axis_types=types, abstract_device=device)


def abstract_mesh_of_this_process(sizes: Sequence[int], names: Sequence[str], types: Any) -> Any | None:
    """The abstract mesh that a mesh of this process's devices calls its own; None while no device was touched.

    `shard_map(mesh=mesh)` compares it with the mesh in force, down to the kind of the devices.
    """
    if not backend_initialised():
        return None
    here = jax.sharding.Mesh(jax.local_devices()[:1], ("here",)).abstract_mesh.abstract_device
    return jax.sharding.AbstractMesh(tuple(sizes), tuple(names), axis_types=types, abstract_device=here)


def without_dead_code(jaxpr: Any) -> Any:
    """A jaxpr without equations that no result needs, as lowering would drop them; its arguments stay."""
    from jax._src.interpreters import partial_eval

    open_ = getattr(jaxpr, "jaxpr", jaxpr)
    live, _ = partial_eval.dce_jaxpr(open_, [True] * len(open_.outvars), instantiate=True)
    return live


Repair = tuple[str, Mapping[str, Any] | None, Sequence[Any]]
"""A scope's name, and either parameters with which an operation is accepted, or the specs of its results."""
_one_forgiving_thread = threading.RLock()


@contextmanager
def forgiving_trace(repair: Callable[[Exception, Any, Sequence[Any], Mapping[str, Any]], Repair]) -> Generator[None]:
    """While this thread traces, an operation that an Explicit mesh refuses is repaired in a scope, and tracing goes on.

    `repair` gets the error, the primitive, the types of its operands and its parameters. Where it gives no other
    parameters, the operands are gathered and the results resharded. Nothing public lets a trace go on after an error.
    """
    from jax._src import source_info_util

    if source_info_util.is_user_filename(__file__):  # the lines that are reported are the user's
        source_info_util.register_exclusion(__file__)
    thread = threading.get_ident()

    def process(self: Any, primitive: Any, operands: Any, params: Any, /) -> Any:
        try:
            return original(self, primitive, operands, params)
        except ShardingTypeError as error:
            if threading.get_ident() != thread or primitive.name == "reshard":
                raise
            scope, accepted, specs = repair(error, primitive, [jax.typeof(operand) for operand in operands], params)
            with _core.set_current_trace(self), jax.named_scope(scope):
                if accepted is not None:
                    return original(self, primitive, operands, accepted)
                found = original(self, primitive, [_gathered(operand) for operand in operands], params)
                listed = found if primitive.multiple_results else [found]
                placed = [jax.reshard(one, spec) for one, spec in zip(listed, specs, strict=True)]
                return placed if primitive.multiple_results else placed[0]

    with _one_forgiving_thread:
        original = _StagedTrace.process_primitive
        _StagedTrace.process_primitive = process
        try:
            yield
        finally:
            _StagedTrace.process_primitive = original


def _gathered(operand: Any) -> Any:
    sharding = getattr(jax.typeof(operand), "sharding", None)
    if sharding is None or all(entry is None for entry in sharding.spec):
        return operand
    return jax.reshard(operand, jax.sharding.PartitionSpec())


def lowered_program(lowered: Any) -> dict[str, Any]:
    """A lowered program as plain data that another process can compile.

    The public `Lowered` compiles only for devices that its own process holds. Bytecode keeps what text export loses:
    Python lines, parameter paths, donation marks.
    """
    from jax._src.interpreters import mlir
    from jax._src.named_sharding import UnspecifiedValue

    module = lowered.compiler_ir()
    _choose_platform(module)
    arguments = lowered._lowering.compile_args
    effects = (False,) * len(arguments["ordered_effects"])

    def open_ones(shardings: Any) -> tuple[bool, ...]:  # those that the compiler may choose
        return effects + tuple(
            isinstance(sharding, UnspecifiedValue) or mlir.contains_unconstrained(sharding) for sharding in shardings
        )

    return {
        "module": mlir.module_to_bytecode(module),
        "open_inputs": open_ones(arguments["in_shardings"]),
        "open_outputs": open_ones(arguments["out_shardings"]),
        "kept": tuple(sorted(arguments["kept_var_idx"])),
        "devices": arguments["num_devices"],
        "effects": len(effects),
        "shardy": bool(getattr(jax.config, "jax_use_shardy_partitioner", True)),
    }


def _choose_platform(module: Any) -> None:
    """In what was exported for several platforms every one has a branch: keep the one that is lowered for."""
    from jax._src.lib.mlir import passmanager

    if any("call_exported_" in str(each.attributes["sym_name"]) for each in module.body.operations):
        with module.context:
            passes = "inline,func.func(canonicalize),sccp,func.func(canonicalize),symbol-dce"
            passmanager.PassManager.parse(f"builtin.module({passes})").run(module.operation)


def exported_arguments(exported: Any) -> tuple[list[tuple[str, bool] | None], list[Any]]:
    """Path and donation of every argument leaf of an exported function (None: it was not used), and their shardings.

    `jax.export.Exported` keeps both in its program only; its shardings by name are private.
    """
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir

    with mlir.make_ir_context():
        operations: Any = ir.Module.parse(exported.mlir_module()).body.operations
        (main,) = [each for each in operations if "main" in str(each.attributes["sym_name"])]
        listed = [
            (str(argument.location).removeprefix('loc("').removesuffix('")'), str(marks))
            for argument, marks in zip(main.arguments, main.arg_attrs, strict=True)
        ]
    count = len(exported.module_kept_var_idx)
    found: list[tuple[str, bool] | None] = [None] * len(exported.in_avals)
    for at, (path, marks) in zip(exported.module_kept_var_idx, listed[len(listed) - count :], strict=True):
        found[at] = path, "jax.buffer_donor" in marks or "tf.aliasing_output" in marks
    return found, list(exported._in_named_shardings or [None] * len(found))


def compile_program(program: Mapping[str, Any], devices: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Compile bytecode of `lowered_program` for devices of this process or of a topology; an XLA executable."""
    import numpy as np
    from jax._src import compiler
    from jax._src.interpreters import mlir, pxla
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir

    order = np.empty(len(devices), dtype=object)
    order[:] = devices
    jax.config.update("jax_use_shardy_partitioner", program["shardy"])
    with mlir.make_ir_context():
        module = ir.Module.parse(program["module"])
        if program["devices"] != len(devices):  # no argument says how many: a function of nothing
            count = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), len(devices))
            module.operation.attributes["mhlo.num_partitions"] = count
        build = pxla.create_compile_options(
            module,
            False,
            program["open_inputs"],
            program["open_outputs"],
            devices[0].client,
            order,
            dict(options),
        )
        return compiler.backend_compile_and_load(
            devices[0].client, module, xla_client.DeviceList(tuple(devices)), build, []
        )


def output_specs(executable: Any, mesh: Any) -> list[Any] | None:
    """The partition spec of every output of an XLA executable; None where the compiler does not say."""
    from jax._src.sharding_impls import parse_flatten_op_sharding

    shardings = executable.get_output_shardings()
    if not shardings:
        return None
    specs: list[Any] = []
    for sharding in shardings:
        try:
            specs.extend(parse_flatten_op_sharding(sharding, mesh))
        except (NotImplementedError, ValueError):  # a sharding that no partition spec can say
            specs.append(None)
    return specs


# ---- many processes: jax.distributed keeps its place, its store and its detection to itself -------------------------


def distributed_client() -> Any:
    """The client of the coordination service (its store, its barriers), or None before `jax.distributed.initialize`."""
    from jax._src import distributed

    return distributed.global_state.client


def distributed_place() -> tuple[int, int, str | None]:
    """Rank, number of processes and coordinator of this process; `jax.process_index()` would touch the devices."""
    from jax._src import distributed

    state = distributed.global_state
    return state.process_id, state.num_processes, state.coordinator_address


def detect_cluster(
    coordinator_address: str | None,
    num_processes: int | None,
    process_id: int | None,
    local_device_ids: Any,
    method: str | None,
    timeout: int,
) -> tuple[str | None, int | None, int | None, Any]:
    """What jax's own detection (Open MPI, SLURM, Cloud TPU, Kubernetes) says, without initialising anything."""
    from jax._src import clusters

    return clusters.ClusterEnv.auto_detect_unset_distributed_params(
        coordinator_address, num_processes, process_id, local_device_ids, method, timeout
    )


def cluster_methods() -> dict[str, Callable[[], bool]]:
    """The clusters that jax can be told to look for, by name: is this process in one?"""
    from jax._src import clusters

    return {kind.name: kind.is_env_present for kind in clusters.ClusterEnv._cluster_types if kind.name}


def preemption_service_runs() -> bool:
    """Is there a preemption sync manager, so that `reached_preemption_sync_point` can answer?"""
    from jax._src import distributed

    return distributed.global_state.preemption_sync_manager is not None
