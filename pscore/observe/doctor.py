"""Diagnoses the path between this process and the shards.

Both sides use it (`psserver doctor`, `psworker doctor`). Each check asks one question and returns
findings. Judging answers is separate from asking, so that it can be tested without a network.
Nothing is changed, and no job is joined.
"""

from __future__ import annotations

import datetime
import os
import resource
import shutil
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.x509.oid import ExtensionOID

from pscore.errors import PacelineError
from pscore.grid import Grid
from pscore.memory.segment import Segment
from pscore.net import tls, wire
from pscore.net.addresses import explain_silence, is_open_elsewhere
from pscore.net.credentials import Credentials
from pscore.net.rpc import RETRYABLE, error_of
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import control_pb2_grpc
from pscore.text import printable

OK, WARNING, WRONG = "ok", "warning", "wrong"
ASK_TIMEOUT_S = 5.0
SKEW_S_OK, SKEW_S_MAX = 5.0, 300.0  # Certificates are made an hour back; logs are compared.
SOON = datetime.timedelta(days=14)
FILES_MIN, FILES_WANTED = 256, 1024
SHM_NBYTES_WANTED = 64 << 20
DISK_NBYTES_MIN, DISK_NBYTES_WANTED = 64 << 20, 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    check: str  # Subject of the check: address, certificate, ...
    about: str  # Whose: host:port, a path, or "here".
    state: str  # OK, WARNING or WRONG.
    what: str
    do: str = ""


def good(check: str, about: str, what: str) -> Finding:
    """Returns a finding of nothing wrong."""
    return Finding(check=check, about=about, state=OK, what=what)


def wrong(check: str, about: str, what: str, do: str = "") -> Finding:
    """Returns a finding of something that stops work."""
    return Finding(check=check, about=about, state=WRONG, what=what, do=do)


def doubtful(check: str, about: str, what: str, do: str = "") -> Finding:
    """Returns a finding of something that may do harm later."""
    return Finding(check=check, about=about, state=WARNING, what=what, do=do)


# ----- shards


def examine(
    addresses: Sequence[str], credentials: Credentials, job: str | None, fingerprint: str = ""
) -> list[Finding]:
    """Checks the shards at `addresses`, in their order.

    Args:
        addresses: `host:port` each.
        fingerprint: That the model of the job must have; empty: the shards are only compared.
    """
    findings = own_certificate(credentials)
    replies: dict[str, pb.DescribeReply] = {}
    for address in addresses:
        problems = reach(address, credentials)
        findings += problems
        if any(problem.state == WRONG for problem in problems):
            continue
        found, reply = ask(address, credentials)
        findings += found
        if reply is not None:
            replies[address] = reply
            findings += judge_version(address, reply)
            findings += data_port(address, reply)
    findings += judge_order(addresses, replies)
    if job is not None and len(replies) == len(addresses):
        findings += look_at_job(addresses, credentials, job, fingerprint)
    return findings


