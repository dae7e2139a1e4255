"""Paceline's own compressors: a line for each, which is its registration."""

from pscore.compressors.bf16 import BF16 as BF16
from pscore.compressors.dgc import DGC as DGC
from pscore.compressors.fp16 import FP16 as FP16
from pscore.compressors.int8 import Int8 as Int8
from pscore.compressors.natural import Natural as Natural
from pscore.compressors.none import NoCompression as NoCompression
from pscore.compressors.one_bit import OneBit as OneBit
from pscore.compressors.pulseloco import PulseLoCo as PulseLoCo
from pscore.compressors.qsgd import QSGD as QSGD
from pscore.compressors.randomk import RandomK as RandomK
from pscore.compressors.sparseloco import SparseLoCo as SparseLoCo
from pscore.compressors.terngrad import TernGrad as TernGrad
from pscore.compressors.topk import TopK as TopK
from pscore.compressors.two_bit import TwoBit as TwoBit
