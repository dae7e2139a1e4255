"""The commands of `psworker`: flags to plans, and errors to exit codes.

Torch, NumPy and gRPC are imported by the commands that need them, so that help, completion and
`run` start without; `commandline.importing` ends a command by Ctrl-C meanwhile.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from pscore import commandline
from pscore.errors import ConfigError, PacelineError, TransportError
from pscore.json_text import to_json
from pscore.program import AsJson, make_app, write
from pscore.text import printable
from pscore.variables import require_no_other_shards
from psworker.commands.output import Prefixed, plain
from psworker.commands.run import (
    Launch,
    LaunchPlan,
    OnFailure,
    new_job,
    parse_elastic,
    worker_command,
)
from psworker.exits import MEANINGS, Exit
from psworker.job.place import DEFAULT_JOB, Flags, find_place, parse_nnodes, parse_workers
from psworker.pipeline.plan.plan_file import read_plan

PROGRAM = "psworker"
EPILOG = "\b\nExit codes:\n" + "\n".join(f"  {code:>3}  {MEANINGS[code]}" for code in Exit)
RUN_EPILOG = (
    "\b\nExit codes:\n"
    "  of the first worker that failed; 128 + N if signal N ended it\n"
    + "\n".join(f"  {code:>3}  {MEANINGS[code]}" for code in Exit if code is not Exit.FAILED)
)

app = make_app(
    "Worker side of Paceline: starts workers, lists modes, and trains a demo.",
    EPILOG,
    "Show tracebacks of errors, of workers too [PACELINE_DEBUG].",
)

bench = typer.Typer(help="Measure on this machine.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(bench, name="bench")


# Options of `run` for the place of its workers.
Elastic = Annotated[
    str | None,
    typer.Option(metavar="MIN:MAX", help="Let workers join and leave: MIN to MAX of them."),
]
PipelineFile = Annotated[
    Path | None,
    typer.Option(
        envvar="PACELINE_PIPELINE",
        metavar="FILE",
        help="A plan that psworker plan --save-plan wrote: start its workers, and give it to "
        "psworker.Pipeline.",
    ),
]
Workers = Annotated[
    str | None,
    typer.Option(
        "--workers",
        "-n",
        metavar="N|gpu",
        help="Number of workers to start here, or gpu: one for each GPU [1, or MIN].",
    ),
]
Nnodes = Annotated[
    str | None, typer.Option(metavar="N", help="Number of hosts that run this command.")
]
NodeRank = Annotated[int | None, typer.Option(help="With --nnodes: number of this host, from 0.")]


@app.command(epilog=RUN_EPILOG, context_settings={"allow_interspersed_args": False})
def run(
    *,
    command: Annotated[
        list[str] | None,
        typer.Argument(help="script.py, -m module, or a program; then its arguments."),
    ] = None,
    workers: Workers = None,
    nnodes: Nnodes = None,
    node_rank: NodeRank = None,
    elastic: Elastic = None,
    pipeline: PipelineFile = None,
    servers: Annotated[
        str | None, typer.Option(help="Addresses of the shards, host:port,... [PACELINE_SERVERS].")
    ] = None,
    shards: Annotated[
        int | None,
        typer.Option(help="Number of shards to start if no servers are given [1].", min=1, max=64),
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(
            envvar="PACELINE_JOB",
            help="Name of the job [a new one; `default` if other machines may join it].",
        ),
    ] = None,
    on_failure: Annotated[
        OnFailure | None,
        typer.Option(
            help="Whether the other workers stop or continue when one fails [stop; continue if "
            "elastic]."
        ),
    ] = None,
    grace_s: Annotated[
        float, typer.Option(help="Seconds that workers may take to end before they are killed.")
    ] = 10.0,
    prefix: Annotated[bool, typer.Option(help="Prefix each line with the rank.")] = True,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only messages about failures.")
    ] = False,
) -> None:
    """Start workers on this machine, and shards too if no address of a server is given."""
    addresses = _addresses(servers)
    flags = Flags(
        workers=None if workers is None else parse_workers(workers),
        elastic=None if elastic is None else parse_elastic(elastic),
        nnodes=None if nnodes is None else parse_nnodes(nnodes),
        node_rank=node_rank,
    )
    place = find_place(flags if pipeline is None else _of_pipeline(pipeline, flags), os.environ)
    if on_failure is None:
        on_failure = OnFailure.STOP if place.elastic is None else OnFailure.CONTINUE
    # Launches that join the same job have to agree on its name.
    is_shared = place.has_others or (place.elastic is not None and addresses != ())
    plan = LaunchPlan(
        command=worker_command(command or ()),
        place=place,
        pipeline="" if pipeline is None else str(pipeline.absolute()),
        servers=addresses,
        num_shards=1 if shards is None else shards,
        job=job or (DEFAULT_JOB if is_shared else new_job()),
        on_failure=on_failure,
        grace_s=grace_s,
    )
    _require_one_place(addresses, shards)
    launch = Launch(plan, write=Prefixed() if prefix else plain, tell=_tell, is_quiet=quiet)
    sys.exit(launch.run())


def _require_one_place(servers: Sequence[str], shards: int | None) -> None:
    """Checks whether shards run elsewhere, or are started here.

    Raises:
        ConfigError: Both are asked for.
    """
    if not servers:
        require_no_other_shards(os.environ)
    elif shards is not None:
        raise ConfigError(
            f"--shards {shards} starts shards here, but servers are given: {','.join(servers)}; "
            "leave out --shards, or unset PACELINE_SERVERS"
        )


@app.command()
def modes(*, as_json: AsJson = False) -> None:
    """List the modes and their arguments."""
    with commandline.importing(PROGRAM):
        from psworker.training.modes import modes as list_modes
    write(list_modes(), _show_modes, as_json=as_json)


@app.command()
def demo(
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON at the end instead of a table.")
    ] = False,
    data: Annotated[
        Path | None, typer.Option(help="Folder of Fashion-MNIST's files [examples/data].")
    ] = None,
    epochs: Annotated[int, typer.Option(help="Number of passes over the images.", min=1)] = 5,
    modes: Annotated[
        str, typer.Option(help="Modes to train in, separated by commas.")
    ] = "ssgd, asgd, ssd(steps=5, warmup=50)",
    out: Annotated[Path, typer.Option(help="Folder for the plot.")] = Path("paceline-demo"),
    workers: Annotated[int, typer.Option(help="Number of worker processes.", min=1, max=64)] = 2,
    shards: Annotated[int, typer.Option(help="Number of shard processes.", min=1, max=64)] = 2,
    images: Annotated[
        int | None, typer.Option(help="Number of images to train on [all].", min=1)
    ] = None,
    seed: Annotated[
        int,
        typer.Option(help="Seed of the weights and the order of images.", min=0, max=(1 << 63) - 1),
    ] = 1,
) -> None:
    """Train a small model on real shards and workers, in several modes."""
    with commandline.importing(PROGRAM):
        from psworker.commands.demo.run import DemoPlan, run_demo

    plan = DemoPlan(
        modes=modes,
        data=data,
        epochs=epochs,
        out=out,
        num_workers=workers,
        num_shards=shards,
        num_images=images,
        seed=seed,
    )
    sys.exit(run_demo(plan, as_json=as_json))


# Options of `plan --pipeline`.
AsPipeline = Annotated[
    bool, typer.Option("--pipeline", help="Measure the layers, and cut them into stages.")
]
Bandwidth = Annotated[
    str | None,
    typer.Option(help="With --pipeline: bandwidth of links: 1gbit, or by level 100gbit,10gbit."),
]
Machines = Annotated[
    int | None, typer.Option(help="With --pipeline: number of machines [1].", min=1)
]
MemoryLimit = Annotated[
    str | None, typer.Option(help="With --pipeline: memory limit of a worker, such as 16g.")
]
Input = Annotated[
    str | None,
    typer.Option(
        "--input", help="With --pipeline: shape of a minibatch: 8x3x224x224, 4x1024:50257."
    ),
]
Device = Annotated[
    str | None, typer.Option(help="With --pipeline: device to measure on: cpu, cuda, ... [cpu].")
]
Sync = Annotated[
    str | None,
    typer.Option(help="With --pipeline: replicas exchange on shards, or in a ring [shards]."),
]
SaveProfile = Annotated[
    Path | None, typer.Option(help="With --pipeline: file for the measured profile.")
]
SavePlan = Annotated[
    Path | None,
    typer.Option(help="With --pipeline: file for the plan, for psworker run --pipeline."),
]


@app.command()
def plan(
    *,
    model: Annotated[
        str,
        typer.Argument(
            help="alexnet, gpt2, lenet, resnet50, vgg16, or module:factory of a torch module; with "
            "--pipeline also a saved profile.json."
        ),
    ],
    shards: Annotated[
        int | None,
        typer.Option(
            help="Number of shards of the job [1; with --pipeline as many as workers].",
            min=1,
            max=4096,
        ),
    ] = None,
    mode: Annotated[str, typer.Option(help="Mode, as in DistributedOptimizer.")] = "ssgd",
    compression: Annotated[str, typer.Option(help="As in DistributedOptimizer.")] = "none",
    pull_compression: Annotated[str, typer.Option(help="As in DistributedOptimizer.")] = "none",
    optimizer: Annotated[
        str, typer.Option(help="Optimizer of the shards: sgd, adam, rmsprop, ...")
    ] = "sgd",
    workers: Annotated[
        int, typer.Option(help="Number of workers of the job.", min=1, max=1 << 20)
    ] = 2,
    tokens: Annotated[
        int, typer.Option(help="Tokens (or samples) in a worker's step.", min=0, max=1 << 40)
    ] = 0,
    pipeline: AsPipeline = False,
    bandwidth: Bandwidth = None,
    machines: Machines = None,
    memory: MemoryLimit = None,
    inputs: Input = None,
    device: Device = None,
    sync: Sync = None,
    save_profile: SaveProfile = None,
    save_plan: SavePlan = None,
    as_json: AsJson = False,
) -> None:
    """Show slices, shards and bytes of a model, or the stages of a pipeline; needs no server."""
    with commandline.importing(PROGRAM):
        from psworker.commands import model_plan, pipeline_plan

    job = model_plan.parse_job(mode, compression, pull_compression, optimizer)
    wanted = pipeline_plan.Wanted(
        bandwidth=bandwidth,
        machines=machines,
        memory=memory,
        inputs=inputs,
        device=device,
        sync=sync,
        save_profile=save_profile,
        save_plan=save_plan,
    )
    if pipeline:
        found = pipeline_plan.plan_pipeline(model, wanted, job, workers, shards)
        lines = pipeline_plan.lines_of(found)
    else:
        wanted.require_none()
        shapes = model_plan.shapes_of(model)
        report = model_plan.make_report(shapes, job, shards or 1, workers, tokens)
        found, lines = asdict(report), model_plan.lines_of(report)
    sys.stdout.write((to_json(found) if as_json else "\n".join(lines)) + "\n")


# Options of `advise`.
Script = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[-- SCRIPT [ARGUMENT]...]",
        help="Script to run for a minute, with one worker: its model and computing.",
    ),
]
AdvisedJob = Annotated[str | None, typer.Option(help="Job that runs, instead of numbers.")]
JobServers = Annotated[
    str | None, typer.Option(help="With --job: addresses, host:port,... [PACELINE_SERVERS].")
]
AdvisedModel = Annotated[
    str | None, typer.Option(help="Model by name: gpt2-xl, resnet50, ..., or its parameters: 350M.")
]
NumWorkers = Annotated[int | None, typer.Option(help="Number of workers [one for each GPU].")]
NumHosts = Annotated[int | None, typer.Option(help="Number of hosts [one for each worker].")]
NumGpus = Annotated[
    int | None,
    typer.Option(
        help="Number of GPUs on all hosts; 0: computing is on CPUs [one for each worker]."
    ),
]
LinkGbit = Annotated[
    float | None, typer.Option(help="Bandwidth of each host's link, in 10^9 bit/s.")
]
ComputeMs = Annotated[
    float | None, typer.Option(help="Milliseconds of forward and backward of a step.")
]
LatencyMs = Annotated[float | None, typer.Option(help="Round trip between hosts in ms [0.2].")]
Sites = Annotated[str | None, typer.Option(help="Workers of each site, instead of hosts: 6,2.")]
BetweenGbit = Annotated[
    float | None, typer.Option(help="With --sites: bandwidth between sites, in 10^9 bit/s.")
]


@app.command()
def advise(
    *,
    command: Script = None,
    job: AdvisedJob = None,
    servers: JobServers = None,
    model: AdvisedModel = None,
    workers: NumWorkers = None,
    hosts: NumHosts = None,
    gpus: NumGpus = None,
    gbit: LinkGbit = None,
    compute_ms: ComputeMs = None,
    latency_ms: LatencyMs = None,
    sites: Sites = None,
    between_gbit: BetweenGbit = None,
    optimizer: Annotated[str, typer.Option(help="Optimizer: sgd, adam, ...")] = "sgd",
    tls: Annotated[
        bool | None,
        typer.Option(
            "--tls/--no-tls",
            help="Whether connections are encrypted [no; with --job if PACELINE_TLS_CA is set].",
        ),
    ] = None,
    overlap: Annotated[
        bool, typer.Option(help="Whether gradients may leave during backward.")
    ] = True,
    risk: Annotated[
        str, typer.Option(help="Accuracy that may be lost: none, low (half a point) or any.")
    ] = "low",
    as_json: AsJson = False,
) -> None:
    """Say which mode, how many shards and how fast, before machines are rented."""
    from psworker.advice import report as advice
    from psworker.advice import shown
    from psworker.advice.choices import require_risk
    from psworker.advice.request import AdviceRequest

    require_risk(risk)
    if job is not None and command:
        raise ConfigError(f"--job {job} runs already: leave out the script, {command[0]!r}")
    if servers is not None and job is None:
        raise ConfigError("--servers has no effect without --job")
    request = AdviceRequest(
        model=model,
        workers=workers,
        hosts=hosts,
        gpus=gpus,
        gbit=gbit,
        compute_ms=compute_ms,
        latency_ms=latency_ms,
        sites=sites,
        between_gbit=between_gbit,
        optimizer=optimizer,
        tls=tls,
        overlap=overlap,
    )
    if job is not None:
        situation = request.of_job(job, _addresses(servers))
    elif command:
        situation = request.of_script(command)
    else:
        situation = request.read()
    advised = advice.advise(situation, risk)
    lines = shown.lines_of(advised, shown.terminal_width())
    sys.stdout.write((to_json(advised.as_json(), indent=1) if as_json else "\n".join(lines)) + "\n")


@app.command()
def simulate(
    *,
    model: Annotated[
        str, typer.Option(help="Model by name: llama-7b, ..., or its parameters: 70B.")
    ],
    workers: Annotated[str, typer.Option(help="Numbers of workers: 64,256,1024.")],
    gbit: Annotated[
        str, typer.Option(help="Bandwidths of each host's link, in 10^9 bit/s.")
    ] = "1,10,100,400",
    modes: Annotated[
        list[str] | None, typer.Option("--mode", help="A mode; may be repeated [ssgd, od, local].")
    ] = None,
    per_host: Annotated[int, typer.Option(help="Workers of each host.", min=1, max=64)] = 8,
    compute_ms: Annotated[
        float, typer.Option(help="Milliseconds of forward and backward of a step.")
    ] = 1000.0,
    every_message: Annotated[
        bool, typer.Option(help="Simulate every message too: minutes for 1,024 workers.")
    ] = False,
    failures: Annotated[
        float | None, typer.Option(help="Mean hours from one death of a process to its next.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File for a plot.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show step times, limits and shards of many workers, beside all-reduce."""
    from psworker.commands import simulate as simulating

    points = simulating.simulate(
        model=model,
        workers=simulating.workers_of(workers),
        per_host=per_host,
        gbits=simulating.numbers_of(gbit, "--gbit"),
        modes=modes or ["ssgd", "od", "local(steps=8)"],
        compute_ms=compute_ms,
        every_message=every_message,
        failure_hours=failures,
        plot=out,
    )
    lines = simulating.lines_of(points)
    sys.stdout.write((to_json(points, indent=1) if as_json else "\n".join(lines)) + "\n")


