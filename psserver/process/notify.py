"""Signs of life: to systemd, for a unit with `WatchdogSec=` (sd_notify(3)), or in a file."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pscore.errors import ConfigError

ALIVE_S = 30.0  # Silence of a shard after which the file for signs of life is left alone.


@dataclass(frozen=True, slots=True)
class ServiceManager:
    """The service manager that has started this process, if one has."""

    address: str = ""  # Address of its datagram socket; empty: none listens.
    watchdog_s: float = 0.0  # Silence after which it restarts the service; 0: never.
    alive_file: Path | None = None  # Its time of change is that of the last sign of life.

    @staticmethod
    def of(
        alive_file: Path | None = None, environment: Mapping[str, str] = os.environ
    ) -> ServiceManager:
        """Returns the service manager that the environment names.

        Args:
            alive_file: File for signs of life; None: none.

        Raises:
            ConfigError: The file cannot be written: a check would end shards that work.
        """
        address = environment.get("NOTIFY_SOCKET", "")
        is_ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        watchdog_s = 0.0
        if address and is_ours:
            watchdog_s = int(environment.get("WATCHDOG_USEC", "0")) / 1e6
        if alive_file is not None:
            try:
                alive_file.touch()
                alive_file.open("a").close()  # A folder has a time too.
            except OSError as problem:
                raise ConfigError(f"cannot write --alive-file {alive_file}: {problem}") from problem
            watchdog_s = watchdog_s or ALIVE_S
        return ServiceManager(address, watchdog_s, alive_file)

    def ready(self, status: str) -> None:
        """Reports that the service has started; `status` is shown by systemctl."""
        self._touch()
        self._send(f"READY=1\nSTATUS={status}")

    def stopping(self) -> None:
        """Reports that the service ends."""
        self._send("STOPPING=1")

    def alive(self) -> None:
        """Resets the watchdog, and sets the time of the file for signs of life."""
        self._touch()
        if self.watchdog_s:
            self._send("WATCHDOG=1")

    def _touch(self) -> None:
        """Sets the file's time; a file that cannot be written is a sign that the check sees."""
        if self.alive_file is None:
            return
        with contextlib.suppress(OSError):
            self.alive_file.touch()

    def _send(self, message: str) -> None:
        """Sends a message; a service manager that does not take it is ignored."""
        if not self.address:
            return
        address = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            try:
                sender.sendto(message.encode(), socket.MSG_DONTWAIT, address)
            except OSError:
                return
