"""The minibatches that a slice has counted, of the pushes that name theirs."""

from __future__ import annotations

from pscore.types import Push
from psserver.decisions.progress import Progress


class Minibatches(Progress):
    """The minibatches counted: all below `clock`, and those in `ahead`.

    A worker of a pipeline that was lost may have pushed a minibatch to some slices and not to
    others. Another worker then computes it again, and each slice counts it once.
    """

    def is_repeated(self, push: Push) -> bool:
        """Returns whether the minibatch of a push is counted already."""
        return push.minibatch >= 0 and push.minibatch in self

    def once(self, push: Push) -> Push:
        """Returns a push as its step takes it: without a weight if its minibatch is counted."""
        return push._replace(samples=0.0, present=0) if self.is_repeated(push) else push

    def note(self, push: Push) -> None:
        """Counts the minibatch of a push, if it names one."""
        if push.minibatch >= 0 and push.minibatch not in self:
            self.add(push.minibatch)
