"""The benchmark of serving: it runs on a CPU, and what it makes of a trace and of its figures is right."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
MARK = "at::cuda::(anonymous namespace)::spin_kernel(long)"


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


@pytest.fixture
def figures(tmp_path):
    """What a run of HybridLM on a CPU writes."""
    path = tmp_path / "figures.json"
    command = [
        sys.executable, "benchmarks/gpu_serving.py", "--shape", "tiny", "--device", "cpu", "--repeats", "2",
        "--models", "HybridLM-8B", "--only", "prefill", "checkpoints", "decode", "cold", "conversations",
        "--json", str(path),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return path


@pytest.mark.long
def test_a_run_on_a_cpu_has_each_figure_beside_its_limit(figures):
    parts = json.loads(figures.read_text())["models"]["HybridLM-8B"]
    assert [row["tokens"] for row in parts["prefill"]] == [256, 512]
    assert all(0 < row["products_ms"] < row["forward_ms"] < row["step_ms"] for row in parts["prefill"])
    assert [row["requests"] for row in parts["decode"]] == [1, 2]
    assert all(0 < row["limit_ms"] < row["step_ms"] for row in parts["decode"])
    assert parts["checkpoints"]["states"] == 2
    assert parts["cold"]["on_s"] > 0
    with_cache = parts["conversations"]["with cache"]
    assert with_cache["resumed_tokens"] == 256 * 3  # all but the first of four requests find the shared block
    assert with_cache["generated_tokens"] == 2 * 2 * 4
    assert parts["conversations"]["without cache"]["resumed_tokens"] == 0

    from serving_plot import figures_of, merged

    named = {what: (value, limit) for (what, _, value), limit in figures_of(merged([figures])["HybridLM-8B"])}
    row = parts["decode"][0]
    assert named["decode step of 1"] == (row["step_ms"], row["limit_ms"])


def test_bytes_of_a_decode_step_are_weights_states_and_kv():
    from serving_limits import decode_bytes
    from serving_models import HYBRID_SHAPES, build

    served = build("HybridLM-8B", "tiny", torch.device("cpu"))
    shape = HYBRID_SHAPES["tiny"]
    weights = sum(weight.numel() * 4 for weight in served.model.parameters())
    embedding = shape["vocab_size"] * shape["hidden_size"] * 4
    layers = served.model.config.pattern.count("*")
    kv = layers * 2 * shape["num_kv_heads"] * shape["head_dim"] * 4
    states = served.model.state_spec().state_bytes
    assert decode_bytes(served, [100, 7]) == weights - embedding + 2 * 2 * states + 107 * kv
    products = sum(weight.numel() * 4 for weight in served.products)
    assert 0.9 * (weights - 2 * embedding) < products < weights - 2 * embedding


def test_idle_time_lies_between_two_forwards():
    from serving_trace import Launch, steps_of

    launches = []
    for start in (0, 10_000, 20_000, 30_000):  # forward of 6 us with a gap of 1; copy of 2 us; then nothing
        launches += [
            Launch(start, start + 100, MARK),
            Launch(start + 100, start + 3_000, "nvjet_sm90_tst_64x8"),
            Launch(start + 4_000, start + 5_900, "_rms_norm_forward_kernel"),
            Launch(start + 5_900, start + 6_000, MARK),
            Launch(start + 6_500, start + 8_500, "Memcpy DtoH (Device -> Pinned)"),
        ]
    found = steps_of(launches)
    assert found["steps"] == 3
    assert found["period_us"] == 10
    assert found["idle_us"] == 2  # 0.5 before the copy, 1.5 after it
    assert found["idle_share"] == pytest.approx(0.2)
    assert found["gap_us"] == 1.5
    assert found["gaps_in_forward_us"] == 1
    assert found["kernels"]["launches"] == 5
    families = {row["name"]: row["us"] for row in found["kernels"]["families"]}
    assert families == {"products": 2.9, "copies": 2.0, "norms": 1.9, "mark": 0.2}


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<...> > >", "attention"),
        ("rotary_and_write_kv_kernel", "rotary and KV"),
        ("cutlass_80_simt_sgemm_256x128_8x4_nn_align1", "products in float32"),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "products"),
        ("_fused_add_rms_norm_forward_kernel", "norms"),
        ("gated_norm_kernel", "norms"),
        ("chunk_gated_delta_rule_fwd_kernel_h", "scan stages"),
        ("update_kernel", "scan stages"),
        ("prefill_kernel", "convolution"),
        ("_relu_squared_forward_kernel", "activations"),
        ("move_listed_states", "states"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
    ],
)
def test_kernels_have_their_families(name, family):
    from serving_trace import family_of

    assert family_of(name) == family


def test_requirements_compare_with_the_limits():
    from serving_report import requirements

    parts = {
        "prefill": [{"tokens": 4096, "forward_ms": 130.0, "products_ms": 100.0}],
        "transformers": {"tokens": 4096, "forward_ms": 120.0},
        "decode": [{"requests": 32, "step_ms": 9.0, "limit_ms": 6.0, "trace": {"idle_share": 0.01}}],
        "checkpoints": {
            "states": 16, "without_forward_ms": 99.0, "without_again_forward_ms": 101.0,
            "with_forward_ms": 100.5,
        },
    }  # fmt: skip
    found = {what: (value, most) for what, value, most in requirements("m", parts)}
    qwen = {what: (value, most) for what, value, most in requirements("Qwen3.5-4B", parts)}
    assert found["m: prefill of 4,096 / its products"] == (1.3, 1.35)
    assert qwen["Qwen3.5-4B: prefill of 4,096 / transformers' own"] == (pytest.approx(130 / 120), 1.0)
    assert "Qwen3.5-4B: prefill of 4,096 / its products" not in qwen
    assert found["m: decode of 32 / its bytes"] == (1.5, 1.35)
    assert found["m: decode of 32: GPU idle between steps"] == (0.01, 0.05)
    assert found["m: 16 checkpoints in a prefill"] == (pytest.approx(0.005), 0.01)


def test_later_files_add_rows_and_replace_them(tmp_path):
    from serving_plot import draw, merged

    def row(requests, step_ms):
        return {"requests": requests, "step_ms": step_ms, "limit_ms": 1.0}

    files = []
    for index, rows in enumerate(([row(1, 5.0), row(32, 9.0)], [row(32, 8.0), row(128, 20.0)])):
        files.append(tmp_path / f"{index}.json")
        files[-1].write_text(json.dumps({"models": {"m": {"decode": rows}}}))
    models = merged(files)
    assert [(row["requests"], row["step_ms"]) for row in models["m"]["decode"]] == [
        (1, 5),
        (32, 8),
        (128, 20),
    ]
    pytest.importorskip("matplotlib")
    draw({}, models, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 0
