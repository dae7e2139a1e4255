"""Which processes are one worker: from the argument `local_group`, the environment and torch.

| `local_group` | the processes of one worker |
|---|---|
| `"auto"` | those that torchrun has started on this host, if `torch.distributed` is initialised |
| `"host"` | those of this host; an error where `torch.distributed` is not initialised |
| a `ProcessGroup` of torch | its processes |
| `None` | this process alone |

Groups of one job have the same number of processes each. Their numbers follow from the ranks of
torch's world, or, where every host has a world of its own, from PACELINE_GROUP and
PACELINE_NUM_GROUPS.
"""

from __future__ import annotations

import dataclasses
import logging

import torch.distributed as dist

from pscore.errors import ConfigError
from psworker.group.local_group import LocalGroup
from psworker.group.worker_group import WorkerGroup
from psworker.job.environment import Environment

log = logging.getLogger("paceline")
CHOICES = ("auto", "host")
Choice = str | dist.ProcessGroup | None


def choose_group(choice: Choice, environment: Environment) -> tuple[WorkerGroup, Environment]:
    """Returns this process's group, connected, and the environment of the worker that it is.

    All processes of torch's world call it with the same choice.

    Raises:
        ConfigError: The choice is not one, or its processes cannot be numbered.
        GroupError: A process of the group has ended.
    """
    if choice is None:
        return WorkerGroup(), environment
    if choice == "auto" and not _is_wanted(environment):
        return WorkerGroup(), _alone(environment)
    if choice in CHOICES:
        group = _of_host(environment)
    elif isinstance(choice, dist.ProcessGroup):
        group = choice
    else:
        raise ConfigError(
            f"local_group is {choice!r}, must be a ProcessGroup of torch.distributed, "
            f"{', '.join(map(repr, CHOICES))} or None"
        )
    size = dist.get_world_size(group)
    if size == 1:
        return WorkerGroup(), environment
    worker, num_workers = _place(group, environment)
    log.info(
        "two levels: %d processes of torch's group are worker %s; gradients are averaged among "
        "them first (local_group=None turns it off)",
        size,
        "of a number from the shards" if worker < 0 else f"{worker} of {num_workers}",
    )
    environment = dataclasses.replace(environment, rank=worker, num_workers=num_workers)
    return LocalGroup(group), environment


def _alone(environment: Environment) -> Environment:
    """Returns the environment of a worker of one process; where groups are numbered, it is one."""
    if environment.num_groups < 2:  # noqa: PLR2004
        return environment
    if environment.local_workers > 1:
        raise ConfigError(
            f"PACELINE_NUM_GROUPS is {environment.num_groups}, and the "
            f"{environment.local_workers} processes of this host are no group: each host would "
            "train alone; call torch.distributed.init_process_group() first, under torchrun or "
            "with local_group='host'"
        )
    return dataclasses.replace(
        environment, rank=environment.group, num_workers=environment.num_groups
    )


def _is_wanted(environment: Environment) -> bool:
    """Returns whether torchrun has started several processes here, and they are connected."""
    if not environment.is_torchrun or environment.local_workers < 2:  # noqa: PLR2004
        return False
    if dist.is_available() and dist.is_initialized():
        return True
    log.info(
        "each of the %d processes of this host is a worker; call "
        "torch.distributed.init_process_group() first to send each byte once per host",
        environment.local_workers,
    )
    return False


def _of_host(environment: Environment) -> dist.ProcessGroup:
    """Returns a new group of torch with the processes of this host."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            "local_group='host' needs torch.distributed.init_process_group() before it"
        )
    world, here = dist.get_world_size(), environment.local_workers
    if world % here:
        raise ConfigError(
            f"{world} processes, and {here} on this host (LOCAL_WORLD_SIZE): every host needs "
            "equally many; pass local_group=None, or a ProcessGroup"
        )
    group: dist.ProcessGroup = dist.new_subgroups(here)[0]  # type: ignore[no-untyped-call]
    return group


def _place(group: dist.ProcessGroup, environment: Environment) -> tuple[int, int]:
    """Returns the number of a group among those of the job, and how many there are.

    -1: the shards decide the number.
    """
    if environment.num_groups:
        return environment.group, environment.num_groups
    size, world = dist.get_world_size(group), dist.get_world_size()
    if environment.min_workers:
        return -1, environment.num_workers
    if size == world:
        if environment.num_workers > world:
            raise ConfigError(
                f"torch's world is this group of {size}, and the job has "
                f"{environment.num_workers} processes: set PACELINE_NUM_GROUPS and, from 0, "
                "PACELINE_GROUP on each host"
            )
        return 0, 1
    ranks = sorted(dist.get_process_group_ranks(group))
    num_groups, first = world // size, ranks[0]
    if world % size == 0:
        if ranks == list(range(first, first + size)) and first % size == 0:
            return first // size, num_groups
        if ranks == list(range(first, world, num_groups)):
            return first, num_groups
    raise ConfigError(
        f"local_group has the ranks {', '.join(map(str, ranks))} of {world}: groups must be of "
        "equal size, of consecutive ranks or of every n-th one"
    )
