"""What state a worker is in after an error in a step, so that a script may catch it and go on.

What has been counted stays counted, and what has not left has changed nothing. There are two kinds:

- **Nobody but this worker knows of it**: a gradient with NaN or Inf, one that float32 cannot add to
  what is owed, one that was changed after it had left, a setting that is wrong. The step is still
  to be made. Slices that have left keep the gradient with which they left, and the others take the
  one that the next `step()` finds; mostly nothing has left, and then the step can be left out.
- **Shards may know of it**: one refused something, did not answer, has declared this worker lost,
  or the step was all but over. Of each slice the shards have counted the step or not. This worker
  joins anew before it does anything else, and goes on behind that step from the global weights. A
  `step()` does that and no more: its gradient is of weights from before.

On a GPU a gradient is looked at while its step goes on. Slices that turn out to be no numbers are
pushed as absent, so that the step ends everywhere; then `step()` raises.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from pscore.errors import (
    ConfigError,
    GradientError,
    JobMismatchError,
    PacelineError,
    ReplacedError,
    UnknownJobError,
)

if TYPE_CHECKING:
    from psworker.training.optimizer import DistributedOptimizer

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(slots=True)
class Setback:
    """An error that shards may know of."""

    problem: BaseException
    step: int  # At which this worker was.
    is_given_up: bool = False  # That step; coming back may take several attempts.


@contextlib.contextmanager
def recovers(wrapper: DistributedOptimizer) -> Iterator[None]:
    """Leaves the wrapper usable when a part of a step raises."""
    number = wrapper.replica.step
    try:
        yield
    except (PacelineError, KeyboardInterrupt) as problem:
        is_own = isinstance(problem, GradientError | ConfigError)
        if isinstance(problem, KeyboardInterrupt):
            is_own = not wrapper.gradients.have_left
        if is_own and not wrapper.replica.is_ending:
            wrapper.gradients.begin_again()
            wrapper.show_weights()
        else:
            wrapper.setback = wrapper.setback or Setback(problem, number)
            wrapper.left_out.given_up()
        raise


def hook(wrapper: DistributedOptimizer, parameter: torch.Tensor) -> None:
    """Sends what `parameter` completes; autograd calls it when a gradient is there."""
    if wrapper.setback is not None:
        return
    with recovers(wrapper):
        try:
            wrapper.gradients.made(parameter)
        except (ReplacedError, UnknownJobError) as problem:
            # `step` comes back; backward goes on undisturbed.
            wrapper.setback = Setback(problem, wrapper.replica.step)


@contextlib.contextmanager
def guard(wrapper: DistributedOptimizer) -> Iterator[None]:
    """Joins anew first, where the last step ended in an error that shards may know of.

    What is refused only now, a push of the last step, is such an error too. A job that is another
    one is not: whoever joins it anew is refused again.

    Raises:
        PacelineError: It is not possible to join anew, or that error.
    """
    if wrapper.setback is not None:
        come_back(wrapper, wrapper.setback)
    try:
        yield
    except PacelineError as problem:
        if not isinstance(problem, GradientError | ConfigError | JobMismatchError):
            wrapper.setback = wrapper.setback or Setback(problem, wrapper.replica.step)
        raise


def mends(method: Method) -> Method:
    """Runs a method of the wrapper under `guard`."""

    @functools.wraps(method)
    def call(wrapper: DistributedOptimizer, *args: Any, **kwargs: Any) -> Any:
        with guard(wrapper):
            return method(wrapper, *args, **kwargs)

    return cast(Method, call)


def come_back(wrapper: DistributedOptimizer, setback: Setback) -> None:
    """Joins anew: of the step that was under way counts what the shards have of it.

    Raises:
        PacelineError: It is not possible; the setback stays, for another attempt.
    """
    wrapper.setback = setback
    exchange, replica = wrapper.exchange, wrapper.replica
    if not setback.is_given_up:
        exchange.give_up_step(wrapper.clock, setback.problem)
        setback.is_given_up = True
    wrapper.session.rejoin()
    exchange.restart()
    wrapper.buffers.restart()
    replica.restart()
    replica.rank = wrapper.session.rank
    exchange.run(replica.begin(exchange))
    wrapper.progress.locate(setback.step)
    wrapper.setback = None
    wrapper.gradients.end()
    wrapper.gradients.begin_again()
    wrapper.show_weights()
