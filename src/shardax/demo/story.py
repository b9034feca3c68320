"""`shardax demo`: one small GPT, from its mesh to a training that survives a kill, on eight simulated devices."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax
from rich.rule import Rule
from rich.text import Text

import shardax
from shardax.cli.answer import Answer, Code
from shardax.cli.comparison import comparison
from shardax.cli.files import require_writable
from shardax.cli.proofs import prove_one
from shardax.cli.screen import console, own_command, short_path, show
from shardax.cluster.simulate import simulate
from shardax.demo import example
from shardax.demo.bar import TrainingBar
from shardax.demo.equal import compare
from shardax.demo.job import PROCESSES, Job, Losses, Run, run_job
from shardax.errors import plural
from shardax.names.layout import Layout
from shardax.names.mesh_build import make_mesh
from shardax.proving.case import Case
from shardax.proving.compiling import quiet_start
from shardax.proving.proof import Proof
from shardax.proving.target import Target
from shardax.report.draw import Drawing, draw_spec
from shardax.report.html import write_report
from shardax.report.layout_section import alike_grid
from shardax.report.mesh_drawing import draw_mesh
from shardax.report.values import Chart, Grid
from shardax.tables import show_bytes

MESH = "dp=2,fsdp=2,tp=2"
DEVICES = 8
TARGETS = ("cpu:8", "tpu:v5e:2x4")


@dataclass(frozen=True)
class Plan:
    """How much is done: a quick demo trains just long enough to be killed and to go on."""

    targets: tuple[str, ...] = TARGETS
    steps: int = 40
    kill_after: int = 28
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    words: str = "about a minute"


SMALL = {"width": 64, "layers": 1, "length": 32, "batch": 16}
QUICK = Plan(targets=("cpu:8",), steps=24, kill_after=22, sizes=SMALL, words="half a minute")


def demo(folder: Path, *, quick: bool = False) -> Answer:
    """Tell the story on the screen; the answer holds its numbers."""
    plan, started = QUICK if quick else Plan(), time.monotonic()
    example.require()
    require_writable(folder / "index.html")
    where = f"{DEVICES} simulated devices"
    _say(f"shardax {shardax.__version__}: {short_path(str(example.place()))} on {where}, in {plan.words}", style="bold")
    with quiet_start():
        simulate(DEVICES)
        mesh = make_mesh(MESH, devices=jax.devices()[:DEVICES])
        gpt = example.load()
        config = gpt.Config(**plan.sizes)
        case: Case = gpt.case(config)
    _chapter("The mesh: eight devices, three axes")
    show(draw_mesh(mesh))
    _chapter("Where every array goes: five rules for parameters, optimiser and batch")
    layout = case.lay_out(mesh)
    show(_largest(layout, 8), _drawn(layout, "up/kernel"))
    proofs = _prove(case, plan.targets)
    alone = _train_here(plan.steps, mesh, gpt.train(plan.steps, config=config))
    lives = _train_in_processes(plan)
    equal = compare(alone, lives)
    show(equal.words)
    page = _report(folder, [layout, *([comparison(proofs)] if len(proofs) > 1 else []), *proofs], alone, lives)
    seconds = round(time.monotonic() - started, 1)
    _end(page, seconds)
    data = {
        "mesh": MESH,
        "bytes_per_device": layout.bytes_per_device,
        "proofs": [proof.to_json() for proof in proofs],
        "losses": {str(step): loss for step, loss in alone.items()},
        "killed_after": plan.kill_after,
        "resumed_at": lives[1].first_step,
        "last_words": lives[0].last_words,
        "largest_difference": equal.largest,
        "repeated_steps_equal": equal.repeated,
        "report": str(page),
        "seconds": seconds,
    }
    return Answer((), data, Code.YES if equal.ok else Code.NO)


# ---- chapters -------------------------------------------------------------------------------------------------------


def _say(words: str, style: str = "") -> None:
    console().print(Text(words, style))


def _chapter(title: str) -> None:
    _say("")
    console().print(Rule(Text(title, "bold"), align="left", style="dim"))


def _largest(layout: Layout, most: int) -> Grid:
    """The first rows of the layout table: layers that are alike stand together."""
    held, whole = show_bytes(layout.bytes_per_device), show_bytes(layout.nbytes)
    words = f"{plural(len(layout.decisions), 'array')}, {whole} in all; each device holds {held}"
    return replace(alike_grid(layout.decisions), title="", most=most, notes=(words,))


def _drawn(layout: Layout, words: str) -> Drawing:
    """Which device holds which block of an array whose path ends so."""
    found = next(decision for decision in layout.decisions if decision.path.endswith(words))
    return draw_spec(found.spec, layout.mesh, found.shape, found.path)


def _prove(case: Case, names: Sequence[str]) -> list[Proof]:
    """The same step, compiled by a real compiler for each target; one whose compiler is missing is left out, aloud."""
    _chapter("What real compilers say of one training step, before anything runs")
    goals = [Target.of(name) for name in names]
    for goal in goals:
        if goal.missing:
            _say(f"{goal} is left out: {goal.missing}; {goal.install_hint}", style="yellow")
    proofs = [prove_one(case, goal, case.mesh_on(goal, MESH), timeout=300) for goal in goals if not goal.missing]
    show(comparison(proofs))
    return proofs


def _train_here(steps: int, mesh: jax.sharding.Mesh, training: Generator[tuple[int, float]]) -> Losses:
    _chapter(f"Training for real: one process, {DEVICES} devices")
    losses: Losses = {}
    with TrainingBar(console(), steps) as bar, jax.set_mesh(mesh), closing(training) as run:
        bar.begin("one process")
        for step, loss in run:
            losses[step] = loss
            bar.reach(step, loss)
    return losses


def _train_in_processes(plan: Plan) -> tuple[Run, Run]:
    """The job lives twice: until one of its processes is killed, and from its last checkpoint to the end."""
    _chapter(f"Again in {PROCESSES} processes with checkpoints, and one is killed on the way")
    with tempfile.TemporaryDirectory(prefix="shardax-demo-") as name, TrainingBar(console(), plan.steps) as bar:
        bar.begin(f"{PROCESSES} processes")
        job = Job(MESH, plan.sizes, plan.steps, Path(name), DEVICES)
        first = run_job(job, bar.reach, plan.kill_after)
        bar.end()
        _say(f"kill -9: {first.last_words}", style="yellow")
        bar.begin("launched again")
        second = run_job(job, bar.reach)
    return first, second


def _report(folder: Path, values: Sequence[object], alone: Losses, lives: tuple[Run, Run]) -> Path:
    lines = {"one process": alone, "two processes, until one is killed": lives[0].losses, "resumed": lives[1].losses}
    losses = {name: [(float(step), loss) for step, loss in sorted(found.items())] for name, found in lines.items()}
    chart = Chart.of("Training", losses, "step", "loss")
    lead = f"A small GPT on {DEVICES} simulated devices: where its arrays lie, what compilers say, and how it learned."
    return write_report(folder / "index.html", *values, chart, title="shardax demo", lead=lead)


def _end(page: Path, seconds: float) -> None:
    _say(f"wrote {page}: all of this as one page; {seconds:.0f} s in all")
    _chapter("Try next")
    tpu = Target.of(TARGETS[1]).missing is None
    for command in next_commands(short_path(str(example.place())), tpu=tpu):
        console().print(Text(f"  {command}", "cyan"), soft_wrap=True)  # whole, so that it can be copied


def next_commands(file: str, *, tpu: bool) -> list[str]:
    """Three commands that work as they stand, from here; a compiler that is missing is not asked."""
    prove = f"prove {file} -t tpu:v5e:2x4 -t tpu:v6e:2x4" if tpu else f"check {file} --mesh dp=2,fsdp=8,tp=4"
    mesh = 'mesh "dp=2,fsdp=-1" --target tpu:v5e:4x8' if tpu else 'mesh "dp=2,fsdp=2,tp=2" --axis fsdp'
    return [f"{own_command()} {words}" for words in (f"layout {file} --explain up/kernel", prove, mesh)]
