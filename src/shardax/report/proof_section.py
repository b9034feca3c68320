"""A proof as report values: the verdict first, then memory, time, collectives, and what is not as it should be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardax.errors import plural
from shardax.names.alike import alike
from shardax.names.spec import axes_in
from shardax.proving.cost import Estimate
from shardax.proving.ledger import Ledger
from shardax.proving.memory import Memory
from shardax.proving.placing import Placed, Replicated
from shardax.proving.proof import Proof
from shardax.report.cutting import array_cell, drawings, spec_text
from shardax.report.devices import mesh_on
from shardax.report.ledger_section import ledger_section
from shardax.report.mesh_drawing import draw_mesh
from shardax.report.values import (
    Bar,
    Bars,
    Block,
    Cell,
    Column,
    Grid,
    Part,
    Pictures,
    Roof,
    Roofline,
    Section,
    Stat,
    Stats,
    Verdict,
    Words,
    bytes_cell,
    count_cell,
    show_seconds,
)
from shardax.tables import show_bytes, show_flops

PATH = Column("path", code=True, keep=10, cut="middle", least=16)
BUFFERS = (
    Column("size", right=True, keep=10),
    Column("array", code=True, keep=8, least=14),
    Column("where", code=True, keep=9, cut="middle", least=12),
)
NOT_AS_ASKED = (
    Column("where", code=True, keep=10, cut="middle", least=16),
    Column("shape", code=True, keep=5),
    Column("asked", code=True, keep=8),
    Column("got", code=True, keep=9),
    Column("costs each device", right=True, keep=7),
)
ARRAYS_ALIKE = Column("arrays", right=True, keep=6)
DONATIONS = (PATH, ARRAYS_ALIKE, Column("held twice on each device", right=True, keep=9))
REPLICATED = (
    PATH,
    ARRAYS_ALIKE,
    Column("spec", code=True, keep=5),
    Column("not sharded over", keep=8),
    Column("copies", right=True, keep=6),
    Column("per device", right=True, keep=7),
    Column("could be saved", right=True, keep=9),
)
ARRAYS = (
    PATH,
    Column("", keep=5),
    Column("array", code=True, keep=7, cut="middle", least=10),
    Column("spec", code=True, keep=9, least=10),
    Column("per device", right=True, keep=8),
    Column("copies", right=True, keep=4),
    Column("said by", keep=3),
)


def proof_section(proof: Proof) -> Section:
    """Everything a proof says."""
    blocks: list[Block | Section] = [verdict_of(proof), _stats(proof)]
    worries = tuple(_worries(proof))
    if worries:
        blocks.append(Section("Not as it was meant to be", worries))
    blocks.append(memory_section(proof.memory, proof.refusal))
    if proof.estimate is not None:
        blocks.append(estimate_section(proof.estimate, proof.ledger))
    if not proof.refusal:
        blocks.append(ledger_section(proof.ledger))
    blocks += [_mesh(proof), _cut(proof), Section("Every array", (_arrays(proof),), page_only=True), _fine_print(proof)]
    return Section(name_of(proof), tuple(blocks))


def name_of(proof: Proof) -> str:
    """What a proof is called among others."""
    return f"{proof.name} on {proof.target}, mesh {proof.mesh}"


# ---- the answer -----------------------------------------------------------------------------------------------------


def verdict_of(proof: Proof) -> Verdict:
    """Fits, does not fit, or (where no limit is known) partitions."""
    memory = proof.memory
    if memory.hbm is None or memory.margin is None:
        return Verdict("plain", "Partitions", f"about {show_bytes(memory.peak)} per device; this target has no limit")
    held = f"{show_bytes(memory.peak)} of {show_bytes(memory.hbm)} per device"
    if proof.fits:
        return Verdict("good", "Fits", f"{held}, {show_bytes(memory.margin)} free")
    return Verdict("bad", "Does not fit", f"{held}, {show_bytes(-memory.margin)} too much")


def _stats(proof: Proof) -> Stats:
    stats: list[Stat] = [Stat("peak per device", show_bytes(proof.memory.peak), f"{plural(proof.mesh.size, 'device')}")]
    if proof.estimate is not None:
        stats.append(Stat("a step takes at least", show_seconds(proof.estimate.seconds), _overlap(proof.estimate)))
        stats.append(Stat("bound by", proof.estimate.bottleneck, "the slowest resource"))
    if not proof.refusal:
        sent, times = show_bytes(proof.ledger.wire_bytes), plural(proof.ledger.executions, "collective")
        stats.append(Stat("sent by each device", sent, times))
        stats.append(Stat("work per device", show_flops(proof.flops), f"{show_flops(proof.total_flops)} in all"))
    return Stats(tuple(stats))


def _overlap(estimate: Estimate) -> str:
    return f"{show_seconds(estimate.serial_seconds)} if nothing overlaps"


def _worries(proof: Proof) -> Iterator[Block]:
    if proof.refusal:
        yield Words((f"refused: {' '.join(proof.refusal.split())[:600]}",), "bad")
    if proof.not_as_asked:
        rows = tuple(
            (
                Cell(each.where),
                Cell(f"[{','.join(map(str, each.shape))}]"),
                Cell(spec_text(each.asked)),
                Cell(spec_text(each.got), tone="warn"),
                bytes_cell(each.bytes_per_device),
            )
            for each in proof.not_as_asked
        )
        yield Grid("Shardings that are not as asked", NOT_AS_ASKED, rows, most=6)
    if proof.lost_donations:
        groups = alike(proof.lost_donations, lambda each: each.path, lambda each: each.bytes)
        sized = sorted(groups.items(), key=lambda item: -sum(each.bytes for each in item[1]))
        rows = tuple(
            (Cell(path, tone="warn"), count_cell(len(found)), bytes_cell(sum(each.bytes for each in found)))
            for path, found in sized
        )
        total = f"{show_bytes(sum(each.bytes for each in proof.lost_donations))} per device are held twice"
        yield Grid("Donations lost", DONATIONS, rows, (total,), most=6)
    if proof.replicated:
        yield replicated_grid("Replicated arrays", proof.replicated)


def replicated_grid(title: str, replicated: Sequence[Replicated]) -> Grid:
    """Arrays that stand on several devices, and what cutting them would save."""
    groups = alike(replicated, lambda each: each.path, lambda each: (each.spec, each.bytes_per_device, each.copies))
    sized = sorted(groups.items(), key=lambda item: -sum(each.wasted for each in item[1]))
    rows = tuple(
        (
            Cell(path),
            count_cell(len(found)),
            Cell(spec_text(found[0].spec)),
            Cell("any axis" if found[0].whole else ", ".join(found[0].unused_axes), tone="warn"),
            count_cell(found[0].copies),
            bytes_cell(sum(each.bytes_per_device for each in found)),
            bytes_cell(sum(each.wasted for each in found)),
        )
        for path, found in sized
    )
    return Grid(title, REPLICATED, rows, most=6)


# ---- memory ---------------------------------------------------------------------------------------------------------


def memory_section(memory: Memory, refusal: str = "") -> Section:
    """Bars against what the device gives, and the largest buffers."""
    blocks: list[Block] = [memory_bars(memory, refusal)]
    if len(memory.groups) > 1:
        blocks.append(argument_bars(memory))
    if memory.buffers:
        rows = tuple((bytes_cell(b.bytes), Cell(b.what), Cell(b.place)) for b in memory.buffers)
        blocks.append(Grid("Largest buffers", BUFFERS, rows, most=5))
    return Section("Memory on each device", tuple(blocks))


def memory_bars(memory: Memory, refusal: str = "") -> Bars:
    """The peak by what it is made of, against what the device has."""
    parts = [Part("arguments", memory.arguments, show_bytes(memory.arguments), 0)]
    if not refusal:
        new = memory.outputs - memory.aliased
        parts.append(Part("new outputs", new, show_bytes(new), 2))
    parts.append(Part("temporaries", memory.temporaries, show_bytes(memory.temporaries), 1))
    other = memory.peak - sum(part.size for part in parts)
    if other > 0:
        parts.append(Part("compiler's own", other, show_bytes(other), 6))
    bar = Bar("at once", tuple(part for part in parts if part.size > 0), show_bytes(memory.peak))
    limit_text = f"device {show_bytes(memory.hbm)}" if memory.hbm is not None else ""
    return Bars("", (bar,), memory.hbm, limit_text, legend=True)


def argument_bars(memory: Memory) -> Bars:
    """The arguments by where they come from, on a scale of their own: beside the device's memory they may be hairs."""
    shown = memory.groups[:8]
    bars = tuple(Bar(name, (Part(name, size, show_bytes(size), 0),), show_bytes(size)) for name, size in shown)
    left = len(memory.groups) - len(shown)
    notes = (f"… and {plural(left, 'smaller argument')}",) if left else ()
    return Bars("Arguments", bars, notes=notes)


