"""The model of a worker is of one family."""

import pytest
from pydantic import ValidationError

from xtuner.v1.rl.trainer import WorkerConfig


@pytest.mark.parametrize("value", [{}, {"model_type": "qwen3", "vocab_size": 8}])
def test_a_dict_does_not_say_which_model_it_is(value):
    with pytest.raises(ValidationError, match=r"model_cfg\n.*a dict .*give get_model_config_from_hf\(path\)"):
        WorkerConfig(model_cfg=value)
