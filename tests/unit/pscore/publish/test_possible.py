"""The tables whose weights can be published."""

import pytest

from pscore.errors import ConfigError
from pscore.optimizers.mean import Mean
from pscore.optimizers.sgd import SGD
from pscore.publish.possible import require_weights
from pscore.rules import RULES, parse_mode


@pytest.mark.parametrize("name", list(RULES))
def test_the_shards_must_have_the_weights(name: str) -> None:
    rule = parse_mode(name)
    with pytest.raises(ConfigError, match="the shards hold no weights"):
        require_weights("model", rule, Mean())
    if name in ("dpsgd", "sgp", "adpsgd", "allreduce"):
        with pytest.raises(ConfigError, match=f"in mode {name} the workers exchange the weights"):
            require_weights("model", rule, SGD())
    else:
        require_weights("model", rule, SGD())
