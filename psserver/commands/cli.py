"""The commands of `psserver`: flags to settings, and errors to exit codes."""

from __future__ import annotations

import contextlib
import functools
import inspect
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pscore import commandline
from pscore.errors import AccessError, ConfigError, RemoteProtocolError
from pscore.json_text import to_json
from pscore.program import AsJson, make_app, write
from psserver.exits import MEANINGS, CommandError, Exit

if TYPE_CHECKING:
    from psserver.commands.find import FoundServers
    from psserver.process.settings import Settings

EPILOG = "\b\nExit codes:\n" + "\n".join(f"  {code:>3}  {MEANINGS[code]}" for code in Exit)

app = make_app(
    "Parameter server of Paceline: starts shards, and shows their state.",
    EPILOG,
    "Show the traceback of an error [PACELINE_DEBUG].",
)
config_app = typer.Typer(help="Show the settings and their origins.", no_args_is_help=True)
app.add_typer(config_app, name="config")

RunPort = Annotated[
    int | None,
    typer.Option(help="Port of shard 0, for servers of this machine [the only ones, or 7070]."),
]
RunStateDir = Annotated[
    Path | None,
    typer.Option(
        help="Directory that servers of this machine were started with [PACELINE_STATE_DIR]."
    ),
]
Detach = Annotated[
    bool, typer.Option("--detach", help="Run in the background; return when all are ready.")
]
Config = Annotated[Path | None, typer.Option(help="TOML file with [server], [metrics], [log].")]
Servers = Annotated[
    str | None, typer.Option(help="Addresses, host:port,host:port,... [PACELINE_SERVERS].")
]
Job = Annotated[str | None, typer.Option(help="Name of the job [the only one].")]
Shard = Annotated[int, typer.Option(help="Place of the shard among the addresses.", min=0)]
EmptyProcess = Annotated[str, typer.Argument(help="Address of an empty process of that shard.")]


