"""How long a step takes at least, and what it waits for: compute, memory, kernel launches, or one of the links.

A roofline: every kernel takes the longest of its arithmetic, its memory traffic and its launch; collectives take their
bytes over the link's bandwidth. It ranks layouts and names the bottleneck; it is not a measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from shardax.proving.collectives import Collective
from shardax.proving.hlo import HloModule
from shardax.proving.ledger import Ledger
from shardax.proving.traffic import Kernel, kernels
from shardax.tables import Table, show_bytes, show_flops

# A rate that a data sheet does not give is at least that of a wider type, else taken from the type it is computed in.
_STAND_INS = {
    "f4": ("f8", "bf16"),
    "f8": ("bf16",),
    "s4": ("s8", "f8", "bf16"),
    "s8": ("f8", "bf16"),
    "f16": ("bf16",),
    "f32": ("tf32", "bf16"),
    "c64": ("f32", "bf16"),
    "f64": ("f32", "bf16"),
    "c128": ("f64", "f32", "bf16"),
}


class Accelerator(Protocol):
    """What is asked of a chip: numbers per JAX device (`chips.py` has them)."""

    @property
    def peak_flops(self) -> Mapping[str, float]: ...
    @property
    def hbm_bandwidth(self) -> float: ...
    @property
    def link_bandwidth(self) -> float: ...
    @property
    def link_name(self) -> str: ...
    @property
    def dcn_bandwidth(self) -> float: ...
    @property
    def launch_seconds(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Link:
    """What carries one mesh axis: a name and the bytes per second that one device can send along it."""

    name: str
    bandwidth: float


@dataclass(frozen=True, slots=True)
class LinkTime:
    """The time that the collectives over one set of axes need on their link."""

    link: str
    axes: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        return f"{self.link} ({'×'.join(self.axes)})" if self.axes else self.link


@dataclass(frozen=True)
class Estimate:
    """Seconds of one step on one device, by what takes them.

    `seconds` is the lower bound (everything that can overlap does), `serial_seconds` the upper one (nothing does).
    """

    compute_seconds: float
    hbm_seconds: float
    dispatch_seconds: float
    device_seconds: float
    link_seconds: tuple[LinkTime, ...]
    flops: int
    hbm_bytes: int
    wire_bytes: int

    @property
    def seconds(self) -> float:
        return max(self.device_seconds, *self._by_link().values(), 0.0)

    @property
    def serial_seconds(self) -> float:
        return self.device_seconds + sum(self._by_link().values())

    def _by_link(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for time in self.link_seconds:
            found[time.link] = found.get(time.link, 0.0) + time.seconds
        return found

    @property
    def bottleneck(self) -> str:
        """ "compute", "HBM", "dispatch", or a link with its axes, e.g. "ICI (fsdp)"."""
        times = [("compute", self.compute_seconds), ("HBM", self.hbm_seconds), ("dispatch", self.dispatch_seconds)]
        return max([*times, *((str(time), time.seconds) for time in self.link_seconds)], key=lambda item: item[1])[0]

    def table(self) -> Table:
        """Every bound with what it comes from."""
        rows = [
            ("compute", _show(self.compute_seconds), show_flops(self.flops)),
            ("HBM", _show(self.hbm_seconds), f"{show_bytes(self.hbm_bytes)} read and written"),
            ("dispatch", _show(self.dispatch_seconds), "kernel launches"),
            *((str(time), _show(time.seconds), "collectives") for time in self.link_seconds),
        ]
        title = f"at least {_show(self.seconds)} a step, bound by {self.bottleneck}"
        notes = (f"nothing overlapped: {_show(self.serial_seconds)}; a roofline, not a measurement",)
        return Table(title, ("bound", "time", "from"), tuple(rows), ("time",), notes)

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()  # pyright: ignore[reportPrivateUsage]

    def to_json(self) -> dict[str, Any]:
        """Plain data; `Estimate.from_json` gives the same estimate back."""
        return {**asdict(self), "link_seconds": [{**asdict(t), "axes": list(t.axes)} for t in self.link_seconds]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Estimate:
        links = tuple(LinkTime(t["link"], tuple(t["axes"]), t["seconds"]) for t in data["link_seconds"])
        values: dict[str, Any] = {**data, "link_seconds": links}
        return cls(**values)


def _show(seconds: float) -> str:
    for limit, unit in ((1e-3, 1e6), (1.0, 1e3)):
        if seconds < limit:
            return f"{seconds * unit:.3g} {'µs' if unit == 1e6 else 'ms'}"
    return f"{seconds:.3g} s"


def peak_rate(rates: Mapping[str, float], dtype: str) -> float:
    """FLOP/s for an element type.

    >>> peak_rate({"bf16": 459e12}, "f32") == peak_rate({"bf16": 459e12}, "bf16")
    True
    """
    kind = "f8" if dtype.startswith("f8") else "f4" if dtype.startswith("f4") else dtype.replace("u", "s")
    for name in (dtype, kind, *_STAND_INS.get(kind, ("bf16",))):
        if name in rates:
            return rates[name]
    return max(rates.values())


def estimate(module: HloModule, ledger: Ledger, chip: Accelerator, links: Mapping[str, Link] | None = None) -> Estimate:
    """The roofline of a compiled step on a chip.

    `links` says what carries each mesh axis where that is not the chip's own interconnect.
    """
    found = kernels(module)
    compute = [_compute(kernel, chip) for kernel in found]
    memory = [kernel.bytes / chip.hbm_bandwidth for kernel in found]
    launch = chip.launch_seconds
    device = (max(c, m, launch) * k.times for k, c, m in zip(found, compute, memory, strict=True))
    return Estimate(
        compute_seconds=sum(c * kernel.times for c, kernel in zip(compute, found, strict=True)),
        hbm_seconds=sum(m * kernel.times for m, kernel in zip(memory, found, strict=True)),
        dispatch_seconds=sum(launch * kernel.times for kernel in found),
        device_seconds=sum(device),
        link_seconds=_link_times(ledger, chip, links or {}),
        flops=sum(count * kernel.times for kernel in found for _, count in kernel.flops),
        hbm_bytes=sum(kernel.bytes * kernel.times for kernel in found),
        wire_bytes=ledger.wire_bytes,
    )


def _compute(kernel: Kernel, chip: Accelerator) -> float:
    return sum(count / peak_rate(chip.peak_flops, dtype) for dtype, count in kernel.flops)


def _link_times(ledger: Ledger, chip: Accelerator, links: Mapping[str, Link]) -> tuple[LinkTime, ...]:
    sums: dict[tuple[str, tuple[str, ...]], float] = {}
    for row in ledger:
        link = _link(row, chip, links)
        key = (link.name, row.axes)
        sums[key] = sums.get(key, 0.0) + row.wire_bytes / link.bandwidth
    ordered = sorted(sums.items(), key=lambda item: -item[1])
    return tuple(LinkTime(name, axes, seconds) for (name, axes), seconds in ordered)


def _link(row: Collective, chip: Accelerator, links: Mapping[str, Link]) -> Link:
    """The slowest link among the axes of a collective."""
    if row.link == "dcn":
        return Link("DCN", chip.dcn_bandwidth)
    own = Link(chip.link_name, chip.link_bandwidth)
    return min((links.get(axis, own) for axis in row.axes), key=lambda link: link.bandwidth, default=own)
