"""The flat vector of a model: gradients in, weights out, and refusals."""

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import save_model

from pscore.errors import ConfigError, GradientError
from pscore.partition import Layout, make_layout
from psworker.model.flat import FlatModel, describe, trained


def make_parameters() -> dict[str, torch.nn.Parameter]:
    """Returns a matrix, a scalar, a transposed matrix, and one of half precision."""
    return {
        "matrix": torch.nn.Parameter(torch.arange(6.0).view(2, 3)),
        "scalar": torch.nn.Parameter(torch.tensor(7.0)),
        "transposed": torch.nn.Parameter(torch.arange(8.0).view(4, 2).t()),
        "half": torch.nn.Parameter(torch.tensor([1.0, 2.0]).bfloat16()),
    }


def layout_of(parameters: dict[str, torch.nn.Parameter], num_shards: int = 1) -> Layout:
    return make_layout(describe(list(parameters.items()), [0] * len(parameters)), num_shards)


def make_bucket() -> tuple[dict[str, torch.nn.Parameter], FlatModel]:
    parameters = make_parameters()
    return parameters, FlatModel(list(parameters.values()), layout_of(parameters))


def test_a_declaration_has_name_shape_type_and_group() -> None:
    (spec,) = describe([("half", make_parameters()["half"])], [3])
    assert (spec.name, spec.shape, spec.dtype, spec.group) == ("half", (2,), "bfloat16", 3)


def test_the_weights_are_those_of_the_model_in_their_places() -> None:
    parameters, flat_model = make_bucket()
    for index, parameter in enumerate(parameters.values()):
        assert flat_model.weight(index).tolist() == parameter.detach().float().flatten().tolist()
    values = sum(parameter.numel() for parameter in parameters.values())
    assert (
        int(flat_model.weights.count_nonzero()) == values - 2
    )  # Two zeros; the gaps are zeros too.


def test_contiguous_float32_parameters_are_views_on_the_weights() -> None:
    parameters, flat_model = make_bucket()
    flat_model.weights.fill_(5.0)
    assert parameters["matrix"].tolist() == [[5.0] * 3] * 2
    assert parameters["scalar"].item() == 5.0
    assert parameters["half"].tolist() == [1.0, 2.0]
    assert flat_model.has_casts


