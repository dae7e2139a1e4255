"""Paceline's own rules: a line for each, which is its registration."""

from pscore.rules.adpsgd import ADPSGD as ADPSGD
from pscore.rules.allreduce import AllReduce as AllReduce
from pscore.rules.asgd import ASGD as ASGD
from pscore.rules.cd import CD as CD
from pscore.rules.dcasgd import DCASGD as DCASGD
from pscore.rules.delayed_nesterov import DelayedNesterov as DelayedNesterov
from pscore.rules.diloco import DiLoCo as DiLoCo
from pscore.rules.dpsgd import DPSGD as DPSGD
from pscore.rules.local import LocalSGD as LocalSGD
from pscore.rules.od import OD as OD
from pscore.rules.sgp import SGP as SGP
from pscore.rules.slowmo import SlowMo as SlowMo
from pscore.rules.ssd import SSD as SSD
from pscore.rules.ssgd import SSGD as SSGD
from pscore.rules.ssp import SSP as SSP
from pscore.rules.staleness import Staleness as Staleness
