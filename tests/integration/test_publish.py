"""Published weights: each version is bfloat16 of one step of all shards."""

import contextlib
import copy
import io
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pytest
import safetensors.torch
import torch
from rich.console import Console

import psworker
from pscore.net.credentials import ANYONE
from pscore.publish.codec import round_to_bf16
from pscore.subscription import lines
from pscore.subscription.assembly import WeightsVersion
from pscore.subscription.lines import ReaderLine
from pscore.subscription.weights import PublishedWeights
from pscore.types import Role
from psserver.dashboard import terminal
from psserver.dashboard.history import History
from psserver.dashboard.watch import Asker, ShardWatch
from psserver.remote import checkpoint
from psworker.connection.exchange.exchange import Exchange
from psworker.connection.exchange.publishing import begin_publication
from psworker.training import table
from tests.inside import forget_worker, table_of
from tests.integration.cluster import Shards, Station, Worker, new_job, wait_until
from tests.integration.command import Command, eventually, free_ports, lasting_ports
from tests.integration.models import backward, batch, make_model, sgd

pytestmark = pytest.mark.timeout(300)
WAIT_S = 120.0


@pytest.fixture(scope="module")
def publishing() -> Iterator[Shards]:
    """Two shards that publish each update of each job."""
    with Shards(2, env={"PACELINE_PUBLISH": "*:every=1"}) as started:
        yield started
        started.require_alive()


def exported(shards: Shards, job: str, table: int = 0) -> dict[str, np.ndarray]:
    """Returns a job's weights as `psserver export` writes them, rounded to bfloat16."""
    found = checkpoint.capture(shards.addresses, ANYONE, job, weights_only=True)
    arrays = dict(found.tables[table].arrays["weights"])
    return {
        name: round_to_bf16(np.ascontiguousarray(array).reshape(-1)).reshape(array.shape)
        for name, array in arrays.items()
    }


def trains(station: Station, mode: str, num_steps: int) -> None:
    """Trains; makes a step each time that the test says so."""
    model = make_model()
    optimizer = psworker.DistributedOptimizer(
        sgd(model.parameters()), named_parameters=model.named_parameters(), mode=mode
    )
    for step in range(num_steps):
        station.hear()
        backward(model, *batch(step, station.rank))
        optimizer.step()
        station.tell(step)
    station.hear()


def require_shown(shards: Shards, job: str, weights: PublishedWeights) -> None:
    """Requires that status and dashboard show this process as the reader of a version."""
    asker = Asker(shards.addresses, ANYONE)
    watch = ShardWatch(asker, History())
    watch.look()
    asker.close()
    view = watch.history.view()
    (found,) = [one for one in view["status"]["jobs"] if one["name"] == job]
    (published,) = found["published"]
    assert published["version"] == weights.version.number
    assert published["sent"]["whole"] >= weights.bits.nbytes
    assert [one["pid"] for one in published["readers"]] == [os.getpid()]
    text = io.StringIO()
    Console(width=200, file=text).print(terminal.picture(view, job))
    assert f"pid {os.getpid()}: version" in text.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ssgd", "ssd(steps=2, warmup=1)", "diloco(steps=1, warmup=1)"])
def test_each_version_is_bf16_of_the_shards_at_its_step(publishing: Shards, mode: str) -> None:
    job, num_steps = new_job(), 4
    with publishing.workers(trains, mode, num_steps, num_workers=1, job=job) as (worker,):
        with psworker.Subscriber(publishing.addresses, job=job, dtype="bf16") as subscriber:
            weights = subscriber.wait(timeout_s=WAIT_S)
            first = {name: array.copy() for name, array in weights.arrays.items()}
            assert weights.step == 0
            for _ in range(num_steps):
                former = weights
                worker.tell()
                worker.hear()
                weights = subscriber.wait(newer_than=former.version, timeout_s=WAIT_S)
                assert weights.version == (former.version.lineage, former.version.number + 1)
                assert weights.exact
                assert weights.step == former.step + 1
                expected = exported(publishing, job)
                for name, array in weights.arrays.items():
                    np.testing.assert_array_equal(array, expected[name], err_msg=name)
            assert subscriber.resyncs == 0
            require_shown(publishing, job, weights)
        worker.tell()
        worker.result()
    for name, array in first.items():
        assert (array != weights.arrays[name]).any(), name


