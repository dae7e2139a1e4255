"""Row tables through real shards: equal to torch, to the equations, and to the bit in all ways."""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import psworker
from psserver.remote import ask
from psserver.remote.status import combine
from psworker.training.optimizer import DistributedOptimizer
from psworker.transports import OutgoingPush, Transport
from tests.inside import table_of
from tests.integration.cluster import Shards, Station, new_job, wait_until
from tests.integration.row_models import (
    TABLES,
    Batch,
    Net,
    Oracle,
    batch,
    first_rows,
    joined,
    make_tables,
    torch_tables,
    touched,
)

STEPS = 50
Rows = dict[str, np.ndarray]
Make = Callable[[Any], torch.optim.Optimizer]
HYPER: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.3},
    "adagrad": {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.1, "eps": 1e-4},
    "sparse_adam": {"lr": 0.02, "betas": (0.8, 0.99), "eps": 1e-3},
    "rowwise": {"lr": 0.1},
    "ftrl": {"lr": 0.2, "l1": 0.01, "l2": 0.1},
}
INVARIANTS: Any = torch.sparse.check_sparse_tensor_invariants
CHECKED = INVARIANTS(True)  # Else torch warns of sparse tensors that its optimizers make.
CLASSES: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "sparse_adam": torch.optim.SparseAdam,
    "rowwise": psworker.RowwiseAdagrad,
    "ftrl": psworker.FTRL,
}


def make_rows(name: str, parameters: Any) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = CLASSES[name](parameters, **HYPER[name])
    return made


def wrap(
    model: Net, name: str, **options: Any
) -> tuple[DistributedOptimizer, list[torch.optim.lr_scheduler.LRScheduler]]:
    """Returns the wrapper of a model with row tables, and schedulers of both parts."""
    rows = make_rows(name, [table.weight for table in model.tables.values()])
    dense = torch.optim.SGD(psworker.dense_parameters(model), lr=0.1, momentum=0.9)
    optimizer = DistributedOptimizer(dense, model.named_parameters(), rows=rows, **options)
    return optimizer, [halve(each) for each in (optimizer, rows)]


def halve(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.5)


def values_of(model: Net) -> Rows:
    """Returns all rows of the tables, and the dense layer."""
    rows = {name: rows.numpy() for name, rows in first_rows(dict(model.tables.items())).items()}
    return rows | {"head": model.head.weight.detach().numpy().copy()}


def train(me: Station, name: str, steps: int = STEPS, ahead: bool = False) -> Rows:
    """Trains; with `ahead` rows of the next batch are pulled early, but for those of `words`."""
    torch.set_num_threads(1)
    model = Net(make_tables())
    optimizer, schedulers = wrap(model, name)
    batches: Any = (batch(me.rank, step) for step in range(steps))
    tables: Any = model.tables
    users, _, tags, peaks = (tables[table] for table in TABLES)
    if ahead:
        batches = psworker.prefetch(
            batches,
            model,
            ids=lambda given: {
                users: [given.users, given.tags[:, 0]],
                tags: given.tags,
                peaks: given.tags + 1,
            },
        )
    for given in batches:
        optimizer.zero_grad()
        torch.autograd.backward(model(given))
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    psworker.barrier("trained")
    return values_of(model)


@CHECKED
def train_in_torch(name: str, num_workers: int, steps: int = STEPS) -> Rows:
    """Returns the result of one process on the joined batch, with torch's own optimizers."""
    model = Net(torch_tables(sparse=True))
    rows = make_rows(name, [model.tables[table].weight for table in TABLES])
    dense = torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9)
    schedulers = [halve(each) for each in (dense, rows)]
    for step in range(steps):
        model.zero_grad()
        given = joined(step, num_workers)
        torch.autograd.backward(model(given))
        peaks: Any = model.tables["peaks"].weight
        ids = torch.tensor(sorted(touched(given)["peaks"]))[None]
        peaks.grad = torch.sparse_coo_tensor(ids, peaks.grad[ids[0]], peaks.shape)
        for optimizer in (dense, rows):
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    return arrays_of(model)


def arrays_of(model: Net) -> Rows:
    """Returns the weights of modules of torch."""
    tables: Any = model.tables
    found: Rows = {name: table.weight.detach().numpy() for name, table in tables.items()}
    return found | {"head": model.head.weight.detach().numpy()}


