"""The reader of published weights that scripts use: it also writes them into a module of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pscore.subscription.reader import Reader

if TYPE_CHECKING:
    import torch


class Subscriber(Reader):
    """A reader of one table; used by one thread at a time."""

    def into(self, module: torch.nn.Module) -> None:
        """Copies each version that is committed from now on into a module's parameters.

        Only changed elements are written, in place, under `torch.no_grad`. A version that is
        committed already is written now. Buffers (of BatchNorm) are not on the shards.

        `commit` and `wait` write while they run. A thread that computes with the module meanwhile
        may use parts of two versions: keep a lock around its use and around `commit`, with `stage`
        before it, outside of the lock.

        Args:
            module: A module with the job's parameters, on any device and in any dtype.

        Raises:
            ConfigError: It is no module, or its parameters are others.
        """
        from psworker.subscription.module import ModuleTarget

        self.keep(ModuleTarget(module))
