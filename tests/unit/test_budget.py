"""What `make test` leaves to `make test-long` is named by marks; each value of a parameter stays in it."""

from itertools import product

import pytest
from hypothesis import settings
from oracle.budget import costly, dear, is_quick, profile, sample, thinned

pytest_plugins = ["pytester"]

SUITE = """
import pytest

@pytest.mark.sampled
@pytest.mark.parametrize("color", ["red", "green", "blue"])
@pytest.mark.parametrize("size", [1, 2])
def test_products(color, size):
    pass

@pytest.mark.sampled(seed=2)
@pytest.mark.parametrize("seed", range(9))
def test_seeds(seed):
    pass

@pytest.mark.sampled(name=("b",))
@pytest.mark.parametrize(("name", "answer"), [("a", 1), ("b", 2), ("c", 3)])
def test_names(name, answer):
    pass

@pytest.mark.sampled(color=("renamed",))
@pytest.mark.parametrize("color", ["red", "green"])
def test_renamed(color):
    pass

@pytest.mark.sampled(2)
class TestMost:
    @pytest.mark.sampled(seed=(1, 3, 5))
    @pytest.mark.parametrize("seed", range(9))
    def test_two_of_three(self, seed):
        pass

@pytest.mark.sampled
class TestMarks:
    @pytest.mark.parametrize("way", [1, pytest.param(2, marks=pytest.mark.long)])
    @pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
    def test_devices(self, device, way):
        pass

    def test_without_parameters(self):
        pass
"""
CONFTEST = """
import pytest
from oracle.budget import mark_long

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    mark_long(items)
"""


def test_a_sample_is_what_the_marks_leave(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nmarkers = gpu\n  long\n  sampled")
    pytester.makepyfile(SUITE)
    pytester.makeconftest(CONFTEST)
    run = pytester.runpytest("--collect-only", "-q", "-m", "not long", "-p", "no:cacheprovider")
    names = [line.rpartition("::")[2] for line in run.outlines if "::" in line]
    assert names == [
        "test_products[1-red]",
        "test_products[1-blue]",
        "test_products[2-green]",
        "test_seeds[0]",
        "test_seeds[1]",
        "test_names[b-2]",
        "test_renamed[red]",
        "test_renamed[green]",
        "test_two_of_three[1]",
        "test_two_of_three[3]",
        "test_devices[cpu-1]",
        "test_devices[cuda-1]",
        "test_without_parameters",
    ]


KINDS = """
import pytest

@pytest.mark.parametrize("kind", ["Mamba-2", "mix of all", "delta net"])
@pytest.mark.parametrize("size", range(40))
def test_sizes(size, kind):
    pass
"""


def test_each_case_is_on_one_kind_of_model_and_about_a_third_on_the_mix(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nmarkers = gpu\n  long\n  sampled")
    pytester.makepyfile(KINDS)
    pytester.makeconftest(CONFTEST)
    run = pytester.runpytest("--collect-only", "-q", "-m", "not long", "-p", "no:cacheprovider")
    cases = [line.rpartition("[")[2].rstrip("]").split("-", 1) for line in run.outlines if "::" in line]
    assert [int(size) for size, _ in cases] == list(range(40))
    kinds = [kind for _, kind in cases]
    assert {kinds.count(kind) > 3 for kind in ("Mamba-2", "delta net")} == {True}
    assert 6 < kinds.count("mix of all") < 21


IN_TURN = """
import pytest

@pytest.mark.in_turn("mode")
@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["Mamba-2", "mix of all"])
@pytest.mark.parametrize("mode", ["plain", "drafts", "async"])
@pytest.mark.parametrize("color", ["red", "green"])
@pytest.mark.parametrize("size", range(20))
def test_sizes(size, color, mode, kind):
    pass

@pytest.mark.in_turn("mode")
@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["Mamba-2", "mix of all"])
@pytest.mark.parametrize("mode", ["plain", "drafts", "async"])
def test_nothing_else(mode, kind):
    pass

@pytest.mark.parametrize("mode", ["plain", "drafts"])
def test_all_modes(mode):
    pass
"""


def test_what_runs_in_turn_has_each_value_in_some_case_and_each_case_once(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nmarkers = gpu\n  long\n  sampled\n  in_turn")
    pytester.makepyfile(IN_TURN)
    pytester.makeconftest(CONFTEST)
    run = pytester.runpytest("--collect-only", "-q", "-m", "not long", "-p", "no:cacheprovider")
    names = [
        line.rpartition("[")[2].rstrip("]").split("-") for line in run.outlines if "::test_sizes[" in line
    ]
    assert [int(size) for size, *_ in names] == list(range(20))
    colors, modes = ({name[place] for name in names} for place in (1, 2))
    assert colors == {"red", "green"}
    assert modes == {"plain", "drafts", "async"}
    assert sum("::test_nothing_else[" in line for line in run.outlines) == 1
    assert sum("::test_all_modes[" in line for line in run.outlines) == 2


@pytest.mark.parametrize("sizes", [(1,), (4,), (3, 3), (2, 5, 3)])
def test_a_sample_has_each_value_in_few_cases(sizes: tuple[int, ...]) -> None:
    cases = [set(enumerate(case)) for case in product(*map(range, sizes))]
    chosen = sample(cases)  # type: ignore[arg-type]
    assert set().union(*chosen) == set().union(*cases)
    assert len(chosen) == max(sizes)


def test_no_cases_have_no_sample() -> None:
    assert sample([]) == []


def test_costly_examples_are_fewer_in_each_profile() -> None:
    assert settings.default is not None
    assert settings.default.max_examples == profile().examples
    assert settings.default.stateful_step_count == profile().steps
    assert profile().examples > costly().max_examples > dear().max_examples > 1
    assert costly().deadline is None


def test_loops_are_thinned_in_the_quick_profile_only() -> None:
    assert list(thinned(range(8), 3)) == ([0, 3, 6] if is_quick() else list(range(8)))