def train_oracle(name: str, num_workers: int, steps: int = STEPS) -> Rows:
    """Returns the result of the equations in float64 on the joined batch."""
    model = Net(torch_tables(sparse=False)).double()
    dense = torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9)
    scheduler = halve(dense)
    tables: Any = model.tables
    weights = {table: tables[table].weight.data.numpy() for table in TABLES}
    oracles = {table: Oracle(name, dict(HYPER[name]), weights[table]) for table in TABLES}
    for step in range(steps):
        model.zero_grad()
        given: Batch = joined(step, num_workers)
        torch.autograd.backward(model(given))
        for table, oracle in oracles.items():
            oracle.hyper["lr"] = HYPER[name]["lr"] * 0.5 ** (step // 20)
            grad = tables[table].weight.grad.numpy()
            oracle.step(weights[table], grad, touched(given)[table])
        dense.step()
        scheduler.step()
    return weights | {"head": model.head.weight.detach().numpy()}


def require_close(ours: Rows, theirs: Rows, bound: float) -> None:
    """Compares with the largest element as the unit."""
    for name, values in ours.items():
        wanted = theirs[name][: len(values)]
        assert np.abs(values - wanted).max() <= bound * max(1.0, np.abs(wanted).max()), name


@pytest.mark.slow
@pytest.mark.parametrize("name", list(HYPER))
def test_fifty_steps_equal_torch_and_the_equations(shards: Shards, name: str) -> None:
    """To 1e-6 of torch, which adds duplicates in another order; the oracle rounds nowhere."""
    num_workers = 2
    results = shards.run(train, name, num_workers=num_workers)
    for found in results:
        require_close(found, train_oracle(name, num_workers), 2e-5)
        if name in ("sgd", "adagrad", "sparse_adam"):
            require_close(found, train_in_torch(name, num_workers), 1e-6)
    for key in results[0]:
        assert np.array_equal(results[0][key], results[1][key]), key


def require_same(one: Rows, other: Rows) -> None:
    for name, values in one.items():
        assert np.array_equal(values, other[name]), name


@pytest.mark.slow
def test_bits_are_those_of_any_number_of_shards_and_plane_and_of_prefetched_rows(
    shards: Shards,
) -> None:
    first, _ = shards.run(train, "adagrad", 12)
    for ahead, plane in ((True, "auto"), (False, "tcp"), (True, "grpc")):
        env = {"PACELINE_DATA_PLANE": plane}
        require_same(first, shards.run(train, "adagrad", 12, ahead, env=env)[1])
    for number in (1, 3):
        with Shards(number) as others:
            require_same(first, others.run(train, "adagrad", 12, number == 1)[0])


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 4])
def test_any_number_of_workers_equals_the_equations(shards: Shards, num_workers: int) -> None:
    expected = train_oracle("sparse_adam", num_workers, steps=10)
    for found in shards.run(train, "sparse_adam", 10, num_workers=num_workers):
        require_close(found, expected, 2e-5)


NUM_PUSHES = 9


def count_pushes(me: Station, mode: str, rows_mode: str | None, ahead: bool) -> list[float]:
    """Pushes a gradient of 1 in row 7 at each step, of 0 or more in others; returns their rows."""
    torch.set_num_threads(1)
    table = psworker.Embedding(None, 2, name="table", init="zeros")
    model = torch.nn.ModuleDict({"table": table, "top": torch.nn.Linear(2, 1)})
    optimizer = DistributedOptimizer(
        torch.optim.SGD(psworker.dense_parameters(model), lr=0.0),
        model.named_parameters(),
        rows=torch.optim.SGD([table.weight], lr=1.0),
        mode=mode,
        rows_mode=rows_mode,
    )
    own = 100 + me.rank
    batches: Any = (torch.tensor([7, own]) for _ in range(NUM_PUSHES))
    if ahead:
        batches = psworker.prefetch(batches, model, ids=lambda ids: {table: ids})
    for step, ids in enumerate(batches):
        optimizer.zero_grad()
        rows = table(ids)
        assert rows[1, 0].item() == -step  # All of its own pushes, in every mode.
        torch.autograd.backward(rows.sum() + 0.0 * model["top"](rows).sum())
        optimizer.step()
    optimizer.close()  # `step` may return before its rows are counted.
    psworker.barrier("trained")
    with torch.no_grad():
        values: list[float] = table(torch.tensor([7, 100, 101, 102]))[:, 0].tolist()
    return values


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "rows_mode", "ahead"),
    [
        ("asgd", None, False),
        ("ssp(bound=2)", None, True),
        ("ssgd", "asgd", False),
        ("ssgd", "asgd", True),
        ("asgd", "ssp(bound=1)", False),
    ],
)
def test_every_push_counts_once_in_asynchronous_modes(
    shards: Shards, mode: str, rows_mode: str | None, ahead: bool
) -> None:
    for found in shards.run(count_pushes, mode, rows_mode, ahead, num_workers=2):
        assert found == [-2.0 * NUM_PUSHES, -NUM_PUSHES, -NUM_PUSHES, 0.0]


