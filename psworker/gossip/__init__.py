"""State machines of decentralised modes, by the names that modes give (`exchange_name`)."""

from __future__ import annotations

from psworker.gossip.atomic import Atomic
from psworker.gossip.base import Gossip
from psworker.gossip.collective import Collective
from psworker.gossip.mixing import Mixing
from psworker.gossip.pairs import Pairs
from psworker.gossip.push_sum import PushSum
from psworker.gossip.ring import Ring

GOSSIPS: dict[str, type[Gossip]] = {
    gossip.name: gossip for gossip in (Ring, Collective, Mixing, Pairs, Atomic, PushSum)
}
