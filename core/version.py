"""The version of mambaslots, and the newest versions of what it runs on with which its tests pass."""

import importlib.metadata
import platform

from packaging.version import Version

VERSION = "0.1.0"
NEWEST_TESTED = {
    "python": "3.14", "torch": "2.15", "triton": "3.9", "numpy": "2.5", "safetensors": "0.8",
    "transformers": "5.24", "fastapi": "0.165", "uvicorn": "0.54", "prometheus-client": "0.26",
    "fla-core": "0.6", "ray": "2.60",
}  # fmt: skip


def untested() -> list[str]:
    """What is newer here than any tested minor version; empty where nothing is.

    Example: with torch 2.16.1 installed, `["torch 2.16.1 (newest tested: 2.15)"]`.
    """
    found = []
    for name, newest in NEWEST_TESTED.items():
        try:
            here = platform.python_version() if name == "python" else importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if Version(here).release[:2] > Version(newest).release:
            found.append(f"{name} {here} (newest tested: {newest})")
    return found