@bench.command()
def compressors(
    *,
    model: Annotated[
        str,
        typer.Argument(
            help="Name of a model, such as resnet50, or module:factory of a torch module."
        ),
    ],
    servers: Annotated[
        str | None,
        typer.Option(help="Shards to measure the link to, host:port,... [PACELINE_SERVERS]."),
    ] = None,
    gbit: Annotated[
        float | None,
        typer.Option(help="Assume a link of this bandwidth, in 10^9 bit/s.", min=1e-6, max=1e6),
    ] = None,
    latency_ms: Annotated[
        float | None, typer.Option(help="With --gbit: round trip in ms [0.2].", min=0.0)
    ] = None,
    workers: Annotated[
        int, typer.Option(help="Number of workers of the job.", min=1, max=1 << 20)
    ] = 1,
    shards: Annotated[int, typer.Option(help="Number of shards of the job.", min=1, max=4096)] = 1,
    compute_ms: Annotated[
        float, typer.Option(help="Computing time in ms that can hide a step's traffic.", min=0.0)
    ] = 0.0,
    only: Annotated[
        list[str] | None, typer.Option(help="A compressor to measure; may be repeated.")
    ] = None,
    min_nbytes: Annotated[
        int, typer.Option(help="Bytes below which a parameter is not compressed.")
    ] = 1 << 16,
    as_json: AsJson = False,
) -> None:
    """Show what each compressor costs and saves on this machine and link."""
    if gbit is None and latency_ms is not None:
        raise ConfigError("--latency-ms has no effect without --gbit: the link is measured")
    if gbit is not None and servers is not None:
        raise ConfigError("--servers has no effect with --gbit: no link is measured")
    with commandline.importing(PROGRAM):
        from psworker.commands import bench_compressors as measuring
        from psworker.commands.model_plan import shapes_of
    shapes = shapes_of(model)
    if gbit is None:
        wire = measuring.measure_wire_to(_addresses(servers))
    else:
        wire = measuring.Wire.given(gbit, (0.2 if latency_ms is None else latency_ms) / 1e3)
    report = measuring.make_report(
        model,
        shapes,
        wire,
        names=only or measuring.NAMES,
        num_workers=workers,
        num_shards=shards,
        compute_s=compute_ms / 1e3,
        min_nbytes=min_nbytes,
    )
    if as_json:
        sys.stdout.write(to_json(asdict(report)) + "\n")
    else:
        measuring.show(report)