def test_a_parameter_is_saved_without_the_others(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    FlatModel(list(model.parameters()), layout_of(dict(model.named_parameters())))
    assert [one.untyped_storage().nbytes() for one in model.parameters()] == [24, 8]
    save_model(model, str(tmp_path / "model.safetensors"))


def test_other_parameters_are_cast_when_weights_are_scattered() -> None:
    parameters, flat_model = make_bucket()
    flat_model.weights.copy_(torch.arange(float(len(flat_model.weights))) + 0.001)
    flat_model.scatter_weights()
    start = flat_model.layout.offsets[2]
    assert not parameters["transposed"].is_contiguous()
    expected = torch.arange(8.0).view(2, 4) + start + 0.001
    torch.testing.assert_close(parameters["transposed"].detach(), expected)
    assert parameters["half"].dtype == torch.bfloat16
    half = flat_model.weight(3).bfloat16()
    assert torch.equal(parameters["half"].detach(), half)


def test_weights_that_were_loaded_into_the_model_are_gathered() -> None:
    parameters, flat_model = make_bucket()
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.fill_(3.0)
    flat_model.gather_weights()
    for index in range(4):
        assert flat_model.weight(index).unique().tolist() == [3.0]  # type: ignore[no-untyped-call]


def test_gradients_of_any_layout_and_type_are_gathered() -> None:
    parameters, flat_model = make_bucket()
    for number, parameter in enumerate(parameters.values()):
        parameter.grad = torch.full_like(parameter, 1.0 + number)
    parameters["transposed"].grad = torch.arange(8.0).view(4, 2).t()
    parameters["matrix"].grad = torch.arange(6.0).view(3, 2).t()
    flat_model.gather_grads(range(4), step=0)

    def part(index: int) -> list[float]:
        values: list[float] = flat_model.state_view(flat_model.grads, index).flatten().tolist()
        return values

    assert part(0) == [0.0, 2.0, 4.0, 1.0, 3.0, 5.0]
    assert part(1) == [2.0]
    assert part(2) == [0.0, 2.0, 4.0, 6.0, 1.0, 3.0, 5.0, 7.0]
    assert part(3) == [4.0, 4.0]
    flat_model.clear_grad(0)
    assert part(0) == [0.0] * 6
    assert part(1) == [2.0]


def test_gradients_lie_in_the_memory_that_is_given() -> None:
    parameters = make_parameters()
    layout = layout_of(parameters)
    given = np.zeros(layout.numel, np.float32)
    flat_model = FlatModel(list(parameters.values()), layout, given)
    parameters["scalar"].grad = torch.tensor(9.0)
    flat_model.gather_grads([1], step=0)
    assert given[layout.offsets[1]] == 9.0
    assert np.count_nonzero(given) == 1


def test_the_gradient_of_a_slice_is_a_view() -> None:
    parameters = {"wide": torch.nn.Parameter(torch.zeros(10_000))}
    layout = layout_of(parameters, num_shards=2)
    flat_model = FlatModel(list(parameters.values()), layout)
    flat_model.grads.copy_(torch.arange(float(layout.numel)))
    for spec in layout.slices:
        part = flat_model.grads_of(spec.index)
        assert part[0].item() == spec.start
        assert len(part) == spec.numel
        assert part.data_ptr() == flat_model.grads[spec.start :].data_ptr()


@pytest.mark.parametrize("name", ["matrix", "transposed", "half"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_is_refused_by_name(name: str, value: float) -> None:
    parameters, flat_model = make_bucket()
    grad = torch.zeros_like(parameters[name])
    grad[(-1,) * grad.ndim] = value
    parameters[name].grad = grad
    message = f"gradient of '{name}' holds 1 NaN or Inf of {grad.numel()} elements at step 4"
    with pytest.raises(GradientError, match=message):
        flat_model.gather_grads([list(parameters).index(name)], step=4)


def test_of_several_gradients_the_one_that_is_not_finite_is_named() -> None:
    parameters, flat_model = make_bucket()
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    grad = parameters["transposed"].grad
    assert grad is not None
    grad[0, 0] = float("nan")
    with pytest.raises(GradientError, match="gradient of 'transposed' holds 1 NaN or Inf of 8"):
        flat_model.gather_grads(range(4), step=0)


def test_a_negated_view_is_gathered_as_what_it_stands_for() -> None:
    parameters, flat_model = make_bucket()
    parameters["scalar"].grad = torch._neg_view(torch.tensor(4.0))
    flat_model.gather_grads([1], step=0)
    assert flat_model.state_view(flat_model.grads, 1).item() == -4.0


def test_a_sparse_gradient_is_gathered_as_a_dense_one() -> None:
    parameters, flat_model = make_bucket()
    shape = parameters["matrix"].shape
    dense = torch.zeros(shape)
    dense[0, 1] = 4.0
    parameters["matrix"].grad = dense.to_sparse()
    index = list(parameters).index("matrix")
    flat_model.gather_grads([index], step=0)
    assert torch.equal(flat_model.state_view(flat_model.grads, index).reshape(shape), dense)


@pytest.mark.parametrize(("devices", "listed"), [(["meta"] * 4, "meta"), (["cpu", "meta"], "cpu")])
def test_parameters_must_be_on_one_device_that_holds_numbers(
    devices: list[str], listed: str
) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2, device=device)) for device in devices]
    named = [(str(index), weight) for index, weight in enumerate(parameters)]
    with pytest.raises(ConfigError, match=f"the parameters are on {listed}.*, must be on one"):
        trained(torch.optim.SGD(parameters, lr=0.1), named)


def test_a_parameter_that_was_given_other_memory_is_refused_by_name() -> None:
    parameters, flat_model = make_bucket()
    flat_model.check_weights()
    with torch.no_grad():
        parameters["matrix"].fill_(2.0)
        parameters["half"].data = torch.zeros(2).bfloat16()  # It is cast anyway.
    flat_model.check_weights()
    parameters["scalar"].data = torch.tensor(1.0)
    with pytest.raises(ConfigError, match="parameter 'scalar' was given other memory"):
        flat_model.check_weights()


