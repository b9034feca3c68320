"""`prove`: any JAX function, compiled for hardware that is not there, and read."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jax import export
from jax.sharding import PartitionSpec

from shardax.errors import CompilerError, Offence
from shardax.names.mesh import MeshLike, MeshSpec
from shardax.names.spec import canonical, shard_count
from shardax.proving.artefact import Artefact
from shardax.proving.buffers import largest_buffers
from shardax.proving.chips import Chip, chips
from shardax.proving.compiling import compile_for, quiet_start
from shardax.proving.cost import Estimate, Link, estimate
from shardax.proving.flops import doubts, flops
from shardax.proving.hlo import HloModule, parse_hlo
from shardax.proving.installed import compiler_version
from shardax.proving.ledger import Ledger
from shardax.proving.memory import BigBuffer, Memory, Refusal, read_memory, read_refusal, report_buffers
from shardax.proving.placing import UNKNOWN, Placed, chosen_mesh, replicated
from shardax.proving.proof import LostDonation, NotAsAsked, Proof, read_spec
from shardax.proving.rebind import Program, Result, lower
from shardax.proving.shapes import arrays
from shardax.proving.step import Names, Step
from shardax.proving.target import Target
from shardax.proving.worker import DEFAULT_TIMEOUT
from shardax.tables import parse_bytes

BLIND = {
    "cpu": (
        "temporaries and peak are the CPU compiler's (bf16 work widened): only arguments and outputs are exact",
        "collectives are those of the partitioner: a TPU or GPU compiler merges some and turns all-reduce into"
        " reduce-scatter; no device to fit, no time",
    ),
    "tpu": ("time is a roofline: no contention on the links, no real overlap; it ranks layouts, it predicts no clock",),
    "gpu": (
        "the GPU compiler never refuses: fit is its peak against the card; without a GPU nothing is autotuned",
        "time is a roofline: it ranks layouts, it predicts no clock",
    ),
}


def prove(
    fn: Any,
    *args: Any,
    mesh: MeshLike | None = None,
    target: str | Target = "cpu:8",
    layout: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
    donate: Names = None,
    static: Names = None,
    replicated_over: str | int = "64MB",
    compiler_options: Mapping[str, Any] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    cache: bool = True,
    **kwargs: Any,
) -> Proof:
    """Compile `fn(*args, **kwargs)` for a target without having it, and say what the compiler said.

    `fn` is plain, `jax.jit`ted or stateful; arguments are arrays or `jax.ShapeDtypeStruct`s, and nothing of them is
    allocated. Their shardings come from `in_specs`, else `layout`, else `jax.jit`, else the arrays; they are put on the
    target's mesh by axis name, and that mesh is the current one while `fn` is traced. Without `mesh=` it is the one in
    force, else that of the layouts. What `jax.export` exported will do for `fn`, and brings its arguments along.

    >>> import jax, jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    >>> proof = prove(lambda x: x.sum(), x, mesh="dp=8", in_specs=jax.P("dp"))
    >>> [(row.op, row.axes, row.payload_bytes) for row in proof.ledger]
    [('all-reduce', ('dp',), 4)]
    """
    goal = Target.of(target)
    goal.require()
    if isinstance(fn, export.Exported):
        artefact = Artefact.of(fn, goal, mesh, args, kwargs)
        fn, args, kwargs, mesh = artefact.function, artefact.args, dict(artefact.kwargs), artefact.mesh
        donate = artefact.donated if donate is None else donate
    spec = goal.mesh(chosen_mesh(mesh, layout, in_specs, need="prove"))
    step = Step.of(fn, args, kwargs, donate, static)
    with quiet_start():
        program = lower(step, spec, goal, in_specs, out_specs, layout)
    answer = compile_for(program, goal, options=compiler_options, timeout=timeout, cache=cache)
    return read_answer(program, goal, answer, parse_bytes(replicated_over))


def read_answer(program: Program, target: Target, answer: Mapping[str, Any], threshold: int) -> Proof:
    """The compiler's answer, read into a proof."""
    refusal = read_refusal(answer["refused"]) if "refused" in answer else None
    if "refused" in answer and refusal is None:
        lacks = target.platform == "cpu" and "UNIMPLEMENTED" in answer["refused"]
        raise CompilerError(
            f"the compiler refused {program.name} for {target}",
            [Offence(program.name, " ".join(answer["refused"].split())[:1500])],
            "XLA:CPU lacks this operation; a tpu: or gpu: target may have it, and sx.check needs no compiler" * lacks,
        )
    blind = list(BLIND[target.platform])
    module = parse_hlo(answer["hlo"]) if refusal is None else None
    outputs = _outputs(program, answer)
    common: dict[str, Any] = {
        "name": program.name,
        "target": target,
        "mesh": program.mesh,
        "inputs": program.inputs,
        "outputs": outputs,
        "replicated": replicated([*program.inputs, *_new(outputs)], program.mesh, threshold),
        "not_as_asked": _not_as_asked(program, outputs),
        "refusal": answer.get("refused", ""),
        "compile_seconds": answer["seconds"],
        "compile_cpu_seconds": answer["cpu_seconds"],
        "versions": compiler_version(target.platform),
        "cached": answer["cached"],
        "hlo": answer.get("hlo", ""),
    }
    if module is None:
        assert refusal is not None
        blind.insert(0, "collectives and work: the compiler stopped at memory; a cpu target shows them")
        memory = _refused_memory(refusal, program, target, answer.get("memory_report", ""))
        return Proof(
            **common,
            memory=memory,
            ledger=Ledger(()),
            flops=0,
            estimate=None,
            lost_donations=(),
            blind_spots=tuple(blind),
        )
    ledger = Ledger.of(module, program.mesh.shape, slice_of=answer["slice_of"], messages=answer["said"])
    return Proof(
        **common,
        memory=_memory(program, target, answer, module),
        ledger=ledger,
        flops=flops(module),
        estimate=_estimate(target, answer, module, ledger),
        lost_donations=_lost_donations(program, answer["header"]),
        blind_spots=(*blind, *doubts(module)),
    )


