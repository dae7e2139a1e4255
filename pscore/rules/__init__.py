"""Update rules by name. A new rule is one file here and one line in `own.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pscore.errors import UnsupportedOptimizerError
from pscore.optimizers import Optimizer, from_torch
from pscore.plugins import make_plugin, parse_plugin
from pscore.registry import Registry, classes_of
from pscore.rules import own
from pscore.rules.base import Memory as Memory
from pscore.rules.base import Plan as Plan
from pscore.rules.base import Rule as Rule
from pscore.rules.base import SliceClocks as SliceClocks
from pscore.rules.own import *  # noqa: F403

RULES: Registry[Rule] = Registry("mode", "paceline.rules", Rule, classes_of(own, Rule))


def make_rule(name: str, arguments: Mapping[str, Any]) -> Rule:
    """Returns the rule `name` with `arguments`; those left out have their defaults.

    Raises:
        ConfigError: No rule has this name, or the rule has no such argument; the right ones are
            listed.
    """
    return make_plugin(RULES, name, arguments)


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
