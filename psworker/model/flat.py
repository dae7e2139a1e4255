"""The model's parameters and gradients as flat vectors.

Gradients are copied into the flat vector after backward has made them; on the CPU the same pass
checks them for NaN and Inf. The weights of float32 parameters are views of the flat weights, so a
change of the vector is a change of the model; parameters of another type are cast.
"""

from __future__ import annotations

import ctypes
import logging
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from pscore.errors import ConfigError
from pscore.memory import streaming
from pscore.partition import Layout
from pscore.types import FloatArray, TensorSpec
from psworker.model.copies import CopyEnd, copies_of
from psworker.model.device import is_on_device
from psworker.model.dtensors import is_dtensor
from psworker.model.finite import first_not_finite, is_finite, not_finite
from psworker.model.grad_views import GradViews, dense, is_plain

log = logging.getLogger("paceline")
COMPARED_NUMEL = 1 << 24  # Elements that a device compares at once.
_compare = ctypes.CDLL(None).memcmp
_compare.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def trained(
    optimizer: torch.optim.Optimizer,
    named: Iterable[tuple[str, torch.nn.Parameter]],
    kept: Iterable[torch.nn.Parameter] = (),
) -> tuple[list[str], list[torch.nn.Parameter], list[int]]:
    """Returns names, parameters and groups of the trained parameters, in the order of `named`.

    Args:
        kept: Parameters that count as trained though they are frozen now.

    Raises:
        ConfigError: The optimizer has a parameter without a name, there is nothing to train, or
            parameters are on several devices, or on none that holds numbers.
    """
    group_of = {
        id(parameter): index
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    names: list[str] = []
    parameters: list[torch.nn.Parameter] = []
    known: set[int] = set()
    kept_ids = {id(parameter) for parameter in kept}
    for name, parameter in named:
        refuse_joined(name, parameter)
        _refuse_unmade(name, parameter)
        is_trained = _can_train(parameter) or id(parameter) in kept_ids
        if is_trained and id(parameter) in group_of and id(parameter) not in known:
            known.add(id(parameter))
            names.append(name)
            parameters.append(parameter)
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if _can_train(parameter) and id(parameter) not in known:
                raise ConfigError(
                    f"parameter {position} of group {index} {list(parameter.shape)} is in the "
                    "optimizer but not in named_parameters; pass model.named_parameters() of the "
                    "whole model, and give a layer that is made later a DistributedOptimizer of "
                    "its own"
                )
    if not parameters:
        raise ConfigError("the optimizer has no parameter that requires a gradient")
    _refuse_devices(parameters)
    _refuse_shared(names, parameters)
    return names, parameters, [group_of[id(parameter)] for parameter in parameters]


def _advise_trainer() -> str:
    """Returns advice for a script that has imported the Trainer of Transformers; else nothing."""
    if "transformers.trainer" not in sys.modules:
        return ""
    return (
        "; transformers.Trainer moves it in train(): use "
        "psworker.integrations.transformers.PacelineTrainer in its place"
    )


def refuse_joined(name: str, parameter: torch.Tensor) -> None:
    """Refuses a parameter that FSDP1 has joined with others.

    Raises:
        ConfigError: It belongs to FSDP1, whose parameters have no names of their own.
    """
    if getattr(parameter, "_fsdp_flattened", False) or "_flat_param" in name:
        raise ConfigError(
            f"parameter {name!r} belongs to FullyShardedDataParallel, which joins several tensors "
            "in one; shard the model with torch.distributed.fsdp.fully_shard(model) instead "
            "(docs/hosts.md)"
        )


def _refuse_unmade(name: str, parameter: torch.Tensor) -> None:
    """Refuses a parameter that cannot be trained as it is."""
    if is_lazy(parameter):
        raise ConfigError(
            f"parameter {name!r} has no shape yet (a lazy module); call the model with a batch "
            "before DistributedOptimizer is made"
        )
    if parameter.is_inference():
        raise ConfigError(
            f"parameter {name!r} was made inside torch.inference_mode(): make the model outside"
        )


def _refuse_devices(parameters: Sequence[torch.nn.Parameter]) -> None:
    devices = {parameter.device for parameter in parameters}
    if len(devices) != 1 or next(iter(devices)).type == "meta":
        listed = ", ".join(sorted(str(device) for device in devices))
        raise ConfigError(f"the parameters are on {listed}, must be on one device with memory")


def _refuse_shared(names: Sequence[str], parameters: Sequence[torch.nn.Parameter]) -> None:
    """Refuses parameters that share memory: as views of the flat weights they would part."""
    end, before = 0, ""
    whole = [pair for pair in zip(names, parameters, strict=True) if not is_dtensor(pair[1])]
    for name, parameter in sorted(whole, key=lambda pair: pair[1].data_ptr()):
        if any(
            n > 1 and not step for n, step in zip(parameter.shape, parameter.stride(), strict=True)
        ):
            raise ConfigError(
                f"parameter {name!r} is expanded, so several elements have one place in memory; "
                "make it of tensor.clone()"
            )
        start = parameter.data_ptr()
        if parameter.is_contiguous() and start:
            if start < end:
                raise ConfigError(
                    f"parameters {before!r} and {name!r} share memory; use one torch.nn.Parameter "
                    "in both places, or make one of tensor.clone()"
                )
            end, before = start + parameter.nbytes, name


def _can_train(parameter: torch.nn.Parameter) -> bool:
    return parameter.requires_grad and parameter.numel() > 0


def describe(
    named: Sequence[tuple[str, torch.nn.Parameter]], groups: Sequence[int]
) -> list[TensorSpec]:
    """Returns the declarations of parameters; `groups` are their parameter groups."""
    return [
        TensorSpec(
            name=name,
            shape=tuple(parameter.shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            group=group,
        )
        for (name, parameter), group in zip(named, groups, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Compared:
    """A comparison of gradients on a device with those that have left."""

    indices: list[int]  # The parameters.
    flags: torch.Tensor  # (len(indices),) bool on the host: whether each has changed.
    done: CopyEnd  # The end of the copy of `flags`.


def _differ(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Returns whether the tensors of each pair differ, `(len(pairs),) bool`, by few kernels.

    NaN counts as equal: finite.py refuses it.
    """
    norms: list[torch.Tensor] = []
    first, numel = 0, 0
    for index, (flat, _) in enumerate(pairs):
        numel += flat.numel()
        if numel >= COMPARED_NUMEL or index == len(pairs) - 1:  # Bounds the differences' memory.
            ours, theirs = zip(*pairs[first : index + 1], strict=True)
            norms += torch._foreach_norm(torch._foreach_sub(ours, theirs), math.inf)
            first, numel = index + 1, 0
    return torch.stack(norms) > 0.0


class FlatModel:
    """Flat gradients and weights of a model on one device."""

    is_sharded = False  # Whether each process of a group holds a part of the model (sharded.py).

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        layout: Layout,
        grads: FloatArray | None = None,
        *,
        has_views: bool = False,
    ) -> None:
        """Copies the weights into a flat vector and makes the parameters views of it.

        Args:
            parameters: The parameters, in the order of `layout.tensors`.
            grads: `(layout.numel,) float32` zeros for the gradients of a model on the CPU.
            has_views: Whether parts of `grads` may become `.grad` (grad_views.py).
        """
        self.layout = layout
        self.parameters = list(parameters)
        self.device = parameters[0].device
        if grads is not None and not is_on_device(parameters[0]):
            self.grads = torch.from_numpy(grads)
        else:
            self.grads = torch.zeros(layout.numel, device=self.device, dtype=torch.float32)
        self.weights = torch.zeros(layout.numel, device=self.device, dtype=torch.float32)
        # Made once, because steps without a push need them too, and each takes microseconds.
        self._grads_of = [self.grads[spec.start : spec.stop] for spec in layout.slices]
        self._grads_host = None if is_on_device(self.grads) else self.grads.numpy()
        starts = np.array(layout.offsets, dtype=np.int64)
        numels = [spec.numel for spec in layout.tensors]
        self._spans = np.stack((starts, starts + numels), axis=1)
        if has_views and self._grads_host is None:
            log.warning("gradient_as_bucket_view=True has no effect on %s", self.device)
        self.views = GradViews(self.parameters, layout, self._grads_host if has_views else None)
        # The parameters' parts of the gradients of a device, as `state_view` returns them.
        self._places: list[torch.Tensor] = []
        if self._grads_host is None:
            self._places = [self.state_view(self.grads, index) for index in range(len(starts))]
        self._cast: list[int] = []  # Parameters that are not views of the weights.
        self._homes: dict[int, int] = {}  # Addresses in the flat weights of the other parameters.
        self.gather_weights()
        self._adopt_weights()
        self._has_warned = False
        self._copies = copies_of(self.device)
        self._compared: _Compared | None = None
        self.note_weights()

    def _adopt_weights(self) -> None:
        """Makes the parameters views of the flat weights, where their type allows it."""
        for index, parameter in enumerate(self.parameters):
            if parameter.dtype == torch.float32 and parameter.is_contiguous():
                # With a storage of its own size: a layer is saved alone, and safetensors takes it.
                whole = torch.utils.dlpack.from_dlpack(self.weight(index))
                parameter.data = whole.view(parameter.shape)
                self._homes[index] = parameter.data_ptr()
            else:
                self._cast.append(index)

    @property
    def has_casts(self) -> bool:
        """Whether some parameters are not views of the flat weights."""
        return bool(self._cast)

    def weight(self, index: int) -> torch.Tensor:
        """Returns parameter `index`'s part of the flat weights, `(numel,) float32`."""
        start = self.layout.offsets[index]
        return self.weights[start : start + self.layout.tensors[index].numel]

    def gather_weights(self) -> None:
        """Copies the parameters into the flat weights, unless they are views of them."""
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters):
                if parameter.data_ptr() != self._homes.get(index):
                    self.weight(index).copy_(parameter.detach().reshape(-1))

    def scatter_weights(self) -> None:
        """Casts the flat weights into the parameters that are not views of them."""
        with torch.no_grad():
            for index in self._cast:
                parameter = self.parameters[index]
                parameter.copy_(self.weight(index).view(parameter.shape))

    @property
    def here(self) -> Sequence[int]:
        """The slices of which this process's model has a part."""
        return range(len(self.layout.slices))

    def placed(self, weights: torch.Tensor) -> torch.Tensor:
        """Returns `(layout.numel,) float32` weights of the host for `swap_weights`."""
        return weights.to(self.device)

    def swap_weights(self, other: torch.Tensor) -> None:
        """Swaps the weights of the model with `other`, `(layout.numel,) float32` on its device."""
        for spec in self.layout.slices:  # So that memory for one slice is enough.
            ours, theirs = self.weights[spec.start : spec.stop], other[spec.start : spec.stop]
            kept = ours.clone()
            ours.copy_(theirs)
            theirs.copy_(kept)
        self.scatter_weights()

    def note_weights(self) -> None:
        """Records the parameters' versions as written by the optimizer."""
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        return [parameter._version for parameter in self.parameters]

    def changed_weights(self) -> str | None:
        """Returns the name of the first parameter changed in place since then, or None."""
        for index, version in enumerate(self._versions_now()):
            if version != self._versions[index]:
                return self.layout.tensors[index].name
        return None

    def warn_of_changes(self) -> None:
        """Warns once if the script has changed weights, which changes nothing on the shards."""
        name = None if self._has_warned else self.changed_weights()
        if name is not None:
            self._has_warned = True
            log.warning(
                "the weights of %r were changed in place, not by this optimizer; training "
                "continues from the shards' weights: load weights before DistributedOptimizer is "
                "made, or call its load_state_dict after it; to change weights in each step "
                "(weight clipping, max_norm of an embedding), pass optimizer_on='worker' in ssgd",
                name,
            )

    def check_weights(self) -> None:
        """Raises ConfigError for parameters whose memory was replaced since the start."""
        for index, home in self._homes.items():
            if self.parameters[index].data_ptr() != home:
                raise ConfigError(
                    f"parameter {self.layout.tensors[index].name!r} was given other memory "
                    "(model.to(), share_memory(), or an assignment to .data) after "
                    f"DistributedOptimizer was made; move the model before{_advise_trainer()}"
                )

    def grads_of(self, index: int) -> torch.Tensor:
        """Returns the flat gradient of slice `index`, `(numel,) float32`."""
        return self._grads_of[index]

    def present(self, index: int) -> int:
        """Returns which segments of slice `index` have a gradient: bit i stands for segment i."""
        segments = self.layout.slices[index].segments
        has = [self.parameters[segment.tensor].grad is not None for segment in segments]
        return sum(bit << position for position, bit in enumerate(has))

    def gather_grads(self, indices: Iterable[int], step: int) -> None:
        """Copies the gradients of parameters into the flat vector.

        Raises:
            GradientError: One is on the CPU and holds NaN or Inf.
        """
        if self._grads_host is None:
            self._gather_on_device(indices)
            return
        plain, addresses = [], []
        for index in indices:
            grad = self.parameters[index].grad
            assert grad is not None
            if is_plain(grad, self.parameters[index].numel()):
                plain.append(index)
                addresses.append(grad.data_ptr())
            else:
                self._cast_grad(index, grad, step)
        if plain:
            places = np.array(addresses, dtype=np.int64)
            bad = streaming.gather(places, self._spans[plain], self._grads_host)
            if bad >= 0:
                grad = self.parameters[plain[bad]].grad
                assert grad is not None
                raise not_finite(self.layout.tensors[plain[bad]].name, grad, step)

    def require_finite(self, step: int) -> None:
        """Refuses gradients that hold NaN or Inf; waits once for a device.

        Args:
            step: Step of the gradients, for the message.

        Raises:
            GradientError: Names the first one.
        """
        made = [index for index, one in enumerate(self.parameters) if one.grad is not None]
        grads = [dense(grad) for one in self.parameters if (grad := one.grad) is not None]
        place = first_not_finite(grads)
        if place is not None:
            raise not_finite(self.layout.tensors[made[place]].name, grads[place], step)

    def changed_grad(self, indices: Iterable[int]) -> int | None:
        """Returns a parameter whose gradient has changed since it was gathered, or None.

        On a device the comparison only starts, and `changed_before` has its result.
        """
        compared: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for index in indices:
            parameter, start = self.parameters[index], self.layout.offsets[index]
            grad = parameter.grad
            assert grad is not None
            if self._grads_host is None:
                part = self._places[index]
                compared[index] = part, dense(grad).to(part.dtype)
                continue
            part = self.grads[start : start + parameter.numel()]
            if not self._is_as_gathered(index, grad, part):
                return index
        if compared:
            flags = _differ([*compared.values()])
            host = torch.empty_like(flags, device="cpu", pin_memory=flags.device.type == "cuda")
            self._compared = _Compared([*compared], host, self._copies.to_host((host, flags)))
        return None

    def changed_before(self, *, waits: bool) -> int | None:
        """Returns a gradient that the last comparison on a device has found changed, once, or None.

        Args:
            waits: Whether to wait for the comparison; else None is returned before it is over.
        """
        compared = self._compared
        if compared is None or not (waits or compared.done.is_over()):
            return None
        self._compared = None
        compared.done.wait()
        changed = compared.flags.tolist()
        return compared.indices[changed.index(True)] if any(changed) else None

    def _is_as_gathered(self, index: int, grad: torch.Tensor, part: torch.Tensor) -> bool:
        """Returns whether a gradient on the CPU equals its part of the vector."""
        if self.views.has(index):
            return self.views.is_stamped(index)
        if is_plain(grad, part.numel()):  # Needs less than half of the time of `torch.equal`.
            return bool(_compare(grad.data_ptr(), part.data_ptr(), part.nbytes) == 0)
        return torch.equal(part.view(grad.shape), dense(grad).to(part.dtype))

    def _cast_grad(self, index: int, grad: torch.Tensor, step: int) -> None:
        """Copies a gradient of another type, layout or memory order into the flat vector."""
        part = self.state_view(self.grads, index)
        part.copy_(dense(grad))
        if not is_finite(part):
            raise not_finite(self.layout.tensors[index].name, dense(grad), step)

    def _gather_on_device(self, indices: Iterable[int]) -> None:
        """Copies gradients into the flat vector by few kernels; `finite.py` checks them later."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ConfigError(
                "gradients cannot be pushed while a CUDA graph is captured, since its replays "
                "would push nothing: capture forward and backward alone, with overlap=False, and "
                "call step() outside of the graph"
            )
        places, grads = [], []
        for index in indices:
            grad = self.parameters[index].grad
            assert grad is not None
            places.append(self._places[index])
            grads.append(dense(grad))
        if places:
            with torch.no_grad():
                torch._foreach_copy_(places, grads)

    def clear_grad(self, index: int) -> None:
        """Sets the flat gradient of parameter `index` to zero, since it has none in this step."""
        start = self.layout.offsets[index]
        self.grads[start : start + self.parameters[index].numel()].zero_()

    def state_view(self, flat: np.ndarray | torch.Tensor, index: int) -> torch.Tensor:
        """Returns parameter `index`'s part of a flat `(numel,)` state, in its shape."""
        start, spec = self.layout.offsets[index], self.layout.tensors[index]
        whole = flat if isinstance(flat, torch.Tensor) else torch.from_numpy(flat)
        return whole[start : start + spec.numel].view(spec.shape)
