"""Compiles the loops of row slices before the first push of a table needs them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pscore.memory.kernels import all_finite
from pscore.rows.optimizers import RowOptimizer
from pscore.rows.partition import BUCKETS
from pscore.rows.payload import Owned, require_owned
from pscore.rows.spec import COUNTER, RowTable, stride_of
from psserver.rows import kernels
from psserver.rows.copying import SlabCopy
from psserver.rows.mapped import Mapped
from psserver.rows.policy import RowPolicy, make_waiting
from psserver.rows.slab import Slab, sum_up
from psserver.rows.undo import Undo

ROOM_NBYTES = 4096


def warm_up(optimizer: RowOptimizer) -> None:
    """Checks, steps, reads, loads and takes back one row, with all loops of a row slice."""
    ids, values = np.zeros(1, np.uint64), np.zeros(1, np.float32)
    # First those that a shard calls while it decides about a push:
    require_owned(ids, Owned(name="", num_rows=1, seed=0, start=0, stop=BUCKETS))
    all_finite(values)
    slab = Slab(1, 1, optimizer, RowTable(), Mapped(stride_of(optimizer, 1)))
    undo = Undo(Mapped(ROOM_NBYTES))
    slab.read(ids, slab.find(ids), 1, values)
    rows = sum_up([(ids, values, 1.0)] * 2, 1)
    table = RowTable(min_count=2, ttl=1)
    policy = RowPolicy(table, slab, make_waiting(1, table, Mapped(stride_of(COUNTER, 1))))
    late = replace(rows, times=rows.times - 1)
    policy.count(policy.decide(late, slab.find_summed(rows, []), 2), 2)
    plan = policy.decide(rows, slab.find(rows.ids), 2).rows
    slab.begin(plan)
    slab.step(plan, rows.values, 1.0, 1, 1, np.full(len(optimizer.hyper_names), 0.5))
    slab.load(plan, values, 1, slab.versions(plan.places))
    copy = SlabCopy(slab, 0)
    copy.keep(plan)
    copy.advance()
    undo.save([(slab, slab.plan(ids))], 0)
    undo.roll_back([slab], 0)
    # Nothing here has expired: the loop is called with no id.
    kernels.remove(np.zeros(1, np.uint64), np.zeros(1, np.int32), slab.init.mask, ids[:0])
