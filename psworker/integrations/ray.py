"""Shards and workers on a Ray cluster: shards are actors, workers are those of TorchTrainer.

    shards = Shards(2, settings={"insecure": True})
    TorchTrainer(train_loop, torch_config=PacelineConfig(shards), ...).fit()
    shards.stop()

Ray restarts both. `BackendConfig` and `Backend` are the API of Ray Train for such libraries.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psworker

try:
    import ray
    from ray.train.backend import Backend, BackendConfig
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ModuleNotFoundError:  # An instance is refused.
    ray = None
    Backend = BackendConfig = object

PR_SET_PDEATHSIG = 1
READY_S = 60.0  # A shard is started again for so long, and so long Ray looks for room.
STOP_S = 30.0
REFUSED = 2  # Exit code of `psserver start`.


class ShardActor:
    """One shard: a `psserver start` that ends with this actor, however the actor ends."""

    def __init__(self, index: int, port: int, settings: Mapping[str, str]) -> None:
        """Starts the shard, and waits until it listens; Ray calls it again after a restart.

        Raises:
            ServerUnavailableError: It ended each time, its settings are refused, or its port is
                taken.
        """
        host = ray.util.get_node_ip_address()
        self._address = f"{host}:{port}"
        folder = settings.get("PACELINE_STATE_DIR", "")
        is_again = ray.get_runtime_context().was_current_actor_reconstructed
        self._is_empty = bool(is_again) and not (folder and Path(folder).exists())
        words = [sys.executable, "-P", "-m", "psserver", "start", "--shard-index", str(index)]
        environment = {"PACELINE_HOST": host, **settings, "PACELINE_PORT": str(port)}
        end_s = time.monotonic() + READY_S
        reason = "another process listens there: stop it, or give another `port`"
        while time.monotonic() < end_s:
            # A shard of the actor before this one may still write its journal.
            if not _listens(host, port):
                self._process = subprocess.Popen(
                    words, env={**os.environ, **environment}, preexec_fn=_end_with_parent
                )
                reason = "it ended each time; Ray's log of its actor has its messages"
                # However long it reads its journal or a checkpoint: its supervisor has a limit.
                while self._process.poll() is None:
                    if _listens(host, port):
                        return
                    time.sleep(0.1)
                if self._process.returncode == REFUSED:  # Another try would end like this one.
                    reason = "it refuses its settings; Ray's log of its actor says which, and why"
                    break
            time.sleep(0.5)
        raise psworker.ServerUnavailableError(
            f"shard {index} does not start at {self._address}: {reason}"
        )

    def address(self) -> str:
        """Returns the shard's address."""
        return self._address

    def is_empty(self) -> bool:
        """Returns whether Ray has restarted the shard where its state is not."""
        return self._is_empty

    def pids(self) -> tuple[int, int]:
        """Returns the ids of the actor's process and of the shard's supervisor."""
        return os.getpid(), self._process.pid

    def stop(self) -> None:
        """Ends the shard; requests under way are answered first."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)


class Shards:
    """The shards of a cluster of Ray, one actor each, in a placement group.

    A shard that dies is restarted by its supervisor, an actor that dies by Ray, at the same port;
    with `state_dir` it continues from its journal on that node. Workers wait for it.
    """

    def __init__(
        self,
        num_shards: int = 1,
        *,
        strategy: str = "SPREAD",
        port: int = 7070,
        num_cpus: float = 1,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        """Starts the shards, and waits until all listen.

        Args:
            strategy: Ray's, for the bundles: `SPREAD`, `STRICT_SPREAD`, `PACK`, `STRICT_PACK`.
            port: Port of shard 0; the others have the next ones, so that one node may have several.
            num_cpus: That Ray reserves for each.
            settings: Options of `psserver start` by name: `{"tls_cert": "/secrets/server.pem"}`.
                Files are read on the node of each shard, which has a folder in `state_dir`.

        Raises:
            ConfigError: Ray is not installed, or has no room for the actors.
            ServerUnavailableError: A shard did not start.
        """
        if ray is None:
            raise psworker.ConfigError("shards on Ray need `pip install 'ray[train]'`")
        self.cluster = f"ray-{secrets.token_hex(4)}"
        self.num_shards = num_shards
        self._group = placement_group([{"CPU": num_cpus}] * num_shards, strategy=strategy)
        if not self._group.wait(READY_S):
            remove_placement_group(self._group)
            raise psworker.ConfigError(
                f"Ray has no room for {num_shards} shards of {num_cpus} CPU each ({strategy})"
            )
        common = {
            f"PACELINE_{name.upper()}": _text(value) for name, value in (settings or {}).items()
        }
        common |= {"PACELINE_CLUSTER": self.cluster, "PACELINE_SHARDS": str(num_shards)}
        folder = common.pop("PACELINE_STATE_DIR", None)
        self.actors = []
        for index in range(num_shards):
            own = {} if folder is None else {"PACELINE_STATE_DIR": f"{folder}/shard-{index}"}
            place = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=index
            )
            actor = ray.remote(ShardActor).options(
                num_cpus=num_cpus,
                max_restarts=-1,
                max_task_retries=-1,
                scheduling_strategy=place,
                name=f"{self.cluster}-shard-{index}",
            )
            self.actors.append(actor.remote(index, port + index, {**common, **own}))
        try:
            self.addresses()
        except ray.exceptions.RayError as problem:
            self.stop()
            last = str(problem).strip().splitlines()[-1]  # After Ray's own, and a traceback.
            raise psworker.ServerUnavailableError(f"a shard did not start: {last}") from problem

    def addresses(self) -> list[str]:
        """Returns the addresses of all shards, in order; waits for one that Ray restarts."""
        found: list[str] = ray.get([actor.address.remote() for actor in self.actors])
        return found

    def require_state(self) -> None:
        """Requires that each shard which Ray has restarted has found its state.

        Raises:
            StateLostError: One has not: its node is lost, or there is no `state_dir`.
        """
        empty: list[bool] = ray.get([actor.is_empty.remote() for actor in self.actors])
        if any(empty):
            raise psworker.StateLostError(
                f"shard {empty.index(True)} was restarted without its state, which was on another "
                "node or in no `state_dir`: run the script again, from a checkpoint"
            )

    def environment(self, num_workers: int, rank: int | None = None) -> dict[str, str]:
        """Returns the variables by which a worker finds the shards.

        Args:
            rank: Rank of the worker; None: the shards assign one.
        """
        variables = {
            "PACELINE_SERVERS": ",".join(self.addresses()),
            "PACELINE_JOB": self.cluster,
            # All of them, always: a step waits for a worker that Ray starts again.
            "PACELINE_MIN_WORKERS": str(num_workers),
            "PACELINE_MAX_WORKERS": str(num_workers),
            "PACELINE_LOCAL_RANK": "0",
            "PACELINE_LOCAL_WORKERS": "1",
        }
        return variables if rank is None else {**variables, "PACELINE_RANK": str(rank)}

    def stop(self) -> None:
        """Ends shards and actors, and gives the placement group back."""
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get([actor.stop.remote() for actor in self.actors], timeout=STOP_S)
        for actor in self.actors:
            ray.kill(actor, no_restart=True)
        remove_placement_group(self._group)


@dataclass
class PacelineConfig(BackendConfig):  # type: ignore[misc]
    """A backend of TorchTrainer whose workers join the shards; it makes no process group.

    Attributes:
        shards: Where they join.
        backend: For TorchTrainer, which sets it to Gloo or NCCL where it is empty.
    """

    shards: Shards
    backend: str = field(default="paceline")

    @property
    def backend_cls(self) -> type[Any]:
        """The class that Ray Train calls."""
        return PacelineBackend


class PacelineBackend(Backend):  # type: ignore[misc]
    """Gives each worker of a group its place, when Ray has started or restarted the group."""

    def __init__(self) -> None:
        self._num_groups = 0  # Groups started so far.

    def on_start(self, worker_group: Any, backend_config: PacelineConfig) -> None:
        """Sets the variables of each worker.

        Raises:
            StateLostError: A shard has lost its state since the group before this one: its
                workers would begin the job again, without a word.
        """
        if self._num_groups:
            backend_config.shards.require_state()
        for rank in range(len(worker_group)):
            place = backend_config.shards.environment(len(worker_group), rank)
            # As with torchrun: a worker takes the rank of one of an earlier group at once.
            place["TORCHELASTIC_RESTART_COUNT"] = str(self._num_groups)
            worker_group.execute_single(rank, _set, place)
        self._num_groups += 1


def _end_with_parent() -> None:
    """Asks the kernel to send SIGTERM to this process when its parent dies, by SIGKILL too."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _set(variables: Mapping[str, str]) -> None:
    """Sets variables of this process; a method of `os.environ` would be sent with a copy of it."""
    os.environ.update(variables)


def _listens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False


def _text(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)
