"""A worker steps aside from a table's steps, and takes part again, or changes the table's mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.rules.base import Rule
from pscore.table_spec import plugin_to_proto
from psworker.connection.membership.session import Session
from psworker.connection.shard_link import Link

PROCESSES_MAX = float(1 << 30)


def step_aside(
    session: Session, table: int, number: int, step: int, rule: Rule | None = None
) -> None:
    """Asks the shards not to wait for this worker's pushes until it returns.

    Args:
        number: Number of the absence or of the change of the mode, counted by this worker.
        rule: The mode to come, if it changes: every shard has to be able to take it before one
            does.

    Raises:
        ConfigError: The mode does not fit the job.
        LimitError: A shard has no memory for it.
    """
    request = pb.ChangeRequest(table=table, number=number, step=step)
    if rule is not None:
        request.next.CopyFrom(plugin_to_proto(rule))
    _change(session, request, session.links)


def come_back(session: Session, table: int, number: int, minibatch: int) -> None:
    """Asks the shards to wait for this worker's pushes again, in the same mode.

    Args:
        number: The number under which it has stepped aside.
        minibatch: All minibatches before it are in the weights that the job had to begin with.
    """
    request = pb.ChangeRequest(table=table, number=number, returns=True, minibatch=minibatch)
    _change(session, request, session.links)


def change(session: Session, table: int, number: int, rule: Rule) -> None:
    """Changes the mode of a table; every worker calls it, after all have stepped aside.

    Args:
        number: The number under which it has stepped aside.

    Raises:
        JobMismatchError: Another worker has named another mode.
        ConfigError: The mode does not fit the job.
    """
    request = pb.ChangeRequest(table=table, number=number, rule=plugin_to_proto(rule))
    _change(session, request, session.links[::-1])  # Others may join once the first shard has it.


def is_lowest(session: Session, name: str) -> bool:
    """Returns whether no process of a lower rank is in the job any more.

    Waits as a barrier that holds: the workers meet again once that process has done its work.

    Raises:
        PacelineError: This worker is no longer part of the job, or a shard does not answer.
    """
    rank = session.process_rank
    return _holds_lowest(rank, session.agree(name, PROCESSES_MAX - rank, holds=True))


def is_lowest_or_passed(session: Session, name: str) -> tuple[bool, list[str]]:
    """Returns `is_lowest`; or, of a worker that came late, where the others are instead.

    Others that came late, and begin behind the barrier, lose their place: they join again behind
    the change.

    Raises:
        PacelineError: This worker is no longer part of the job, or a shard does not answer.
    """

    def has_end() -> bool:
        return bool(session.beat().others_ended)

    rank = session.process_rank
    places, largest = session.meet_or_pass(name, PROCESSES_MAX - rank, holds=True)
    if session.passed.at_start and not places and session.group.led(has_end):
        session.barrier(name)  # Others may join again.
        places = ["the end of the job"]
    return _holds_lowest(rank, largest), places


def _holds_lowest(rank: int, largest: float) -> bool:
    return rank in {0, PROCESSES_MAX - largest}


def bring_once(
    session: Session, name: str, bring: Callable[[], None], *, is_mine: bool, holds: bool = False
) -> None:
    """Waits until one process has brought something; another does so if that one is lost meanwhile.

    Args:
        name: Name of the barriers.
        bring: Brings it; a part of it may be there already.
        is_mine: Whether this process is the first that brings it (`is_lowest`).
        holds: As for `barrier`, once it is brought.

    Raises:
        PacelineError: This worker is no longer part of the job, or a shard does not answer.
    """
    while True:
        if is_mine:
            bring()
        # A worker that passes a round of others gets 0.
        if session.agree(name, 1.0 + is_mine, holds=holds) != 1.0:
            return
        is_mine = is_lowest(session, name)


def is_first(session: Session) -> bool:
    """Returns whether no worker of a lower rank is in the job any more, or still to come.

    Raises:
        PacelineError: This worker is no longer part of the job, or the first shard does not answer.
    """
    if session.rank == 0:
        return True
    return int(session.beat().first) == session.rank


def _change(session: Session, request: pb.ChangeRequest, links: Sequence[Link]) -> None:
    request.job, request.worker = session.job, session.rank
    request.incarnation = session.incarnation
    for link in links:
        link.call(link.control.Change, request)