def reach(address: str, credentials: Credentials) -> list[Finding]:
    """Checks that an address is listened on, and its certificate."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError, UnicodeError) as problem:
        do = "correct the address, or the name service of this machine"
        return [wrong("address", address, f"{host!r} is not a known host: {problem}", do)]
    try:
        socket.create_connection((host, int(port)), tls.PROBE_TIMEOUT_S).close()
    except OSError as problem:
        do = explain_silence(address) or (
            f"start the shard (psserver start --port {port}), correct the address, or open the "
            "port in the firewall"
        )
        return [wrong("port", address, f"cannot connect: {problem}", do)]
    findings = [good("port", address, _listens(found, int(port)))]
    if reason := tls.diagnose(address, credentials):
        what, _, do = str(reason).partition("; ")
        findings.append(wrong("TLS", address, what, do))
    if credentials.ca is not None and (der := tls.shown(host, int(port), credentials)):
        findings += judge_certificate(address, x509.load_der_x509_certificate(der))
    elif credentials.ca is None and not _is_near(found):
        do = "psserver certs makes certificates; docs/security.md"
        open_ = "connections beyond this machine are not encrypted"
        findings.append(doubtful("TLS", address, open_, do))
    return findings


def ask(address: str, credentials: Credentials) -> tuple[list[Finding], pb.DescribeReply | None]:
    """Asks a shard for its identity and its time."""
    with credentials.channel(address) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        before_s = time.time()
        try:
            reply = stub.Describe(pb.DescribeRequest(), timeout=ASK_TIMEOUT_S)
        except grpc.RpcError as failure:
            return [_refusal("shard", address, failure)], None
        after_s = time.time()
    skew_s = reply.now_s - (before_s + after_s) / 2 if reply.now_s else 0.0
    return judge_clock(address, skew_s), reply


def judge_version(address: str, reply: pb.DescribeReply) -> list[Finding]:
    """Compares protocol and package with ours."""
    ours = metadata.version("paceline")
    both = f"paceline {reply.version}, protocol {reply.protocol}; here {ours}, {wire.PROTOCOL}"
    do = "install one version on all machines"
    if reply.protocol != wire.PROTOCOL:
        return [wrong("version", address, both, do)]
    if reply.version != ours:
        return [doubtful("version", address, both, do)]
    return [good("version", address, both)]


def judge_clock(address: str, skew_s: float) -> list[Finding]:
    """Compares clocks; leases do not need them, certificates and logs do."""
    what = f"the clock there is {abs(skew_s):.1f} s {'ahead' if skew_s > 0 else 'behind'}"
    do = "let NTP set the clocks of both machines (timedatectl status)"
    if abs(skew_s) > SKEW_S_MAX:
        return [wrong("clock", address, what, do)]
    if abs(skew_s) > SKEW_S_OK:
        return [doubtful("clock", address, what, do)]
    return [good("clock", address, what)]


def judge_order(addresses: Sequence[str], replies: dict[str, pb.DescribeReply]) -> list[Finding]:
    """Checks that the addresses are the shards of one cluster, in order."""
    if not replies:
        return []
    listed = ", ".join(
        f"{address} is shard {reply.shard} of {reply.num_shards} of cluster {reply.cluster}"
        for address, reply in replies.items()
    )
    if len({reply.cluster for reply in replies.values()}) > 1:
        do = "name the shards of one start, or give --cluster the same name at each"
        return [wrong("order", "all", f"these were not started together: {listed}", do)]
    numbers = {reply.shard: address for address, reply in replies.items()}
    number = next(iter(replies.values())).num_shards
    if len(replies) < len(addresses):
        return [doubtful("order", "all", f"not all shards answer: {listed}")]
    if len(addresses) != number or len(numbers) != number:
        what = f"{len(addresses)} addresses for {number} shards: {listed}"
        return [wrong("order", "all", what, f"give all {number} addresses, each once")]
    right = [numbers[index] for index in sorted(numbers)]
    if right != list(addresses):
        do = f"the order is {','.join(right)}"
        return [wrong("order", "all", f"not in the order of the shards: {listed}", do)]
    return [good("order", "all", listed)]


def data_port(address: str, reply: pb.DescribeReply) -> list[Finding]:
    """Checks that the fast data plane can be reached."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        socket.create_connection((host, reply.data_port), tls.PROBE_TIMEOUT_S).close()
    except OSError as problem:
        do = "open that port in the firewall; until then data goes over gRPC, which is slower"
        what = f"data port {reply.data_port} cannot be reached: {problem}"
        return [doubtful("data port", address, what, do)]
    return [good("data port", address, f"port {reply.data_port} can be reached")]


# ----- certificates


def own_certificate(credentials: Credentials) -> list[Finding]:
    """Checks this side's own files."""
    findings = []
    for path, about in ((credentials.ca, "the CA"), (credentials.cert, "our certificate")):
        if path is None:
            continue
        try:
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
        except ValueError as problem:
            findings.append(wrong("certificate", str(path), f"no certificate: {problem}"))
            continue
        findings += judge_certificate(f"{about} {path}", certificate, has_names=False)
    return findings


