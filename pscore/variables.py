"""Variables of the environment: which are refused, because they would be ignored; whole numbers."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping

from pscore.errors import ConfigError
from pscore.text import printable

log = logging.getLogger("paceline")
PREFIX = "PACELINE_"
# Without the prefix; tests/house/test_docs.py compares them with those that the code reads.
NAMES = re.findall(
    r"\w+",
    """
    ALIVE_FILE CHECKPOINT_COPIES CHECKPOINT_S CLUSTER DATA_PLANE DATA_PORT DEBUG DURABILITY
    FAILOVER_S FAULTS GRACE_S GROUP HOST INSECURE JOB KEEP_CHECKPOINTS_S KEEP_ENDED_S
    KEEP_INTERRUPTED_S LEASE_S LOCAL_RANK LOCAL_WORKERS LOG_FORMAT LOG_LEVEL LOG_MAX_MB
    MAX_WORKERS MEMORY_MB METRICS_PORT MIN_WORKERS NUM_GROUPS NUM_WORKERS OWN_ADDRESS PEER_HOST
    PEER_PORTS PIPELINE PORT PUBLISH PUBLISH_MBIT RANK RESTART RUN_ID SERVERS SHARDS
    SHARD_ADDRESSES SHARD_INDEX SHORT_ERRORS SPARE STANDBY_AT STANDBY_OF
    STANDBY_REGISTER STATE_DIR THREADS TIMELINE TIMEOUT_S TLS_CA TLS_CERT TLS_CLIENT_CA TLS_KEY
    TOKEN_FILE UNDER_WAY_MB
""",
)
# Names without a variable, which someone may take for one.
ELSEWHERE = {
    **dict.fromkeys(
        (
            *("COMPRESSION", "LOCAL_GROUP", "MODE", "OPTIMIZER_ON", "OVERLAP", "PUBLISH_EVERY"),
            "PULL_COMPRESSION",
        ),
        "an argument of psworker.DistributedOptimizer",
    ),
    **dict.fromkeys(("ELASTIC", "NNODES", "NODE_RANK", "ON_FAILURE"), "an option of psworker run"),
}
# Shards that `psserver start` starts read them; those that a job starts for itself do not.
OF_OTHER_SHARDS = re.findall(
    r"\w+",
    """
    CHECKPOINT_COPIES CHECKPOINT_S CLUSTER DATA_PORT DURABILITY HOST MEMORY_MB METRICS_PORT PORT
    SHARDS SHARD_ADDRESSES SHARD_INDEX STANDBY_AT STANDBY_OF STANDBY_REGISTER STATE_DIR TLS_CA
    TLS_CERT TLS_CLIENT_CA TLS_KEY TOKEN_FILE
""",
)
WHOLE_MAX = (1 << 31) - 1
NEAR = 0.75  # RNAK is as near to RANK, by difflib; and PIPELINE to PACELINE.
# Kubernetes sets them in each pod for a Service whose name begins with paceline.
OF_SERVICES = re.compile(r"(.*_)?SERVICE_(HOST|PORT)(_.*)?|(.*_)?PORT_\d+_(TCP|UDP)(_.*)?")


def require_known(variables: Mapping[str, str]) -> None:
    """Refuses variables whose names are nearly those of Paceline, or mean something elsewhere.

    Others may be the user's own: a warning names each. Values with marks of the file from which
    they were read are refused too: they would become parts of paths and addresses.

    Raises:
        ConfigError: There is one; it names the variable, argument or option that was meant.
    """
    for name, value in variables.items():
        prefix, _, word = name.partition("_")
        is_ours = name.startswith(PREFIX)
        if not (is_ours or _is_near(prefix, word)):
            continue
        if is_ours and (word in NAMES or _is_of_service(word, value)):
            _require_clean(name, value)
            continue
        if word in ELSEWHERE:
            raise ConfigError(
                f"{name} is set, which is no variable of Paceline: {word.lower()} is "
                f"{ELSEWHERE[word]}; unset the variable"
            )
        if near := difflib.get_close_matches(word, NAMES, 1, NEAR):
            raise ConfigError(
                f"{name} is set, which is no variable of Paceline: {PREFIX}{near[0]} was probably "
                "meant; rename it or unset it (docs/reference.md)"
            )
        log.warning("%s is set, which is no variable of Paceline: it is ignored", printable(name))


def require_no_other_shards(variables: Mapping[str, str]) -> None:
    """Refuses variables of other shards, for a job that starts its own.

    Raises:
        ConfigError: There is one; names it.
    """
    for word in OF_OTHER_SHARDS:
        value = variables.get(name := PREFIX + word, "")
        if value and not _is_of_service(word, value):
            raise ConfigError(
                f"{name} is set, and no server address is given: the shards that a job starts for "
                "itself ignore it; set PACELINE_SERVERS to the addresses of shards that run, or "
                f"unset {name}"
            )


def require_name(job: str) -> None:
    """Refuses a job's name with a blank that nobody sees.

    Raises:
        ConfigError: It begins or ends with one.
    """
    if job != job.strip():
        raise ConfigError(
            f"the name of the job is {printable(job, 40)!r}: it must not begin or end with a blank "
            "(PACELINE_JOB, --job)"
        )


def _require_clean(name: str, value: str) -> None:
    if value.endswith("\r"):
        raise ConfigError(
            f"{name} ends with a carriage return: the file that sets it has the line ends of "
            "Windows (CRLF); save it with those of Unix"
        )
    if value[:1] in tuple("\"'") and value[-1:] == value[:1]:
        raise ConfigError(
            f"{name} is {printable(value, 40)}, with quotation marks that are part of the value: "
            "leave them out (docker run --env-file keeps them)"
        )


def _is_near(prefix: str, word: str) -> bool:
    """Returns whether a variable would be one of Paceline's but for a slip in its prefix."""
    wanted = PREFIX.rstrip("_")
    return word in NAMES and difflib.SequenceMatcher(None, prefix, wanted).ratio() > NEAR


def _is_of_service(word: str, value: str) -> bool:
    return value.startswith("tcp://") or OF_SERVICES.fullmatch(word) is not None


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
