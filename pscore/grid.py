"""Tables for people: where a terminal is too narrow for one, each row is a paragraph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

WIDEST = 10_000  # Columns of a terminal in which every table fits.
BESIDE = 3  # Columns of a terminal that a column of a table takes beside its text.


class Grid:
    """A table for `rich` to print, in which no word is cut."""

    def __init__(
        self, columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None
    ) -> None:
        """Keeps names and cells, which are markup of `rich`; a column may have an empty name."""
        self._columns, self._rows, self._title = columns, rows, title

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """Yields the table if its longest words fit, else a line or more for each row."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        if (widths := self._widths(console, options)) is None:
            if self._title:
                yield Text.from_markup(self._title)
            for row in self._rows:
                named = (f"{name} {cell}" for name, cell in zip(self._columns, row, strict=True))
                yield Text.from_markup(f"- {'; '.join(map(str.strip, named))}")
            return
        grid = Table(box=box.SIMPLE_HEAD, title=self._title, title_justify="left")
        for name, width in zip(self._columns, widths, strict=True):
            grid.add_column(name, width=width)
        for row in self._rows:
            grid.add_row(*row)
        yield grid

    def _widths(self, console: Console, options: ConsoleOptions) -> list[int] | None:
        """Returns the width of each column; None: there is no room for their longest words."""
        from rich.measure import Measurement
        from rich.text import Text

        widest = options.update(max_width=WIDEST)
        columns = zip(self._columns, *self._rows, strict=True)
        texts = (Text.from_markup("\n".join(cells)) for cells in columns)
        ranges = [Measurement.get(console, widest, text) for text in texts]
        room = options.max_width - 1 - sum(BESIDE + one.minimum for one in ranges)
        if room < 0:
            return None
        widths = [one.minimum for one in ranges]
        wanted = [one.maximum - one.minimum for one in ranges]
        for place, index in enumerate(sorted(range(len(ranges)), key=wanted.__getitem__)):
            more = min(wanted[index], room // (len(ranges) - place))
            widths[index] += more
            room -= more
        return widths