def publishes_and_grows(station: Station) -> int:
    """Publishes each second update, is lost, and unfreezes a layer; returns how often it asked."""
    model: Any = make_model()
    model[0].requires_grad_(False)
    given: dict[str, Any] = {"named_parameters": model.named_parameters(), "publish_every": 2}
    with pytest.raises(psworker.ConfigError, match="the workers exchange the weights"):
        psworker.DistributedOptimizer(sgd(model.parameters()), mode="dpsgd", **given)
    given["named_parameters"] = list(model.named_parameters())
    with pytest.raises(psworker.ConfigError, match="no placeholder of a row table"):
        psworker.DistributedOptimizer(sgd(model.parameters()), rows=sgd([torch.ones(1)]), **given)
    with mock.patch.object(table, "begin_publication", wraps=begin_publication) as asked:
        optimizer = psworker.DistributedOptimizer(sgd(model.parameters()), **given)
        assert table_of(optimizer).name == "model"
        for step in range(4):
            station.tell()
            station.hear()
            if step == 1:
                forget_worker(optimizer)
                optimizer.zero_grad()
                backward(model, *batch(step, 0))
                with contextlib.suppress(psworker.PacelineError):
                    optimizer.step()
                assert asked.call_count == 2
            if step == 2:
                model[0].requires_grad_(True)
            while optimizer.clock <= step:
                optimizer.zero_grad()
                backward(model, *batch(step, 0))
                optimizer.step()
        station.tell()
        station.hear()
        with pytest.raises(psworker.ConfigError, match="the workers exchange the weights"):
            optimizer.set_mode("dpsgd")
        return asked.call_count


@pytest.mark.slow
def test_a_wrapper_publishes_its_tables_also_when_it_was_lost_and_when_it_has_grown(
    shards: Shards,
) -> None:
    job = new_job()
    versions: list[WeightsVersion] = []
    with shards.workers(publishes_and_grows, num_workers=1, job=job) as (worker,):
        with psworker.Subscriber(shards.addresses, job=job, dtype="bf16") as subscriber:
            for number in range(2):
                for _ in range(2 - number):
                    worker.hear()
                    worker.tell()
                worker.hear()
                newest = versions[-1] if versions else None
                weights = subscriber.wait(newer_than=newest, timeout_s=WAIT_S)
                while weights.step < 2 * number + 2:
                    weights = subscriber.wait(newer_than=weights.version, timeout_s=WAIT_S)
                expected = exported(shards, job, number)
                assert weights.arrays.keys() == expected.keys()
                for key, array in weights.arrays.items():
                    np.testing.assert_array_equal(array, expected[key], err_msg=key)
                versions.append(weights.version)
                worker.tell()
            assert versions[1].lineage > versions[0].lineage, "the tensors of another table"
        assert worker.result() == 3


def publishes(station: Station) -> None:
    """Publishes arrays of its own, each time that the test says so."""
    psworker.init()
    arrays = {"w": np.zeros((300, 7), dtype=np.float32), "b": np.zeros(3, dtype=np.float32)}
    publisher = psworker.Publisher(arrays, step=5)
    while (step := station.hear()) is not None:
        arrays["w"][:], arrays["b"][:] = step, -step
        publisher.publish(1000 * step)
        station.tell()


@pytest.mark.slow
def test_a_publisher_makes_a_version_of_each_call(shards: Shards) -> None:
    job = new_job()
    with shards.workers(publishes, num_workers=1, job=job) as (worker,):
        with psworker.Subscriber(shards.addresses, job=job) as subscriber:
            weights = subscriber.wait(timeout_s=WAIT_S)
            assert weights.step == 5
            assert {name: array.shape for name, array in weights.arrays.items()} == {
                "w": (300, 7),
                "b": (3,),
            }
            module = torch.nn.Module()
            module.w = torch.nn.Parameter(torch.ones(300, 7))
            module.b = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
            subscriber.into(module)
            assert not module.w.any()
            with pytest.raises(psworker.ConfigError, match=r"takes a torch.*, not a dict"):
                subscriber.into(dict(module.named_parameters()))  # type: ignore[arg-type]
            for step in (1, 2, 3):
                worker.tell(step)
                worker.hear()
                weights = subscriber.wait(newer_than=weights.version, timeout_s=WAIT_S)
                assert weights.step == 1000 * step
                assert (weights.arrays["w"] == step).all()
                assert (module.w == step).all()
                assert (module.b == -step).all()
        worker.tell(None)
        worker.result()


