"""The benchmarks: each module here is a program, and `python -m benchmarks` lists them.

Four modules serve several programs: `kit` starts shards and workers as processes, `measured` is the
part of `kit` that a process may import before its start is measured, `tasks` loads data and models,
`curves` draws. Parts of programs are in folders: `learning` (accuracy), `survival` (the kill loop),
`links` (hosts of a network lab), `drawing` (pictures), `peers` (other systems).
"""
