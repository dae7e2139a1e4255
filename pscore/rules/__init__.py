"""Update rules by name. A new rule is one file here and one line in `RULES`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pscore.errors import UnsupportedOptimizerError
from pscore.optimizers import Optimizer, from_torch
from pscore.plugins import make_plugin, parse_plugin
from pscore.rules.adpsgd import ADPSGD
from pscore.rules.allreduce import AllReduce
from pscore.rules.asgd import ASGD
from pscore.rules.base import Memory, Plan, Rule, SliceClocks
from pscore.rules.cd import CD
from pscore.rules.dcasgd import DCASGD
from pscore.rules.delayed_nesterov import DelayedNesterov
from pscore.rules.diloco import DiLoCo
from pscore.rules.dpsgd import DPSGD
from pscore.rules.local import LocalSGD
from pscore.rules.od import OD
from pscore.rules.sgp import SGP
from pscore.rules.slowmo import SlowMo
from pscore.rules.ssd import SSD
from pscore.rules.ssgd import SSGD
from pscore.rules.ssp import SSP
from pscore.rules.staleness import Staleness

RULES: dict[str, type[Rule]] = {
    rule.name: rule
    for rule in (
        *(SSGD, ASGD, Staleness, DCASGD, SSP, OD, SSD, CD, LocalSGD, SlowMo, DiLoCo),
        *(DelayedNesterov, AllReduce, DPSGD, ADPSGD, SGP),
    )
}

__all__ = [
    "ADPSGD",
    "ASGD",
    "CD",
    "DCASGD",
    "DPSGD",
    "OD",
    "RULES",
    "SGP",
    "SSD",
    "SSGD",
    "SSP",
    "AllReduce",
    "DelayedNesterov",
    "DiLoCo",
    "LocalSGD",
    "Memory",
    "Plan",
    "Rule",
    "SliceClocks",
    "SlowMo",
    "Staleness",
    "make_rule",
    "make_server_optimizer",
    "parse_mode",
]


def make_rule(name: str, arguments: Mapping[str, Any]) -> Rule:
    """Returns the rule `name` with `arguments`; those left out have their defaults.

    Raises:
        ConfigError: No rule has this name, or the rule has no such argument; the right ones are
            listed.
    """
    return make_plugin("mode", RULES, name, arguments)


def parse_mode(text: str | Rule) -> Rule:
    """Returns the rule that `text` describes: `ssgd` or `ssd(steps=5, warmup=100, local="glu")`.

    >>> parse_mode("ssd(steps=8)").name
    'ssd'
    >>> str(parse_mode("ssp(bound=2)"))
    'ssp(bound=2)'

    Raises:
        ConfigError: The text does not have that form, or there is no such rule or argument.
    """
    if isinstance(text, Rule):
        return text
    return make_rule(*parse_plugin("mode", text))


def make_server_optimizer(optimizer: Any) -> Optimizer:
    """Returns the shards' counterpart of a torch optimizer (`pscore.optimizers.from_torch`).

    Raises:
        UnsupportedOptimizerError: There is none; the message names the modes that need none.
    """
    try:
        return from_torch(optimizer)[0]
    except UnsupportedOptimizerError as problem:
        modes = ", ".join(sorted(name for name, rule in RULES.items() if rule.outer_optimizer))
        raise UnsupportedOptimizerError(
            f"{problem}; the modes {modes}, and ssgd with optimizer_on='worker', run any torch "
            "optimizer on the workers"
        ) from None
