"""The data planes: the same bits by each of them, and nothing lost, doubled or left behind."""

import contextlib
import hashlib
import itertools
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import psworker
from pscore.partition import LONG_NUMEL_MAX
from psworker.connection import shard_link as link
from psworker.training import declaration
from psworker.transports import Endpoint, Transport, choose
from psworker.transports.retry import RetryPolicy
from tests.inside import table_of
from tests.integration.cluster import Shards, Station, wait_until
from tests.integration.models import backward, batch, make_model, sgd, weights_of

MEMFD = "/memfd:paceline"
LARGE = (1 << 20) + 4321  # Elements: six slices, together more than a connection's buffers hold.


def plane_of(optimizer: psworker.DistributedOptimizer) -> set[str]:
    return {link.transport.name for link in table_of(optimizer).session.links}


def train(me: Station, mode: str) -> tuple[set[str], dict[str, np.ndarray]]:
    model = make_model()
    optimizer = psworker.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), mode=mode
    )
    for step in range(8):
        optimizer.zero_grad()
        backward(model, *batch(me.rank, step))
        optimizer.step()
    plane = plane_of(optimizer)
    psworker.shutdown()
    return plane, weights_of(model)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ssgd", "ssd(steps=2, warmup=2)"])
def test_every_data_plane_gives_the_same_bits(shards: Shards, mode: str) -> None:
    results = {
        plane: shards.run(train, mode, env={"PACELINE_DATA_PLANE": plane})
        for plane in ("local", "tcp", "grpc", "auto")
    }
    for plane, workers in results.items():
        for used, weights in workers:
            assert used == {"local" if plane == "auto" else plane}
            for name, weight in results["grpc"][0][1].items():
                assert np.array_equal(weights[name], weight), (plane, name)


def train_long(
    me: Station, planes: Sequence[str], is_near: bool, path: Path
) -> tuple[str, int, list[str]]:
    """Trains four steps, or the last two of them from the state of the first two.

    Returns:
        The data plane of this worker, the number of slices, and digests of weights and state.
    """
    os.environ["PACELINE_DATA_PLANE"] = planes[me.rank]
    declaration.is_near = lambda session: is_near
    parameter = torch.nn.Parameter(torch.ones(2 * LONG_NUMEL_MAX))
    optimizer = psworker.DistributedOptimizer(
        torch.optim.Adam([parameter], lr=0.01, amsgrad=True), [("large", parameter)]
    )
    if path.exists():
        parameter.data.copy_(torch.load(path.with_suffix(".weights")))
        optimizer.load_state_dict(torch.load(path))
    while optimizer.steps < 4:
        generator = torch.Generator().manual_seed(10 * me.rank + optimizer.steps)
        parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        if me.rank == 0 and optimizer.steps == 2 and not path.exists():
            torch.save(parameter.data, path.with_suffix(".weights"))
            torch.save(optimizer.state_dict(), path)
    (state,) = optimizer.state_dict()["state"].values()
    digests = [
        hashlib.sha256(array.numpy()).hexdigest() for array in (parameter.data, *state.values())
    ]
    return plane_of(optimizer).pop(), len(table_of(optimizer).layout.slices), digests


@pytest.mark.slow
def test_slices_of_each_length_give_the_same_bits_by_each_plane(tmp_path: Path) -> None:
    """A long slice with three arrays of state is the longest of all frames."""
    path = tmp_path / "state"
    with Shards(1) as one:
        (_, num_slices, digests), other = one.run(train_long, ("tcp", "local"), False, path)
        assert (other[1], other[2]) == (num_slices, digests)
        assert num_slices == 8
        for planes in (("local", "tcp"), ("grpc", "local")):
            for rank, found in enumerate(one.run(train_long, planes, True, path)):
                assert found == (planes[rank], 2, digests)


def make_layer(
    mode: str, *, overlap: bool
) -> tuple[torch.nn.Module, psworker.DistributedOptimizer]:
    """Returns a layer whose weights are large enough to lie once in memory."""
    torch.manual_seed(0)
    model = torch.nn.Linear(400, 300)
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
        mode=mode,
        overlap=overlap,
        gradient_as_bucket_view=overlap,
    )
    return model, optimizer


def train_by_hand(me: Station, mode: str, overlap: bool) -> dict[str, np.ndarray]:
    """Sets tensors of its own as `.grad`, and writes to them between the steps."""
    model, optimizer = make_layer(mode, overlap=overlap)
    grads = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        parameter.grad = grad
    for step in range(8):
        for grad in grads:
            grad.fill_(1 + step + me.rank)
        optimizer.step()
    optimizer.close()
    return weights_of(model)


def train_in_place(
    me: Station, mode: str, sets_to_none: bool
) -> tuple[bool, dict[str, np.ndarray]]:
    """Sends gradients during backward; returns whether `.grad` is the memory that is sent."""
    model, optimizer = make_layer(mode, overlap=True)
    for step in range(8):
        optimizer.zero_grad(set_to_none=sets_to_none)
        generator = torch.Generator().manual_seed(10 * step + me.rank)
        torch.autograd.backward(model(torch.randn(8, 400, generator=generator)).square().mean())
        optimizer.step()
    optimizer.close()
    return table_of(optimizer).flat.views.has(0), weights_of(model)


