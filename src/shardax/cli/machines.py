"""`shardax mesh`, `targets` and `launch`: what a mesh crosses, what can be compiled for, and processes here."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardax.cli.answer import Answer
from shardax.cli.files import require_file
from shardax.cluster.launch import launch as launch_processes
from shardax.errors import CommandError, did_you_mean
from shardax.names.mesh import MeshSpec
from shardax.names.mesh_build import describe
from shardax.proving.chips import Chip, chip, chips
from shardax.proving.installed import compiler_version, install_command, missing
from shardax.proving.target import Target, tpu_shapes
from shardax.proving.target import targets as known_targets
from shardax.report.devices import mesh_on
from shardax.report.mesh_drawing import draw_mesh
from shardax.report.values import Cell, Column, Grid
from shardax.tables import Table, show_bytes


def mesh(text: str, target: str | None, axis: str | None) -> Answer:
    """A mesh on the devices of a target, or on abstract ones."""
    spec = MeshSpec.of(text)
    if axis is not None and axis not in spec.names:
        raise CommandError(f"no axis {axis!r} in mesh {spec}{did_you_mean(axis, spec.names)}")
    if target is None:
        if -1 in spec.sizes:
            raise CommandError(f"mesh {spec} has no size yet", remedy="--target says how many devices: tpu:v5e:4x4")
        goal, laid = None, spec.abstract()
    else:
        goal = Target.of(target)
        laid = mesh_on(goal, spec)
    found = describe(laid)
    axes = [{"name": a.name, "size": a.size, "type": a.axis_type.lower(), "crosses": a.crosses} for a in found.axes]
    data = {"mesh": str(MeshSpec.of(laid)), "target": str(goal) if goal else None, "devices": found.devices}
    drawing = draw_mesh(laid, axis)
    seats = [
        {"device": seat.device, "host": seat.host, "slice": seat.slice_index, "coordinate": list(seat.coordinate)}
        for seat in drawing.seats
    ]
    shown = (drawing, Table("", found.table().columns, found.table().rows, found.table().right))
    return Answer(shown, data | {"axes": axes, "seats": seats})


# ---- targets --------------------------------------------------------------------------------------------------------


def targets(name: str | None) -> Answer:
    """Every family of targets with the state of its compiler, or everything of one chip."""
    if name is not None:
        return _one_chip(name)
    compilers = {kind: _compiler(kind) for kind in ("cpu", "tpu", "gpu")}
    words = [f"{kind}: {_said(facts)}" for kind, facts in compilers.items()]
    data = {"compilers": compilers, "chips": [_chip_data(found) for found in chips().values()]}
    more = "every TPU size also as 2 to 64 slices: tpu:v5e:16x16*4; every topology of a chip: shardax targets v5e"
    return Answer((_families(compilers), "\n".join(words), more), data)


def _families(compilers: dict[str, Any]) -> Grid:
    """The families of targets; why a compiler is missing is said once, below."""
    columns = (
        Column("target", keep=10, cut="never"),
        Column("device", keep=5, least=14),
        Column("memory", right=True, keep=6),
        Column("sizes", keep=8, least=17),
        Column("here", keep=9, cut="never"),
    )
    rows: list[tuple[Cell, ...]] = []
    for name, device, memory, sizes, _ in known_targets().rows:
        ready = compilers[name.partition(":")[0]]["ready"]
        state = Cell("ready" if ready else "missing", tone="good" if ready else "quiet")
        rows.append((Cell(name), Cell(device), Cell(memory), Cell(sizes.partition(", *")[0]), state))
    return Grid("", columns, tuple(rows), most=len(rows))


def _compiler(platform: str) -> dict[str, Any]:
    why = missing(platform)
    install = install_command(platform) if why else None
    return {"ready": why is None, "missing": why, "install": install, "versions": dict(compiler_version(platform))}


def _said(facts: dict[str, Any]) -> str:
    if facts["ready"]:
        return "ready, " + ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return f"{facts['missing']}; {facts['install']}"


def _topologies(found: Chip) -> list[str]:
    if found.platform == "gpu":
        return [*(f"gpu:{found.name}:{count}" for count in (1, 2, 4, 8)), f"gpu:{found.name}:2x8"]
    return [f"tpu:{found.name}:{'x'.join(map(str, shape))}" for shape in tpu_shapes(found.name)]


def _chip_data(found: Chip) -> dict[str, Any]:
    return {
        "name": found.name,
        "platform": found.platform,
        "device_kind": found.device_kind,
        "memory": found.hbm_usable,
        "flops": dict(found.peak_flops),
        "targets": _topologies(found),
    }


def _one_chip(name: str) -> Answer:
    text = name.partition(":")[2] or name
    platforms = [text] if text in ("cpu", "tpu", "gpu") else []
    if platforms:
        listed = [found.name for found in chips().values() if found.platform == text]
        raise CommandError(f"{text!r} is no chip", remedy=f"chips: {', '.join(listed or sorted(chips()))}")
    found = chip(text.partition(":")[0])
    rows = tuple(
        (each, f"{goal.devices:,}", show_bytes(goal.devices * found.hbm_usable))
        for each in _topologies(found)
        for goal in [Target.of(each)]
    )
    more = "also *2 … *64 slices of each" if found.platform == "tpu" else "… up to 512x8: hosts × GPUs of each"
    sizes = Table("", ("target", "devices", "memory"), rows, ("devices", "memory"), (more,))
    return Answer((found.table(), sizes), _chip_data(found) | {"compiler": _compiler(found.platform)})


# ---- launch ---------------------------------------------------------------------------------------------------------


def launch(command: Sequence[str], processes: int, devices: int | None, grace: float) -> Answer:
    """Run processes to their end; their output is shown as it comes, on standard error where JSON is wanted."""
    if command[0].endswith(".py"):
        require_file(Path(command[0]))  # said once, not by every process
    started = time.monotonic()
    code = launch_processes(command, processes, devices, grace=grace, output=sys.stdout)
    seconds = round(time.monotonic() - started, 3)
    data = {"command": list(command), "processes": processes, "devices": devices, "exit_code": code, "seconds": seconds}
    return Answer((), data, code)
