"""Sets all shards of a job back to its newest checkpoint when one has lost its part.

The workers learn that their job was replaced, and join again; a shard that has lost its part comes
last, so that none of them begins before all shards are at one step.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import structlog

from pscore.errors import PacelineError
from pscore.net.credentials import Credentials
from pscore.pb.ps.v1 import control_pb2 as pb
from psserver.decisions.shard import JOBS_MAX
from psserver.exits import CommandError, Exit
from psserver.mending.losses import Losses
from psserver.mending.successors import Successors
from psserver.remote import ask
from psserver.remote.checkpoint import restore
from psserver.remote.checkpoint_files import PROBLEMS, Checkpoint, newest, verified

log = structlog.get_logger()
SUCCESSORS = ".successors"
LATE_S = 15.0  # Less than menders.LEASE_S: until then a shard waits before it has a standby.
ASK_S = 1.0  # From one question to the next while jobs are restored.


class Mender:
    """Looks for losses now and then, and mends them."""

    def __init__(
        self,
        addresses: list[str],
        folders: Sequence[Path],
        credentials: Callable[[], Credentials],
        fetch: Callable[[], None] = lambda: None,
    ) -> None:
        """Asks nobody yet.

        Args:
            addresses: Addresses of all shards, in order; those of shards that move are replaced.
            folders: Folders of checkpoints; of equal ones that of the first folder is used. It also
                keeps where the standbys of shards are.
            credentials: Returns the token for everything.
            fetch: Called where the folders have no usable checkpoint of a job; brings what a second
                place has into the first of them.
        """
        self._fetch = fetch
        self._addresses, self._folders, self._credentials = addresses, folders, credentials
        self._losses = Losses()
        self._successors = Successors(self._ask_one, addresses, folders[0] / SUCCESSORS)
        self._name = secrets.token_hex(8)
        self._asked_s = time.monotonic()
        self._is_late = False  # Whether it did not ask for a while since the last look.
        self._said = ""  # The last problem that was logged.
        self._elsewhere: set[int] = set()  # The shards of which that was logged.
        # Jobs of which a checkpoint is taken, and the status of each shard before it.
        self._taken: deque[tuple[str, Sequence[pb.StatusReply]]] = deque(maxlen=JOBS_MAX)

    def note(self, job: str, answers: Sequence[pb.StatusReply]) -> None:
        """Records that a checkpoint of a job is taken, which shards may lose before the next look.

        May be called by any thread.

        Args:
            answers: The status of each shard.
        """
        self._taken.append((job, answers))

    def look(self) -> None:
        """Mends what shards have lost, if anything; a problem is logged once, and tried again."""
        problem = ""
        try:
            credentials = self._credentials()
            while self._taken:
                self._losses.add(*self._taken.popleft())
            answers = self._ask(credentials)
            ask.follow(self._addresses, answers)
            found = [one if isinstance(one, pb.StatusReply) else None for one in answers]
            found = self._successors.look(found)
            is_late, self._is_late = self._is_late, False
            missing = self._losses.look(found, is_late=is_late)
            self._note_elsewhere()
            self._mend_all(missing, credentials)
        except (PacelineError, OSError, ValueError, LookupError, MemoryError) as error:
            problem = str(error) or type(error).__name__
        if problem and problem != self._said and self._losses.has_any:
            log.error("a job cannot be restored; it is tried again", reason=problem)
        self._said = problem

    def _note_elsewhere(self) -> None:
        """Logs once which shards the workers reach, and this process does not."""
        for shard in self._losses.elsewhere - self._elsewhere:
            log.error(
                "a shard came back empty, and is not restored: workers reach it elsewhere; start "
                "shard 0 again with the address where it is",
                shard=shard,
                address=self._addresses[shard],
            )
        self._elsewhere = self._losses.elsewhere

    def _ask(self, credentials: Credentials) -> list[pb.StatusReply | CommandError]:
        """Asks all shards, which learn what this process knows of their standbys."""
        former_s, self._asked_s = self._asked_s, time.monotonic()
        request = pb.StatusRequest(mender=self._name, next_addresses=self._successors.next)
        try:
            return ask.answers(self._addresses, credentials, request)
        finally:  # A stop in the middle counts too: another process may have answered.
            if time.monotonic() - former_s > LATE_S:
                self._is_late = True
                log.warning("no look for lost jobs for a while: those lost meanwhile stay so")

    def _ask_one(self, address: str) -> pb.StatusReply | None:
        try:
            (answer,) = ask.answers([address], self._credentials())
        except CommandError:
            return None
        return answer if isinstance(answer, pb.StatusReply) else None

    def _mend_all(self, missing: Mapping[str, Sequence[int]], credentials: Credentials) -> None:
        """Restores jobs, and asks meanwhile: the shards take one that does not ask for gone.

        Raises:
            CommandError: As `_mend`.
        """
        if not missing:
            return
        with ThreadPoolExecutor(1, thread_name_prefix="mending") as executor:
            work = [executor.submit(self._mend, job, missing[job], credentials) for job in missing]
            while wait(work, ASK_S).not_done:
                with contextlib.suppress(CommandError):
                    self._ask(credentials)
        for one in work:
            one.result()

    def _mend(self, job: str, lost: Sequence[int], credentials: Credentials) -> None:
        """Restores a job onto all shards.

        Raises:
            CommandError: There is no checkpoint of it, or a shard does not answer or refuses.
        """
        try:
            path, checkpoint = self._newest(job)
        except CommandError:
            self._fetch()
            path, checkpoint = self._newest(job)
        log.error(
            "shards came back without a job: all go back to its newest checkpoint",
            job=job,
            shards=list(lost),
            at=checkpoint.position,
            path=str(path),
        )
        others = [index for index in range(len(self._addresses)) if index not in lost]
        order = [*others, *lost]
        restore(self._addresses, credentials, checkpoint, job, order, replaces=True)
        log.warning("job restored on all shards; its workers join again", job=job)

    def _newest(self, job: str) -> tuple[Path, Checkpoint]:
        """Returns the newest whole checkpoint of a job, and where it is.

        Raises:
            CommandError: There is none.
        """
        found = [one for folder in self._folders for one in newest(folder).get(job, ())]
        problems = []
        for one in sorted(found, key=lambda one: -one.sequence):
            try:
                return one.path, verified(one)
            except PROBLEMS as problem:
                problems.append(f"{one.path}: {problem}")
        why = "; ".join(problems) or "there is none in " + ", ".join(map(str, self._folders))
        raise CommandError(
            Exit.STATE_DIR,
            f"shards have lost job {job!r}, and no checkpoint of it can be used: {why}",
        )