# ---- time -----------------------------------------------------------------------------------------------------------


def estimate_section(estimate: Estimate, ledger: Ledger) -> Section:
    """What each resource needs, and the roofline that they make."""
    lead = f"at least {show_seconds(estimate.seconds)} a step, bound by {estimate.bottleneck}; {_overlap(estimate)}"
    blocks: list[Block | Section] = [time_bars(estimate)]
    roofs = roofline(estimate, ledger)
    if len(roofs.roofs) > 1:
        blocks.append(Section("Roofline", (roofs,), page_only=True))
    return Section("Time of a step", tuple(blocks), lead)


def time_bars(estimate: Estimate) -> Bars:
    """Seconds that each resource needs if it waits for no other."""
    rows = [
        ("compute", estimate.compute_seconds, show_flops(estimate.flops), 0),
        ("HBM", estimate.hbm_seconds, f"{show_bytes(estimate.hbm_bytes)} read and written", 2),
        ("dispatch", estimate.dispatch_seconds, "kernel launches", 6),
        *((str(time), time.seconds, "collectives", 1) for time in estimate.link_seconds),
    ]
    bars = tuple(
        Bar(
            name,
            (Part(name, seconds, show_seconds(seconds), colour),),
            show_seconds(seconds),
            source,
            "warn" if name == estimate.bottleneck else "plain",
        )
        for name, seconds, source, colour in sorted(rows, key=lambda row: -row[1])
    )
    note = "a roofline: it ranks layouts and names the bottleneck, it predicts no clock"
    return Bars("", bars, notes=(*_shared_links(estimate), note))


