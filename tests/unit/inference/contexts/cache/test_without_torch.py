"""The cache decides over plain integers: all of its modules import and work without torch."""

import subprocess
import sys

CODE = """
import importlib, pkgutil, sys
sys.modules["torch"] = sys.modules["triton"] = None  # an import of these raises
import mambaslots.inference.contexts.cache as cache
for module in pkgutil.iter_modules(cache.__path__):
    importlib.import_module(f"{cache.__name__}.{module.name}")
import mambaslots as ms
prefix_cache = ms.PrefixCache(8, 4, 4)
prefix_cache.check_integrity([], False)
print(len(sys.modules))
"""


def test_the_cache_imports_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


SERVES = """
import sys

sys.modules["torch"] = sys.modules["triton"] = None  # an import raises ImportError
import numpy as np
import mambaslots as ms

cache = ms.PrefixCache(num_kv_blocks=8, num_slots=2, block_size_tokens=4)
for resumed in (0, 8):
    tokens = list(range(10))
    chain = ms.PrefixHashChain(4)
    chain.extend_to(tokens)
    match = cache.match(chain, len(tokens))
    assert match.resume_tokens == resumed
    path = cache.open(chain, ms.CheckpointPlan(), np.full(8, -1), max_resume_tokens=9)
    cache.hold(path, match)
    cache.grow(path, 3)
    boundaries = path.plan.boundaries(
        start=resumed, stop=10, prompt_tokens=10, block_size_tokens=4
    )
    (step,) = cache.reserve([ms.PathStep(path, tokens, resumed, 10, boundaries=boundaries)])
    cache.register(path, tokens, 10)
    cache.commit(step)
    cache.release(path)
cache.check_integrity([])
"""


def test_a_cache_serves_where_torch_cannot_be_imported() -> None:
    done = subprocess.run([sys.executable, "-c", SERVES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