def stop_behind(station: Station, name: str) -> None:
    """Makes the next call of a method of `Exchange` say so when the shards have got it, and wait.

    Of one that loads something only if that is a state.
    """
    call = getattr(Exchange, name)

    def stopping(exchange: Exchange, index: int, what: Any, *given: Any, **named: Any) -> None:
        call(exchange, index, what, *given, **named)
        if name != "load" or what is not Role.WEIGHTS:
            setattr(Exchange, name, call)
            exchange.flush()
            station.tell("stopped")
            station.hear()

    setattr(Exchange, name, stopping)


def require_one(weights: PublishedWeights) -> float:
    """Returns the value that all elements of a version have."""
    (value,) = {float(value) for array in weights.arrays.values() for value in np.unique(array)}
    return value


def read_whole(reader: psworker.Subscriber, before: PublishedWeights) -> PublishedWeights:
    """Returns the newest version of one that is read for a while; each has one value."""
    for _ in range(3):  # Shards look for something to publish once a second.
        with contextlib.suppress(TimeoutError):
            before = reader.wait(newer_than=before.version, timeout_s=1.0)
            require_one(before)
    return before


LONG = 1 << 19  # Elements of an array: several slices on each shard.


def publishes_long(station: Station, value: int, stops_at: int | None) -> None:
    """Publishes three versions; stops in the middle of one, or of the first one if it is loaded."""
    psworker.init()
    arrays = {name: np.full(LONG, value, dtype=np.float32) for name in ("a", "b", "c")}
    if stops_at == value:
        stop_behind(station, "load")
    publisher = psworker.Publisher(arrays, step=value)
    for step in (value + 1, value + 2):
        station.tell("made")
        station.hear()
        if stops_at == step:
            stop_behind(station, "push")
        for array in arrays.values():
            array += 1
        publisher.publish(step)
    station.tell("published")


@pytest.mark.slow
def test_a_publisher_that_was_killed_in_the_middle_of_a_version_begins_anew(shards: Shards) -> None:
    """Some slices have a version that the others never get: no reader sees it."""
    job = new_job()

    @contextlib.contextmanager
    def life(number: int, stops_at: int | None = None) -> Iterator[Worker]:
        given, env = (10 * number, stops_at), {"TORCHELASTIC_RESTART_COUNT": str(number)}
        run = shards.workers(publishes_long, *given, num_workers=1, job=job, env=env)
        with run as (worker,):
            yield worker

    with psworker.Subscriber(shards.addresses, job=job) as reader:
        with life(1, stops_at=12) as worker:
            version = None
            for step in (10, 11):
                assert worker.hear() == "made"
                seen = reader.wait(newer_than=version, timeout_s=WAIT_S)
                assert require_one(seen) == step
                version = seen.version
                worker.tell()
            assert worker.hear() == "stopped"
            seen = read_whole(reader, seen)
            worker.kill()
        with life(2, stops_at=20) as worker:
            assert worker.hear() == "stopped"
            seen = read_whole(reader, seen)
            worker.kill()
        with life(3) as worker:
            for step in (30, 31):
                assert worker.hear() == "made"
                seen = reader.wait(newer_than=seen.version, timeout_s=WAIT_S)
                assert (seen.step, require_one(seen)) == (step, step)
                worker.tell()
            worker.result()


def loads_a_state(station: Station) -> None:
    """Trains five steps, and loads the state of the third, with a stop in the middle."""
    names = ("a", "b", "c")
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros(LONG)) for name in names})
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), publish_every=5
    )
    state: dict[str, Any] = {}
    for step in range(10):
        if step == 3:
            state = {"model": copy.deepcopy(model.state_dict()), "own": optimizer.state_dict()}
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, -1.0)
        optimizer.step()
    station.tell("trained")
    station.hear()
    stop_behind(station, "load")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["own"])
    station.tell("loaded")
    station.hear()