def _shared_links(estimate: Estimate) -> Iterator[str]:
    """Axes that run over one link wait for each other: their times add up."""
    for link in dict.fromkeys(time.link for time in estimate.link_seconds):
        times = [time.seconds for time in estimate.link_seconds if time.link == link]
        if len(times) > 1:
            yield f"all axes share {link}: {show_seconds(sum(times))} together"


def roofline(estimate: Estimate, ledger: Ledger) -> Roofline:
    """A point per resource: what it moves for each FLOP, and the FLOP/s that it allows at that."""
    flops = estimate.flops
    roofs: list[Roof] = []

    def add(name: str, moved: float, seconds: float) -> None:
        if moved > 0 and seconds > 0 and flops:
            roofs.append(Roof(name, moved / seconds, flops / moved, flops / seconds, seconds))

    add("HBM", estimate.hbm_bytes, estimate.hbm_seconds)
    for time in estimate.link_seconds:
        moved = sum(r.wire_bytes for r in ledger if r.axes == time.axes and (r.link == "dcn") == (time.link == "DCN"))
        add(str(time), moved, time.seconds)
    peak = flops / estimate.compute_seconds if estimate.compute_seconds else 0.0
    return Roofline(peak, tuple(roofs), estimate.bottleneck)


# ---- where things lie -----------------------------------------------------------------------------------------------


def _mesh(proof: Proof) -> Section:
    drawing = draw_mesh(mesh_on(proof.target, proof.mesh))
    return Section("Mesh", (Pictures((drawing,)),), page_only=True)


def _cut(proof: Proof) -> Section:
    arrays = [(leaf.path, leaf.shape, leaf.spec, leaf.bytes) for leaf in proof.inputs]
    pictures = drawings(arrays, mesh_on(proof.target, proof.mesh))
    return Section("How arrays are cut", (pictures,), "which device holds which block of the arguments", page_only=True)


def _arrays(proof: Proof) -> Grid:
    results = () if proof.refusal else proof.outputs  # where those of a refused step lie, nobody has said
    named = [*((leaf, _input_kind(leaf)) for leaf in proof.inputs), *((leaf, "out") for leaf in results)]
    whole = max((leaf.bytes_on(proof.mesh) for leaf, _ in named), default=1) or 1
    rows = tuple(
        (
            Cell(leaf.path or "(result)"),
            Cell(kind),
            array_cell(leaf.dtype, leaf.shape, leaf.bytes),
            Cell(spec_text(leaf.spec)),
            bytes_cell(leaf.bytes_on(proof.mesh), whole=whole),
            count_cell(_copies(leaf, proof.mesh.shape)),
            Cell(leaf.source),
        )
        for leaf, kind in named
    )
    return Grid("", ARRAYS, rows)


def _input_kind(leaf: Placed) -> str:
    if leaf.number is None:
        return "unused"
    return "donated" if leaf.donated else "in"


def _copies(leaf: Placed, sizes: dict[str, int]) -> int:
    copies = 1
    for axis, size in sizes.items():
        copies *= 1 if axis in axes_in(leaf.spec) else size
    return copies


def _fine_print(proof: Proof) -> Section:
    versions = ", ".join(f"{name} {version}" for name, version in proof.versions.items())
    kept = ", kept from an earlier proof" if proof.cached else ""
    took = f"compiled in {proof.compile_seconds:.1f} s ({proof.compile_cpu_seconds:.1f} CPU-s){kept}"
    lines: Sequence[str] = (*proof.blind_spots, f"{took}; {versions}")
    return Section("What this cannot see", (Words(tuple(lines), "quiet"),))