# ---- memory ---------------------------------------------------------------------------------------------------------


def chip_of(target: Target, device_kind: str = "") -> Chip | None:
    """The chip of a target; a local GPU is known by its kind."""
    return target.chip or next((found for found in chips().values() if found.device_kind == device_kind), None)


def usable_memory(target: Target, device_kind: str = "") -> int | None:
    """Bytes that one device of the target gives to programs."""
    found = chip_of(target, device_kind)
    return None if found is None else found.hbm_usable


def _groups(program: Program) -> list[tuple[str, int]]:
    sizes: dict[str, int] = {}
    for leaf in program.inputs:
        if leaf.number is not None:
            sizes[leaf.group] = sizes.get(leaf.group, 0) + leaf.bytes_on(program.mesh)
    return sorted(sizes.items(), key=lambda pair: -pair[1])


def _memory(program: Program, target: Target, answer: Mapping[str, Any], module: HloModule) -> Memory:
    known = largest_buffers(module, 200)
    buffers = [
        BigBuffer(found.bytes, f"{found.dtype}[{','.join(map(str, found.shape))}]", found.place) for found in known
    ]
    if target.platform != "cpu" and answer["memory_report"]:
        buffers = _with_lines(report_buffers(answer["memory_report"]), buffers)
    hbm = usable_memory(target, answer["device_kind"])
    return read_memory(answer["memory"], target, _groups(program), buffers[:8], hbm)


def _with_lines(allocations: Sequence[tuple[int, list[str]]], known: Sequence[BigBuffer]) -> list[BigBuffer]:
    """Allocations of the compiler's report, each with the line of a buffer of one of its shapes."""
    places = {buffer.what: buffer.place for buffer in reversed(known) if buffer.place}
    found: list[BigBuffer] = []
    for size, shapes in allocations:
        shown = max(shapes, key=lambda shape: (_shape_bytes(shape), shape in places), default="")
        more = f" and {len(shapes) - 1} more" if len(shapes) > 1 else ""
        found.append(BigBuffer(size, shown + more, places.get(shown, "")))
    return found


def _shape_bytes(text: str) -> int:
    return sum(array.bytes for array in arrays(text))


