"""A rule, a compressor and an optimizer that Paceline finds by this package's entry points.

Shards import `gap_aware`, `int16` and `lion`, which do without torch; scripts use `torch_lion`.
"""
