"""Starts Python programs as forks of an interpreter that has imported their modules already.

A program that imports torch takes seconds of CPU before its first line, and one that imports gRPC
and Numba half a second. `Popen` takes the arguments of an interpreter (`-m psserver status`, or a
script) and starts them in a process that a server has forked: with its own standard streams,
directory, variables and session, as a child of the caller, and with the end of an ordinary
interpreter. Tests of the start of an interpreter use `subprocess`.

The server is this file, run as a program; it forks a process for each request and runs nothing
itself. There is one for `psserver`, which has no torch, and one for `psworker`. A shard that a
supervisor starts is a fork of the supervisor. A program that starts workers (`LAUNCHERS`) has a
server of its own for them, forked before its first thread.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PR_SET_CHILD_SUBREAPER = 36
REQUEST_NBYTES_MAX = 1 << 17
SHARD = ["-m", "psserver", "shard"]
# Modules whose processes are workers, for the most part: those of the launchers are forked too.
LAUNCHERS = ("psworker", "torch.distributed.run", "benchmarks.recovery")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
subprocess_start = subprocess.Popen._execute_child  # type: ignore[attr-defined]
SIGNATURE = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
_lines: dict[str, socket.socket] = {}
_lock = threading.Lock()


class Popen(subprocess.Popen[Any]):
    """A `subprocess.Popen` of Python whose process is a fork of a server.

    A variable that Python reads when it starts has no effect, except PYTHONPATH and
    PYTHONUNBUFFERED.
    """

    def __init__(self, words: Sequence[object], **options: Any) -> None:
        """Starts a program.

        Args:
            words: The arguments of `python` on a command line: `-m module`, `-c code` or a path,
            and
                the arguments.
            options: Options of `subprocess.Popen`; it takes those for standard streams, text,
                `cwd`, `env`, `start_new_session` and `process_group`.
        """
        super().__init__([sys.executable, *map(str, words)], **options)

    def _execute_child(self, *given: Any) -> None:
        """Asks the server for the process, where `subprocess` would start one."""
        options = SIGNATURE.bind(self, *given).arguments
        pipes, streams = _pipes(options)
        request = _request_of(options)
        self.pid = _ask(self._kind(request["words"]), request, streams)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    @staticmethod
    def _kind(words: Sequence[str]) -> str:
        """Returns the server for a program."""
        return "psserver" if any("psserver" in word for word in words[1:2]) else "psworker"


def run(
    words: Sequence[object], *, timeout: float, env: Mapping[str, str], **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end, with its output as text; see `subprocess.run`."""
    pipe = subprocess.PIPE
    with Popen(words, env=env, stdout=pipe, stderr=pipe, text=True, **options) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def _request_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a server has to know, from the arguments of `subprocess`."""
    before = options["preexec_fn"]
    return {
        "words": list(options["args"])[1:],
        "cwd": os.fspath(options["cwd"] or os.getcwd()),
        "env": dict(os.environ if options["env"] is None else options["env"]),
        "session": bool(options["start_new_session"]),
        "group": options.get("process_group", -1),
        "before": before and [before.__module__, before.__name__],
    }


def _pipes(options: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Returns both ends of the pipes of `subprocess`, and the new process's standard streams."""
    pipes = [options[name] for name in PIPES]
    ends = (options["p2cread"], options["c2pwrite"], options["errwrite"])
    return pipes, [number if fd == -1 else fd for number, fd in enumerate(ends)]


def _ask(kind: str, request: dict[str, Any], streams: list[int]) -> int:
    """Returns the number of a new process."""
    data = json.dumps(request).encode()
    assert len(data) <= REQUEST_NBYTES_MAX
    with _lock:
        if kind not in _lines:
            _lines[kind] = _start(kind)
        socket.send_fds(_lines[kind], [data], streams)
        answer = _lines[kind].recv(100)
    assert answer, f"the server for {kind} has ended"
    return int(answer)


def _start(kind: str) -> socket.socket:
    """Starts a server; it ends with this process."""
    # A process that the server's processes leave without a parent becomes a child of this one.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, kind, str(theirs.fileno())],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


# ----- In the server


def _prepare(kind: str) -> None:
    """Imports what the programs import."""
    import gc
    import pkgutil

    def load(package: str) -> None:
        for module in pkgutil.walk_packages(
            importlib.import_module(package).__path__, package + "."
        ):
            if not module.name.endswith(".__main__"):
                importlib.import_module(module.name)

    load("psserver")
    if kind == "psserver":
        importlib.import_module("tests.kernels").compile_kernels()
        assert "torch" not in sys.modules
        subprocess.Popen = _ShardPopen  # type: ignore[misc]
    else:
        importlib.import_module("tests.integration.preload")
        for name in ("cluster", "command", "models", "worker"):  # Most files of tests import them.
            importlib.import_module(f"tests.integration.{name}")
        load("psworker")
    assert threading.active_count() == 1
    gc.freeze()  # A collection in a fork would copy all pages.


