"""Hosts on one machine: network namespaces with shaped links. Needs root and iproute2.

    with Lab(num_hosts=2, rate="1gbit") as lab:
        subprocess.run([*lab.inside(0), "ping", "-c", "1", lab.address(1)])

    python -m benchmarks.netlab --hosts 2 --rate 100mbit   # until Enter; says how to get inside
    python -m benchmarks.netlab --clean                    # remove the remains of a killed process

Every host is a namespace `paceline-PID-I` with one link to a switch, a namespace of its own, so
that nothing of the machine's own network is touched; addresses are 10.77.0.1 and on, inside only.
Both ends of a link are shaped (tc tbf), so it is full duplex. The switch can hold every packet for
some time (`links/delay.py`), as a long way would.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
QUEUE_MS = 50  # As much as a switch's buffer may hold.
TICKS_PER_S = 250  # A bucket must hold what flows between two ticks of the kernel.
BURST_NBYTES_MIN = 64 << 10
NAME = re.compile(r"paceline-(\d+)-\w+")


def bits_per_s(rate: str) -> float:
    """Returns `100mbit` as a number."""
    matched = re.fullmatch(r"([\d.]+)([kmg]bit)", rate)
    if matched is None:
        raise ValueError(f"rate is {rate!r}, must look like 100mbit or 10gbit")
    return float(matched[1]) * UNITS[matched[2]]


def shaped_nbytes(device: str, namespace: str | None = None) -> int:
    """Returns the bytes that a device has sent, as its shaper has counted them against the rate.

    These have the headers of every packet. The device's own counters have those of one packet for
    up to 64 KiB, which the kernel passes on whole: 4 % less.

    Args:
        device: `net` on a host, `port0` and on on the switch.
        namespace: Where the device is; None: in this process's.
    """
    inside = [] if namespace is None else ["-n", namespace]
    command = ["tc", "-s", "-j", *inside, "qdisc", "show", "dev", device]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(next(one["bytes"] for one in json.loads(listed) if one["kind"] == "tbf"))


class Lab:
    """Namespaces that exist inside a `with` block."""

    def __init__(self, num_hosts: int, rate: str, delay_s: float = 0.0) -> None:
        """Makes nothing yet.

        Args:
            num_hosts: Hosts on one switch.
            rate: Rate of each link, each way, as tc writes it: `100mbit`.
            delay_s: Seconds for which the switch holds each packet.
        """
        self.num_hosts = num_hosts
        self._rate = rate
        self._delay_s = delay_s
        self._delays: subprocess.Popen[str] | None = None  # The process that delays packets.
        self._names: list[str] = []

    def name(self, host: int | str) -> str:
        """Returns the namespace of a host."""
        return f"paceline-{os.getpid()}-{host}"

    def address(self, host: int) -> str:
        """Returns the address of a host."""
        return f"10.77.0.{host + 1}"

    def inside(self, host: int) -> list[str]:
        """Returns the words in front of a command that run it on a host."""
        return ["ip", "netns", "exec", self.name(host)]

    def cut(self, host: int, *, restore: bool = False) -> None:
        """Cuts a host's link, or restores it: packets are lost without notice."""
        _ip("-n", self.name("switch"), "link", "set", f"port{host}", "up" if restore else "down")

    def slow(self, host: int, rate: str | None = None) -> None:
        """Gives a host's link another rate, each way; without one, its own again."""
        self._shape(self.name("switch"), f"port{host}", rate or self._rate, "change")
        self._shape(self.name(host), "net", rate or self._rate, "change")

    def __enter__(self) -> Lab:
        clean()
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes the namespaces, and with them the links; processes inside lose both."""
        if self._delays is not None:
            self._delays.kill()
            self._delays.communicate()
        while self._names:
            subprocess.run(["ip", "netns", "delete", self._names.pop()], check=False)

    def _make(self) -> None:
        switch = self._namespace("switch")
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for host in range(self.num_hosts):
            inner, port = self._namespace(host), f"port{host}"
            _ip("-n", switch, "link", "add", port, "type", "veth",
                "peer", "name", "net", "netns", inner)  # fmt: skip
            _ip("-n", switch, "link", "set", port, "master", "bridge")
            _ip("-n", switch, "link", "set", port, "up")
            _ip("-n", inner, "addr", "add", f"{self.address(host)}/24", "dev", "net")
            _ip("-n", inner, "link", "set", "net", "up")
            _ip("-n", inner, "link", "set", "lo", "up")
            for namespace, device in ((switch, port), (inner, "net")):
                self._shape(namespace, device, self._rate, "add")
        if self._delay_s:
            words = ["ip", "netns", "exec", switch, sys.executable, "-m", "benchmarks.links.delay"]
            self._delays = subprocess.Popen(
                [*words, str(self._delay_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).parents[1],
            )
            assert self._delays.stdout is not None
            if not self._delays.stdout.readline():
                raise OSError("packets cannot be delayed here")

    def _namespace(self, host: int | str) -> str:
        name = self.name(host)
        _ip("netns", "add", name)
        self._names.append(name)
        return name

    def _shape(self, namespace: str, device: str, rate: str, verb: str) -> None:
        burst = max(BURST_NBYTES_MIN, int(bits_per_s(rate) / 8 / TICKS_PER_S))
        _tc(namespace, "qdisc", verb, "dev", device, "root", "handle", "1:", "tbf", "rate", rate,
            "burst", str(burst), "latency", f"{QUEUE_MS}ms")  # fmt: skip


def clean() -> None:
    """Removes the namespaces of processes that are no longer there."""
    listed = subprocess.run(
        ["ip", "netns", "list"], check=True, capture_output=True, text=True
    ).stdout
    for matched in NAME.finditer(listed):
        if not os.path.exists(f"/proc/{matched[1]}"):
            _ip("netns", "delete", matched[0])


def available() -> str | None:
    """Returns why there can be no lab here, or None."""
    if os.geteuid() != 0:
        return "needs root"
    try:
        with Lab(1, "1gbit"):
            return None
    except (OSError, subprocess.CalledProcessError) as problem:
        return str(problem)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _tc(namespace: str, *arguments: str) -> None:
    subprocess.run(["tc", "-n", namespace, *arguments], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--delay-s", type=float, default=0.0, help="of each packet")
    parser.add_argument("--clean", action="store_true", help="only remove remains")
    options = parser.parse_args()
    if options.clean:
        clean()
        return
    with Lab(options.hosts, options.rate, options.delay_s) as lab:
        for host in range(options.hosts):
            print(f"{lab.address(host)}: {' '.join(lab.inside(host))} COMMAND")
        print("Enter removes them", flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main()
