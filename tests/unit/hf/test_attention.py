"""What transformers asks of the attention, beside what the tests of answers see."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from mambaslots.hf.attention import attention_forward


@pytest.mark.parametrize("name", ["attention_mask", "sliding_window", "softcap", "s_aux"])
def test_another_attention_than_the_causal_one_is_refused(name: str) -> None:
    def attend(query: torch.Tensor, *_: Any) -> torch.Tensor:
        return query

    module: Any = SimpleNamespace(mambaslots_attention=attend)
    tensor = torch.ones(1, 2, 3, 4)
    arguments: dict[str, Any] = {"attention_mask": None, "scaling": 1.0, "dropout": 0.0, "softcap": None}
    output, _ = attention_forward(module, tensor, tensor, tensor, **arguments)
    assert output.shape == (1, 3, 2, 4)
    with pytest.raises(ValueError, match=f"has the argument {name}; accepted: causal attention"):
        attention_forward(module, tensor, tensor, tensor, **arguments | {name: 16})
