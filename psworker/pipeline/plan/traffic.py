"""The cost of a pipeline's stages on shards, from the bytes of the mode between their replicas."""

from __future__ import annotations

from pscore.compressors.base import Compressor
from pscore.compressors.none import NoCompression
from pscore.errors import ConfigError
from pscore.net.wire import FLOAT_NBYTES
from pscore.rules.base import Rule
from psworker.connection.accounts.mode_traffic import traffic_of
from psworker.pipeline.plan.costs import ShardsCost
from psworker.pipeline.plan.profile import Profile

RAW = NoCompression()


def cost_on_shards(
    profile: Profile,
    rule: Rule,
    num_state: int,
    *,
    num_shards: int,
    on_workers: bool = False,
    compressors: tuple[Compressor, Compressor] = (RAW, RAW),
) -> ShardsCost:
    """Returns the cost of stages whose replicas meet on shards.

    Args:
        rule: The mode between the replicas of a stage.
        num_shards: Shards, each behind a link as fast as a worker's.
        on_workers: Whether shard i is on the host of worker i, behind its link.

    Raises:
        ConfigError: The model has nothing to train.
    """
    numels = [layer.parameter_nbytes // FLOAT_NBYTES for layer in profile.layers]
    numels = [numel for numel in numels if numel]
    if not numels:
        raise ConfigError(f"{profile.model!r} has no parameters that are trained")
    traffic = traffic_of(numels, rule, compressors, num_state)
    return ShardsCost(
        pushed=traffic.pushed,
        pulled=traffic.pulled,
        hides=not traffic.blocks,
        num_shards=num_shards,
        on_workers=on_workers,
    )
