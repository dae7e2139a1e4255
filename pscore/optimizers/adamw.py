"""AdamW, as `torch.optim.AdamW` makes its steps: Adam with weight decay beside the gradient.

Ilya Loshchilov and Frank Hutter, "Decoupled Weight Decay Regularization", ICLR 2019,
arXiv:1711.05101.

    w = (1 - lr * weight_decay) * w               then Adam's step with weight_decay = 0

Differs from the paper: the decay is multiplied by the learning rate, as in torch.
"""

from __future__ import annotations

from pscore.optimizers.adam import Adam


class AdamW(Adam):
    """`torch.optim.AdamW`, and `torch.optim.Adam` with `decoupled_weight_decay=True`."""

    name = "adamw"
    torch_classes = {"AdamW": frozenset(), "Adam": frozenset({"decoupled_weight_decay"})}
    decoupled = True
