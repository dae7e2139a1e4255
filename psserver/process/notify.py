"""Messages to systemd, for a unit with `Type=notify` and `WatchdogSec=` (sd_notify(3))."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServiceManager:
    """The service manager that has started this process, if one has."""

    address: str = ""  # Address of its datagram socket; empty: none listens.
    watchdog_s: float = 0.0  # Silence after which it restarts the service; 0: never.

    @staticmethod
    def of(environment: Mapping[str, str] = os.environ) -> ServiceManager:
        """Returns the service manager that the environment names."""
        address = environment.get("NOTIFY_SOCKET", "")
        if not address:
            return ServiceManager()
        if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
            return ServiceManager(address)
        return ServiceManager(address, int(environment.get("WATCHDOG_USEC", "0")) / 1e6)

    def ready(self, status: str) -> None:
        """Reports that the service has started; `status` is shown by systemctl."""
        self._send(f"READY=1\nSTATUS={status}")

    def stopping(self) -> None:
        """Reports that the service ends."""
        self._send("STOPPING=1")

    def alive(self) -> None:
        """Resets the watchdog."""
        if self.watchdog_s:
            self._send("WATCHDOG=1")

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
