"""Variables of the environment: a misspelt name is refused, not ignored; whole numbers."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from pscore.errors import ConfigError
from pscore.text import printable

PREFIX = "PACELINE_"
# Without the prefix; tests/house/test_docs.py compares them with those that the code reads.
NAMES = re.findall(
    r"\w+",
    """
    ALIVE_FILE CHECKPOINT_COPIES CHECKPOINT_S CLUSTER DATA_PLANE DATA_PORT DEBUG DURABILITY
    FAILOVER_S FAULTS GRACE_S GROUP HOST INSECURE JOB KEEP_CHECKPOINTS_S KEEP_ENDED_S
    KEEP_INTERRUPTED_S LEASE_S LOCAL_RANK LOCAL_WORKERS LOG_FORMAT LOG_LEVEL LOG_MAX_MB
    MAX_WORKERS MEMORY_MB METRICS_PORT MIN_WORKERS NUM_GROUPS NUM_WORKERS OWN_ADDRESS PEER_HOST
    PEER_PORTS PIPELINE PORT PUBLISH PUBLISH_MBIT RANK RESTART SERVERS SHARDS SHARD_ADDRESSES
    SHARD_INDEX SHORT_ERRORS SNAPSHOT_S SPARE STANDBY_AT STANDBY_OF STANDBY_REGISTER STATE_DIR
    THREADS TIMELINE TIMEOUT_S TLS_CA TLS_CERT TLS_CLIENT_CA TLS_KEY TOKEN_FILE UNDER_WAY_MB
""",
)
WHOLE_MAX = (1 << 31) - 1
NEAR = 0.75  # RNAK is as near to RANK, by difflib.
# Kubernetes sets them in each pod for a Service whose name begins with paceline.
OF_SERVICES = re.compile(r"(.*_)?SERVICE_(HOST|PORT)(_.*)?|(.*_)?PORT_\d+_(TCP|UDP)(_.*)?")


def require_known(variables: Mapping[str, str]) -> None:
    """Refuses variables whose names are nearly those of Paceline; others may be the user's own.

    Raises:
        ConfigError: There is one; it names the variable that was meant.
    """
    for name, value in variables.items():
        word = name.removeprefix(PREFIX)
        if word in (name, *NAMES) or OF_SERVICES.fullmatch(word) or value.startswith("tcp://"):
            continue
        if near := difflib.get_close_matches(word, NAMES, 1, NEAR):
            raise ConfigError(
                f"{name} is set, which is no variable of Paceline: {PREFIX}{near[0]} was probably "
                "meant; rename it or unset it (docs/reference.md)"
            )


def whole_number(variables: Mapping[str, str], name: str, default: int, least: int = 0) -> int:
    """Returns the whole number in a variable, and `default` if that is empty or not set.

    Raises:
        ConfigError: It is no whole number, less than `least`, or more than fits into 31 bits.
    """
    text = variables.get(name, "")
    if not text:
        return default
    number = int(text) if re.fullmatch(r" *-?[0-9]{1,10} *", text) else None
    if number is None or not least <= number <= WHOLE_MAX:
        raise ConfigError(
            f"{name} is {printable(text, 40)!r}, must be a whole number in {least}..{WHOLE_MAX}"
        )
    return number
