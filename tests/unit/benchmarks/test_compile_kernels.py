"""Every kernel compiles for a Hopper GPU, without one: nothing spills, and states move 16 bytes at a time."""

import json
import os
from pathlib import Path

import pytest
from oracle.fresh_process import run_script

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]
KERNELS = ROOT / "core/inference/kernels"
VLLM_KERNELS = ROOT / "core/vllm"


def compile_kernels(*arguments, **environment):
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return run_script("benchmarks/compile_kernels.py", *arguments, env=compiling | environment)


STATES_MOVE = (
    *("copy_states float32", "copy_states bfloat16", "delta_state_passing", "gated_delta_rule_update"),
    "ssd_states",
)
"""How the names of launches begin that load and store states, or in part only store them."""
FILES = {"moving states": ("state_move",), "all": ()}


@pytest.fixture(scope="module", params=["moving states", pytest.param("all", marks=pytest.mark.long)])
def files(request):
    return FILES[request.param]


@pytest.fixture(scope="module")
def run(tmp_path_factory, files):
    figures = tmp_path_factory.mktemp("compile_kernels") / "figures.json"
    done = compile_kernels("--json", str(figures), *files)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(figures.read_text())["kernels"]


def test_nothing_spills(run):
    _, kernels = run
    for kernel in kernels:
        assert (kernel["spill_stores"], kernel["spill_loads"], kernel["faults"]) == (0, 0, []), kernel
        assert 0 < kernel["registers"] <= 255, kernel
        assert kernel["shared"] <= 232448, kernel


def test_states_move_16_bytes_at_a_time(run):
    _, kernels = run
    widest = {
        kernel["name"]: tuple(max(map(int, kernel[way]), default=0) for way in ("loads", "stores"))
        for kernel in kernels
    }
    wide = {name: found for name, found in widest.items() if name.startswith(STATES_MOVE)}
    assert wide
    for name, (loads, stores) in wide.items():
        assert stores == 16, name
        assert loads == 16, name


def test_every_file_that_has_kernels_is_compiled(run, files):
    printed, kernels = run
    with_kernels = {path.stem for path in KERNELS.glob("*.py") if "\n@triton.jit" in path.read_text()}
    # A file without a launched kernel has device functions, which are compiled as parts of kernels.
    with_kernels |= {path.stem for path in VLLM_KERNELS.glob("*.py") if "_kernel(" in path.read_text()}
    assert {kernel["file"] for kernel in kernels} == (set(files) or with_kernels)
    assert all(kernel["name"] in printed for kernel in kernels)


def test_a_kernel_that_is_not_as_it_must_be_fails_the_run(tmp_path):
    """The machine code of a stand-in that is asked for what it has not: 16-byte stores of single words."""
    script = tmp_path / "narrow.py"
    script.write_text(
        "import sys\n"
        "sys.path.insert(0, 'benchmarks')\n"
        "import compile_kernels\n"
        "from dataclasses import replace\n"
        "narrow = compile_kernels.KERNELS['state_move'][0]()[-1]\n"
        "listed = [replace(narrow, wide=('load', 'store'))]\n"
        "compile_kernels.KERNELS['state_move'] = (lambda: listed,)\n"
        "sys.argv = ['compile_kernels.py', 'state_move']\n"
        "sys.exit(compile_kernels.main())\n"
    )
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = run_script(str(script), env=compiling)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "no 16-byte loads, no 16-byte stores" in done.stdout


def test_the_interpreter_compiles_nothing_and_says_so():
    done = compile_kernels(TRITON_INTERPRET="1")
    assert done.returncode == 1
    assert "unset it" in done.stderr
