"""The examples in docstrings give the results that they show."""

import doctest
from types import ModuleType

import pytest

from pscore import compressors, partition, rules
from psserver.decisions import slice_clock

MODULES = (compressors, partition, rules, slice_clock)


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_the_examples_of_a_docstring_hold(module: ModuleType) -> None:
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0
