"""Paceline's own optimizers: a line for each, which is its registration."""

from pscore.optimizers.adagrad import Adagrad as Adagrad
from pscore.optimizers.adam import Adam as Adam
from pscore.optimizers.adamw import AdamW as AdamW
from pscore.optimizers.amsgrad import AMSGrad as AMSGrad
from pscore.optimizers.amsgrad import AMSGradW as AMSGradW
from pscore.optimizers.assign import Assign as Assign
from pscore.optimizers.assign_sum import AssignSum as AssignSum
from pscore.optimizers.delayed_nesterov import DelayedNesterov as DelayedNesterov
from pscore.optimizers.mean import Mean as Mean
from pscore.optimizers.nadam import NAdam as NAdam
from pscore.optimizers.radam import RAdam as RAdam
from pscore.optimizers.rmsprop import CenteredRMSprop as CenteredRMSprop
from pscore.optimizers.rmsprop import RMSprop as RMSprop
from pscore.optimizers.sgd import SGD as SGD
from pscore.optimizers.slowmo import SlowMo as SlowMo