def read_within_bound(me: Station, mode: str, bound: int, steps: int) -> int:
    """Trains at a pace of its own; returns the most steps that another worker was behind.

    Each worker adds 1 to the row of its rank at each step, so a row says which steps are in it.
    """
    table = psworker.Embedding(None, 1, name="table", init="zeros")
    model = torch.nn.ModuleDict({"table": table, "top": torch.nn.Linear(1, 1)})
    optimizer = DistributedOptimizer(
        torch.optim.SGD(psworker.dense_parameters(model), lr=0.0),
        model.named_parameters(),
        rows=torch.optim.SGD([table.weight], lr=1.0),
        mode="asgd",
        rows_mode=mode,
    )
    behind = 0
    for step in range(steps):
        if me.rank == 1 and step % 8 == 0:
            time.sleep(0.2)  # The others come as far ahead as they may.
        optimizer.zero_grad()
        rows = table(torch.arange(me.num_workers))
        counts = rows.detach().flatten()
        assert counts[me.rank] == step  # All of its own.
        behind = max(behind, step - int(counts.min()))
        torch.autograd.backward(-rows[me.rank].sum() + 0.0 * model["top"](rows).sum())
        optimizer.step()
    assert bound < 0 or behind <= bound
    psworker.barrier("trained")
    with torch.no_grad():
        assert (table(torch.arange(me.num_workers)) == steps).all()
    return behind


@pytest.mark.slow
@pytest.mark.parametrize("bound", [1, 3])
def test_rows_lack_no_more_steps_of_others_than_ssp_allows(shards: Shards, bound: int) -> None:
    shards.run(read_within_bound, f"ssp(bound={bound})", bound, 40, num_workers=3)


def train_given(me: Station) -> tuple[Rows, Rows]:
    """Begins with given rows and a bound of the norm; returns them, and those of torch."""
    torch.set_num_threads(1)
    results = []
    values = torch.randn(30, 4, generator=torch.Generator().manual_seed(me.rank))
    given: Any = torch.nn.Embedding
    theirs = given.from_pretrained(
        torch.randn(30, 4, generator=torch.Generator().manual_seed(0)), freeze=False, max_norm=1.0
    )
    ours = psworker.Embedding.from_pretrained(values, freeze=False, max_norm=1.0, name="given")
    for table in (ours, theirs):
        torch.manual_seed(1)
        model = torch.nn.ModuleDict({"table": table, "top": torch.nn.Linear(4, 1)})
        rows: torch.optim.Optimizer = torch.optim.Adagrad([table.weight], lr=0.1)
        dense = torch.optim.SGD(model["top"].parameters(), lr=0.1)
        optimizers = [dense, rows]
        if table is ours:
            optimizers = [DistributedOptimizer(dense, model.named_parameters(), rows=rows)]
        for step in range(10):
            ids = torch.randint(30, (8,), generator=torch.Generator().manual_seed(step))
            model.zero_grad()
            torch.autograd.backward(model["top"](table(ids)).square().sum())
            for optimizer in optimizers:
                optimizer.step()
        with torch.no_grad():
            results.append({"rows": table(torch.arange(30)).numpy()})
    return results[0], results[1]


@pytest.mark.slow
def test_given_rows_are_those_of_rank_0_and_norms_are_bounded_as_in_torch(shards: Shards) -> None:
    for ours, theirs in shards.run(train_given):
        require_close(ours, theirs, 1e-6)


def train_cached(me: Station) -> tuple[int, int, float]:
    """Reads row 3 at each of 12 steps through a cache; returns hits, misses and the oldest age."""
    cache = psworker.RowCache(rows=10, staleness=2)
    table = psworker.Embedding(None, 2, name="cached", init="zeros", cache=cache)
    model = torch.nn.ModuleDict({"table": table, "top": torch.nn.Linear(2, 1)})
    optimizer = DistributedOptimizer(
        torch.optim.SGD(psworker.dense_parameters(model), lr=0.0),
        model.named_parameters(),
        rows=torch.optim.SGD([table.weight], lr=1.0),
        mode="asgd",
    )
    oldest = 0.0
    for step in range(12):
        optimizer.zero_grad()
        rows = table(torch.tensor([3]))
        oldest = max(oldest, step + rows[0, 0].item())  # Pushes of this worker that are not in it.
        torch.autograd.backward(rows.sum())
        optimizer.step()
    with torch.no_grad():  # A look does not use the cache.
        assert table(torch.tensor([3]))[0, 0].item() == -12.0
    return cache.num_hits, cache.num_misses, oldest