def _serve(line: socket.socket) -> dict[str, Any]:
    """Forks a process for each request; returns in each of those, with the request."""
    while True:
        data, fds, _, _ = socket.recv_fds(line, REQUEST_NBYTES_MAX, 3)
        if not data:
            os._exit(0)
        told, tell = os.pipe()
        between = os.fork()
        if between == 0:
            between = os.getpid()
            pid = os.fork()
            if pid:
                os.write(tell, str(pid).encode())
                os._exit(0)
            os.close(told)
            os.close(tell)
            while os.getppid() == between:  # Until it is a child of the process that asks.
                time.sleep(0.001)
            line.close()
            request: dict[str, Any] = json.loads(data)
            _be(fds, request)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            return request
        os.waitpid(between, 0)
        line.send(os.read(told, 100))  # Now it is a child of the process that asks.
        for fd in (*fds, told, tell):
            os.close(fd)


def _be(fds: Sequence[int], request: Mapping[str, Any]) -> None:
    """Makes this process, which was forked, look as if it were started."""
    for number, fd in enumerate([os.dup(fd) for fd in fds]):
        os.dup2(fd, number)
    os.closerange(3, 256)
    if request["session"]:
        os.setsid()
    elif request["group"] != -1:
        os.setpgid(0, request["group"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if request["env"].get("PYTHONUNBUFFERED") or "-u" in request.get("words", [])[:1]:
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - to its end
    if before := request.get("before"):
        getattr(importlib.import_module(before[0]), before[1])()


def _program(words: Sequence[str]) -> tuple[types.CodeType, dict[str, Any]]:
    """Returns the code of a program and its globals; makes it the main module."""
    words = list(words)
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    isolated = "-P" in words[:1]
    if isolated or words[0] == "-u":
        words.pop(0)
    first = os.getcwd()
    if words[0] == "-m":
        sys.argv = words[1:]
        if not hasattr(sys.modules.get(words[1]), "__path__"):
            sys.modules.pop(words[1], None)  # It is run, not imported.
        source, name = f"import runpy; runpy.run_module({words[1]!r}, None, '__main__', True)", "-m"
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        source, name, first = words[1], "<string>", ""
    else:
        sys.argv = words
        source, name, first = (
            Path(words[0]).read_text("utf-8"),
            words[0],
            str(Path(words[0]).parent),
        )
        main.__file__ = words[0]
    path = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.path[:0] = path if isolated else [first, *path]
    return compile(source, name, "exec"), main.__dict__


def _program_of(request: Mapping[str, Any]) -> tuple[types.CodeType, dict[str, Any]]:
    """Returns the code and globals of the program to become; a launcher gets a server first."""
    words: list[str] = request["words"]
    if words[0] != "-m" or words[1] not in LAUNCHERS:
        return _program(words)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if server := os.fork():
        theirs.close()
        _launch(ours, server)
        return _program(words)
    ours.close()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # It ends with the launcher.
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    os.close(null)
    return _program(_serve(theirs)["words"])


def _launch(line: socket.socket, server: int) -> None:
    """Makes this process start workers as forks of a server."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    subprocess.Popen = _WorkerPopen  # type: ignore[misc]
    _lines["launcher"] = line

    def end() -> None:
        line.close()
        os.waitpid(server, 0)

    atexit.register(end)


class _WorkerPopen(Popen):
    """Forks a script or module from the launcher's server; starts everything else as usual."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Starts a program, with the arguments of `subprocess.Popen`."""
        super(Popen, self).__init__(*args, **options)

    def _execute_child(self, *given: Any) -> None:
        options = SIGNATURE.bind(self, *given).arguments
        first, *words = list(options["args"])
        if first == sys.executable and "psserver" not in words and not options["pass_fds"]:
            super()._execute_child(*given)
        else:
            subprocess_start(self, *given)

    @staticmethod
    def _kind(words: Sequence[str]) -> str:
        return "launcher"


class _ShardPopen(subprocess.Popen[Any]):
    """Forks the process of a shard from its supervisor; starts everything else as usual."""

    def _execute_child(self, *given: Any) -> None:
        options = SIGNATURE.bind(self, *given).arguments
        words = [word for word in list(options["args"])[1:] if word != "-P"]
        if words[:3] != SHARD or threading.active_count() > 1:
            return super()._execute_child(*given)  # type: ignore[misc, no-any-return]
        pipes, streams = _pipes(options)
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _be_shard(streams, words)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        return None


def _be_shard(streams: Sequence[int], words: Sequence[str]) -> None:
    """Runs the process of a shard; does not return."""
    status = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.set_wakeup_fd(-1)
        request = {"session": False, "group": 0, "cwd": os.getcwd(), "env": dict(os.environ)}
        _be(streams, request)
        import structlog

        structlog.reset_defaults()
        from psserver.process import daemon

        daemon.main(words[3])
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as an interpreter does
        sys.excepthook(*sys.exc_info())
    finally:
        _end(status)
        ctypes.pythonapi.Py_Exit(status)  # The end of an interpreter, from any depth.


def _end(status: int) -> None:
    """Ends the process without a visit to each object, which would copy the server's pages.

    First comes all that programs notice of an interpreter's end: it waits for threads, calls what
    was registered, and writes what is in buffers. Returns if that fails; the interpreter's own end
    then has the last word.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    _prepare(sys.argv[1])
    _request = _serve(socket.socket(fileno=int(sys.argv[2])))
    sys.path.pop(0)
    _status = 0
    try:
        exec(*_program_of(_request))
    except SystemExit as _exit:
        if isinstance(_exit.code, str):
            raise
        _status = _exit.code or 0
    if _request["words"][0] != "-m":
        sys.exit(_status)  # A script of a user, whose end may be what is tested.
    _end(_status)
    sys.exit(_status)