def about_servers(function: Callable[..., None]) -> Callable[..., None]:
    """Makes a command of a function that gets the servers first, which three more options name."""

    @functools.wraps(function)
    def run(
        *args: Any, port: int | None, state_dir: Path | None, servers: str | None, **options: Any
    ) -> None:
        from psserver.commands.find import find

        function(find(servers, port, state_dir), *args, **options)

    # The type of the servers is not imported here: other commands start sooner without it.
    own = inspect.signature(function, eval_str=True, locals={"FoundServers": Any}).parameters
    kind = inspect.Parameter.KEYWORD_ONLY
    common = (("port", RunPort), ("state_dir", RunStateDir), ("servers", Servers))
    parameters = [
        *list(own.values())[1:],
        *(inspect.Parameter(name, kind, default=None, annotation=hint) for name, hint in common),
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return app.command()(run)


class StartCommand(typer.core.TyperCommand):
    """A command that also has a flag for each setting.

    The settings are imported when they are needed: other commands start sooner without pydantic.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        """Returns the command's own options behind those of the settings."""
        from psserver.commands.settings_flags import make_flags

        return [*make_flags(), *super().get_params(ctx)]

    def invoke(self, ctx: Any) -> Any:
        """Runs the command, with the flags of the settings in `ctx.obj`."""
        own = {param.name for param in self.params}
        ctx.obj = {name: ctx.params.pop(name) for name in set(ctx.params) - own}
        return super().invoke(ctx)


@app.command(cls=StartCommand)
def start(
    context: typer.Context,
    *,
    detach: Detach = False,
    config: Config = None,
) -> None:
    """Start shards, one process each, on ports P..P+N-1."""
    from psserver.process.start import launch

    sys.exit(launch(_settings({**context.obj, "config": config}), detach=detach))


@about_servers
def status(
    found: FoundServers,
    *,
    job: Annotated[str | None, typer.Option(help="Show only this job.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show shards, jobs, workers, and the workers that each one waits for."""
    from psserver.remote import ask
    from psserver.remote import readers as lister
    from psserver.remote import status as picture

    replies = ask.answers(found.addresses, found.credentials)
    combined = picture.combine(found.addresses, replies)
    there = [shard["address"] for shard in combined["shards"] if not shard["moved_to"]]
    with contextlib.suppress(CommandError):  # One that has ended since then.
        lister.add(combined, ask.publications(there, found.credentials))
    if job is not None:
        combined = picture.only(combined, job)
    write(combined, picture.show, as_json=as_json)
    if silent := next((reply for reply in replies if isinstance(reply, CommandError)), None):
        raise silent


@about_servers
def dashboard(
    found: FoundServers,
    *,
    listen: Annotated[
        str, typer.Option(help="Address of the page, host:port.", metavar="HOST:PORT")
    ] = "127.0.0.1:8090",
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate of the page.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key of that certificate.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond loopback without TLS and token.")
    ] = False,
) -> None:
    """Serve a page that shows the shards, jobs and workers, with a history of six hours."""
    from psserver.commands.dashboard import run_page

    run_page(found, listen, tls_cert, tls_key, is_insecure=insecure)


@about_servers
def top(
    found: FoundServers,
    *,
    job: Annotated[str | None, typer.Option(help="Show only this job.")] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print it once and exit, as without a terminal.")
    ] = False,
) -> None:
    """Show the dashboard's figures in the terminal, and update them every second."""
    from psserver.commands.dashboard import run_top

    run_top(found, job, once=once)


@about_servers
def jobs(found: FoundServers, *, as_json: AsJson = False) -> None:
    """List the jobs that the shards have, live ones first: state, step, workers, memory."""
    from psserver.remote import ask
    from psserver.remote import jobs as lister

    listed = lister.listed(ask.statuses(found.addresses, found.credentials))
    write(listed, lister.show, as_json=as_json)


@about_servers
def readers(found: FoundServers, *, as_json: AsJson = False) -> None:
    """List published weights and their readers: version, lag, bytes by form, resyncs."""
    from psserver.remote import ask
    from psserver.remote import readers as lister

    answers = ask.publications(found.addresses, found.credentials)
    write(lister.listed(answers), lister.show, as_json=as_json)
    lister.require_all(answers)


@about_servers
def relay(
    found: FoundServers,
    *,
    job: Annotated[str, typer.Option(help="Name of the job.", envvar="PACELINE_JOB")],
    listen: Annotated[
        str,
        typer.Option(
            help="Host, and port of shard 0; the next ports are those of the other shards.",
            metavar="HOST:PORT",
        ),
    ] = "127.0.0.1:7170",
    table: Annotated[str, typer.Option(help="Name of the table.")] = "model",
    mbit: Annotated[
        int,
        typer.Option(
            help="Most Mbit/s to all readers on other hosts together; 0: no limit.", min=0
        ),
    ] = 0,
    data_port: Annotated[
        int, typer.Option(help="Port of shard 0's data sockets; 0: free ones.", min=0)
    ] = 0,
    metrics_port: Annotated[
        int | None,
        typer.Option(help="Port of a page for Prometheus; 0: a free one [no page].", min=0),
    ] = None,
    tls_cert: Annotated[str | None, typer.Option(help="Certificate of the relay.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="Private key of that certificate.")] = None,
    tls_client_ca: Annotated[
        str | None, typer.Option(help="CA of readers: they need a certificate of it.")
    ] = None,
    token_file: Annotated[
        str | None, typer.Option(help="Tokens: that of the job reads it, and admits readers.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond loopback without TLS and tokens.")
    ] = False,
) -> None:
    """Serve a job's published weights to the readers of a site, which then load its shards once."""
    from psserver.access.files import Trust
    from psserver.commands.relaying import relay_weights

    relay_weights(
        found,
        listen,
        Trust(cert=tls_cert, key=tls_key, client_ca=tls_client_ca, token_file=token_file),
        job=job,
        table=table,
        mbit=mbit,
        data_port=data_port,
        metrics_port=metrics_port,
        is_insecure=insecure,
    )


@about_servers
def publish(
    found: FoundServers,
    *,
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="The folder of the versions.")],
    job: Annotated[str, typer.Option(help="Name of the job.", envvar="PACELINE_JOB")],
    table: Annotated[str, typer.Option(help="Name of the table.")] = "model",
    keep: Annotated[int, typer.Option(help="Number of versions that stay.", min=1)] = 3,
    dtype: Annotated[str, typer.Option(help="bf16, float16 or float32.")] = "bf16",
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder with config.json, tokenizer, ...: copied too."),
    ] = None,
    names: Annotated[
        str | None,
        typer.Option(
            "--map",
            metavar="MODULE:FUNCTION",
            help="f(name, array) returns pairs of a name and an array in its place.",
        ),
    ] = None,
    file_gb: Annotated[float, typer.Option(help="Most GB in one file.", min=0.001)] = 5.0,
    once: Annotated[bool, typer.Option("--once", help="Write one version, and end.")] = False,
) -> None:
    """Write each published version into a folder in the layout of Hugging Face."""
    from psserver.commands.publishing import publish_versions
    from psserver.publish.folder import VersionsFolder

    try:
        folder = VersionsFolder(to, job=job, keep=keep, nbytes_max=int(file_gb * 1e9), model=model)
    except OSError as problem:
        raise CommandError(Exit.STATE_DIR, f"--to {to}: {problem.strerror}") from problem
    token_file = None if found.run is None else found.run.token_file
    publish_versions(
        folder,
        found.addresses,
        job=job,
        table=table,
        dtype=dtype,
        names=names,
        token_file=token_file,
        is_once=once,
    )


@about_servers
def forget(
    found: FoundServers,
    *,
    job: Annotated[str, typer.Argument(metavar="JOB", help="Name of the job, as `jobs` shows it.")],
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Forget the job even if it has live workers; they end with an error."
        ),
    ] = False,
) -> None:
    """Delete a job and its state on the shards; its checkpoints are moved aside."""
    from psserver.remote import jobs as lister
    from psserver.remote.status import in_bytes

    nbytes, folders = lister.forget(found.addresses, found.credentials, job, is_forced=force)
    sys.stdout.write(f"forgot job {job} ({in_bytes(nbytes)} on {len(found.addresses)} shards)\n")
    for folder in folders:
        sys.stdout.write(
            f"its checkpoints are in {folder} now: psserver restore {shlex.quote(folder)} "
            "brings it back\n"
        )


