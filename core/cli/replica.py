"""The engines of a command line, in processes of their own."""

import argparse
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from ..inference.contexts.cache.hashing import ENVIRONMENT_NAME
from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..loaded_model import LoadedText, load_text
from ..net import LeadingEngine
from ..parallel_groups import ParallelGroups
from .setup import load_model, make_engine

_SAMPLE_BYTES = 1 << 16
_SUFFIXES = (".safetensors", ".bin", ".json")


@dataclass(frozen=True)
class ReplicaEngine:
    """Makes the engine of a replica; can be pickled.

    Attributes:
        options: a command line with `options.add_model` and `options.add_engine`.
        salt_key: the key of all replicas; never shown.
    """

    options: argparse.Namespace
    salt_key: str

    def __call__(self, groups: ParallelGroups | None = None) -> DynamicInferenceEngine:
        """The engine, in the process that runs it."""
        os.environ[ENVIRONMENT_NAME] = self.salt_key
        loaded = load_model(self.options, groups)
        leads = groups is not None and groups.is_split and not groups.rank
        engine = make_engine(loaded, self.options, LeadingEngine if leads else DynamicInferenceEngine)
        engine.set_weights_version(weights_version(loaded.folder))
        return engine

    def __repr__(self) -> str:
        return f"<ReplicaEngine of {self.options.model}>"


@dataclass(frozen=True)
class ReplicaText:
    """Loads the text of a model; can be pickled."""

    model: str

    def __call__(self) -> LoadedText:
        return load_text(self.model)


def weights_version(folder: Path) -> str:
    """A digest of a checkpoint's files: names, sizes, and 64 KiB from the start, the middle and the end.

    It costs some milliseconds a file. Two checkpoints that differ in other bytes alone are taken for one;
    training changes all.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix not in _SUFFIXES or not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(json.dumps([path.name, size]).encode())
        with path.open("rb") as file:
            for start in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                file.seek(start)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]
