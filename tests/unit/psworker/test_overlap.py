"""When a gradient may leave during backward, and how a later change is found."""

from collections.abc import Callable

import pytest
import torch

from pscore.errors import ConfigError, GradientError
from psworker.overlap import WATCHED_STEPS, Overlap


def make(numel: int = 2) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(1)) for _ in range(numel)]


def backward(overlap: Overlap, parameters: list[torch.nn.Parameter]) -> None:
    for index, parameter in enumerate(parameters):
        parameter.grad = torch.ones(1)
        overlap.made(index, parameter)


def watch(overlap: Overlap, parameters: list[torch.nn.Parameter], steps: int) -> None:
    for _ in range(steps):
        backward(overlap, parameters)
        overlap.finish(parameters)


def test_auto_begins_to_leave_early_after_the_watched_steps() -> None:
    overlap, parameters = Overlap("auto", ["a", "b"]), make()
    watch(overlap, parameters, WATCHED_STEPS - 1)
    assert not overlap.is_early
    watch(overlap, parameters, 1)
    assert overlap.is_early


def clip(parameters: list[torch.nn.Parameter]) -> None:
    assert parameters[1].grad is not None
    parameters[1].grad.mul_(0.5)


def replace(parameters: list[torch.nn.Parameter]) -> None:
    parameters[0].grad = torch.ones(1)


def drop(parameters: list[torch.nn.Parameter]) -> None:
    parameters[0].grad = None


CHANGES = [(clip, "'b'"), (replace, "'a'"), (drop, "'a'")]


@pytest.mark.parametrize(("change", "_"), CHANGES)
def test_auto_never_leaves_early_where_gradients_are_changed(
    change: Callable[[list[torch.nn.Parameter]], None], _: str
) -> None:
    overlap, parameters = Overlap("auto", ["a", "b"]), make()
    for step in range(3 * WATCHED_STEPS):
        backward(overlap, parameters)
        if step == 1:
            change(parameters)
        overlap.finish(parameters)
    assert not overlap.is_early


@pytest.mark.parametrize(("change", "name"), CHANGES)
def test_a_change_after_an_early_push_is_an_error_with_a_name(
    change: Callable[[list[torch.nn.Parameter]], None], name: str
) -> None:
    overlap, parameters = Overlap(True, ["a", "b"]), make()
    watch(overlap, parameters, 2)
    backward(overlap, parameters)
    change(parameters)
    with pytest.raises(GradientError, match=f"gradient of {name} was changed after it had been"):
        overlap.finish(parameters)


def test_two_backward_passes_a_step_are_seen() -> None:
    overlap, parameters = Overlap("auto", ["a", "b"]), make()
    for _ in range(3 * WATCHED_STEPS):
        backward(overlap, parameters)
        backward(overlap, parameters)
        overlap.finish(parameters)
    assert not overlap.is_early
    early = Overlap(True, ["a", "b"])
    backward(early, parameters)
    with pytest.raises(GradientError, match="gradient of 'a' got a second gradient after"):
        backward(early, parameters)


def test_what_travels_with_a_push_must_not_change_after_it() -> None:
    overlap, parameters = Overlap("auto", ["a", "b"]), make()
    overlap.changed("samples")  # Before backward.
    backward(overlap, parameters)
    overlap.finish(parameters)
    overlap.changed("samples")  # Between two steps.
    watch(overlap, parameters, WATCHED_STEPS)
    assert overlap.is_early
    overlap.changed("samples")
    backward(overlap, parameters)
    with pytest.raises(GradientError, match=r"samples was changed after .*before backward\(\)"):
        overlap.changed("samples")
    late = Overlap("auto", ["a", "b"])
    backward(late, parameters)
    late.changed("samples")
    late.finish(parameters)
    watch(late, parameters, WATCHED_STEPS)
    assert not late.is_early


def test_a_parameter_without_a_gradient_is_no_change() -> None:
    overlap, parameters = Overlap("auto", ["a", "b"]), make()
    for _ in range(WATCHED_STEPS):
        overlap.made(1, parameters[1])
        overlap.finish(parameters)
    assert overlap.is_early


def test_a_step_that_is_left_out_is_no_second_gradient() -> None:
    overlap, parameters = Overlap(True, ["a", "b"]), make()
    backward(overlap, parameters)
    assert overlap.has_begun
    overlap.forget()
    assert not overlap.has_begun
    backward(overlap, parameters)
    overlap.finish(parameters)


@pytest.mark.parametrize("overlap", [True, False])
def test_it_is_as_the_user_says(overlap: bool) -> None:
    chosen, parameters = Overlap(overlap, ["a", "b"]), make()
    watch(chosen, parameters, 2 * WATCHED_STEPS)
    assert chosen.is_early is overlap


def test_another_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="overlap is 'maybe', must be True, False or 'auto'"):
        Overlap("maybe", [])
