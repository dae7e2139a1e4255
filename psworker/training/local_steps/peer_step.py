"""The wrapped optimizer's step on this worker, alone or with an exchange with other workers.

In modes with rounds it is the wrapped optimizer's step. In decentralised modes it is that step and
the exchange with other workers, which the mode's gossip decides (psworker/gossip).
"""

from __future__ import annotations

import threading

import numpy as np
import torch

from pscore.errors import ConfigError
from pscore.observe.timeline import recorded
from pscore.rules.base import Rule
from pscore.rules.decentralised import Decentralised
from pscore.types import FloatArray
from psworker.connection.accounts.trace import peer_step
from psworker.gossip import GOSSIPS
from psworker.gossip.base import Model
from psworker.model.copies import on_device, on_host
from psworker.model.grad_views import is_plain
from psworker.peers.peers import Peers
from psworker.training.changes.shared_state import share_state
from psworker.training.local_steps.local_step import LocalStep
from psworker.training.parts import refuse_in_group
from psworker.training.state.optimizer_state import pack, unpack
from psworker.training.table import TrainingTable


class AloneStep(LocalStep):
    """The wrapped optimizer's step."""

    def __init__(self, inner: torch.optim.Optimizer, table: TrainingTable) -> None:
        self._inner = inner
        self._table = table

    def make(self, *, skips: bool) -> None:
        """Makes one step, unless the script leaves it out."""
        if not skips:
            self._update()

    def share_state(self) -> None:
        """Makes the wrapped optimizer's state the mean of those of all workers."""
        share_state(self._inner, self._table)

    def _update(self) -> None:
        table = self._table
        with recorded(table.session.timeline, "local update", step=table.replica.step):
            self._inner.step()
        plan = table.replica.plan()
        if not table.flat.is_sharded or plan.push is not None or plan.lands:
            table.flat.gather_weights()


