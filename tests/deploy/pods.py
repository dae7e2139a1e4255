"""Runs the pods of Kubernetes documents as processes, without a cluster.

Each pod gets a network namespace with an address, the names of its peers in /etc/hosts, a root file
system that is read-only where the document says so, its volumes, its secrets with their modes, its
environment, its user, and its probes. The examples are at /app, as in the image. It cannot show
scheduling, the kubelet's own timing, image pulls, storage classes.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import os
import re
import select
import shlex
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

Document = Mapping[str, Any]

# Runs in the pod's network namespace: makes its mounts, gives up rights, becomes the command.
ENTER = """
set -e
mount --make-rprivate /
# Writable for mount points; /root too: the interpreter may be there, and the user must reach it.
for base in /etc /run /var/lib /root; do
    mkdir -p {scratch}/upper$base {scratch}/work$base
    mount -t overlay overlay $base \
        -o lowerdir=$base,upperdir={scratch}/upper$base,workdir={scratch}/work$base
done
cp {hosts} /etc/hosts
mount --bind {boot} /proc/sys/kernel/random/boot_id
mount --bind {app} /app
{mounts}
{read_only}
cd /app
exec setpriv --reuid {user} --regid {group} --groups {fs_group} --no-new-privs \
    --inh-caps=-all --bounding-set=-all -- {command}