def judge_certificate(
    about: str,
    certificate: x509.Certificate,
    *,
    has_names: bool = True,
    now: datetime.datetime | None = None,
) -> list[Finding]:
    """Checks a certificate's dates, and reports its names."""
    now = datetime.datetime.now(datetime.UTC) if now is None else now
    until, since = certificate.not_valid_after_utc, certificate.not_valid_before_utc
    what = f"good until {until:%Y-%m-%d %H:%M} UTC"
    if has_names:
        what += f", for {', '.join(names_of(certificate)) or 'no name'}"
    if now < since:
        return [wrong("certificate", about, tls.not_yet_valid(since, now), tls.CLOCKS)]
    if now > until:
        return [wrong("certificate", about, f"expired: {what}", tls.NEW)]
    if until - now < SOON:
        return [doubtful("certificate", about, f"expires soon: {what}", tls.NEW)]
    return [good("certificate", about, what)]


def names_of(certificate: x509.Certificate) -> list[str]:
    """Returns the names and addresses that a certificate is made out to."""
    try:
        extension = certificate.extensions.get_extension_for_oid(
            ExtensionOID.SUBJECT_ALTERNATIVE_NAME
        )
    except x509.ExtensionNotFound:
        return []
    value: Any = extension.value
    return [str(name.value) for name in value]


# ----- a job


def look_at_job(
    addresses: Sequence[str], credentials: Credentials, job: str, fingerprint: str
) -> list[Finding]:
    """Checks that a job is the same on all shards, whole, and moving."""
    tables: dict[str, dict[str, set[str]]] = {}  # By name: fingerprint -> addresses.
    findings: list[Finding] = []
    for address in addresses:
        with credentials.channel(address) as channel:
            try:
                status = control_pb2_grpc.ControlStub(channel).Status(
                    pb.StatusRequest(), timeout=ASK_TIMEOUT_S
                )
            except grpc.RpcError as failure:
                return [_refusal("job", address, failure)]
        found = next((entry for entry in status.jobs if entry.job == job), None)
        if found is None:
            there = ", ".join(sorted(entry.job for entry in status.jobs)) or "none"
            do = "it begins with its first worker; check --job and PACELINE_JOB"
            findings.append(doubtful("job", address, f"no job {job!r}; jobs there: {there}", do))
            continue
        findings += judge_workers(address, found)
        for table in found.tables:
            tables.setdefault(table.name, {}).setdefault(table.fingerprint, set()).add(address)
    for name, prints in tables.items():
        findings.append(judge_model(job, name, prints, fingerprint if name == "model" else ""))
    return findings


def judge_model(job: str, table: str, prints: dict[str, set[str]], wanted: str) -> Finding:
    """Compares the fingerprints of a model on all shards, and with the one here."""
    about = f"{job}/{table}"
    listed = ", ".join(f"{mark} at {', '.join(sorted(at))}" for mark, at in prints.items())
    if len(prints) > 1:
        do = "end the job and start it again: its shards hold different models"
        return wrong("model", about, f"differs between shards: {listed}", do)
    if wanted and wanted not in prints:
        do = "give the model, and the order of its parameters, that the job began with"
        return wrong("model", about, f"is {wanted} here, {listed}", do)
    return good("model", about, f"fingerprint {listed}")


def judge_workers(address: str, job: pb.JobStatus) -> list[Finding]:
    """Reports the workers that are live or lost, and the waits."""
    live = sum(worker.state == "live" for worker in job.workers)
    least = f"{job.min_workers} to " if job.min_workers else ""
    what = f"{live} of {least}{job.num_workers} workers live"
    lost = [str(worker.rank) for worker in job.workers if worker.state == "lost"]
    waits = [f"{table.name} waits for {table.waiting_for}" for table in job.tables]
    waits = [text for text, table in zip(waits, job.tables, strict=True) if table.waiting_for]
    do = "read the log of that worker, and of the shards: psserver status, psserver logs"
    if lost:
        what = "; ".join([what, f"lost: worker {', '.join(lost)}", *waits])
        return [doubtful("job", address, what, do)]
    return [good("job", address, "; ".join([what, *waits]))]


# ----- this machine


def examine_machine(folder: Path | None = None) -> list[Finding]:
    """Checks the limits of this machine; `folder` is the shards' state directory, if any."""
    findings = [*shared_memory(), judge_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])]
    return findings + ([] if folder is None else disk(folder))


