"""The waits of a job for people: one for each worker and step that slices wait for."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from pscore.table_names import BESIDE, newest
from pscore.timing.waiting import PaceSums, advice_line

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


def advice_of(job: dict[str, Any]) -> str:
    """Returns the share of waits in a job and a mode that takes less; empty: they hardly wait.

    With row tables no mode is named: lookups wait for the rows in any mode of the dense part.
    """
    paces = [
        PaceSums(
            rank=worker["rank"],
            num_steps=worker["pace"]["num_steps"],
            steps_s=worker["pace"]["steps_s"],
            waits_s=worker["pace"]["waits_s"],
            requests_s=worker["pace"]["requests_s"],
            step_s=worker["pace"]["step_s"],
        )
        for worker in job["workers"]
        if worker["state"] == "live"
    ]
    modes = {table["name"]: table["mode"] for table in job["tables"]}
    has_rows = any(BESIDE in name for name in modes)
    mode = "" if has_rows or not modes else modes[newest(next(iter(modes)), modes)]
    return advice_line(mode, paces)