def _refused_memory(refusal: Refusal, program: Program, target: Target, report: str) -> Memory:
    """An early refusal is one sentence; what is large stands in the compiler's report then."""
    arguments = refusal.arguments or sum(size for _, size in _groups(program))
    temporaries = refusal.program or max(refusal.used - arguments, 0)
    hbm = min(refusal.available, usable_memory(target) or refusal.available)
    buffers = refusal.buffers or tuple(_with_lines(report_buffers(report), ()))
    return Memory(arguments, 0, temporaries, 0, 0, refusal.used, hbm, tuple(_groups(program)), buffers)


# ---- what is not as it was meant to be ------------------------------------------------------------------------------


def _lost_donations(program: Program, header: str) -> tuple[LostDonation, ...]:
    _, _, listed = header.partition("input_output_alias={")
    reused = {int(number) for number in re.findall(r"\((\d+), \{[^}]*\}, (?:may|must)-alias\)", listed)}
    effects = program.data["effects"]
    return tuple(
        LostDonation(leaf.path, leaf.bytes_on(program.mesh))
        for leaf in program.inputs
        if leaf.donated and leaf.number is not None and leaf.number + effects not in reused
    )


def _outputs(program: Program, answer: Mapping[str, Any]) -> tuple[Placed, ...]:
    specs = answer.get("output_specs")
    given = specs[program.data["effects"] :] if specs else [None] * len(program.results)
    if len(given) != len(program.results):
        given = [None] * len(program.results)
    return tuple(
        Placed(result.path, result.shape, result.dtype, result.itemsize, *_got(result, spec))
        for result, spec in zip(program.results, given, strict=True)
    )


def _got(result: Result, spec: Any) -> tuple[PartitionSpec, str]:
    """How a result lies, and who says so: of a refused step nobody does."""
    if spec is not None:
        return read_spec(spec), "compiler"
    return (PartitionSpec(), UNKNOWN) if result.asked is None else (result.asked, "asked")


def _new(outputs: Sequence[Placed]) -> list[Placed]:
    return [output for output in outputs if output.shape and output.source != UNKNOWN]


def _not_as_asked(program: Program, outputs: Sequence[Placed]) -> tuple[NotAsAsked, ...]:
    mesh = program.mesh
    found: list[NotAsAsked] = []
    for result, output in zip(program.results, outputs, strict=True):
        if result.asked is None or canonical(result.asked, mesh) == canonical(output.spec, mesh):
            continue
        ideal = output.bytes // max(_shards(result.asked, mesh), 1)
        cost = max(output.bytes_on(mesh) - ideal, 0)
        found.append(NotAsAsked(result.path, result.shape, result.asked, output.spec, cost))
    known = {(each.shape, each.asked) for each in found}
    found += [
        NotAsAsked(each.where, each.shape, each.asked, each.got, each.bytes_per_device)
        for each in program.unmet
        if (each.shape, each.asked) not in known
    ]
    return tuple(found)


def _shards(spec: PartitionSpec, mesh: MeshSpec) -> int:
    return shard_count(canonical(spec, mesh), mesh)


# ---- time -----------------------------------------------------------------------------------------------------------


def _estimate(target: Target, answer: Mapping[str, Any], module: HloModule, ledger: Ledger) -> Estimate | None:
    chip = chip_of(target, answer["device_kind"])
    return None if chip is None else estimate(module, ledger, chip, links_of(target, chip, answer["axes"]))


def links_of(target: Target, chip: Chip, axes: Mapping[str, Any]) -> dict[str, Link]:
    """What carries each mesh axis: the torus dimensions it runs along, the switch, or the network."""
    one_way = chip.link_bandwidth / (2 if chip.torus else 1)
    links: dict[str, Link] = {}
    for name, facts in axes.items():
        if facts["slices"] or (target.platform == "gpu" and facts["hosts"]):
            links[name] = Link("network", chip.dcn_bandwidth)
        elif chip.torus:
            dimensions = [at for at in facts["dimensions"] if at < len(target.wrap)]
            ways = math.fsum(2 if target.wrap[at] else 1 for at in dimensions) or 2
            links[name] = Link(chip.link_name, one_way * ways)
        else:
            links[name] = Link(chip.link_name, chip.link_bandwidth)
    return links
