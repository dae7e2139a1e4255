"""Imports for every worker of the tests, made once in the process that workers are forked from."""

import numpy.testing  # noqa: F401 - files of tests import it
import psutil  # noqa: F401 - files of tests import it
import pytest  # noqa: F401 - files of tests import it
import torch

import psworker
from pscore.local import LOCAL_UPDATES
from tests.kernels import compile_kernels

torch.set_num_threads(1)  # A thread pool would not survive the fork.
torch.optim.SGD([torch.zeros(1)], lr=0.1).zero_grad()  # Torch imports its compiler at the first.
assert LOCAL_UPDATES
assert dir(psworker)
compile_kernels()