@pytest.mark.slow
def test_a_cache_holds_its_bound_of_staleness_and_withholds_no_push(shards: Shards) -> None:
    assert shards.run(train_cached, num_workers=1) == [(8, 4, 2.0)]


def declare(me: Station, dim_of: tuple[int, int]) -> str:
    """Declares a table whose rows have another length on each worker; returns the error."""
    if me.rank != 0:
        me.hear()  # Until rank 0 has declared it: the second one is refused.
    table = psworker.Embedding(None, dim_of[me.rank], name="users")
    model = torch.nn.ModuleDict({"users": table, "top": torch.nn.Linear(2, 1)})
    try:
        DistributedOptimizer(
            torch.optim.SGD(psworker.dense_parameters(model), lr=0.1),
            model.named_parameters(),
            rows=torch.optim.SGD([table.weight], lr=0.1),
        )
    except psworker.JobMismatchError as problem:
        return str(problem)
    me.tell()
    me.hear()
    return ""


@pytest.mark.slow
def test_a_table_of_another_dimension_is_refused_by_name(shards: Shards) -> None:
    with shards.workers(declare, (4, 5), job=new_job()) as (first, second):
        first.hear()
        second.tell()
        said = second.result()
        first.tell()
        assert first.result() == ""
    assert "'users'" in said
    assert "5" in said
    assert "4" in said


def declare_wrongly(station: Station) -> list[str]:
    """Makes wrong optimizers of rows in one mode, then a right one in another; returns errors."""
    table = psworker.Embedding(None, 2, name="users", max_rows=100)
    model = torch.nn.ModuleDict({"users": table, "top": torch.nn.Linear(2, 1)})
    dense = list(psworker.dense_parameters(model))
    said = []
    other = torch.nn.Parameter(torch.zeros(3))
    for rows in (3, torch.optim.SGD([table.weight, other], lr=0.1), None):
        with pytest.raises(psworker.ConfigError) as refused:
            DistributedOptimizer(
                torch.optim.SGD(dense, lr=0.1),
                model.named_parameters(),
                rows=rows,  # type: ignore[arg-type]
            )
        said.append(str(refused.value))
    with pytest.raises(psworker.ConfigError) as refused:
        DistributedOptimizer(
            torch.optim.SGD(dense, lr=0.1),
            model.named_parameters(),
            mode="ssd",
            rows=torch.optim.SGD([table.weight], lr=0.1),
        )
    said.append(str(refused.value))
    rows = torch.optim.SGD([table.weight], lr=0.1)
    inner = torch.optim.SGD(dense, lr=0.1)
    DistributedOptimizer(inner, model.named_parameters(), mode="asgd", rows=rows)
    return said


@pytest.mark.slow
def test_wrong_optimizers_of_rows_are_refused_before_the_job_has_a_table(shards: Shards) -> None:
    with shards.workers(declare_wrongly, num_workers=1, job=new_job()) as (worker,):
        said = worker.result()
    parts = ("rows is 3", "no placeholder", "no optimizer", "rows cannot be trained in ssd")
    for message, part in zip(said, parts, strict=True):
        assert part in message


def look_and_train(station: Station) -> None:
    """Looks up ids, then trains on some; at each stage the test looks at the status."""
    psworker.init()
    table = psworker.Embedding(None, 4, name="users", max_rows=1000)
    model = torch.nn.ModuleDict({"users": table, "top": torch.nn.Linear(4, 1)})
    optimizer = DistributedOptimizer(
        torch.optim.SGD(psworker.dense_parameters(model), lr=0.1),
        model.named_parameters(),
        rows=torch.optim.SGD([table.weight], lr=0.1),
    )
    with torch.no_grad():
        table(torch.arange(100))
    station.tell()
    station.hear()
    for _ in range(2):
        optimizer.zero_grad()
        model["top"](table(torch.tensor([7, 7, 2**62, 12]))).sum().backward()
        optimizer.step()
    optimizer.close()
    station.tell()
    station.hear()