class PeerStep(AloneStep):
    """The wrapped optimizer's step and an exchange with other workers."""

    def __init__(
        self, rule: Decentralised, inner: torch.optim.Optimizer, table: TrainingTable
    ) -> None:
        """Listens for other workers.

        Raises:
            ConfigError: The mode does not fit the table (`require_peers`), or this worker cannot
                listen.
        """
        super().__init__(inner, table)
        require_peers(table, rule)
        self._rule = rule
        self._skips = self._forgets = False
        self._peers = Peers(table.session, table.exchange.table)
        table.exchange.answers.meanwhile = self._meet_if_moved

    def announce(self) -> None:
        """Reports to the directory that this worker takes part again, and waits for the others."""
        self._peers.table = self._table.exchange.table
        self._peers.announce()
        self._table.session.barrier("exchange")

    def start(self) -> int | None:
        """Meets the other workers with the weights that the model has now."""
        model = Model(
            weights=self._table.flat.weights,
            first_step=self._table.replica.step,
            update=self._update_unless_left_out,
            gather=self._gather,
            scatter=self._scatter,
            pack=self._pack,
            unpack=self._unpack,
            lock=threading.Lock(),
        )
        gossip = GOSSIPS[self._rule.exchange_name](
            self._rule, self._table.session.rank, model, self._peers
        )
        self._peers.table = self._table.exchange.table
        self._peers.drive(gossip)
        self.begin()
        return gossip.number

    def begin(self) -> None:
        """Gives or reads the model with which the next step begins."""
        assert self._peers.gossip is not None
        if self._forgets:
            self._inner.state.clear()
            self._forgets = False
        self._peers.gossip.begin()

    def make(self, *, skips: bool) -> None:
        """Makes one step; one that the script leaves out has the exchange alone."""
        assert self._peers.gossip is not None
        self._skips = skips
        self._forgets = self._rule.forgets and self._table.replica.plan().pull
        if not skips:
            self._table.flat.require_finite(self._number)
        with peer_step(self._table.session.timeline, self._peers.report):
            self._peers.run(self._peers.gossip.step())

    def part(self) -> None:
        """Reports to the others that this worker makes no further step."""
        self._peers.part()

    def close(self) -> None:
        """Closes the connections to other workers."""
        self._table.exchange.answers.meanwhile = None
        self._peers.close()

    def note_average(self, average: torch.Tensor) -> None:
        """Measures the distance of this worker's model to an average, for status."""
        apart = torch.linalg.vector_norm(self._table.flat.weights - average)
        norm, distance = on_host(torch.stack((torch.linalg.vector_norm(average), apart))).tolist()
        self._peers.distance = distance / norm if norm else 0.0

    def _meet_if_moved(self) -> None:
        """Meets workers that come or end, which wait for this one while it waits for shards."""
        peers = self._peers
        if peers.gossip is None or not peers.has_moved:
            return
        if peers.has_parted:
            peers.say_parted()
        else:
            peers.run(peers.gossip.meet())

    # ----- Model

    def _update_unless_left_out(self) -> None:
        if not self._skips:
            self._update()

    def _gather(self) -> FloatArray:
        """Returns the gradient times its weight, the weight, and which parameters have one."""
        flat, table = self._table.flat, self._table
        table.exchange.flush()  # A push of the model may still be read from this memory.
        has = [not self._skips and p.grad is not None for p in flat.parameters]
        for index, is_there in enumerate(has):
            if not is_there:
                flat.clear_grad(index)
        flat.gather_grads([index for index, is_there in enumerate(has) if is_there], self._number)
        weight = 0.0 if self._skips else table.progress.samples
        numel = table.layout.numel
        vector = np.empty(numel + 1 + len(has), np.float32)
        np.multiply(on_host(flat.grads).numpy(), np.float32(weight), out=vector[:numel])
        vector[numel], vector[numel + 1 :] = weight, has
        return vector

    def _scatter(self, total: FloatArray) -> None:
        """Puts the weighted mean of all workers' gradients in place of this worker's."""
        flat, numel = self._table.flat, self._table.layout.numel
        weight = total[numel]
        if weight <= 0:
            return
        self._skips = False  # The others' gradients count here too.
        mean = None
        if flat.device.type != "cpu":
            mean = on_device(torch.from_numpy(total[:numel] / weight), flat.device)
        for index, parameter in enumerate(flat.parameters):
            if total[numel + 1 + index] == 0:
                parameter.grad = None
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if mean is not None:
                parameter.grad.copy_(flat.state_view(mean, index))
                continue
            summed = flat.state_view(total, index).numpy()
            if is_plain(parameter.grad, parameter.numel()):  # Without memory for the mean.
                np.divide(summed, weight, out=parameter.grad.numpy())
            else:
                parameter.grad.copy_(torch.from_numpy(np.asarray(summed / weight)))

    @property
    def _number(self) -> int:
        return self._table.replica.step

    def _pack(self) -> FloatArray:
        """Returns the model and the state of the wrapped optimizer."""
        weights = on_host(self._table.flat.weights).numpy()
        return np.concatenate((weights, pack(self._inner)))

    def _unpack(self, values: FloatArray) -> None:
        """Replaces model and state of the wrapped optimizer by another worker's."""
        flat, numel = self._table.flat, self._table.layout.numel
        unpack(self._inner, values[numel:], flat.parameters)
        flat.weights.copy_(on_device(torch.from_numpy(values[:numel]), flat.device))
        flat.scatter_weights()


def require_peers(table: TrainingTable, rule: Rule) -> None:
    """Refuses a mode whose workers exchange models, where they could not; nothing has changed then.

    Raises:
        ConfigError: The table compresses, this worker is a group of processes, or the way in which
            they exchange does not fit the model or the job.
    """
    if not isinstance(rule, Decentralised):
        return
    spec, session = table.exchange.spec, table.session
    if not (spec.compressor.is_raw and spec.pull_compressor.is_raw):
        raise ConfigError(
            f"in mode {rule} workers exchange whole models: compression and pull_compression must "
            "be 'none'"
        )
    refuse_in_group(rule, table.optimizer, table.group)
    has_tls = session.links[0].credentials.ca is not None
    device = table.flat.weights.device.type
    GOSSIPS[rule.exchange_name].require_fit(rule, device, has_tls=has_tls)


def use_local_steps(table: TrainingTable, inner: torch.optim.Optimizer) -> None:
    """Makes `inner` the optimizer of a table's local steps, in the modes that have them."""

    def make(rule: Rule) -> LocalStep:
        return (
            PeerStep(rule, inner, table)
            if isinstance(rule, Decentralised)
            else AloneStep(inner, table)
        )

    table.make_step, table.local_step = make, make(table.rule)