@pytest.mark.slow
def test_a_state_that_is_being_loaded_is_published_when_all_slices_have_it(shards: Shards) -> None:
    job = new_job()
    with (
        shards.workers(loads_a_state, num_workers=1, job=job) as (worker,),
        psworker.Subscriber(shards.addresses, job=job) as reader,
    ):
        assert worker.hear() == "trained"
        trained = reader.wait(timeout_s=WAIT_S)
        assert require_one(trained) == 10.0
        worker.tell()
        assert worker.hear() == "stopped"
        assert read_whole(reader, trained) is trained
        worker.tell()
        assert worker.hear() == "loaded"
        loaded = reader.wait(newer_than=trained.version, timeout_s=WAIT_S)
        assert (loaded.step, require_one(loaded)) == (3, 3.0)
        worker.tell()
        worker.result()


def stop(process: psutil.Process) -> None:
    """Stops a process; returns when none of its threads runs."""
    process.suspend()
    states = Path(f"/proc/{process.pid}/task")
    wait_until(
        lambda: all(
            (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
            for task in states.iterdir()
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["while it waits", "before it fetches"])
def test_a_reader_of_a_stopped_shard_is_told_in_time(moment: str) -> None:
    job = new_job()
    with Shards(1) as started, started.workers(publishes, num_workers=1, job=job) as (worker,):
        (shard,) = psutil.Process(started.pid).children()
        fetch = ReaderLine.fetch

        def stopped(*given: Any) -> Any:
            stop(shard)
            return fetch(*given)

        # These limits are longer than this test may take: only the reader's own one can end it.
        with (
            psworker.Subscriber(started.addresses, job=job) as subscriber,
            mock.patch.multiple(lines, CALL_S=600.0, SILENCE_S=600.0),
        ):
            former = subscriber.wait(timeout_s=WAIT_S).version
            if moment == "while it waits":
                stop(shard)
            else:
                worker.tell(1)
                worker.hear()
            patch = mock.patch.object(ReaderLine, "fetch", stopped)
            with patch, pytest.raises(TimeoutError, match=r"within 0.5 s: shard 0 does not answer"):
                subscriber.wait(newer_than=former, timeout_s=0.5)
            with patch:
                assert subscriber.wait(timeout_s=0.5).version == former
            shard.resume()
            if moment == "while it waits":
                worker.tell(1)
                worker.hear()
            weights = subscriber.wait(newer_than=former, timeout_s=WAIT_S)
            assert (weights.arrays["w"] == 1).all()
            subscriber.close()
            with pytest.raises(psworker.ConfigError, match="is closed"):
                subscriber.wait()
        worker.tell(None)
        worker.result()


def publishes_other_arrays(station: Station) -> None:
    """Publishes one array, and in the next job of that name another one."""
    for name in ("a", "b"):
        psworker.init()
        psworker.Publisher({name: np.zeros(3, dtype=np.float32)})
        station.tell()
        station.hear()
        psworker.shutdown()


def why_none(reader: psworker.Subscriber, newer_than: WeightsVersion | None) -> str:
    """Returns why a reader gets no version; a busy shard may be too late with its reason."""
    with pytest.raises(TimeoutError) as raised:
        reader.wait(newer_than=newer_than, timeout_s=0.1)
    return str(raised.value)


@pytest.mark.slow
def test_a_reader_sees_a_job_that_has_started_over_and_why_there_is_no_newer_version(
    shards: Shards,
) -> None:
    job = new_job()
    with (
        shards.workers(publishes_other_arrays, num_workers=1, job=job) as (worker,),
        psworker.Subscriber(shards.addresses, job=job) as subscriber,
    ):
        worker.hear()
        former = subscriber.wait(timeout_s=WAIT_S)
        assert list(former.arrays) == ["a"]
        than = f"newer than {tuple(former.version)} within 0.1 s"
        said = f"no version of job {job!r} {than}"  # Another shard has no slice of it.
        eventually(lambda: why_none(subscriber, former.version) == said)
        worker.tell()
        worker.hear()
        with psworker.Subscriber(shards.addresses, job=job) as other:
            other.wait(timeout_s=WAIT_S)
        assert list(subscriber.wait(timeout_s=WAIT_S).arrays) == ["b"]
        worker.tell()
        worker.result()


REFUSED = {
    "text": np.array(["x"]),
    "nothing": None,
    "rows": [[1.0], [1.0, 2.0]],
    "sparse": torch.eye(3).to_sparse(),
    "meta": torch.empty(3, device="meta"),
    "parts": torch.zeros(3, dtype=torch.complex64),
    "short": np.zeros((0, 3)),
}


def publishes_badly(station: Station) -> None:
    """Sends the error of each wrong use of publishers, then publishes once more."""
    psworker.init()
    whole = torch.ones(4, 3).T
    first: dict[str, Any] = {"w": whole, "b": np.float32(3)}

    def tell(call: Callable[..., object], *arguments: object, **options: object) -> None:
        with pytest.raises(psworker.ConfigError) as refused:
            call(*arguments, **options)
        station.tell(str(refused.value))

    for name, array in REFUSED.items():
        tell(psworker.Publisher, {name: array}, table=name)
    for other in (3, ""):
        tell(psworker.Publisher, {other: np.zeros(3)})
    linear = torch.nn.Linear(3, 2)
    for unnamed in (linear, linear.bias, np.zeros(3)):
        tell(psworker.Publisher, unnamed)
    former, publisher = psworker.Publisher(first), psworker.Publisher(first)
    tell(former.publish, 1)
    for step in (1.5, "1", None, -1):
        tell(publisher.publish, step)
    whole.data = torch.zeros(2, 2)
    tell(publisher.publish, 1)
    whole.data = torch.full((3, 4), torch.nan)
    publisher.publish(2)
    station.hear()


@pytest.mark.slow
def test_wrong_arrays_and_steps_are_refused_and_the_publisher_goes_on(shards: Shards) -> None:
    job = new_job()
    with shards.workers(publishes_badly, num_workers=1, job=job) as (worker,):
        for name in REFUSED:
            assert f"'{name}'" in worker.hear()
        for _ in range(2):
            assert "must be texts" in worker.hear()
        for kind in ("Linear", "Parameter", "ndarray"):
            assert f"a {kind} has no named arrays: give a mapping, or pairs" in worker.hear()
        assert "has made another Publisher of table 'model'" in worker.hear()
        for step in ("1.5", "'1'", "None", "-1"):
            assert f"step is {step}, must be a whole number" in worker.hear()
        assert "'w' is (2, 2) now, and was (3, 4)" in worker.hear()
        with psworker.Subscriber(shards.addresses, job=job) as subscriber:
            weights = subscriber.wait(timeout_s=WAIT_S)
            while weights.step < 2:
                weights = subscriber.wait(newer_than=weights.version, timeout_s=WAIT_S)
            assert np.isnan(weights.arrays["w"]).all()
            assert weights.arrays["w"].shape == (3, 4)
            assert weights.arrays["b"] == 3
            require_refused_in_a_fork(subscriber)
        worker.tell()
        worker.result()


def require_refused_in_a_fork(subscriber: psworker.Subscriber) -> None:
    """Requires that a process forked from a reader's is told, and waits for nothing."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            subscriber.wait(timeout_s=1.0)
        except psworker.ConfigError as problem:
            subscriber.close()
            os.write(writing, str(problem).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    assert b"was forked from" in os.read(reading, 1000)
    os.close(reading)
    assert subscriber.wait(timeout_s=WAIT_S).step >= 2  # Its own reading goes on.


def upper(name: str, array: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Returns an array under another name, for `--map`."""
    return [(name.upper(), array)]


@pytest.mark.slow
def test_versions_are_written_into_a_folder_also_after_a_kill(
    publishing: Shards, tmp_path: Path
) -> None:
    job = new_job()
    to, command = tmp_path / "to", Command(tmp_path)
    words = ("publish", "--to", to, "--job", job, "--servers", ",".join(publishing.addresses))
    hook = ("--map", "tests.integration.test_publish:upper")
    with publishing.workers(trains, "ssgd", 3, num_workers=1, job=job) as (worker,):
        with command.spawn(*words, *hook) as process:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert first.startswith(f"{to}/v")
            assert first.endswith(" step 0\n")
            worker.tell()
            worker.hear()
            assert process.stdout.readline().endswith(" step 1\n")
            process.kill()
        worker.tell()
        worker.hear()
        done = command.run(*words, *hook, "--once")
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith(" step 2\n")
        expected = exported(publishing, job)
        found = safetensors.torch.load_file(to / "latest" / "model.safetensors")
        assert found.keys() == {name.upper() for name in expected}
        for name, array in expected.items():
            bits = found[name.upper()].view(torch.uint16).numpy()
            np.testing.assert_array_equal(bits, array)
        for _ in range(1):
            worker.tell()
            worker.hear()
        worker.tell()
        worker.result()


@pytest.mark.slow
def test_the_command_says_that_no_version_comes(tmp_path: Path) -> None:
    command = Command(tmp_path)
    words = ("publish", "--to", tmp_path / "to", "--job", "night", "--servers", "127.0.0.1:1")
    done = command.run(*words, "--once", code=6)
    assert "no version of job 'night' within 5 s" in done.stderr
    with command.spawn(*words) as process:
        assert process.stderr is not None
        assert "within 5 s" in process.stderr.readline()


def publishes_always(station: Station) -> int:
    """Publishes arrays that are full of the step, until the test says so; returns the last step."""
    psworker.init()
    arrays = {f"w{index}": np.zeros(30_000, dtype=np.float32) for index in range(4)}
    publisher = psworker.Publisher(arrays)
    step = 0
    while not station.is_told():
        step += 1
        for array in arrays.values():
            array.fill(step % 200)
        publisher.publish(step)
    return step


@pytest.mark.slow
def test_no_version_is_torn_and_none_falls_while_shards_are_killed(tmp_path: Path) -> None:
    job, kills, commits = new_job(), 0, 0
    with Command(tmp_path).detached("--shards", 2, *lasting_ports()) as run:
        addresses = run["addresses"]
        launched = {"RANK": "0", "WORLD_SIZE": "1", "PACELINE_SERVERS": ",".join(addresses)}
        worker = Worker(publishes_always, 0, (), launched | {"PACELINE_JOB": job})
        with psworker.Subscriber(addresses, job=job) as subscriber:
            weights = subscriber.wait(timeout_s=WAIT_S)
            lineage = weights.version.lineage
            while kills < 3 or commits < 100:
                former = weights
                weights = subscriber.wait(newer_than=former.version, timeout_s=WAIT_S)
                assert weights.version > former.version
                values = np.concatenate(list(weights.arrays.values()))
                assert (values == weights.step % 200).all(), "slices of several versions"
                commits += 1
                if commits % 30 == 29 and kills < 3:
                    supervised = psutil.Process(run["pid"]).children()
                    os.kill(supervised[kills % len(supervised)].pid, signal.SIGKILL)
                    kills += 1
            assert weights.version.lineage == lineage
        worker.tell()
        worker.result()
        worker.close()


def publishes_in_a_group(station: Station) -> None:
    """Publishes weights that differ between the processes of one worker."""
    torch.distributed.init_process_group("gloo")
    psworker.init()
    arrays = {"w": torch.full((3_000_000,), float(station.rank))}
    publisher = psworker.Publisher(arrays)
    while (step := station.hear()) is not None:
        arrays["w"].fill_(10 * step + station.rank)
        publisher.publish(step)
        station.tell()


@pytest.mark.slow
def test_of_the_processes_of_a_group_the_first_one_publishes(shards: Shards) -> None:
    """In a script of DDP all make the calls: versions had parts of each."""
    (port,), job = free_ports(1), new_job()
    launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "none"}
    with contextlib.ExitStack() as stack:
        workers = []
        for rank in range(2):
            env = shards.environment(rank, 2, job) | launched
            workers.append(Worker(publishes_in_a_group, rank, (), env))
            stack.callback(workers[-1].close)
        subscriber = stack.enter_context(psworker.Subscriber(shards.addresses, job=job))
        weights = subscriber.wait(timeout_s=WAIT_S)
        for step in (1, 2, 3):
            for worker in workers:
                worker.tell(step)
            for worker in workers:
                worker.hear()
            weights = subscriber.wait(newer_than=weights.version, timeout_s=WAIT_S)
            assert (weights.step, weights.version.number) == (step, step)
            assert (weights.arrays["w"] == 10 * step).all()
        for worker in workers:
            worker.tell()
        for worker in workers:
            worker.result()