@app.command()
def health(*, port: RunPort = None, state_dir: RunStateDir = None, servers: Servers = None) -> None:
    """Exit with 0 if every shard is ready, else with 1."""
    from psserver.commands.find import find
    from psserver.remote import ask

    try:
        found = find(servers, port, state_dir)
    except CommandError as problem:
        raise CommandError(
            problem.code if problem.code is Exit.USAGE else Exit.UNHEALTHY, problem.message
        ) from problem
    ready = ask.readiness(found.addresses, found.credentials)
    for address, is_ready in zip(found.addresses, ready, strict=True):
        sys.stdout.write(f"{address} {'ready' if is_ready else 'not ready'}\n")
    sys.exit(Exit.OK if all(ready) else Exit.UNHEALTHY)


@app.command()
def stop(
    *,
    grace_s: Annotated[
        float | None,
        typer.Option(help="With --servers: seconds for requests under way [10].", min=0.0),
    ] = None,
    port: RunPort = None,
    state_dir: RunStateDir = None,
    servers: Servers = None,
) -> None:
    """End shards once the requests under way are answered."""
    from psserver.commands.find import find

    try:
        _stop(find(servers, port, state_dir), grace_s)
    except CommandError as problem:
        if not problem.remedy:  # To start servers, as for other commands.
            raise
        raise CommandError(
            problem.code,
            f"{problem.problem}, and nothing was stopped there: it has ended before, or hangs, or "
            "the address is wrong",
        ) from problem


def _stop(found: FoundServers, grace_s: float | None) -> None:
    from psserver.commands.find import end
    from psserver.remote import ask

    if found.run is not None and grace_s is not None:
        raise ConfigError(
            f"--grace-s {grace_s:g} has no effect on servers that were started here: they take "
            f"{found.run.grace_s:g} s, as `psserver start --grace-s` says; leave it out"
        )
    stopped: list[str] = found.addresses
    silent: list[CommandError] = []
    if found.run is not None:
        end(found.run)
    else:
        grace_s = 10.0 if grace_s is None else grace_s
        stopped, silent = ask.drain(found.addresses, grace_s, found.credentials)
    if stopped:
        sys.stdout.write(f"stopped {', '.join(stopped)}\n")
    if silent:
        raise silent[0]


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def address_of(found: FoundServers, shard: int) -> str:
    """Returns the address of a shard; raises ConfigError if there are fewer addresses."""
    if shard >= len(found.addresses):
        raise ConfigError(f"--shard is {shard}, must be in 0..{len(found.addresses) - 1}")
    return found.addresses[shard]


