"""Spans of a stage in its worker's timeline (pscore/observe/timeline.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from pscore.observe.timeline import Timeline


@contextlib.contextmanager
def recorded(timeline: Timeline | None, what: str, number: int, **args: Any) -> Iterator[None]:
    """Records the body of a `with` block as a span; None records nothing.

    Args:
        timeline: The spans of this process.
        what: `forward`, `backward` or `wait`, of a minibatch, or `update`. The number follows it,
            so that one can read it in the picture.
        number: That of the minibatch, or of the update.
        **args: Further fields.
    """
    begin_ns = 0 if timeline is None else timeline.now_ns()
    yield
    if timeline is not None:
        timeline.span(f"{what} {number}", begin_ns, number=number, **args)
