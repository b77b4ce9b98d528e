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