@about_servers
def drain(
    found: FoundServers,
    to: Annotated[
        str,
        typer.Argument(help="Address of an empty process of the same shard [the shard's standby]."),
    ] = "",
    *,
    shard: Shard = 0,
    mbit: Annotated[
        int, typer.Option(help="Most Mbit/s before the pause; 0: no limit.", min=0)
    ] = 0,
    wait_s: Annotated[
        float | None,
        typer.Option(
            help="Before the process ends: seconds to wait for a standby, if workers use the "
            "shard. It takes no shard any more.",
            min=0.0,
        ),
    ] = None,
) -> None:
    """Move a shard to another process, or to its standby, while its job trains."""
    from psserver.remote.drain import leave, move

    here = address_of(found, shard)
    if to and wait_s is not None:
        raise ConfigError("--wait-s is for a standby: leave the address out")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # It says what goes on, then.
    more = (mbit, found.credentials, _say)
    reply = move(here, to, *more) if wait_s is None else leave(here, wait_s, *more)
    if reply is None:
        sys.stdout.write(f"{here} may end: it has no shard that a worker uses\n")
        return
    sys.stdout.write(
        f"shard moved to {reply.to}: {reply.sent_nbytes / 1e6:.1f} MB sent, no answers for "
        f"{reply.pause_s:.3f} s; stop the old process, and name the new address from now on\n"
    )


@about_servers
def standby(
    found: FoundServers,
    to: EmptyProcess = "",
    *,
    shard: Shard = 0,
    withdraw: Annotated[
        bool, typer.Option("--withdraw", help="Give up the shard's standby, and want none.")
    ] = False,
    mbit: Annotated[int, typer.Option(help="Most Mbit/s for the copy; 0: no limit.", min=0)] = 0,
    same_host: Annotated[
        bool, typer.Option("--same-host", help="Also on the shard's host, lost with it.")
    ] = False,
    register: Annotated[
        str | None,
        typer.Option(
            help="Folder or URL (etcd://, kubernetes://, s3://, gs://) that both machines reach; "
            "with it the standby takes over by itself [a person promotes it]."
        ),
    ] = None,
    failover_s: Annotated[
        float, typer.Option(help="With --register: seconds of silence before it does.", min=0.2)
    ] = 3.0,
) -> None:
    """Make an empty process the standby of a shard: it gets each change before it is answered."""
    from pscore.pb.ps.v1 import standby_pb2
    from psserver.remote import drain

    here = address_of(found, shard)
    if withdraw == bool(to):
        raise ConfigError("name the process that is to be the standby, or --withdraw: one of both")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if withdraw:
        drain.withdraw(here, found.credentials, _say)
        sys.stdout.write(f"the shard at {here} has no standby, and wants none\n")
        return
    wanted = standby_pb2.MoveRequest(
        same_host=same_host, register=register or "", failover_s=failover_s
    )
    drain.move(here, to, mbit, found.credentials, _say, standby=wanted)
    then = f"it takes over after {failover_s} s" if register else f"run psserver promote {to}"
    sys.stdout.write(f"{to} is the standby of {here}; after the loss of that, {then}\n")


@app.command()
def promote(to: Annotated[str, typer.Argument(help="Address of the standby.")]) -> None:
    """Make a standby serve, whose shard's machine is lost: be sure that that is off."""
    from pscore.net.credentials import read_credentials
    from psserver.remote.drain import promote as promote_standby

    jobs = promote_standby(to, read_credentials())
    sys.stdout.write(f"{to} serves; jobs that continue: {', '.join(jobs) or 'none'}\n")


@app.command()
def logs(
    *,
    port: RunPort = None,
    state_dir: RunStateDir = None,
    shard: Annotated[int | None, typer.Option(help="Only the log of this shard.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the logs until the shards end.")
    ] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", help="Number of last lines to show.", min=1)
    ] = 1000,
) -> None:
    """Print the logs of detached shards of this machine, or of those that ran last."""
    from psserver.commands import logview
    from psserver.commands.find import find_run, run_directory

    directory = run_directory(state_dir)
    run = find_run(directory, port)
    if run is None:
        paths = logview.last_files(directory, port, shard)
        sys.stderr.write(f"no psserver runs; these are the last logs in {paths[0].parent}\n")
    else:
        paths = logview.files(run, shard)
    view = logview.LogView(paths)
    sys.stdout.writelines(view.read()[-lines:])
    sys.stdout.flush()
    with contextlib.suppress(KeyboardInterrupt):
        for news in view.follow(run) if follow and run is not None else ():
            sys.stdout.writelines(news)
            sys.stdout.flush()


