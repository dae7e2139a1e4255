"""Runs a scan: `python -m pssim.timing '{"model": "gpt2", ...}'`, as `psworker simulate` does.

The argument is JSON: the fields of `ScanRequest`, and `plot` with the path of a plot or null.
Standard output is the list of points as JSON; an error of the user ends with 2 and one line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pscore.errors import ConfigError
from pscore.json_text import to_json
from pscore.timing.shown import in_ms
from pssim.timing.plot import draw
from pssim.timing.scan import ScanRequest, scan

USER_ERROR = 2


def main() -> int:
    """Runs the scan of the first argument; returns the exit code."""
    given = json.loads(sys.argv[1])
    plot = given.pop("plot")
    try:
        request = ScanRequest(**given)
        points = scan(request)
        if plot is not None:
            draw(
                points,
                Path(plot),
                f"{request.model}, {in_ms(request.compute_ms / 1e3)} of computing",
            )
    except ConfigError as problem:
        sys.stderr.write(f"{problem}\n")
        return USER_ERROR
    sys.stdout.write(to_json(points) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