@app.command()
def doctor(
    *,
    servers: Annotated[
        str | None, typer.Option(help="Addresses, host:port,... [PACELINE_SERVERS].")
    ] = None,
    job: Annotated[
        str | None, typer.Option(envvar="PACELINE_JOB", help="Also check this job.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Compare its model with this one: resnet50, ..., or module:factory."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check the connection to the shards; exit with 1 if there is a problem."""
    with commandline.importing(PROGRAM):
        from pscore.observe import doctor as doc
        from psworker.commands.doctor import examine
    findings = examine(servers, job, model)
    if as_json:
        sys.stdout.write(to_json(doc.as_json(findings), indent=1) + "\n")
    else:
        doc.show(findings)
    sys.exit(Exit.OK if doc.is_well(findings) else Exit.FAILED)


@app.command()
def timeline(
    *,
    files: Annotated[
        list[Path], typer.Argument(help="Trace files: trace.worker0.json trace.shard0.json ...")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Path of the merged trace to write.")],
) -> None:
    """Join the PACELINE_TIMELINE files of a job's processes into one for Perfetto."""
    from pscore.observe.timeline import join

    lines = [*join(files, out), f"{out}: open it at https://ui.perfetto.dev"]
    sys.stdout.write("".join(f"{line}\n" for line in lines))


@app.command()
def version(*, as_json: AsJson = False) -> None:
    """Print the versions of Paceline and its dependencies."""
    versions = {name: importlib.metadata.version(name) for name in ("paceline", "torch", "grpcio")}
    versions["python"] = sys.version.split()[0]
    if as_json:
        sys.stdout.write(to_json(versions) + "\n")
    else:
        sys.stdout.write("".join(f"{name} {number}\n" for name, number in versions.items()))


def main() -> None:
    """Runs one command; an error ends the process with its code and one line."""
    try:
        commandline.run(app, PROGRAM)
    except PacelineError as problem:
        commandline.tell_error(PROGRAM, problem)
        sys.exit(exit_code(problem))


def exit_code(problem: PacelineError) -> Exit:
    """Returns the exit code for `problem`."""
    if isinstance(problem, ConfigError):
        return Exit.USAGE
    return Exit.NO_SHARDS if isinstance(problem, TransportError) else Exit.FAILED


def _of_pipeline(path: Path, flags: Flags) -> Flags:
    """Returns the flags with this host's share of the workers of the plan in a file.

    Raises:
        ConfigError: It is none, or another number of workers is asked for.
    """
    plan, hosts = read_plan(path), flags.nnodes or 1
    if flags.elastic is not None:
        raise ConfigError(
            "--elastic has no effect with --pipeline: the plan has a fixed number of workers"
        )
    if plan.workers % hosts:
        raise ConfigError(
            f"the plan {path}, {plan.name}, has {plan.workers} workers, which {hosts} hosts cannot "
            "share equally: make a plan for another number of workers"
        )
    here = plan.workers // hosts
    if flags.workers not in (None, here):
        raise ConfigError(
            f"--workers is {flags.workers}, but the plan {path}, {plan.name}, has {here}"
            f"{' for each host' if hosts > 1 else ''}: leave out --workers, or make a plan for "
            f"{(flags.workers or 1) * hosts}"
        )
    return replace(flags, workers=here)


def _show_modes(listed_modes: dict[str, dict[str, object]]) -> None:
    from rich.console import Console
    from rich.markup import escape

    from pscore.grid import Grid
    from pscore.rules import RULES

    rows = []
    for name, arguments in sorted(listed_modes.items()):
        rule = RULES[name]
        about = f"{(inspect.getdoc(rule) or '').partition(chr(10))[0]}\n{rule.source}"
        listed = "\n".join(f"{key}={value!r}" for key, value in arguments.items())
        rows.append([name, escape(about), escape(listed or "none")])
    console = Console(highlight=False)
    console.print(Grid(("mode", "what it is", "arguments"), rows))
    console.print('mode="ssd(steps=5)" or psworker.SSD(steps=5) in DistributedOptimizer(...)')


def _tell(line: str) -> None:
    shown = printable(line, keep="\n")
    with contextlib.suppress(OSError, ValueError):  # A closed standard error ends no job.
        sys.stderr.write(f"psworker: {shown}\n")
        sys.stderr.flush()


def _addresses(servers: str | None) -> tuple[str, ...]:
    """Returns the servers of the flag, else those that the environment names; ignores its rank."""
    with commandline.importing(PROGRAM):
        from pscore.net.addresses import parse_addresses
        from psworker.job.environment import Environment

    if addresses := parse_addresses(servers):
        return addresses
    wanted = ("PACELINE_SERVERS", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_SERVER")
    return Environment.read({name: os.environ.get(name, "") for name in wanted}).servers
