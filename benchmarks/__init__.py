"""The benchmarks: each module here is a program, and `python -m benchmarks` lists them.

Some modules serve several programs: `kit` starts shards and workers as processes, `forked` many
workers from one import of torch, `measured` is the part of `kit` that a process may import before
its start is measured, `tasks` loads data and models, `curves` draws, `markdown` writes tables.
Parts of programs are in folders: `learning` (accuracy), `survival` (the kill loop), `links` (hosts
of a network lab), `drawing` (pictures), `exchanges` (workers without weights on a server), `peers`
(other systems).
"""

import os

# Processes are started all the time: with this variable each of them would compile every module.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