@pytest.mark.slow
def test_the_status_shows_rows_that_were_updated_and_none_that_were_looked_up(
    shards: Shards,
) -> None:
    job = new_job()

    def held() -> dict[str, int]:
        status = combine(shards.addresses, ask.statuses(shards.addresses))
        (found,) = [each for each in status["jobs"] if each["name"] == job]
        (table,) = [table for table in found["tables"] if table["held"]]
        return dict(table["held"])

    with shards.workers(look_and_train, num_workers=1, job=job) as (worker,):
        worker.hear()
        assert held()["rows"] == 0
        worker.tell()
        worker.hear()
        wait_until(lambda: held()["rows"] == 3)  # A push is acknowledged before it is added.
        found = held()
        assert (found["rows"], found["pushes_refused"]) == (3, 0)
        assert found["rows_max"] >= 1000
        worker.tell()
        worker.result()


ROOM = 40


def fill(me: Station, rows_mode: str) -> tuple[list[tuple[int, str]], int, list[float]]:
    """Adds 1 to a row of its own at each step; at one step it needs rows that have no room.

    Returns:
        The steps behind which it was refused, with the errors; those that do not count; the rows.
    """
    torch.set_num_threads(1)
    table = psworker.Embedding(None, 1, name="table", init="zeros", max_rows=ROOM)
    model = torch.nn.ModuleDict({"table": table, "top": torch.nn.Linear(1, 1)})
    optimizer = DistributedOptimizer(
        torch.optim.SGD(psworker.dense_parameters(model), lr=0.0),
        model.named_parameters(),
        rows=torch.optim.SGD([table.weight], lr=2.0 if rows_mode == "ssgd" else 1.0),
        mode="ssgd",
        rows_mode=rows_mode,
    )
    failed = []
    for step in range(6):
        many = torch.arange(100, 100 + 4 * ROOM) if (me.rank, step) == (0, 2) else torch.zeros(0)
        ids = torch.cat([torch.tensor([me.rank, 1000]), many]).to(torch.int64)
        while optimizer.steps == step:  # A script that catches the error, and makes the step.
            try:
                optimizer.zero_grad()
                torch.autograd.backward(-table(ids).sum() + 0.0 * model["top"](table(ids)).sum())
                optimizer.step()
            except psworker.TableFullError as problem:
                failed.append((step - 1, str(problem)))
    optimizer.close()
    psworker.barrier("trained")
    with torch.no_grad():
        values = table(torch.tensor([0, 1, 1000, 100, 101, 102])).flatten().tolist()
    exchange = table.source.tables.exchange  # type: ignore[union-attr]
    return failed, exchange.missed.num_steps, values


@pytest.mark.slow
@pytest.mark.parametrize("rows_mode", ["ssgd", "asgd"])
def test_a_worker_may_continue_when_a_table_has_no_room_for_its_rows(
    shards: Shards, rows_mode: str
) -> None:
    """Both shards leave its rows of that step out; all others count, and nobody waits for it."""
    ours, theirs = shards.run(fill, rows_mode)
    assert ([step for step, _ in ours[0]], ours[1]) == ([2], 1)  # Once for both shards.
    ((_, said),) = ours[0]
    assert re.search("'table' would have .* 'table' would .* in slice 0, 1; a script .* may", said)
    assert (theirs[0], theirs[1]) == ([], 0)
    assert ours[2] == theirs[2] == [5.0, 6.0, 11.0, 0.0, 0.0, 0.0]


def push_late(me: Station) -> list[float]:
    """Adds 1 to one row, by a push that leaves long after the step; returns it behind a barrier."""
    table = psworker.Embedding(None, 1, name="table", init="zeros")
    model = torch.nn.ModuleDict({"table": table, "top": torch.nn.Linear(1, 1)})
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD(psworker.dense_parameters(model), lr=0.0),
        model.named_parameters(),
        rows=torch.optim.SGD([table.weight], lr=1.0),
        rows_mode="asgd",
    )
    rows = table(torch.zeros(1, dtype=torch.int64))
    torch.autograd.backward(-rows.sum() + 0.0 * model["top"](rows).sum())
    dense = table_of(optimizer).exchange
    for link in dense.session.links if me.rank else ():
        delay(link.transport, but=dense.table)
    optimizer.step()
    psworker.barrier("stepped")
    with torch.no_grad():
        return [float(each) for each in table(torch.zeros(1, dtype=torch.int64)).flatten()]


def delay(transport: Transport, *, but: int) -> None:
    """Sends each push of a transport half a second late, but for those of one table."""
    send = transport.push

    def push_later(push: OutgoingPush) -> None:
        late_s = 0.0 if push.header.sender.table == but else 0.5
        threading.Timer(late_s, functools.partial(send, push)).start()

    transport.push = push_later  # type: ignore[method-assign]


def test_a_pull_behind_a_barrier_sees_all_pushes_before_it(shards: Shards) -> None:
    assert shards.run(push_late) == [[2.0], [2.0]]
