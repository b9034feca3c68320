"""`Target`: the hardware a proof is for, read from text like `"tpu:v5p:4x4x4"`; no device is touched."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

from shardax.errors import CompilerMissingError, Offence, TargetError, did_you_mean, plural
from shardax.names.mesh import MeshLike, MeshSpec, factorizations
from shardax.proving.chips import Chip, chip, chips, gpu_target_config
from shardax.proving.installed import install_command, missing
from shardax.tables import Table, show_bytes

PLATFORMS = ("cpu", "tpu", "gpu")
MAX_CPU_DEVICES = 2048  # above: "Multiprocess computations aren't implemented on the CPU backend"
MAX_SLICES = 64
MAX_GPUS = 4096
CORES_ARE_COUNTED = ("v4", "v5p")  # Cloud's "v5p-8" is four chips, "v5e-8" is eight
_CLOUD_NAME = re.compile(r"(v\d+\w*|tpu7x)-(\d+)")
FORMS = {
    "cpu": '"cpu:8" (up to 2048 simulated devices)',
    "tpu": '"tpu:v5p:4x4x4", "tpu:v5e:16x16*4" (four slices)',
    "gpu": '"gpu:h100:8", "gpu:h200:8x8" (hosts × GPUs per host), "gpu:local:8"',
}


@dataclass(frozen=True)
class Target:
    """Where a program is to run: a platform, a chip, an arrangement of chips.

    >>> pod = Target.of("tpu:v5e:16x16*4")
    >>> str(pod), pod.devices, pod.slices, pod.chip.name
    ('tpu:v5e:16x16*4', 1024, 4, 'v5e')
    >>> Target.of("tpu:v5e:16x32")
    Traceback (most recent call last):
        ...
    shardax.errors.TargetError: unknown target 'tpu:v5e:16x32'
      16x32: is no v5e slice (512 chips); nearest: 8x16, 16x16; several slices: "16x16*2"
    """

    platform: str
    chip_name: str  # "" on the CPU, "local" for the GPU in this machine
    shape: tuple[int, ...]
    slices: int = 1

    @classmethod
    def of(cls, target: str | Target) -> Target:
        """A target from its text form (or itself)."""
        if isinstance(target, Target):
            return target
        if not isinstance(target, str):
            raise TargetError(f"not a target: {target!r} ({type(target).__name__})", remedy=_forms(PLATFORMS))
        kind, _, rest = target.strip().lower().partition(":")
        readers = {"cpu": _read_cpu, "tpu": _read_tpu, "gpu": _read_gpu, "cuda": _read_gpu}
        if kind not in readers and _CLOUD_NAME.fullmatch(kind):
            _read_tpu(target, kind)
        if kind not in readers:
            problem = f"is not one of {', '.join(PLATFORMS)}{_whose_chip(kind, rest) or did_you_mean(kind, PLATFORMS)}"
            raise TargetError(f"unknown target {target!r}", [Offence(kind, problem)], _forms(PLATFORMS))
        return readers[kind](target, rest)

    @property
    def chip(self) -> Chip | None:
        """The facts of the chip; None on the CPU and for an unnamed local GPU."""
        return None if self.chip_name in ("", "local") else chip(self.chip_name)

    @property
    def devices(self) -> int:
        """The number of JAX devices."""
        per_chip = self.chip.devices_per_chip if self.chip else 1
        return math.prod(self.shape) * self.slices * per_chip

    @property
    def wrap(self) -> tuple[bool, ...]:
        """Which dimensions of a TPU slice close to a ring, as in the real pods.

        Without it the v5p compiler turns reduce-scatters into all-reduces: three-dimensional tori close when every
        side is a multiple of 4, two-dimensional ones along sides of 16.

        >>> Target.of("tpu:v5p:4x4x8").wrap, Target.of("tpu:v5e:8x16").wrap, Target.of("tpu:v5p:2x2x2").wrap
        ((True, True, True), (False, True), (False, False, False))
        """
        if self.platform != "tpu":
            return ()
        if len(self.shape) == 3:
            return (all(side % 4 == 0 for side in self.shape),) * 3
        return tuple(side == 16 for side in self.shape)

    def mesh(self, mesh: MeshLike) -> MeshSpec:
        """The mesh with its -1 inferred; one that does not use every device of the target is an error.

        >>> str(Target.of("tpu:v5p:4x4x4").mesh("fsdp=-1,tp=4"))
        'fsdp=16,tp=4'
        """
        asked = MeshSpec.of(mesh)
        if -1 in asked.sizes:
            return asked.resolve(self.devices)
        if asked.size != self.devices:
            would = [f'target="{text}"' for text in targets_of_size(self.platform, self.chip_name, asked.size)[:2]]
            for sizes in factorizations(self.devices, asked.sizes, most=3):
                would.append(f'mesh="{MeshSpec(asked.names, sizes)}"')
            raise TargetError(
                f"mesh {asked} has {plural(asked.size, 'device')}, target {self} has {self.devices:,}",
                remedy=f"would work: {'; '.join(would)}" if would else "",
            )
        return asked

    @property
    def topology(self) -> dict[str, Any]:
        """What the compiler process needs to make the devices: plain data."""
        size = "x".join(map(str, self.shape))
        if self.platform == "cpu":
            return {"platform": "cpu", "devices": self.devices}
        if self.platform == "gpu":
            facts = {} if self.chip is None else {"target_config": gpu_target_config(self.chip)}
            return {"platform": "cuda", "name": "", "options": {"topology": f"1x{size}"} | facts}
        assert self.chip is not None
        options: dict[str, Any] = {"wrap": (*self.wrap, False)[:3]}
        if self.slices > 1:
            options["num_slices"] = self.slices
        if "chip_config" in self.chip.facts:
            options["chip_config_name"] = self.chip.facts["chip_config"]
        if math.prod(self.shape) == 1 or self.shape == (2, 4):  # one host holds the whole slice
            options["chips_per_host_bounds"] = (*self.shape, 1, 1)[:3]
        return {"platform": "tpu", "name": f"{self.chip.facts['compiler_name']}:{size}", "options": options}

    @property
    def install_hint(self) -> str:
        """What to install so that this target compiles here; empty when nothing is missing."""
        return "" if self.missing is None else install_command(self.platform)

    @property
    def missing(self) -> str | None:
        """Why this machine cannot compile for the target, or None."""
        return missing(self.platform)

    def require(self) -> None:
        """A `CompilerMissingError` with the remedy, unless the compiler is here."""
        why = self.missing
        if why is not None:
            raise CompilerMissingError(
                f"cannot compile for {self}", [Offence(self.platform, why)], install_command(self.platform)
            )

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape)) + (f"*{self.slices}" if self.slices > 1 else "")
        return ":".join(filter(None, (self.platform, self.chip_name, size)))

    def __repr__(self) -> str:
        return f"Target('{self}')"


def _forms(platforms: Sequence[str]) -> str:
    return "write it like " + ", ".join(FORMS[kind] for kind in platforms)


def _whose_chip(name: str, rest: str) -> str:
    """A chip where the platform should stand: "h100:8" lacks only its "gpu:"."""
    found = next((each for each in chips().values() if name in (each.name, *each.facts["aliases"])), None)
    return f"; did you mean '{found.platform}:{name}:{rest}'?" if found else ""


def _refuse(text: str, where: str, problem: str, platform: str) -> NoReturn:
    raise TargetError(f"unknown target {text!r}", [Offence(where, problem)], _forms([platform]))


def _read_cpu(text: str, rest: str) -> Target:
    if not rest.isdecimal() or not 1 <= int(rest) <= MAX_CPU_DEVICES:
        _refuse(text, rest or "(nothing)", f"the CPU tier takes 1 to {MAX_CPU_DEVICES} devices", "cpu")
    return Target("cpu", "", (int(rest),))


def _read_tpu(text: str, rest: str) -> Target:
    name, _, arrangement = rest.partition(":")
    glued = _CLOUD_NAME.fullmatch(name)
    if glued:  # how many chips it says depends on the generation, their arrangement it does not: ask for the topology
        found = chip(glued[1], "tpu")
        chips_asked = max(int(glued[2]) // (2 if found.name in CORES_ARE_COUNTED else 1), 1)
        near = ", ".join(f'"tpu:{found.name}:{shape}"' for shape in _near(found, chips_asked))
        _refuse(text, name, f"name the chip and its topology apart, for example {near}", "tpu")
    found = chip(name, "tpu")
    if found.name == "tpu7x" and name != "tpu7x":
        name = "tpu7x"
    match = re.fullmatch(r"(\d+(?:x\d+)*)(?:\*(\d+))?", arrangement)
    if not match:
        _refuse(text, arrangement or "(nothing)", f"is no topology; {found.name} has {_shapes_hint(found)}", "tpu")
    shape = tuple(map(int, match[1].split("x")))
    if shape not in tpu_shapes(found.name):
        near = ", ".join(_near(found, math.prod(shape), shape))
        chips_text = plural(math.prod(shape), "chip")
        problem = f"is no {found.name} slice ({chips_text}); nearest: {near}"
        slices = _as_slices(found, math.prod(shape))
        raise TargetError(f"unknown target {text!r}", [Offence(match[1], problem + slices)])
    slices = int(match[2] or 1)
    if not 1 <= slices <= MAX_SLICES:
        _refuse(text, f"*{slices}", f"the number of slices is 1 to {MAX_SLICES}", "tpu")
    return Target("tpu", found.name, shape, slices)


def _read_gpu(text: str, rest: str) -> Target:
    name, _, arrangement = rest.partition(":")
    name = "local" if name == "local" else chip(name, "gpu").name
    sides = arrangement.split("x")
    if not all(side.isdecimal() and int(side) for side in sides) or len(sides) > 2:
        _refuse(text, arrangement or "(nothing)", "is neither a number of GPUs nor hosts × GPUs", "gpu")
    most = 8 if name == "local" else chip(name).facts["slices"]["per_host"]
    shape = (1, int(sides[0])) if len(sides) == 1 else (int(sides[0]), int(sides[1]))
    if len(sides) == 1 and shape[1] > most and shape[1] % most == 0:
        shape = (shape[1] // most, most)
    if shape[1] > most:
        near = f"{max(1, round(math.prod(shape) / most))}x{most}"
        _refuse(text, arrangement, f'a host has up to {most} GPUs; nearest: "gpu:{name}:{near}"', "gpu")
    if math.prod(shape) > MAX_GPUS:
        _refuse(text, arrangement, f"up to {MAX_GPUS:,} GPUs were tried", "gpu")
    return Target("gpu", name, shape)


@lru_cache(maxsize=16)
def tpu_shapes(name: str) -> tuple[tuple[int, ...], ...]:
    """Every slice shape of a TPU generation, smallest first.

    A shape outside the list can abort the compiler's whole process, so this is a white list.

    >>> tpu_shapes("v5e")[-1], tpu_shapes("v5p")[4]
    ((16, 16), (4, 4, 4))
    """
    found = chip(name, "tpu")
    shapes = {tuple(map(int, text.split("x"))) for text in found.facts["slices"]["listed"]}
    if found.torus == 3:
        shapes |= set(_tori(found.facts["slices"]["max_chips"]))
    return tuple(sorted(shapes, key=lambda shape: (math.prod(shape), shape)))


def _tori(most: int) -> Iterator[tuple[int, int, int]]:
    sides = range(4, most // 16 + 1, 4)
    for a in sides:
        for b in range(a, most // (a * a) + 1, 4):
            for c in range(b, most // (a * b) + 1, 4):
                yield (a, b, c)


def _near(found: Chip, size: int, shape: tuple[int, ...] = ()) -> list[str]:
    known = tpu_shapes(found.name)
    if tuple(sorted(shape)) in known:
        return ["x".join(map(str, sorted(shape)))]

    def distance(other: tuple[int, ...]) -> tuple[float, int]:
        sides = sum(abs(a - b) for a, b in zip(sorted(shape)[::-1], other[::-1], strict=False))
        return abs(math.log(math.prod(other) / max(size, 1))), sides

    nearest = sorted(known, key=distance)[:2]
    return ["x".join(map(str, other)) for other in sorted(nearest, key=lambda other: (math.prod(other), other))]


def _as_slices(found: Chip, size: int) -> str:
    largest = tpu_shapes(found.name)[-1]
    count, left = divmod(size, math.prod(largest))
    return f'; several slices: "{"x".join(map(str, largest))}*{count}"' if count > 1 and not left else ""


def _shapes_hint(found: Chip) -> str:
    shown = ["x".join(map(str, shape)) for shape in tpu_shapes(found.name)]
    return ", ".join(shown if len(shown) <= 9 else [*shown[:8], f"… up to {shown[-1]}"])


def targets_of_size(platform: str, chip_name: str, devices: int) -> list[str]:
    """Targets of that platform and chip with exactly so many devices.

    >>> targets_of_size("tpu", "v5p", 64)
    ['tpu:v5p:4x4x4']
    """
    if platform == "cpu":
        return [f"cpu:{devices}"] if devices <= MAX_CPU_DEVICES else []
    if platform == "gpu":
        return [f"gpu:{chip_name}:{devices}"] if devices <= 8 or (devices % 8 == 0 and devices <= MAX_GPUS) else []
    found = chip(chip_name)
    shapes = [shape for shape in tpu_shapes(chip_name) if math.prod(shape) * found.devices_per_chip == devices]
    return [f"tpu:{chip_name}:{'x'.join(map(str, shape))}" for shape in shapes]


# ---- what there is --------------------------------------------------------------------------------------------------


def targets() -> Table:
    """Every target family: its chip, what the compiler allows, its sizes, and whether it compiles here.

    >>> targets().columns
    ('target', 'device', 'memory', 'sizes', 'here')
    """

    def state(platform: str) -> str:
        why = missing(platform)
        return "ready" if why is None else why

    rows = [("cpu:1 … cpu:2048", "simulated devices", "-", "1 … 2048 devices", state("cpu"))]
    for found in sorted(chips().values(), key=lambda each: (each.platform != "tpu", each.name)):
        memory = show_bytes(found.hbm_usable)
        if found.platform == "tpu":
            first, last = ("x".join(map(str, tpu_shapes(found.name)[place])) for place in (0, -1))
            sizes = f"{first} … {last}, *2 … *{MAX_SLICES} slices"
        else:
            sizes = "1 … 8 GPUs, 2x8 … 512x8"
        rows.append((f"{found.platform}:{found.name}", found.device_kind, memory, sizes, state(found.platform)))
    rows.append(("gpu:local", "the GPU in this machine", "-", "1 … 8 GPUs, 2x8 … 512x8", state("gpu")))
    notes = [install_command(kind) for kind in ("tpu", "gpu") if missing(kind)]
    return Table("", ("target", "device", "memory", "sizes", "here"), tuple(rows), ("memory",), tuple(notes))
