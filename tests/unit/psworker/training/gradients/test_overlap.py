"""When a gradient may leave during backward, and how a later change is found."""

from collections.abc import Callable

import pytest
import torch

from pscore.errors import ConfigError, GradientError
from psworker.training.gradients.overlap import EarlyGradients


def make(numel: int = 2) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(1)) for _ in range(numel)]


def backward(overlap: EarlyGradients, parameters: list[torch.nn.Parameter]) -> None:
    for index, parameter in enumerate(parameters):
        parameter.grad = torch.ones(1)
        overlap.made(index, parameter)


def finish(overlap: EarlyGradients, parameters: list[torch.nn.Parameter]) -> list[int]:
    left = overlap.check(parameters)
    overlap.forget()
    return left


def clip(parameters: list[torch.nn.Parameter]) -> None:
    assert parameters[1].grad is not None
    parameters[1].grad.mul_(0.5)


def replace(parameters: list[torch.nn.Parameter]) -> None:
    parameters[0].grad = torch.ones(1)


def drop(parameters: list[torch.nn.Parameter]) -> None:
    parameters[0].grad = None


CHANGES = [(clip, "'b'"), (replace, "'a'"), (drop, "'a'")]


@pytest.mark.parametrize(("change", "name"), CHANGES)
def test_a_change_after_an_early_push_is_an_error_with_a_name(
    change: Callable[[list[torch.nn.Parameter]], None], name: str
) -> None:
    overlap, parameters = EarlyGradients(True, ["a", "b"]), make()
    for _ in range(2):
        backward(overlap, parameters)
        assert finish(overlap, parameters) == [0, 1]
    backward(overlap, parameters)
    change(parameters)
    with pytest.raises(GradientError, match=f"gradient of {name} was changed after it had been"):
        overlap.check(parameters)


def test_a_second_backward_pass_is_an_error() -> None:
    overlap, parameters = EarlyGradients(True, ["a", "b"]), make()
    backward(overlap, parameters)
    with pytest.raises(GradientError, match="gradient of 'a' got a second gradient after"):
        backward(overlap, parameters)


def test_values_sent_with_a_push_must_not_change_after_it() -> None:
    overlap, parameters = EarlyGradients(True, ["a", "b"]), make()
    overlap.changed("samples")  # Before backward.
    backward(overlap, parameters)
    finish(overlap, parameters)
    overlap.changed("samples")  # Between two steps.
    backward(overlap, parameters)
    with pytest.raises(GradientError, match=r"samples was changed after .*before backward\(\)"):
        overlap.changed("samples")


def test_a_parameter_without_a_gradient_is_no_change() -> None:
    overlap, parameters = EarlyGradients(True, ["a", "b"]), make()
    overlap.made(1, parameters[1])
    assert finish(overlap, parameters) == [1]


def test_a_step_that_is_left_out_is_no_second_gradient() -> None:
    overlap, parameters = EarlyGradients(True, ["a", "b"]), make()
    backward(overlap, parameters)
    assert overlap.has_begun
    overlap.forget()
    assert not overlap.has_begun
    backward(overlap, parameters)
    finish(overlap, parameters)


@pytest.mark.parametrize("overlap", [True, False])
def test_it_is_as_the_user_says(overlap: bool) -> None:
    assert EarlyGradients(overlap, []).is_wanted is overlap


@pytest.mark.parametrize("word", ["maybe", "auto"])
def test_another_word_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=f"overlap is '{word}', must be True .* or False"):
        EarlyGradients(word, [])  # type: ignore[arg-type]
