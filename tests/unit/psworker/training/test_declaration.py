"""The declaration of a model's table: the length of its slices."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pscore.compressors import parse_compressor
from pscore.contents import FLAT, LONG
from pscore.rules import parse_mode
from psworker.training.declaration import Declaration


@pytest.mark.parametrize(
    ("mode", "compressor", "pull_compressor", "is_near", "is_long"),
    [
        ("ssgd", "none", "none", True, True),
        ("diloco(steps=2)", "none", "none", True, True),
        ("ssgd", "none", "none", False, False),
        ("ssgd", "fp16", "none", True, False),  # Its scales are of slices.
        ("ssgd", "none", "int8", True, False),
        ("diloco(steps=2, fragments=2)", "none", "none", True, False),
    ],
)
def test_slices_are_long_within_one_host_where_no_number_depends_on_them(
    mode: str, compressor: str, pull_compressor: str, is_near: bool, is_long: bool
) -> None:
    declaration = Declaration(
        named=[("w", torch.nn.Parameter(torch.zeros(3)))],
        compressor=parse_compressor(compressor),
        pull_compressor=parse_compressor(pull_compressor),
        min_nbytes=0,
        exclude=(),
    )
    wanted = LONG if is_long else FLAT
    links = [SimpleNamespace(transport=SimpleNamespace(is_near=near)) for near in (True, is_near)]
    session: Any = SimpleNamespace(group=SimpleNamespace(is_alone=True), links=links)
    assert declaration.content(parse_mode(mode), session) == wanted
    session.group.is_alone = False
    assert declaration.content(parse_mode(mode), session) == FLAT
