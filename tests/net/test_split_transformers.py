"""Models of transformers split over ranks, beside transformers' own whole model in one process."""

import copy
from pathlib import Path
from typing import Any

import mambaslots as ms
import pytest
import torch
from oracle.distributed_world import SPLITS, World, splits

pytest.importorskip("transformers")

from mambaslots import hf
from mambaslots.hf.split import ModelSplit
from mambaslots.hf.weight_files import WeightFiles
from oracle.float64_casts import Float64Casts
from oracle.hf_folders import save_model
from oracle.hf_models import CONFIGS, VOCABULARY, reference_logits, reference_model, tiny_config
from oracle.hf_steps import Steps, step_errors, texts
from oracle.steps import Row
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="float64 experts need a CPU; see test_split_on_gpus",
)
TOLERANCE = 1e-9
CASES = [case for case in CONFIGS if case != "olmo_hybrid"]
ONE_OF_EACH_KIND = pytest.mark.sampled(case=("nemotron_h MoE", "qwen3_5_moe", "lfm2"))
over_tensor_ranks = pytest.mark.parametrize("split", splits("tp 2", "tp 4"))


@ONE_OF_EACH_KIND
@over_tensor_ranks
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_whole_model(world: World, split: str, case: str) -> None:
    """Of whole prompts, prompts in parts, beside others, from a model, and token by token."""
    groups = world.groups(*SPLITS[split])
    with Float64Casts():
        both = texts(VOCABULARY)
        expected = tuple(reference_logits(case, text, torch.float64) for text in both)
        model = hf.ServedModel(copy.deepcopy(reference_model(case, torch.float64)), groups)
        errors, without_state = step_errors(model, both, expected)
    assert max(errors.values()) < TOLERANCE, errors
    assert without_state > 1e-3
    print(f"{case} over {split}: largest error {max(errors.values()):.1e}")


@pytest.mark.sampled(case=("qwen3_5_moe", "lfm2"))
@over_tensor_ranks
@pytest.mark.parametrize("case", CASES)
def test_a_rank_reads_its_part_of_a_model(
    world: World, split: str, case: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = world.groups(*SPLITS[split])
    save_model(case, folder)  # which rank 0 does
    world.gathered(None)
    read: list[int] = []
    unwatched = WeightFiles.read

    def watched(*arguments: Any) -> torch.Tensor:
        tensor = unwatched(*arguments)
        read.append(tensor.numel())
        return tensor

    monkeypatch.setattr(WeightFiles, "read", watched)
    loaded = ms.load(folder, groups=groups).model
    assert isinstance(loaded, hf.ServedModel)
    expected = hf.ServedModel(copy.deepcopy(reference_model(case)), groups)
    weights = loaded.model.state_dict()
    assert weights.keys() == expected.model.state_dict().keys()
    for name, weight in expected.model.state_dict().items():
        assert torch.equal(weights[name], weight), name
    storages = {
        weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() // weight.itemsize
        for weight in weights.values()
    }
    assert sum(read) == sum(storages.values())
    whole = sum(weight.numel() for weight in reference_model(case).parameters())
    assert sum(read) < (0.6 if groups.tensor_size == 2 else 0.42) * whole


@over_tensor_ranks
def test_experts_that_do_not_divide(world: World, split: str) -> None:
    """Ranks hold one expert more or less."""
    groups, config = world.groups(*SPLITS[split]), tiny_config("qwen3_next", num_experts=5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )
    text, _ = texts(VOCABULARY)
    ids = torch.tensor([text])
    with Float64Casts(), torch.no_grad():
        whole = model.eval()(input_ids=ids, use_cache=False, return_dict=True).logits[0]
        served = hf.ServedModel(model, groups)
        counts = world.gathered(served.model.model.layers[0].mlp.experts.num_experts)
        (logits,) = Steps(served).run(Row(text, 0, -1, 0, list(range(10)), logits="all"))
    assert (min(counts), max(counts), sum(counts)) == (5 // world.size, 5 // world.size + 1, 5)
    assert float((logits - whole).abs().max()) < TOLERANCE * float(whole.abs().max())


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("case", "fields", "message"),
    [
        ("bamba", {"mamba_n_heads": 6, "mamba_d_head": 8, "hidden_size": 24}, "num_heads of BambaMixer is 6"),
        (
            "nemotron_h dense",
            {"mamba_num_heads": 12, "n_groups": 3},
            "n_groups of NemotronHMamba2Mixer is 3; accepted: a multiple or a divisor of the 4",
        ),
        (
            "nemotron_h dense",
            {"intermediate_size": 50},
            "the width of down_proj of NemotronHMLP is 50; accepted: a multiple of the 4",
        ),
        ("qwen3_5", {"num_attention_heads": 2}, "num_attention_heads of Qwen3_5Attention is 2"),
        ("qwen3_next", {"linear_num_value_heads": 6}, "num_v_heads of Qwen3NextGatedDeltaNet is 6"),
        (
            "qwen3_next",
            {"shared_expert_intermediate_size": 26},
            "the width of down_proj of Qwen3NextMLP is 26",
        ),
        ("qwen3_5_moe", {"num_experts": 3}, "num_experts of Qwen3_5MoeExperts is 3; accepted: at least"),
        ("lfm2", {"hidden_size": 42, "head_dim": 8}, "hidden_size of Lfm2ShortConv is 42"),
        ("olmo_hybrid", {}, "model_type is 'olmo_hybrid', and groups.tensor has 4 ranks; accepted where"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(
    world: World, case: str, fields: dict[str, Any], message: str, folder: Path
) -> None:
    """Before a weight is read: the folder has none."""
    tiny_config(case, **fields).get_text_config().save_pretrained(folder)
    world.gathered(None)
    with pytest.raises(ValueError, match=message):
        ms.load(folder, groups=world.groups(4, 1))


@pytest.mark.ranks(2)
def test_stages_are_refused(world: World, folder: Path) -> None:
    tiny_config("lfm2").save_pretrained(folder)
    world.gathered(None)
    with pytest.raises(ValueError, match=r"groups.pipeline has 2 ranks; accepted"):
        hf.load(folder, groups=world.groups(1, 2))
    with pytest.raises(ValueError, match="groups is 2"):
        hf.load(folder, groups=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("split", splits("tp 4"))
def test_rows_of_the_head_that_do_not_divide(world: World, split: str) -> None:
    """97 tokens: the last rank has 22 rows, the others 25."""
    split_model = ModelSplit(
        copy.deepcopy(reference_model("lfm2")), tiny_config("lfm2"), world.groups(*SPLITS[split])
    )
    assert world.gathered(split_model._head.size) == [25, 25, 25, 22]
