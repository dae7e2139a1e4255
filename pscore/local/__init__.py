"""Local updates by name. A new one is one file here and one line in `LOCAL_UPDATES`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from pscore.local.base import LocalSlice, LocalUpdate
from pscore.local.dc import DC, AdaptiveDC
from pscore.local.glu import GLU
from pscore.local.mirror import Mirror
from pscore.local.none import NoLocalUpdate
from pscore.local.secant import Secant
from pscore.local.sgd import PlainSGD

LOCAL_UPDATES: dict[str, type[LocalUpdate]] = {
    update.name: update for update in (DC, AdaptiveDC, GLU, Mirror, NoLocalUpdate, PlainSGD, Secant)
}

__all__ = ["LOCAL_UPDATES", "LocalSlice", "LocalUpdate", "make_local_update"]


def make_local_update(name: str, arguments: Mapping[str, Any]) -> LocalUpdate:
    """Returns the local update `name`, given those of a rule's `arguments` that it takes.

    Raises:
        ConfigError: An argument is out of its range.
    """
    factory = LOCAL_UPDATES[name]
    taken = inspect.signature(factory).parameters
    return factory(**{key: value for key, value in arguments.items() if key in taken})
