"""The declarations of a wrapper's tables: which tensors, which compressors, which optimizer."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from pscore.compressors.base import Compressor
from pscore.content import Content
from pscore.contents import FLAT, LONG
from pscore.errors import ConfigError
from pscore.json_text import count_of
from pscore.optimizers.base import Optimizer
from pscore.publish.possible import PUBLISH_EVERY_MAX, require_weights
from pscore.rules.base import Rule
from pscore.table_spec import TableSpec
from psworker.compression.error_feedback import choose
from psworker.connection.membership.session import Session
from psworker.model.flat import describe, trained


def is_near(session: Session) -> bool:
    """Returns whether this process is a worker by itself, on the host of all shards."""
    return session.group.is_alone and all(link.transport.is_near for link in session.links)


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """The arguments of a wrapper with which each of its tables is declared."""

    named: Sequence[tuple[str, torch.nn.Parameter]]  # All named parameters of the model.
    compressor: Compressor
    pull_compressor: Compressor
    min_nbytes: int  # Smaller parameters are not compressed; in bytes of float32.
    exclude: Sequence[str]  # Names or patterns of more parameters to leave out.
    # Updates from one version for readers to the next; None: there are none.
    publish_every: int | None = None
    # Parameters of the present table: the next one has them, and their state, also while frozen.
    kept: Sequence[torch.nn.Parameter] = ()

    def __post_init__(self) -> None:
        """Checks what is left out of compression.

        Raises:
            ConfigError: A limit is no number of bytes, or a name or pattern fits no parameter.
        """
        count_of(self.min_nbytes, "compress_min_nbytes", most=1 << 48)
        exclude: object = self.exclude
        if isinstance(exclude, str) or not isinstance(exclude, Iterable):
            raise ConfigError(f"compress_exclude is {self.exclude!r}, must be a list of names")
        names = [name for name, _ in self.named]
        for pattern in self.exclude:
            if not fnmatch.filter(names, str(pattern)):
                raise ConfigError(f"compress_exclude has {pattern!r}, which names no parameter")

    def require_publishable(self, rule: Rule, plugin: Optimizer) -> None:
        """Refuses to publish weights that the shards do not have.

        Raises:
            ConfigError: They do not have them, or `publish_every` is out of range.
        """
        if self.publish_every is not None:
            count_of(self.publish_every, "publish_every", least=1, most=PUBLISH_EVERY_MAX)
            require_weights("model", rule, plugin)

    def content(self, rule: Rule, session: Session) -> Content:
        """Returns the slices that a worker chooses: long ones within one host.

        Where the numbers depend on the slices, which is so for the scales of compressors and for
        fragments, they do not depend on the data plane. A group shares slices out.
        """
        is_raw = self.compressor.is_raw and self.pull_compressor.is_raw
        is_whole = rule.schedule is None or rule.schedule.number == 1
        return LONG if is_raw and is_whole and is_near(session) else FLAT

    def spec(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        rule: Rule,
        plugin: Optimizer,
        session: Session,
    ) -> TableSpec:
        """Returns the declaration of a table of the parameters that are trained now.

        Args:
            optimizer: The optimizer whose groups hold the parameters.

        Raises:
            ConfigError: A parameter has no name, or there is nothing to train.
        """
        names, parameters, groups = trained(optimizer, self.named, self.kept)
        described = describe(list(zip(names, parameters, strict=True)), groups)
        compressors = self.compressor, self.pull_compressor
        marked = choose(described, *compressors, min_nbytes=self.min_nbytes, exclude=self.exclude)
        return TableSpec(
            name=name,
            tensors=tuple(marked),
            num_shards=len(session.links),
            rule=rule,
            compressor=self.compressor,
            optimizer=plugin.name,
            num_groups=len(optimizer.param_groups),
            pull_compressor=self.pull_compressor,
            content=self.content(rule, session),
        )
