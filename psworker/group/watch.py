"""Notices the end of another process of the group, so that the group ends as one.

A collective that waits for a dead process may wait for minutes, and a process that waits for a
shard would not learn of it at all. So each process of a group on one host keeps a Unix socket to
the leader, and both ends send a line every second. When a socket breaks, or is silent for
`SILENT_S`, every process of the group leaves the job, with a message. A process that is then stuck
in a collective is ended. Groups across hosts rely on their backend's own errors.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator

from pscore.awake import awake_s
from pscore.errors import GroupError
from pscore.threads import OwnedThread

log = logging.getLogger("paceline")
CONNECT_TIMEOUT_S = 30.0
TICK_S = 1.0
SILENT_S = 30.0  # Longer than an import or a compilation keeps Python's lock.
SAY_AFTER_S = 8.0  # A wait is reported after this, and then each time it has doubled.
KNOWN_AFTER_S = 2.0  # From an error of a backend until the socket has told who ended.
STUCK_S = 10.0  # In a collective, after the group was lost.
LINE_NBYTES_MAX = 4096
EXIT_CODE = 1
PING, DONE, LOST = b"ping", b"done", b"lost"


def host_name() -> list[str]:
    """Returns strings that are equal for processes that can share a Unix socket."""
    return [socket.gethostname(), str(os.stat("/proc/self/ns/net").st_ino)]


class Watch:
    """This process's view of the other processes of its group."""

    def __init__(self, rank: int, size: int) -> None:
        """Starts alone.

        Args:
            rank: Local rank of this process.
        """
        self.lost = ""  # Why the group is lost; empty: it is not.
        # Called once when the group is lost, on the thread that has noticed it.
        self.on_lost: Callable[[str], None] = log.debug
        self._rank, self._size = rank, size
        self._listener: socket.socket | None = None
        self._token = ""
        self._peers: dict[socket.socket, int] = {}  # With local ranks.
        self._heard_s: dict[int, float] = {}
        self._done: set[int] = set()  # Local ranks whose part is done.
        self._is_over = False
        self._changed = threading.Condition()
        self._waits_since_s: float | None = None
        self._say_s = SAY_AFTER_S

    # ----- the start

    def listen(self) -> str:
        """Listens as the leader; returns what `connect` needs in each process."""
        self._token = secrets.token_hex(16)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        name = f"paceline-group-{secrets.token_hex(8)}"
        self._listener.bind("\0" + name)
        self._listener.listen(self._size)
        self._listener.settimeout(CONNECT_TIMEOUT_S)
        return f"{name} {self._token}"

    def connect(self, place: str) -> None:
        """Connects this process with the leader, and starts the thread; all processes call it.

        Args:
            place: The leader's result of `listen`.

        Raises:
            GroupError: A process does not come.
        """
        name, token = place.split()
        try:
            if self._listener is not None:
                self._accept(token)
            else:
                peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                peer.settimeout(CONNECT_TIMEOUT_S)
                peer.connect("\0" + name)
                peer.sendall(f"{token} {self._rank}\n".encode())
                self._peers[peer] = 0
        except OSError as problem:
            raise GroupError(f"the processes of this group cannot connect: {problem}") from problem
        self._heard_s = dict.fromkeys(self._peers.values(), awake_s())
        OwnedThread(self._run, "group", lambda error: self.lose(str(error))).start()

    def _accept(self, token: str) -> None:
        """Accepts one connection of each other process."""
        assert self._listener is not None
        with self._listener:
            while len(self._peers) < self._size - 1:
                peer, _ = self._listener.accept()
                peer.settimeout(CONNECT_TIMEOUT_S)
                with peer.makefile("rb") as lines:
                    given, _, rank = lines.readline(LINE_NBYTES_MAX).decode().partition(" ")
                if secrets.compare_digest(given, token):
                    self._peers[peer] = int(rank)
                else:
                    peer.close()
        self._listener = None

    # ----- for the thread that trains

    def check(self) -> None:
        """Raises GroupError if a process of the group has ended."""
        if self.lost:
            raise GroupError(self.lost)

    def explain(self, problem: str) -> str:
        """Returns why the group is lost, for an error of torch's backend; loses it."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self.lost), KNOWN_AFTER_S if self._peers else 0.0)
        self.lose(f"a collective of this worker's group failed: {problem}")
        return self.lost

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        """Context manager: around a wait for the other processes, which is reported."""
        self.check()
        self._waits_since_s, self._say_s = time.monotonic(), SAY_AFTER_S
        try:
            yield
        finally:
            self._waits_since_s = None

    # ----- the end

    def lose(self, why: str) -> None:
        """Records, once, that the group is lost."""
        with self._changed:
            if self.lost or self._is_over:
                return
            self.lost = f"{why}; a group ends as one: start all of its processes again"
            self._changed.notify_all()
        log.error("process %d of this worker's group leaves the job: %s", self._rank, self.lost)
        self._tell(LOST + b" " + why.encode()[: LINE_NBYTES_MAX // 2])
        self.on_lost(why)

    def leave(self, reason: str, *, failed: bool) -> None:
        """Ends this process's part in the group; the leader waits until all have ended theirs.

        Args:
            failed: Whether the group has to end with it.
        """
        if not self._peers:
            return
        if failed:
            self.lose(f"its process {self._rank} failed ({reason})")
        self._tell(DONE)
        if self._rank == 0 and not self.lost:
            self._await_done()
        with self._changed:
            self._is_over = True

    def _await_done(self) -> None:
        started_s, say_s = time.monotonic(), SAY_AFTER_S
        with self._changed:
            while not self.lost and len(self._done) < self._size - 1:
                self._changed.wait(TICK_S)
                waited_s = time.monotonic() - started_s
                if waited_s >= say_s:
                    say_s *= 2
                    others = sorted({*self._peers.values()} - self._done)
                    log.warning(
                        "the first process of this group has done its part, and has waited %.0f s "
                        "for process %s",
                        waited_s,
                        ", ".join(map(str, others)),
                    )

    # ----- the thread

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for peer in self._peers:
                selector.register(peer, selectors.EVENT_READ)
            next_s = 0.0
            while not (self._is_over or self.lost):
                now_s = time.monotonic()
                if now_s >= next_s:
                    next_s = now_s + TICK_S
                    self._tell(PING)
                    self._look_for_silence(now_s)
                for key, _ in selector.select(TICK_S):
                    assert isinstance(key.fileobj, socket.socket)
                    if not self._receive(key.fileobj):
                        selector.unregister(key.fileobj)
        if self.lost:
            time.sleep(STUCK_S)
            if self._waits_since_s is not None:
                log.critical("process %d is stuck in a collective, and ends", self._rank)
                os._exit(EXIT_CODE)
        for peer in self._peers:
            peer.close()

    def _receive(self, peer: socket.socket) -> bool:
        """Reads what a process has sent; returns whether its socket is still of use."""
        rank = self._peers[peer]
        try:
            data = peer.recv(LINE_NBYTES_MAX)
        except OSError:
            data = b""
        if not data:
            if rank in self._done or (self._rank != 0 and self._rank in self._done):
                return False
            self.lose(f"process {rank} of this worker's group has ended")
            return False
        self._heard_s[rank] = awake_s()
        for line in data.splitlines():
            if line == DONE:
                with self._changed:
                    self._done.add(rank)
                    self._changed.notify_all()
            elif line.startswith(LOST):
                self.lose(line[len(LOST) + 1 :].decode(errors="replace"))
        return True

    def _look_for_silence(self, now_s: float) -> None:
        for rank, heard_s in self._heard_s.items():
            if awake_s() - heard_s > SILENT_S and rank not in self._done:
                self.lose(f"process {rank} of this worker's group was silent for {SILENT_S:g} s")
        since_s = self._waits_since_s
        if since_s is not None and now_s - since_s >= self._say_s:
            self._say_s *= 2
            log.warning(
                "process %d has waited %.0f s for the other processes of its group",
                self._rank,
                now_s - since_s,
            )

    def _tell(self, line: bytes) -> None:
        """Sends a line to each connected process; one that has ended is noticed when it is read."""
        if line == DONE:
            self._done.add(self._rank)
        for peer in list(self._peers):
            with contextlib.suppress(OSError):
                peer.sendall(line + b"\n")