"""
READ_ONLY = "mount -o remount,bind,ro /"
APP = Path("/app")
SWITCH = "10.78.0.1"
CLONE_NEWNET = 0x40000000
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
LIMIT_S = 400.0  # Against a hang only.
# User, group and group of files that OpenShift gives a pod which names none.
OPENSHIFT = {"runAsUser": 1000650000, "runAsGroup": 0, "fsGroup": 1000650000}


@dataclass
class Pod:
    """One pod: its document and, while it runs, its process."""

    name: str
    spec: Document
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    address: str
    folder: Path
    claims: Path  # Of the pod's name; kept when the pod is deleted.
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    more: dict[str, str] = field(default_factory=dict)  # Variables beside those of the document.
    late_s: float = 0.0  # Of its kubelet: between the end of preStop and SIGTERM.

    @property
    def boot(self) -> Path:
        """The file with the boot of its node: no two pods are on one."""
        return self.folder / "boot"

    @property
    def container(self) -> Document:
        """The only container."""
        (container,) = self.spec["containers"]
        return dict(container)

    @property
    def security(self) -> Document:
        """User and groups of its processes and files."""
        return OPENSHIFT | dict(self.spec["securityContext"])

    @property
    def log(self) -> Path:
        """Output of the newest start."""
        return self.folder / f"log{self.starts}"


@dataclass
class Cluster:
    """Namespaces on one bridge, and the pods of a StatefulSet and of Jobs in them."""

    documents: list[Document]
    folder: Path
    path: str  # PATH inside the pods.
    app: Path  # Folder of the examples, which the pods have at /app.
    account: Path | None = None  # Files of the account of pods that have one's token.
    pods: dict[str, Pod] = field(default_factory=dict)
    _names: list[str] = field(default_factory=list)
    _num_moves: int = 0

    def __enter__(self) -> Cluster:
        APP.mkdir(exist_ok=True)  # It stays: pods of another process of the tests may be in it.
        self._switch = self._namespace("switch")
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "addr", "add", f"{SWITCH}/24", "dev", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for document in self.documents:
            if document["kind"] == "StatefulSet":
                self._add(document, document["spec"]["replicas"])
            if document["kind"] == "Job":
                spec = document["spec"]
                self._add(document, spec.get("completions", spec["parallelism"]))
        service = next(each for each in self.documents if each["kind"] == "Service")
        self._domain = service["metadata"]["name"]
        self._write_hosts()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pod in self.pods.values():
            if pod.process is not None and pod.process.poll() is None:
                self._kill(pod, signal.SIGKILL)
                pod.process.wait()
        while self._names:
            subprocess.run(["ip", "netns", "delete", self._names.pop()], check=False)

    def start(self, name: str) -> None:
        """Starts a pod, for the first time or anew, as its controller would."""
        pod = self.pods[name]
        pod.starts += 1
        scratch = pod.folder / f"root{pod.starts}"
        subprocess.run(["mkdir", "-p", scratch], check=True)
        # Overlays need a file system that can be an upper one, which /tmp may not be.
        hosts = pod.folder / "hosts"
        hosts.write_text(self._hosts)
        security, container = pod.security, pod.container
        script = ENTER.format(
            scratch=scratch,
            hosts=hosts,
            boot=pod.boot,
            mounts="\n".join(self._mounts(pod)),
            read_only=READ_ONLY if container["securityContext"]["readOnlyRootFilesystem"] else "",
            app=self.app,
            user=security["runAsUser"],
            group=security["runAsGroup"],
            fs_group=security["fsGroup"],
            command=shlex.join([*container["command"], *container.get("args", [])]),
        )
        environment = {"PATH": self.path, "HOME": "/", "PYTHONUNBUFFERED": "1"}
        for each in container.get("envFrom", []):
            environment |= self._find("ConfigMap", each["configMapRef"]["name"])["data"]
        for each in container["env"]:
            value = self._value(pod, each)
            environment[each["name"]] = re.sub(
                r"\$\((\w+)\)", lambda found: environment[found[1]], value
            )
        pod.environment = environment | pod.more
        # The command is process 1 of its namespace, which no signal ends that it does not handle,
        # unless the pod's containers share one with the pod's own process.
        is_shared = pod.spec.get("shareProcessNamespace", False)
        first = ["--fork"] if is_shared else ["--pid", "--fork", "--mount-proc", "--kill-child"]
        with pod.log.open("wb") as log:
            pod.process = subprocess.Popen(
                ["ip", "netns", "exec", self._namespace_of(name),
                 "unshare", "--mount", *first, "sh", "-c", script],
                env=pod.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip

    def is_ready(self, name: str) -> bool:
        """Asks a pod's readiness probe, as the kubelet does: no certificate is checked."""
        pod = self.pods[name]
        assert pod.process is not None
        if pod.process.poll() is not None:
            raise RuntimeError(f"{name} has ended:\n{pod.log.read_text()[-3000:]}")
        probe = pod.container["readinessProbe"]["httpGet"]
        ports = {each["name"]: each["containerPort"] for each in pod.container["ports"]}
        url = f"{probe['scheme'].lower()}://{pod.address}:{ports[probe['port']]}{probe['path']}"
        program = (
            "import ssl, sys, urllib.request\n"
            "unchecked = ssl._create_unverified_context()\n"
            "urllib.request.urlopen(sys.argv[1], timeout=10, context=unchecked)"
        )
        asked = subprocess.run(
            ["ip", "netns", "exec", self._switch, sys.executable, "-c", program, url],
            capture_output=True, check=False,
        )  # fmt: skip
        return asked.returncode == 0

    def is_alive(self, name: str, late_s: float = 0.0) -> bool:
        """Runs a pod's liveness command in it, on a node that needs some seconds to start it."""
        pod = self.pods[name]
        probe = pod.container["livenessProbe"]
        words = probe["exec"]["command"]
        inside = ["nsenter", f"--target={self._first(pod)}", "--mount", "--pid", "--"]
        if late_s >= probe["timeoutSeconds"]:
            return False
        return subprocess.run([*inside, *words], check=False).returncode == 0

    def signal(self, name: str, number: int) -> None:
        """Sends a signal to every process of a pod but the first."""
        for process in psutil.Process(self._first(self.pods[name])).children(recursive=True):
            process.send_signal(number)

    @contextmanager
    def flooded(self, name: str, port: int, count: int) -> Iterator[None]:
        """Holds connections to a port of a pod open that send nothing."""
        program = (
            "import socket, sys\n"
            "address = (sys.argv[1], int(sys.argv[2]))\n"
            "held = [socket.create_connection(address) for _ in range(int(sys.argv[3]))]\n"
            "print(len(held), flush=True)\n"
            "sys.stdin.read()"
        )
        words = ["ip", "netns", "exec", self._switch, sys.executable, "-c", program]
        words += [self.pods[name].address, str(port), str(count)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(words, text=True, **pipes) as process:  # type: ignore[call-overload]
            assert process.stdout.readline().strip() == str(count)
            yield
            process.stdin.close()

    @contextmanager
    def reaching(self, port: int) -> Iterator[None]:
        """Passes connections of pods to 10.78.0.1 on to this machine's loopback, at one port."""
        made: list[socketserver.ThreadingTCPServer] = []
        thread = threading.Thread(target=_serve_in, args=(self._switch, port, made))
        thread.start()
        thread.join()
        with made[0] as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            yield
            server.shutdown()
            thread.join()

    def drain(self, name: str) -> int:
        """Ends a pod as a drained node does, SIGKILL after the grace period; returns its status."""
        pod = self.pods[name]
        assert pod.process is not None
        self._prepare_stop(pod)
        time.sleep(pod.late_s)
        self._kill(pod, signal.SIGTERM)
        try:
            return pod.process.wait(pod.spec["terminationGracePeriodSeconds"])
        except subprocess.TimeoutExpired:
            self._kill(pod, signal.SIGKILL)
            return pod.process.wait()

    def kill(self, name: str) -> None:
        """Kills a pod, as a node without memory does; returns when it has ended."""
        pod = self.pods[name]
        assert pod.process is not None
        self._kill(pod, signal.SIGKILL)
        pod.process.wait()

    def move(self, name: str) -> None:
        """Moves a drained pod to another node: with another boot, and another address."""
        pod = self.pods[name]
        pod.boot.write_text(str(uuid.uuid4()))
        inner = self._namespace_of(name)
        _ip("-n", inner, "addr", "del", f"{pod.address}/24", "dev", "eth0")
        pod.address = f"10.78.0.{len(self.pods) + self._num_moves + 10}"
        self._num_moves += 1
        _ip("-n", inner, "addr", "add", f"{pod.address}/24", "dev", "eth0")
        self._write_hosts()

    def _write_hosts(self) -> None:
        """Writes the address of each pod into those that run, as the cluster's DNS would."""
        self._hosts = "127.0.0.1 localhost\n" + "".join(
            f"{pod.address} {name}.{self._domain} {name}.{self._domain}.default.svc {name}\n"
            for name, pod in self.pods.items()
        )
        for pod in self.pods.values():
            if pod.process is not None and pod.process.poll() is None:
                words = ["nsenter", f"--target={self._first(pod)}", "--mount"]
                words += ["tee", "/etc/hosts"]
                subprocess.run(
                    words, input=self._hosts, text=True, stdout=subprocess.DEVNULL, check=True
                )

    def _prepare_stop(self, pod: Pod) -> None:
        """Runs a container's preStop command in it; the kubelet goes on also if that fails."""
        if "lifecycle" not in pod.container:
            return
        command = pod.container["lifecycle"]["preStop"]["exec"]["command"]
        words = [*self._inside(pod), *command]
        with (pod.folder / "pre-stop").open("wb") as log:
            limit_s = pod.spec["terminationGracePeriodSeconds"]
            subprocess.run(
                words, env=pod.environment, stdout=log, stderr=log, timeout=limit_s, check=False
            )

    def execute(self, name: str, *command: str) -> str:
        """Returns the standard output of a command in a pod, as `kubectl exec` does."""
        pod = self.pods[name]
        words = [*self._inside(pod), *command]
        return subprocess.check_output(words, env=pod.environment, text=True)

    def _inside(self, pod: Pod) -> list[str]:
        """Returns the words in front of a command that run it in a container, as its user."""
        user = [f"--reuid={pod.security['runAsUser']}", f"--regid={pod.security['runAsGroup']}"]
        return [
            *("nsenter", f"--target={self._first(pod)}", "--mount", "--pid", "--net", "--"),
            *("setpriv", *user, f"--groups={pod.security['fsGroup']}"),
        ]

    def _first(self, pod: Pod) -> int:
        """Returns the container's first process, which unshare has forked."""
        assert pod.process is not None
        below = psutil.Process(pod.process.pid).children()
        return below[0].pid if below else pod.process.pid

    def _kill(self, pod: Pod, number: int) -> None:
        """Sends a signal to the container's first process."""
        os.kill(self._first(pod), number)

    def wait(self, what: str, is_done: Callable[[], bool]) -> None:
        """Waits for a condition.

        Raises:
            TimeoutError: It did not come; the message has the end of each pod's log.
        """
        deadline_s = time.monotonic() + LIMIT_S
        while not is_done():
            if time.monotonic() > deadline_s:
                tails = (
                    f"--- {name}\n{pod.log.read_text()[-2000:]}"
                    for name, pod in self.pods.items()
                    if pod.starts
                )
                raise TimeoutError(f"{what} after {LIMIT_S} s\n" + "\n".join(tails))
            time.sleep(0.3)

    def _add(self, document: Document, count: int) -> None:
        template = document["spec"]["template"]
        owner = document["metadata"]["name"]
        uid = str(uuid.uuid4())
        for index in range(count):
            name = f"{owner}-{index}"
            address = f"10.78.0.{len(self.pods) + 10}"
            labels = {
                "apps.kubernetes.io/pod-index": str(index),
                "batch.kubernetes.io/controller-uid": uid,
                **template["metadata"]["labels"],
            }
            annotations = {"batch.kubernetes.io/job-completion-index": str(index)}
            folder, claims = self.folder / name, self.folder / f"claims-{name}"
            folder.mkdir()
            claims.mkdir()
            self.pods[name] = Pod(
                name, template["spec"], labels, annotations, address, folder, claims
            )
            self.pods[name].boot.write_text(str(uuid.uuid4()))
            self._connect(name, address)

    def _mounts(self, pod: Pod) -> list[str]:
        """Returns shell lines that mount the volumes of a pod's container."""
        volumes = {each["name"]: each for each in pod.spec["volumes"]}
        lines = []
        if pod.spec.get("automountServiceAccountToken", True) and self.account is not None:
            lines += [f"mkdir -p {ACCOUNT}", f"mount --bind {self.account} {ACCOUNT}"]
        # The folders to mount are below /tmp, which is mounted last.
        for mount in sorted(
            pod.container["volumeMounts"], key=lambda each: each["mountPath"] == "/tmp"
        ):
            path, name = mount["mountPath"], mount["name"]
            source = pod.claims / name  # Of a volumeClaimTemplate: kept.
            if name in volumes:
                source = pod.folder / f"{name}{pod.starts}"
            if "persistentVolumeClaim" in volumes.get(name, {}):
                source = self.folder / volumes[name]["persistentVolumeClaim"]["claimName"]
            source.mkdir(exist_ok=True)
            os.chown(source, 0, pod.security["fsGroup"])
            source.chmod(0o2775)
            if "projected" in volumes.get(name, {}):
                self._write_secrets(source, volumes[name]["projected"], pod)
            lines += [f"mkdir -p {path}", f"mount --bind {source} {path}"]
            lines += [f"mount -o remount,bind,ro {path}"] if mount.get("readOnly") else []
        return lines

    def _write_secrets(self, folder: Path, volume: Document, pod: Pod) -> None:
        for source in (each["secret"] for each in volume["sources"]):
            if source.get("optional", False) and not self._has("Secret", source["name"]):
                continue
            for name, text in self._find("Secret", source["name"])["data"].items():
                path = folder / name
                path.write_bytes(base64.b64decode(text))
                os.chown(path, 0, pod.security["fsGroup"])
                path.chmod(volume["defaultMode"])

    def _has(self, kind: str, name: str) -> bool:
        return any(
            (each["kind"], each["metadata"]["name"]) == (kind, name) for each in self.documents
        )

    def _find(self, kind: str, name: str) -> Document:
        """Returns the only document of a kind and name."""
        assert self._has(kind, name), f"there is no {kind} {name}"
        (found,) = (
            each for each in self.documents
            if (each["kind"], each["metadata"]["name"]) == (kind, name)
        )  # fmt: skip
        return found

    def _value(self, pod: Pod, entry: Document) -> str:
        if "value" in entry:
            return str(entry["value"])
        path = entry["valueFrom"]["fieldRef"]["fieldPath"]
        matched = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path)
        assert matched is not None, path
        return str(getattr(pod, matched[1])[matched[2]])

    def _connect(self, name: str, address: str) -> None:
        inner, port = self._namespace(name), f"p{len(self.pods)}"
        _ip(
            "-n",
            self._switch,
            "link",
            "add",
            port,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            inner,
        )
        _ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
        _ip("-n", inner, "addr", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", inner, "link", "set", "eth0", "up")
        _ip("-n", inner, "link", "set", "lo", "up")

    def _namespace_of(self, name: str) -> str:
        return f"pods-{os.getpid()}-{name}"

    def _namespace(self, name: str) -> str:
        full = self._namespace_of(name)
        _ip("netns", "add", full)
        self._names.append(full)
        return full


class _PassOn(socketserver.BaseRequestHandler):
    """A connection to this machine's loopback for each one that comes."""

    def handle(self) -> None:
        _, port = self.request.getsockname()
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port)) as far,
        ):
            ends = {self.request: far, far: self.request}
            while True:
                for source in select.select(ends, (), ())[0]:
                    if not (data := source.recv(1 << 16)):
                        return
                    ends[source].sendall(data)


def _serve_in(namespace: str, port: int, made: list[socketserver.ThreadingTCPServer]) -> None:
    """Listens in a network namespace, in which the thread stays."""
    with Path("/run/netns", namespace).open() as file:
        assert ctypes.CDLL(None).setns(file.fileno(), CLONE_NEWNET) == 0
    made.append(socketserver.ThreadingTCPServer((SWITCH, port), _PassOn))


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