def shared_memory(path: Path = Path("/dev/shm")) -> list[Finding]:
    """Checks that memory can be shared."""
    try:
        Segment.create(1 << 12).close()
    except OSError as problem:
        do = "allow memfd_create (seccomp profile of the container), or use another data plane"
        return [wrong("shared memory", "here", f"cannot be made: {problem}", do)]
    try:
        free = shutil.disk_usage(path).free
    except OSError as problem:
        return [doubtful("shared memory", str(path), f"{problem}; torch's loaders need it")]
    what = f"can be made; {path} has {free >> 20} MiB left"
    if free < SHM_NBYTES_WANTED:
        do = "give the container more (--shm-size): torch's data loaders need it, Paceline does not"
        return [doubtful("shared memory", str(path), what, do)]
    return [good("shared memory", str(path), what)]


def judge_files(limit: int) -> Finding:
    """Judges how many files a process may open: each worker takes a few at each shard."""
    if limit == resource.RLIM_INFINITY or limit >= FILES_WANTED:
        return good("open files", "here", "no limit" if limit < 0 else f"at most {limit}")
    do = f"raise the limit: ulimit -n {FILES_WANTED}, or LimitNOFILE= of the service"
    judge = wrong if limit < FILES_MIN else doubtful
    return judge("open files", "here", f"at most {limit}, {FILES_WANTED} wanted", do)


def disk(folder: Path) -> list[Finding]:
    """Checks that a shard can write its state."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        do = "give --state-dir a directory that this user can write to"
        return [wrong("disk", str(folder), "this user cannot write there", do)]
    free = shutil.disk_usage(there).free
    what = f"{free >> 20} MiB left"
    do = "make room, or give --state-dir another place: a checkpoint is as large as a job's state"
    if free < DISK_NBYTES_MIN:
        return [wrong("disk", str(folder), what, do)]
    if free < DISK_NBYTES_WANTED:
        return [doubtful("disk", str(folder), what, do)]
    return [good("disk", str(folder), what)]


# ----- telling


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Returns all findings for a program."""
    return {"ok": is_well(findings), "findings": [asdict(finding) for finding in findings]}


def is_well(findings: Sequence[Finding]) -> bool:
    """Returns whether nothing is wrong; warnings do not count."""
    return not any(finding.state == WRONG for finding in findings)


def show(findings: Sequence[Finding]) -> None:
    """Prints a table for a person, and one line that sums up."""
    from rich.console import Console
    from rich.markup import escape

    colors = {OK: "green", WARNING: "yellow", WRONG: "red"}
    rows: list[list[str]] = []
    for finding in findings:
        text = f"{finding.what}\n-> {finding.do}" if finding.do else finding.what
        color = colors[finding.state]
        words = (finding.check, finding.about, text)
        shown = [escape(printable(each, keep="\n")) for each in words]
        rows.append([f"[{color}]{finding.state}[/]", *shown])
    console = Console(highlight=False)
    console.print(Grid(("", "check", "of", "finding and advice"), rows))
    counts = {state: sum(f.state == state for f in findings) for state in colors}
    console.print(f"{counts[WRONG]} wrong, {counts[WARNING]} warnings, {counts[OK]} fine")


def _refusal(check: str, address: str, failure: grpc.RpcError) -> Finding:
    assert isinstance(failure, grpc.Call)
    error: PacelineError = error_of(failure, address)
    what, _, do = str(error).partition("; ")
    if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
        return wrong(check, address, "another service listens there", "correct the address")
    if failure.code() in RETRYABLE:
        what = f"no answer within {ASK_TIMEOUT_S:g} s: {what.removeprefix(f'{address}: ')}"
        do = do or "correct the address, or read the shard's log (psserver logs)"
    return wrong(check, address, what, do)


def _listens(found: Sequence[Any], port: int) -> str:
    """Returns the finding about a port that is open, with the machines that reach it."""
    where = ", ".join(sorted({str(entry[4][0]) for entry in found}))
    what = f"a server listens ({where})"
    if _is_near(found) and is_open_elsewhere(port) is False:
        what += ", on loopback only: for workers on other machines start it with --host ADDRESS"
    return what


def _is_near(found: Sequence[Any]) -> bool:
    return all(str(entry[4][0]).startswith("127.") or entry[4][0] == "::1" for entry in found)
