"""The processes of one worker: sums and copies among them, through `torch.distributed`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pscore import errors
from pscore.errors import GroupError, PacelineError
from psworker.group.watch import host_name
from psworker.group.worker_group import WorkerGroup

NUMBERS = torch.float64  # Type of the numbers in small collectives.


class Pending:
    """A collective under way."""

    __slots__ = ("_group", "_work")

    def __init__(self, group: LocalGroup, work: dist.Work) -> None:
        self._group = group
        self._work = work

    def is_done(self) -> bool:
        """Returns whether `wait` would return at once; it does not wait for a GPU's stream."""
        return bool(self._work.is_completed())

    def wait(self) -> None:
        """Waits for the result; on a GPU the present stream waits.

        Raises:
            GroupError: A process of the group has ended.
        """
        self._group.await_others(self._work.wait)


class LocalGroup(WorkerGroup):
    """The two or more processes of one worker."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Connects the processes; all of them call it.

        Raises:
            GroupError: A process of the group has ended.
        """
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self._group = group
        self._global = [dist.get_global_rank(group, rank) for rank in range(self.size)]
        kinds = {device.type for device in group._device_types}
        self._small = torch.device("cpu" if "cpu" in kinds else "cuda")
        hosts = [json.loads(text) for text in self._texts(json.dumps(host_name()))]
        if all(host == hosts[0] for host in hosts):
            self.watch.connect(self._text(self.watch.listen() if self.is_leader else ""))

    @property
    def ranks(self) -> list[int]:
        """The ranks of the processes in torch's world, by local rank."""
        return self._global

    # ----- numbers and text

    def sum(self, values: Sequence[float]) -> list[float]:
        """Returns the sums of all processes' values, one by one."""
        total = torch.tensor(values, dtype=NUMBERS, device=self._small)
        self._run(dist.all_reduce, total)
        return list(total.tolist())

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Returns each process's values, by local rank; all give equally many."""
        count = len(values)
        table = [0.0] * (count * self.size)
        table[count * self.rank : count * (self.rank + 1)] = values
        flat = self.sum(table)
        return [flat[count * rank : count * (rank + 1)] for rank in range(self.size)]

    def barrier(self) -> None:
        """Waits for the other processes."""
        self.sum([0.0])

    def _text(self, text: str) -> str:
        """Returns the leader's text."""
        data = text.encode() if self.is_leader else b""
        length = int(self.sum([float(len(data))])[0])
        buffer = torch.zeros(length, dtype=torch.uint8)
        if self.is_leader and length:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        there = buffer.to(self._small)
        if length:
            self._run(dist.broadcast, there, src=self._global[0])
        return bytes(there.cpu().numpy()).decode()

    def led(self, call: Callable[[], Any]) -> Any:
        """Returns the result of the leader's call in all processes, or raises its error in all."""
        answer, problem = "", None
        if self.is_leader:
            try:
                answer = json.dumps({"result": call()})
            except PacelineError as error:
                problem = error
                answer = json.dumps({"error": type(error).__name__, "text": str(error)})
        given = json.loads(self._text(answer))
        if problem is not None:
            raise problem
        if "error" in given:
            raise getattr(errors, given["error"], PacelineError)(given["text"])
        return given["result"]

    # ----- tensors

    def add_at(self, tensor: torch.Tensor, root: int) -> Pending:
        """Starts to add up a tensor at process `root`; elsewhere its values are lost."""
        return self._start(dist.reduce, tensor, dst=self._global[root])

    def add(self, tensor: torch.Tensor) -> Pending:
        """Starts to add up a tensor at all processes, to the same bits."""
        return self._start(dist.all_reduce, tensor)

    def share(self, tensors: Sequence[torch.Tensor], owners: Sequence[int]) -> None:
        """Copies each tensor of the process that owns it to the others, all at the same time."""
        for copy in [
            self._start(dist.broadcast, tensor, src=self._global[owner])
            for tensor, owner in zip(tensors, owners, strict=True)
        ]:
            copy.wait()

    def exchange(
        self,
        taken: torch.Tensor,
        given: torch.Tensor,
        counts_taken: Sequence[int],
        counts_given: Sequence[int],
    ) -> Pending:
        """Starts to send a part of `given` to each process, and to receive a part from each.

        Args:
            taken: Flat memory for the parts of all processes, in the order of their local ranks.
            given: The parts for all processes, likewise.
            counts_taken: Elements from each process.
            counts_given: Elements for each process.
        """
        sizes = {"output_split_sizes": list(counts_taken), "input_split_sizes": list(counts_given)}
        return self._start(dist.all_to_all_single, taken, input=given, **sizes)

    def sum_on_host(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sum of all processes' tensors, on the host."""
        there = values.to(self._small)
        self.add(there).wait()
        return there.cpu()

    def await_others(self, call: Callable[[], object]) -> None:
        """Makes a call that waits for the other processes.

        Raises:
            GroupError: A process of the group has ended.
        """
        with self.watch.waits():
            try:
                call()
            except RuntimeError as problem:  # Torch's backends raise it.
                raise GroupError(self.watch.explain(str(problem))) from problem

    def _run(self, collective: Callable[..., Any], tensor: torch.Tensor, **how: int) -> None:
        self.await_others(lambda: collective(tensor, group=self._group, **how))

    def _start(self, collective: Callable[..., Any], tensor: torch.Tensor, **how: Any) -> Pending:
        self.watch.check()
        try:
            work = collective(tensor, group=self._group, async_op=True, **how)
        except RuntimeError as problem:
            raise GroupError(self.watch.explain(str(problem))) from problem
        return Pending(self, work)

    def _texts(self, text: str) -> list[str]:
        """Returns each process's text, by local rank."""
        data = text.encode()
        longest = int(max(count for (count,) in self.gather([float(len(data))])))
        codes = self.gather([*map(float, data), *[0.0] * (longest - len(data))])
        return [bytes(int(code) for code in row if code).decode() for row in codes]