@app.command()
def embedded(
    *,
    shards: Annotated[int, typer.Option(help="Number of shards.", min=1, max=64)] = 1,
    lease_s: Annotated[
        float,
        typer.Option(
            help="Seconds of silence until a worker is declared lost.",
            envvar="PACELINE_LEASE_S",
            min=0.5,
            max=3600.0,
        ),
    ] = 10.0,
    log_level: Annotated[
        str, typer.Option(help="The lowest level that is logged.", envvar="PACELINE_LOG_LEVEL")
    ] = "error",
    token: Annotated[
        bool, typer.Option("--token", help="Make a token, in a file that only this user can read.")
    ] = False,
) -> None:
    """Start shards that end when standard input does; print their addresses as JSON."""
    from psserver.process.embedded import serve_parent

    serve_parent(shards, lease_s=lease_s, log_level=log_level, has_token=token)


@about_servers
def checkpoint(
    found: FoundServers,
    *,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where checkpoints go.")],
    job: Job = None,
    keep: Annotated[
        int,
        typer.Option(
            help="Number of this job's checkpoints to keep; older ones are deleted.", min=1
        ),
    ] = 3,
) -> None:
    """Write a checkpoint: one step of a job on all shards; training continues meanwhile."""
    from psserver.remote.checkpoint import capture
    from psserver.remote.checkpoint_files import write

    taken = capture(found.addresses, found.credentials, job, weights_only=False)
    with _disk(folder):
        path = write(folder, taken, keep=keep)
    sys.stdout.write(f"{path}\n")
    sys.stderr.write(f"job {taken.job} at {taken.position}\n")


@about_servers
def restore(
    found: FoundServers,
    *,
    path: Annotated[
        Path, typer.Argument(metavar="DIR", help="A checkpoint, or a folder of checkpoints.")
    ],
    job: Annotated[
        str | None,
        typer.Option(
            help="Name of the job [as in the checkpoint]; selects one if DIR holds checkpoints "
            "of several jobs."
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Number of workers that will join [as in the checkpoint].", min=1),
    ] = None,
    max_rows: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TABLE=N",
            help="New max_rows of a row table, for one that is full; the script declares the same.",
        ),
    ] = None,
) -> None:
    """Create a job from a checkpoint, on any number of shards; workers then join it."""
    from pscore.pb.ps.v1.control_pb2 import StatusReply
    from psserver.mending.losses import torn
    from psserver.remote import ask
    from psserver.remote import checkpoint as shards
    from psserver.remote.checkpoint_files import read

    chosen, taken = read(path, job, _warn)
    name = taken.job if job is None else job
    taken.num_workers = taken.num_workers if workers is None else workers
    shards.give_room(taken, max_rows or ())
    answers = ask.answers(found.addresses, found.credentials)
    ask.require_order(found.addresses, answers)
    bare = torn([one for one in answers if isinstance(one, StatusReply)]).get(name, [])
    number = len(found.addresses)
    order = sorted(range(number), key=bare.__contains__)
    # Where shards lack it, its workers wait for this command.
    shards.restore(found.addresses, found.credentials, taken, name, order, replaces=bool(bare))
    sys.stdout.write(
        f"restored job {name} from {chosen} ({taken.position}) on {number} "
        f"{'shard' if number == 1 else 'shards'}\n"
    )


