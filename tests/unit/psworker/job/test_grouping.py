"""Groups that the variables number, where no process group of torch says who is in them."""

import pytest

from pscore.errors import ConfigError
from psworker.job.environment import Environment
from psworker.job.grouping import choose_group

NUMBERED = {"PACELINE_NUM_GROUPS": "3", "PACELINE_GROUP": "1", "TORCHELASTIC_RUN_ID": "none"}


def test_numbered_groups_need_a_process_group_or_each_host_would_train_alone() -> None:
    here = NUMBERED | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0"}
    with pytest.raises(ConfigError, match="PACELINE_NUM_GROUPS is 3, and the 2 processes of this"):
        choose_group("auto", Environment.read(here))
    given = Environment.read(here)
    assert choose_group(None, given)[1] == given  # The caller wants single workers.


def test_the_only_process_of_a_host_is_a_numbered_group() -> None:
    here = NUMBERED | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0"}
    _, found = choose_group("auto", Environment.read(here))
    assert (found.rank, found.num_workers) == (1, 3)