DELAYED = ["ssgd", "ssd(steps=3, warmup=3)", "od(warmup=3)"]


def meet_nan(me: Station, overlap: bool) -> tuple[str, int, int]:
    """Returns the error of a NaN that is looked at last, and the pushes of its step, of how many.

    No gradient leaves during backward, for there is none.
    """
    model, optimizer = make_layer("ssgd", overlap=overlap)
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    psworker.barrier()
    pushes, layout = optimizer.traffic.num_pushes, table_of(optimizer).flat.layout
    last = layout.slices[0].segments[0].tensor
    num_before = sum(
        all(segment.tensor != last for segment in part.segments) for part in layout.slices
    )
    grad = parameters[last].grad
    assert grad is not None
    grad.fill_(float("nan"))
    with pytest.raises(psworker.GradientError, match=r"holds .* NaN or Inf") as caught:
        optimizer.step()
    return str(caught.value), optimizer.traffic.num_pushes - pushes, num_before


@pytest.mark.parametrize("overlap", [False, True])
def test_with_overlap_each_slice_is_sent_without_checking_the_others(
    shards: Shards, overlap: bool
) -> None:
    """Without it a NaN anywhere stops the step before anything has left."""
    for message, num_pushed, num_before in shards.run(meet_nan, overlap):
        assert "at step 1" in message
        assert num_before > 0
        assert num_pushed == (num_before if overlap else 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "overlap"), [*((mode, False) for mode in DELAYED), ("ssgd", True)]
)
def test_a_script_may_continue_writing_to_gradients_of_its_own(
    shards: Shards, mode: str, overlap: bool
) -> None:
    results = [
        shards.run(train_by_hand, mode, overlap, env={"PACELINE_DATA_PLANE": plane})
        for plane in ("local", "tcp", "grpc")
    ]
    for workers in results:
        for weights in workers:
            for name, weight in weights.items():
                assert np.array_equal(weight, results[0][0][name]), name
    if mode == "ssgd":  # Means of 1.5, 2.5, ...
        torch.manual_seed(0)
        model = torch.nn.Linear(400, 300)
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(8):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 1.5 + step)
            plain.step()
        for name, weight in weights_of(model).items():
            np.testing.assert_allclose(results[0][0][name], weight, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", DELAYED)
def test_gradients_are_accumulated_where_they_are_sent_from_if_the_step_waits(
    shards: Shards, mode: str
) -> None:
    results = {
        (plane, sets_to_none): shards.run(
            train_in_place, mode, sets_to_none, env={"PACELINE_DATA_PLANE": plane}
        )
        for plane in ("local", "tcp", "grpc")
        for sets_to_none in (True, False)
    }
    expected = results["grpc", True][0][1]
    for (plane, _), workers in results.items():
        for is_view, weights in workers:
            # Over a network a delayed mode does not wait for gradients that the next backward
            # overwrites.
            assert is_view == (plane == "local" or mode == "ssgd")
            for name, weight in weights.items():
                assert np.array_equal(weight, expected[name]), (plane, name)


# ----- shared memory goes with its users


def segments_of(pid: int) -> set[int]:
    """Returns the inodes of the segments that a process has mapped or holds open."""
    inodes = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if MEMFD in line:
                inodes.add(int(line.split()[4]))
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(entry).startswith(MEMFD):
                    inodes.add(entry.stat().st_ino)
    return inodes


def segments() -> set[int]:
    """Returns the inodes of all segments of this machine."""
    return set().union(*(segments_of(pid) for pid in psutil.pids()))


def hold(me: Station) -> None:
    model = make_model()
    optimizer = psworker.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    backward(model, *batch(me.rank, 0))
    optimizer.step()
    me.tell(sorted(segments_of(os.getpid())))
    me.hear()


def shard_pids(parent: psutil.Process) -> list[int]:
    return [process.pid for process in parent.children(recursive=True)]


@pytest.mark.parametrize("first", ["worker", "shard"])
def test_a_kill_leaves_no_shared_memory_behind(first: str) -> None:
    with Shards(1) as shards:
        (shard,) = (process.pid for process in psutil.Process(shards.pid).children())
        with shards.workers(hold, num_workers=1) as (worker,):
            held = set(worker.hear())
            assert len(held) == 2, "gradients, and the weights of one shard"
            assert held <= segments_of(shard)
            grads = held - segments_of_driver(shard, worker.pid)
            if first == "worker":
                worker.kill()
                wait_until(lambda: not grads & segments())  # The shard lets go of them too.
            os.kill(shard, signal.SIGKILL)
            if first == "shard":
                wait_until(lambda: not psutil.pid_exists(shard) or not segments_of(shard))
                worker.kill()
            wait_until(lambda: not held & segments())


def segments_of_driver(shard: int, worker: int) -> set[int]:
    """Returns the segments whose descriptor the shard itself keeps: those of the weights."""
    kept = set()
    for entry in Path(f"/proc/{shard}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(entry).startswith(MEMFD):
                kept.add(entry.stat().st_ino)
    assert kept, f"shard {shard} keeps no weights for worker {worker}"
    return kept


# ----- fall-backs


def chosen(shards: Shards, endpoint: Endpoint) -> Transport:
    address = shards.addresses[0]
    return choose("auto", address, lambda: endpoint, RetryPolicy(address, 5.0))


def test_without_a_local_socket_it_is_tcp_and_the_log_says_why(
    shards: Shards, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "paceline")
    to_shard = link.Link(shards.addresses[0], patience_s=5.0)
    port = to_shard.endpoint().port
    to_shard.close()
    transport = chosen(shards, Endpoint(host="127.0.0.1", port=port, local="paceline-nobody"))
    is_near = transport.is_near
    transport.close()
    assert (transport.name, transport.shares_memory, is_near) == ("tcp", False, True)
    (line,) = [record.getMessage() for record in caplog.records if "is tcp" in record.message]
    assert "local: no data connection to paceline-nobody: " in line


def test_a_shard_that_is_killed_before_the_connection_is_asked_again(shards: Shards) -> None:
    """The job would use another plane to its end, or end where this one was named."""
    address = shards.addresses[0]
    to_shard = link.Link(address, patience_s=5.0)
    killed = Endpoint(host="127.0.0.1", port=0, local="paceline-killed")
    answers = itertools.chain([killed], itertools.repeat(to_shard.endpoint()))
    transport = choose("local", address, lambda: next(answers), RetryPolicy(address, 5.0))
    transport.close()
    to_shard.close()
    assert transport.name == "local"


def test_without_a_data_port_it_is_grpc_and_the_log_says_why(
    shards: Shards, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "paceline")
    transport = chosen(shards, Endpoint(host="127.0.0.1", port=0, local=""))
    transport.close()
    assert transport.name == "grpc"
    (line,) = [record.getMessage() for record in caplog.records if "is gRPC" in record.message]
    assert "local: the shard is on another host; tcp: the shard has no data port" in line


# ----- a connection that is cut


class Cutter:
    """A TCP proxy that cuts the first connection which has sent so many bytes."""

    def __init__(self, target: tuple[str, int], cut_after_nbytes: int) -> None:
        self._target = target
        self._left = cut_after_nbytes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.num_cuts = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                for source, sink, counts in ((near, far, True), (far, near, False)):
                    threading.Thread(
                        target=self._forward, args=(source, sink, counts), daemon=True
                    ).start()

    def _is_first(self) -> bool:
        with self._lock:
            if self.num_cuts == 0:
                self.num_cuts = 1
                return True
            return False

    def _forward(self, source: socket.socket, sink: socket.socket, counts: bool) -> None:
        sent = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 14):
                sent += len(data)
                if counts and sent > self._left and self._is_first():
                    sink.sendall(data[:100])  # Only a piece of a frame comes through.
                    break
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def cutter(port: int, cut_after_nbytes: int) -> Iterator[Cutter]:
    made = Cutter(("127.0.0.1", port), cut_after_nbytes)
    try:
        yield made
    finally:
        made.close()


def through(port: int) -> Callable[[link.Link], Endpoint]:
    return lambda _: Endpoint(host="127.0.0.1", port=port, local="")


def train_through_a_cut(me: Station) -> tuple[int, int, np.ndarray]:
    """Pushes two slices at each of 4 steps; a connection is cut inside the third step.

    The slices are sent over two connections, because both ends are on one host.
    """
    psworker.init()
    (shard,) = psworker.job.context.current().session.links
    found = shard.endpoint()
    psworker.shutdown()
    with cutter(found.port, cut_after_nbytes=int(1.3 * 4 * LARGE)) as made:
        link.Link.endpoint = through(made.port)  # type: ignore[method-assign,assignment]
        psworker.init(job="cut")
        model = torch.nn.ParameterDict({"large": torch.zeros(LARGE)})
        optimizer = psworker.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.5), model.named_parameters()
        )
        for step in range(4):
            model["large"].grad = torch.full((LARGE,), float(1 << step))
            optimizer.step()
        pushes = optimizer.traffic.num_pushes
        psworker.shutdown()
        return made.num_cuts, pushes, model["large"].detach().numpy().copy()


def test_a_push_whose_connection_is_cut_is_sent_again_and_counted_once() -> None:
    with Shards(1) as shards:
        ((num_cuts, num_pushes, weights),) = shards.run(
            train_through_a_cut, num_workers=1, env={"PACELINE_DATA_PLANE": "tcp"}
        )
    assert num_cuts == 1
    assert num_pushes == 8, "the replica made each push once; the transport sent one again"
    assert np.array_equal(weights, np.full(LARGE, -0.5 * 15, np.float32))
