"""The waits of a job for people: one for each worker and step that slices wait for."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

AT_SLICE = re.compile(r"(.*), at (slice \d+ of .* on shard \d+)", re.DOTALL)


class Wait(NamedTuple):
    """A worker or shard that workers of a job wait for, in words."""

    text: str
    places: list[str]  # Slices that wait for it; empty: it is not at slices.

    @property
    def in_words(self) -> str:
        """The wait as one line, with the first place and the number of the others."""
        if not self.places:
            return self.text
        more = f", and {len(self.places) - 1} more" if len(self.places) > 1 else ""
        return f"{self.text}, at {self.places[0]}{more}"


def waits_of(job: dict[str, Any]) -> list[Wait]:
    """Returns the waits of a job of `psserver.remote.status.combine`."""
    tables = (text for table in job["tables"] for text in table["waiting_for"])
    found: dict[str, list[str]] = {}
    for text in dict.fromkeys([*job["waiting_for"], *tables]):
        at_slice = AT_SLICE.fullmatch(text)
        if at_slice is None:
            found.setdefault(text, [])
        else:
            found.setdefault(at_slice[1], []).append(at_slice[2])
    return [Wait(text, places) for text, places in found.items()]
