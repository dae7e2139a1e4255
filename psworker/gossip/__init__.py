"""State machines of decentralised modes, by name; a mode names its own (`Rule.gossip`)."""

from __future__ import annotations

from psworker.gossip.base import Gossip
from psworker.gossip.mixing import Mixing
from psworker.gossip.pairs import Pairs
from psworker.gossip.push_sum import PushSum
from psworker.gossip.ring import Ring

GOSSIPS: dict[str, type[Gossip]] = {
    gossip.name: gossip for gossip in (Ring, Mixing, Pairs, PushSum)
}