def test_the_trainer_that_moves_a_model_is_named_where_it_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parameters, flat_model = make_bucket()
    parameters["scalar"].data = torch.tensor(1.0)
    monkeypatch.setitem(sys.modules, "transformers.trainer", ModuleType("trainer"))
    with pytest.raises(ConfigError, match=r"use psworker\.integrations\.\S+\.PacelineTrainer in"):
        flat_model.check_weights()


def test_a_change_in_place_by_others_is_seen_and_ones_own_is_not() -> None:
    parameters, flat_model = make_bucket()
    flat_model.weights.add_(1.0)
    flat_model.weights.numpy()[:] = 3.0
    assert flat_model.changed_weights() is None
    flat_model.scatter_weights()
    flat_model.note_weights()
    assert flat_model.changed_weights() is None
    with torch.no_grad():
        parameters["transposed"].clamp_(-1.0, 1.0)
    assert flat_model.changed_weights() == "transposed"
    flat_model.note_weights()
    assert flat_model.changed_weights() is None


@pytest.mark.parametrize(
    ("name", "mark", "text"),
    [
        ("layer.weight", "_fsdp_flattened", "belongs to FullyShardedDataParallel"),
        ("_fsdp_wrapped_module._flat_param", "", "belongs to FullyShardedDataParallel"),
    ],
)
def test_parameters_of_fsdp1_are_refused_by_name(name: str, mark: str, text: str) -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    if mark:
        setattr(weight, mark, True)
    with pytest.raises(ConfigError, match=text):
        trained(torch.optim.SGD([weight], lr=0.1), [(name, weight)])


@pytest.mark.parametrize("at_once", [1, 7, 1 << 24])
def test_gradients_of_a_device_are_compared_while_the_step_continues(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr("psworker.model.flat.is_on_device", lambda _: True)
    monkeypatch.setattr("psworker.model.flat.COMPARED_NUMEL", at_once)
    parameters, flat_model = make_bucket()
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)
    every = range(len(parameters))
    flat_model.gather_grads(every, step=0)
    assert flat_model.changed_grad(every) is None
    assert flat_model.changed_before(waits=True) is None
    for index, parameter in enumerate(parameters.values()):
        assert parameter.grad is not None
        kept = parameter.grad.clone()
        parameter.grad.data.reshape(-1)[-1:].neg_()  # Torch does not count it.
        assert flat_model.changed_grad(every) is None
        assert flat_model.changed_before(waits=False) == index
        assert flat_model.changed_before(waits=True) is None  # It is reported once.
        parameter.grad.data.copy_(kept)


def test_nan_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psworker.model.flat.is_on_device", lambda _: True)
    parameters, flat_model = make_bucket()
    parameters["matrix"].grad = torch.full((2, 3), float("nan"))
    flat_model.gather_grads([0], step=0)
    flat_model.changed_grad([0])
    assert flat_model.changed_before(waits=True) is None


def test_a_parameter_without_a_shape_is_refused_by_name() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LazyLinear(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"'1.weight' has no shape yet \(a lazy module\)"):
        trained(optimizer, model.named_parameters())


def test_a_capture_of_a_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psworker.model.flat.is_on_device", lambda _: True)
    parameters, flat_model = make_bucket()
    parameters["matrix"].grad = torch.ones(2, 3)
    monkeypatch.setattr(flat_model, "device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ConfigError, match="CUDA graph is captured"):
        flat_model.gather_grads([0], step=0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    flat_model.gather_grads([0], step=0)


def test_views_that_a_device_does_not_have_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("psworker.model.flat.is_on_device", lambda _: True)
    parameters, first = make_bucket()
    FlatModel([*parameters.values()], first.layout, has_views=False)
    assert not caplog.messages
    FlatModel([*parameters.values()], first.layout, has_views=True)
    assert caplog.messages == ["gradient_as_bucket_view=True has no effect on cpu"]
