"""Linear modules that are multiplied as one product: what is the same afterwards, and what falls back."""

import copy
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from mambaslots.hf import served_model as served_model_module
from mambaslots.hf.joint_linear import JointLinear, join_weights
from mambaslots.hf.served_model import ServedModel
from oracle.hf_models import (
    CONFIGS,
    VOCABULARY,
    reference_logits,
    reference_model,
    relative_error,
    served_model,
)
from oracle.hf_steps import BLOCK, Steps, texts
from oracle.steps import Row

NAMES = ("first", "second", "third")


class Owner(nn.Module):
    """Three linear modules that read the same input."""

    def __init__(self, bias: bool = False, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        for name, width in zip(NAMES, (5, 1, 8), strict=True):
            self.add_module(name, nn.Linear(16, width, bias=bias, dtype=dtype))
        self.requires_grad_(False)

    def separately(self, x: Tensor) -> Tensor:
        return torch.cat([self.get_submodule(name)(x) for name in NAMES], dim=-1)


def inputs(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(3, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def is_joined(joint: JointLinear) -> bool:
    return joint._is_joined()


def joints(model: nn.Module) -> list[JointLinear]:
    found = (value for module in model.modules() for value in vars(module).values())
    return [value for value in found if isinstance(value, JointLinear)]


def logits(steps: Steps, text: Any) -> Tensor:
    (found,) = steps.run(Row(text, 0, -1, 1, range(math.ceil(len(text) / BLOCK)), logits="all"))
    return found


@pytest.mark.parametrize("bias", [False, True])
def test_a_joint_product_is_the_products_side_by_side(bias: bool) -> None:
    owner = Owner(bias)
    before, parameters = copy.deepcopy(owner.state_dict()), dict(owner.named_parameters())
    joint, expected = JointLinear(owner, NAMES), owner.separately(inputs())
    assert torch.equal(joint(inputs()), expected)
    join_weights(owner)
    assert is_joined(joint)
    torch.testing.assert_close(joint(inputs()), expected, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(owner.separately(inputs()), expected, rtol=1e-14, atol=1e-14)
    assert dict(owner.named_parameters()) == parameters  # the same objects
    after = owner.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("name", NAMES)
def test_a_write_into_a_part_is_seen(name: str) -> None:
    owner = Owner(bias=True)
    joint = JointLinear(owner, NAMES)
    join_weights(owner)
    part: Any = owner.get_submodule(name)
    part.weight.data.mul_(2.0)
    part.bias.copy_(torch.ones(len(part.bias)))
    assert is_joined(joint)
    torch.testing.assert_close(joint(inputs()), owner.separately(inputs()), rtol=1e-14, atol=1e-14)
    owner.load_state_dict(Owner(bias=True).state_dict())
    assert is_joined(joint)
    torch.testing.assert_close(joint(inputs()), owner.separately(inputs()), rtol=1e-14, atol=1e-14)


def replaced_parameter(part: Any) -> None:
    part.weight = nn.Parameter(part.weight.data * 3.0, requires_grad=False)


def replaced_data(part: Any) -> None:
    part.weight.data = part.weight.data * 3.0


def replaced_bias(part: Any) -> None:
    part.bias = nn.Parameter(part.bias.data * 3.0, requires_grad=False)


@pytest.mark.parametrize("replace", [replaced_parameter, replaced_data, replaced_bias])
@pytest.mark.parametrize("name", NAMES)
def test_what_was_replaced_is_multiplied_separately_until_it_is_joined(replace: Any, name: str) -> None:
    owner = Owner(bias=True)
    joint = JointLinear(owner, NAMES)
    join_weights(owner)
    replace(owner.get_submodule(name))
    assert not is_joined(joint)
    assert torch.equal(joint(inputs()), owner.separately(inputs()))
    join_weights(owner)
    assert is_joined(joint)
    torch.testing.assert_close(joint(inputs()), owner.separately(inputs()), rtol=1e-14, atol=1e-14)


def test_a_module_that_was_replaced_is_called() -> None:
    owner = Owner()
    joint = JointLinear(owner, NAMES)
    join_weights(owner)
    owner.second = nn.Sequential(nn.Linear(16, 1, dtype=torch.float64), nn.Tanh())
    assert torch.equal(joint(inputs()), owner.separately(inputs()))
    join_weights(owner)
    assert not is_joined(joint)
    assert torch.equal(joint(inputs()), owner.separately(inputs()))


def test_weights_with_other_users_and_some_biases_are_left_alone() -> None:
    owner = Owner()
    owner.fourth = nn.Linear(16, 5, bias=False)
    owner.fourth.weight = owner.first.weight
    addresses = [parameter.data_ptr() for parameter in owner.parameters()]
    joint = JointLinear(owner, NAMES)
    join_weights(owner)
    assert not is_joined(joint)
    assert [parameter.data_ptr() for parameter in owner.parameters()] == addresses
    other = Owner()
    other.first.bias = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    mixed = JointLinear(other, NAMES)
    join_weights(other)
    assert not is_joined(mixed)
    assert torch.equal(mixed(inputs()), other.separately(inputs()))


def test_a_change_of_dtype_or_a_copy_of_the_model_is_no_joint_until_it_is_joined() -> None:
    owner = Owner()
    joint = JointLinear(owner, NAMES)
    join_weights(owner)
    other = copy.deepcopy(owner)
    (copied,) = joints(other)
    assert not is_joined(copied)
    assert torch.equal(copied(inputs()), other.separately(inputs()))
    other.first.weight.data.zero_()
    assert float(owner.first.weight.abs().min()) > 0
    owner.float()
    assert not is_joined(joint)
    x = inputs(torch.float32)
    assert torch.equal(joint(x), owner.separately(x))
    join_weights(owner)
    assert is_joined(joint)


def test_no_memory_beside_the_weights() -> None:
    """Every storage belongs to one joint weight, or to one parameter that is in none."""
    for case in ("qwen3_5", "olmo_hybrid"):
        model = served_model(case).model
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
        assert sum(storages.values()) == sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("case", CONFIGS)
def test_a_served_model_joins_and_its_state_dict_stays(case: str) -> None:
    expected = reference_model(case).state_dict()
    model = served_model(case)
    assert all(is_joined(joint) for joint in joints(model.model))
    assert bool(joints(model.model)) == (case != "mamba2")
    found = model.model.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("case", "products"), [("qwen3_5", 3 * 4), ("nemotron_h dense", 2 * 2 + 2 + 2 * 2), ("lfm2", 4 * 4)]
)
def test_a_step_has_as_many_products_as_inputs(
    case: str, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two products a mixer or attention, two an MLP; the head is a kernel of its own."""
    counts: Counter[str] = Counter()

    class Counting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counts[getattr(function, "__name__", "")] += 1
            return function(*args, **(kwargs or {}))

    steps = Steps(served_model(case))
    steps.model.model.lm_head.forward = lambda hidden: hidden.new_zeros(*hidden.shape[:-1], VOCABULARY)
    with Counting():
        logits(steps, texts(VOCABULARY)[1])
    assert counts["linear"] == products


def test_a_model_whose_weights_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A served model on the meta device joins when a context asks for its states, and computes before."""
    from transformers import AutoModelForCausalLM

    text, source = texts(VOCABULARY)[1], reference_model("qwen3_5")
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(copy.deepcopy(source.config), dtype=torch.float32)
    model = ServedModel(plain)
    assert not any(is_joined(joint) for joint in joints(plain))
    plain.load_state_dict(source.state_dict(), assign=True)
    for name, buffer in source.named_buffers():
        owner, _, leaf = name.rpartition(".")
        plain.get_submodule(owner)._buffers[leaf] = buffer.clone()
    with monkeypatch.context() as unjoined:
        unjoined.setattr(served_model_module, "join_weights", lambda _: None)
        steps = Steps(model)
    assert not any(is_joined(joint) for joint in joints(plain))
    assert relative_error(logits(steps, text), reference_logits("qwen3_5", text)) < 1e-4
    model.state_spec()
    assert all(is_joined(joint) for joint in joints(plain))
    assert relative_error(logits(steps, text), reference_logits("qwen3_5", text)) < 1e-4


def test_save_pretrained_writes_what_it_wrote_before(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    reference_model("qwen3_5").save_pretrained(tmp_path / "plain")
    served_model("qwen3_5").model.save_pretrained(tmp_path / "joint")
    expected = load_file(tmp_path / "plain" / "model.safetensors")
    found = load_file(tmp_path / "joint" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