@app.command()
def export(
    *,
    path: Annotated[Path, typer.Argument(metavar="FILE", help="File to write: model.safetensors.")],
    job: Job = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Checkpoint to export [the running job].")
    ] = None,
    table: Annotated[
        str | None, typer.Option(help="Row table to export, with its ids [the dense weights].")
    ] = None,
    since: Annotated[
        Path | None, typer.Option(help="Earlier export of the table: write the changes since.")
    ] = None,
    port: RunPort = None,
    state_dir: RunStateDir = None,
    servers: Servers = None,
) -> None:
    """Write a job's weights as one safetensors file, or a row table as FILE.parquet."""
    from psserver.commands.find import find
    from psserver.remote import checkpoint as shards
    from psserver.remote import checkpoint_files as files

    for flag, value in (("--servers", servers), ("--port", port), ("--state-dir", state_dir)):
        if source is not None and value is not None:
            raise ConfigError(f"{flag} {value} has no effect with --from: it reads a checkpoint")
    if since is not None and table is None:
        raise ConfigError(f"--since {since} needs --table: only row tables have changes")
    if not path.parent.is_dir():
        raise CommandError(
            Exit.STATE_DIR, f"cannot write {path}: there is no folder {path.parent}; make it first"
        )
    if source is not None:
        _, taken = files.read(source, job, _warn)
    else:
        found = find(servers, port, state_dir)
        taken = shards.capture(found.addresses, found.credentials, job, weights_only=True)
    with _disk(path):
        files.export(path, taken, table, since)
    sys.stdout.write(f"{path}\n")
    sys.stderr.write(f"weights of job {taken.job} at {taken.position}\n")


def _warn(sentence: str) -> None:
    sys.stderr.write(f"psserver: {sentence}\n")


@contextlib.contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Raises the command's error for a disk that fails."""
    try:
        yield
    except OSError as problem:
        raise CommandError(
            Exit.STATE_DIR,
            f"cannot write {path}: {problem.strerror or problem}; nothing there was changed",
        ) from problem


@app.command()
def certs(
    *,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the files go.")],
    host: Annotated[
        list[str] | None, typer.Option(help="Name or address of a shard; may be repeated.")
    ] = None,
    days: Annotated[int, typer.Option(help="Days until they expire.", min=1, max=3650)] = 365,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
) -> None:
    """Make a CA for development, certificates for shards and clients, and a token."""
    from psserver.access import certs as maker

    maker.make(folder, host or [], days=days, is_forced=force)
    sys.stdout.write("".join(f"{line}\n" for line in maker.next_steps(folder, host or [])))


@app.command()
def doctor(
    *,
    port: RunPort = None,
    state_dir: RunStateDir = None,
    servers: Servers = None,
    job: Annotated[str | None, typer.Option(help="Check this job too.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check the shards and this machine for problems; exit with 1 if there is one."""
    from pscore.observe import doctor as doc
    from psserver.commands.doctor import examine

    findings = examine(servers, port, state_dir, job)
    if as_json:
        sys.stdout.write(to_json(doc.as_json(findings), indent=1) + "\n")
    else:
        doc.show(findings)
    sys.exit(Exit.OK if doc.is_well(findings) else Exit.UNHEALTHY)


@app.command()
def rules(*, as_json: AsJson = False) -> None:
    """List the modes with their arguments and sources."""
    from psserver.commands import listing

    sys.stdout.write(listing.rules(as_json=as_json))


@config_app.command(
    "show", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def config_show(context: typer.Context, *, as_json: AsJson = False) -> None:
    """Print each setting and where it comes from; takes the flags of start."""
    from psserver.commands import listing

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    given = commands["start"].make_context("start", list(context.args)).params
    settings = _settings({key: value for key, value in given.items() if key != "detach"})
    sys.stdout.write(listing.settings(settings, as_json=as_json))


def _settings(flags: dict[str, Any]) -> Settings:
    """Returns the settings from flags by their names in `start`."""
    from psserver.process.settings import resolve

    file = flags.pop("config")
    return resolve({_setting(name): value for name, value in flags.items()}, file)


def _setting(flag: str) -> str:
    section, _, field = flag.partition("_")
    return f"{section}.{field}" if section in ("metrics", "log") else f"server.{flag}"


def _require_words(words: Sequence[str]) -> None:
    """Raises ConfigError if one is empty: as a path it would be the current directory."""
    if "" in words:
        before = " ".join(words[: words.index("")])
        raise ConfigError(
            f"the argument after `psserver {before}` is empty, perhaps from a variable that is not "
            "set: give a value, or leave it out"
        )


def main() -> None:
    """Runs one command; an error ends the process with its code and one line."""
    try:
        _require_words(sys.argv[1:])
        commandline.run(app, "psserver")
    except CommandError as problem:
        commandline.tell_error("psserver", problem)
        sys.exit(problem.code)
    except (ConfigError, RemoteProtocolError) as problem:  # The second: of a reader's commands.
        commandline.tell_error("psserver", problem)
        sys.exit(Exit.ACCESS if isinstance(problem, AccessError) else Exit.USAGE)
