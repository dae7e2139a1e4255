"""The values that a script reports: newest, finite, few; tokens as a sum and as a rate."""

from typing import Any

import pytest
import torch

from pscore.errors import ConfigError
from psserver.decisions.worker_reports import accepted
from psworker.connection.accounts.reports import Reports
from psworker.connection.accounts.traffic import Traffic, ddp_nbytes


class Clock:
    """Seconds that the test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_the_newest_value_of_each_name_stays() -> None:
    reports = Reports()
    reports.put({"loss": torch.tensor([0.5]), "accuracy": 1})
    before = reports.values
    reports.put({"loss": 0.25})
    assert reports.values == {"loss": 0.25, "accuracy": 1.0}
    assert before == {"loss": 0.5, "accuracy": 1.0}  # Another thread may read it.


def test_a_loss_with_a_gradient_is_taken_without_a_warning() -> None:
    reports = Reports()
    reports.put({"loss": torch.tensor([0.5], requires_grad=True)})
    assert reports.values == {"loss": 0.5}


def test_tokens_add_up_and_have_a_rate() -> None:
    clock = Clock()
    reports = Reports(clock)
    reports.put({"tokens": 100})
    assert reports.values == {"tokens": 100.0}
    clock.now_s += 2.0
    reports.put({"tokens": 300})
    assert reports.values == {"tokens": 400.0, "tokens_per_s": 150.0}


def test_the_rate_is_that_of_the_last_seconds() -> None:
    """1000 a second for a minute, then 10 a second: after another minute nothing of it is left."""
    clock = Clock()
    reports = Reports(clock)
    for step in range(12000):
        clock.now_s += 0.01
        reports.put({"tokens": 10 if step < 6000 else 0.1})
    assert reports.values["tokens_per_s"] == pytest.approx(10.0, rel=1e-3)
    assert reports.values["tokens"] == pytest.approx(60600.0)
    assert len(reports._counts) < 100


def test_bytes_per_token_are_those_of_all_steps_beside_those_of_ddp() -> None:
    """Four workers of DDP send 4 bytes of each of 100 elements one and a half times."""
    reports = Reports(Clock())
    traffic = Traffic(pushed_nbytes=1200, pulled_nbytes=600, num_steps=3)
    reports.put_bytes(traffic, ddp_nbytes(100, 4))
    assert reports.values == {}
    reports.put({"tokens": 60} | {f"n{index}": 1.0 for index in range(15)})
    reports.put_bytes(traffic, ddp_nbytes(100, 4))
    found = [reports.values[f"{what}_bytes_per_token"] for what in ("pushed", "pulled", "ddp")]
    assert found == [20.0, 10.0, 600.0 * 3 / 60]
    assert ddp_nbytes(100, 1) == 0.0
    reports.put({"tokens": 60})  # The values that the worker adds are not among its 16.
    reports.put_bytes(traffic, 0.0)
    assert reports.values["pushed_bytes_per_token"] == 10.0
    assert accepted(reports.values) == dict(sorted(reports.values.items()))


def test_a_value_that_is_not_finite_is_left_out_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reports = Reports()
    reports.put({"loss": 0.5, "tokens": 5})
    for value in (float("nan"), float("inf")):
        reports.put({"loss": value, "tokens": value})
    assert reports.values == {"loss": 0.5, "tokens": 5.0}
    assert len(caplog.messages) == 2
    assert "loss is nan, its last finite value stays" in caplog.messages[0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"a" * 41: 1.0}, r"name 'a{40}', must be an identifier of at most 40"),
        ({"lo ss": 1.0}, "name 'lo ss', must be an identifier"),
        ({"tokens_per_s": 1.0}, "and not tokens_per_s"),
        ({"ddp_bytes_per_token": 1.0}, "and not .*, ddp_bytes_per_token"),
        ({"loss": "low"}, "loss of type str, must be a number or a tensor of one element"),
        ({"loss": torch.zeros(2)}, "loss of type Tensor, must be a number or a tensor of one"),
        ({"tokens": -1}, "tokens is -1, must be 0 or more"),
        ({f"n{index}": 1.0 for index in range(17)}, r"has 17 names, 16 are possible: n0"),
    ],
)
def test_values_that_cannot_be_reported_are_refused(values: dict[str, Any], message: str) -> None:
    reports = Reports()
    with pytest.raises(ConfigError, match=message):
        reports.put(values)
    assert reports.values == {}


def test_too_many_names_are_listed_without_those_that_the_worker_computes() -> None:
    reports = Reports(iter((0.0, 1.0, 2.0)).__next__)
    for _ in range(2):
        reports.put({"tokens": 5})
    with pytest.raises(ConfigError, match=r"17 names, 16 are possible: tokens, n0, .*, n15$"):
        reports.put({f"n{index}": 1.0 for index in range(16)})
