"""`mode="auto"` on a worker: it reports before every n-th step, and changes the mode as told.

All workers come to such a step: none passes it without the others. Each reports its sums to the
first shard; behind a barrier the shard decides (psserver/decisions/auto_mode.py); and in a second
one the workers take the largest answer, so that all take the same mode, also if the shard was
started again between two of its answers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from pscore.errors import ConfigError, PacelineError
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.publish.possible import require_weights
from pscore.rules import parse_mode
from pscore.rules.base import Rule
from pscore.timing.auto import auto_candidates, first_mode, parse_wish, read_switches
from psworker.connection.membership.session import Session
from psworker.training.changes import handover, mode_change
from psworker.training.local_steps.peer_step import require_peers
from psworker.training.local_steps.worker_steps import choose_optimizer
from psworker.training.parts import refuse_in_group
from psworker.training.table import TrainingTable

log = logging.getLogger("paceline")
REPORTED, CHOSEN = "auto reported", "auto chosen"  # Barriers; their rounds are steps.
LOCAL = "local"  # Data plane through memory.


class ModeWish:
    """The choice of a job's mode, as one worker waits for it."""

    def __init__(self, mode: str | Rule, rows: object = None) -> None:
        """Reads the argument `mode=`.

        Args:
            mode: A mode, or the wish that the job chooses one.

        Raises:
            ConfigError: It is wrong, its log cannot be read or names no change, or it does not go
                with the tables of rows.
        """
        self._wish = parse_wish(mode)
        self.first = first_mode(mode)  # The mode to begin with.
        self.is_open = self._wish is not None  # Whether the job still chooses its mode.
        self._switches = _read(self._wish.replay) if self._wish and self._wish.replay else None
        self._replayed = -1  # Step of the switch that was made last.
        self._said = ""  # The sentence that was logged last.
        if self.is_open and rows is not None:
            raise ConfigError(f"mode is {mode!r}, and rows are trained beside it: name a mode")

    def join(self, session: Session, table: str) -> Rule:
        """Returns the mode to declare, in a job that may have chosen or changed it already.

        A script that names the mode before the last change begins in that which the job has now:
        it calls `set_mode` itself, at a step that the job has behind it.

        Raises:
            ConfigError: The job chooses its mode, and workers come and go.
        """
        now = session.known.tables.get(table, "")
        if not self.is_open:
            if not now or session.known.former_modes.get(table) != str(self.first):
                return self.first
            if session.group.is_leader:
                text = "worker %d takes the mode %s, to which the job has changed from %s"
                log.warning(text, session.rank, now, self.first)
            return parse_mode(now)
        if session.min_workers:
            raise ConfigError("mode is 'auto' in a job whose workers come and go: name a mode")
        return parse_mode(now or self.first)

    def ask(
        self, table: TrainingTable, inner: torch.optim.Optimizer, *, overlaps: bool
    ) -> Rule | None:
        """Returns the mode that the job has chosen before the next step; None: none or this one.

        Args:
            overlaps: Whether gradients leave during backward.

        Raises:
            PacelineError: A shard does not answer, or this worker is no longer part of the job.
        """
        wish, step, session = self._wish, table.replica.step, table.session
        workers, rule = session.num_workers, table.rule
        if self._switches is not None:
            return self._replay(self._switches, session, step, rule)
        passes_slow = rule.by_step and rule.fan_in(workers, workers) < workers
        if wish is None or not (self.is_open and wish.is_due(step, passes_slow=passes_slow)):
            return None
        begun_s = time.monotonic()
        modes = [parse_mode(one.mode) for one in auto_candidates(workers)]
        request = pb.ChooseRequest(
            job=session.job,
            worker=session.rank,
            incarnation=session.incarnation,
            table=table.exchange.table,
            step=step,
            risk=wish.risk,
            pace=session.pace.message(),
            possible=[str(mode) for mode in modes if _can_take(table, inner, mode)],
            near=[link.data_plane == LOCAL for link in session.links],
            overlaps=overlaps,
        )
        number, text = _call(session, request)
        if table.rule != (modes[number - 1] if number else self.first):
            self.is_open = False  # The script has set another mode; perhaps not all know that yet.
            for name in (REPORTED, CHOSEN):
                session.pass_by(name, step, 0.0)
            return None
        session.agree_at(REPORTED, step, 0.0, holds=True)
        request.decides = True
        number, text = _call(session, request)
        changes = bool(number) and modes[number - 1] != table.rule
        number = int(session.agree_at(CHOSEN, step, float(number), holds=changes)[0])
        session.pace.pause(time.monotonic() - begun_s)
        rule = modes[number - 1] if number else table.rule
        changes = rule != table.rule
        if text and text != self._said and session.process_rank == 0:
            # A change is seen in every script's output, from which `replay` reads it: also in that
            # of a process that came later, if the output of the one before is lost.
            log.log(logging.WARNING if read_switches([text]) else logging.INFO, "%s", text)
        self._said = text
        return rule if changes else None

    def _replay(
        self, switches: Mapping[int, str], session: Session, step: int, rule: Rule
    ) -> Rule | None:
        """Returns the mode that the former job had taken by a step; None: it is the present one."""
        newest = max((each for each in switches if each <= step), default=-1)
        if newest == self._replayed:
            return None
        self._replayed, mode = newest, switches[newest]
        found = parse_mode(mode)
        if found == rule:
            return None
        if session.process_rank == 0:
            log.warning("auto takes %s at step %d: the job of the log did", mode, newest)
        return found


def _read(path: str) -> dict[int, str]:
    """Returns the changes of mode in a log, by step."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as problem:
        raise ConfigError(f"auto.replay: cannot read {path}: {problem}") from problem
    switches = read_switches(text.splitlines())
    if not switches:
        raise ConfigError(
            f"auto.replay: {path} has no line such as 'auto takes od at step 50: ...'"
        )
    return switches


def _call(session: Session, request: pb.ChooseRequest) -> tuple[int, str]:
    """Returns the answer of the first shard: the number of a candidate, and a sentence."""
    first = session.links[0]

    def call() -> list[object]:
        reply: pb.ChooseReply = first.call(first.control.Choose, request)
        return [reply.choice, reply.text]

    number, text = session.group.led(call)
    return int(number), str(text)


def _can_take(table: TrainingTable, inner: torch.optim.Optimizer, rule: Rule) -> bool:
    """Returns whether `DistributedOptimizer.set_mode` would accept a mode."""
    try:
        require_peers(table, rule)
        if table.publish_every is not None:
            require_weights(table.name, rule, table.optimizer)
        refuse_in_group(rule, table.optimizer, table.group)
        if handover.moves_optimizer(table.rule, rule):
            is_raw = table.exchange.spec.pull_compressor.is_raw
            plugin = choose_optimizer(inner, rule, "auto", is_raw=is_raw)
            handover.require_possible(table, rule, plugin)
        else:
            mode_change.require_possible(table, rule)
    except PacelineError:
        return False
    return True
