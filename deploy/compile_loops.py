"""Compiles the loops of shards and workers into NUMBA_CACHE_DIR, when an image is built."""

import numpy as np

from pscore.compressors import COMPRESSORS, parse_compressor
from pscore.compressors.base import LARGEST, ORIGIN
from pscore.local import LOCAL_UPDATES
from pscore.local.base import ElementwiseUpdate
from pscore.memory import kernels, streaming
from pscore.optimizers import OPTIMIZERS
from pscore.publish import codec
from pscore.rows import batches
from pscore.rows.optimizers import ROW_OPTIMIZERS
from pscore.rules.base import Memory
from pscore.rules.dcasgd import DCASGD
from psserver.publish import publications
from psserver.stores import kind_of

NUMEL = 64

for optimizer in OPTIMIZERS.own.values():
    kind_of("flat").warm_up(optimizer())
for row_optimizer in ROW_OPTIMIZERS.values():
    kind_of("rows").warm_up(row_optimizer())
batches.warm_up()
publications.warm_up()
for read in codec.READERS.values():
    read(np.zeros(8, np.uint8), np.zeros(8, np.uint16))
values, out = np.ones((2, NUMEL), np.float32)
for copy in (kernels.copy_checked, streaming.copy_checked):
    copy(values, out)
streaming.gather(kernels.addresses([values]), np.array([[0, NUMEL]]), out)
kernels.sum_all([values, values, values], [1.0, 1.0, 1.0], out)
NAMES = [name + form for name, kind in COMPRESSORS.own.items() for form in kind.examples]
for name in (*NAMES, "dgc(nesterov=True, clip=1.0)"):
    compressor = parse_compressor(name)
    names = [*compressor.state_names, *([ORIGIN] if compressor.needs_origin else [])]
    state = {name: np.zeros(NUMEL, np.float32) for name in names} | {
        LARGEST: np.ones(1, np.float32)
    }
    room = np.empty(compressor.payload_nbytes_max(NUMEL), np.uint8)
    payload = room[: compressor.encode(values, state, room, seed=1)]
    compressor.check(payload, NUMEL)
    for assign in (True, False):
        compressor.decode_add(payload, out, 1.0, assign=assign)
for update in LOCAL_UPDATES.values():
    if issubclass(update, ElementwiseUpdate):
        update().warm_up()
memory = Memory(weights=values)
for rule in (DCASGD(), DCASGD(adaptive=True)):
    rule.on_pull(0, memory)
    rule.compensate(out, 0, memory)
