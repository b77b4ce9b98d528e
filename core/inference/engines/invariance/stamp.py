"""The file that says that a model has passed the check of batch invariance, for later starts."""

import hashlib
import importlib.metadata
import inspect
import json
import os
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import torch

from ....config import InferenceConfig
from ....files import read_regular, replacing
from ....state_spec import HybridStateSpec
from ...contexts.step_inputs import Model


def stamp_of(model: Model, spec: HybridStateSpec, config: InferenceConfig) -> Path | None:
    """The file that says that a model has passed on this machine, with these versions and sizes.

    Its name is a hash of all that the check depends on: shapes, but not the values of weights. None for a
    model that does not name its weights: each start checks it.
    """
    module = model if isinstance(model, torch.nn.Module) else getattr(model, "model", None)
    if not isinstance(module, torch.nn.Module):
        return None
    tensors = (*module.named_parameters(), *module.named_buffers())
    try:
        files = {inspect.getfile(kind) for kind in {type(model), *map(type, module.modules())}}
        sources = [*Path(__file__).parents[3].rglob("*.py"), *map(Path, sorted(files))]
        written = sorted((str(path), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in sources)
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except (OSError, TypeError, RuntimeError):  # a class of no file, or a user without a home
        return None
    depends = (
        torch.__version__, torch.version.cuda, torch.cuda.get_device_properties(spec.device), _packages(),
        sorted(item for item in os.environ.items() if item[0].startswith(_VARIABLES)), written,
        [(field.name, getattr(spec, field.name)) for field in fields(spec) if field.name != "groups"],
        spec.groups.tensor_size, [(name, own.shape, own.stride(), own.dtype) for name, own in tensors],
        config.block_size_tokens, config.max_requests, config.max_tokens_per_step,
        config.num_speculative_tokens, config.num_cuda_graphs is None,
    )  # fmt: skip
    digest = hashlib.sha256(repr(depends).encode()).hexdigest()
    return folder / "mambaslots" / "batch_invariance" / f"{digest}.json"


def read_stamp(stamp: Path | None) -> tuple[str | None, tuple[str, ...]] | None:
    """The reason and the products that `write_stamp` wrote; None without a file that can be read."""
    try:
        entries = None if stamp is None else json.loads(read_regular(stamp))
    except (OSError, ValueError):
        return None
    if not isinstance(entries, list) or not entries:
        return None
    reason, *products = map(str, entries)
    return reason or None, tuple(products)


def write_stamp(stamp: Path, why_not_few_rows: str | None, products: tuple[str, ...]) -> None:
    """Note that the check has passed; without a directory to write to, the next start checks again.

    The file is a list of strings: the reason, "" for None, and the products.
    """
    with suppress(OSError):
        stamp.parent.mkdir(parents=True, exist_ok=True)
        with replacing(stamp) as draft:
            draft.write_text(json.dumps([why_not_few_rows or "", *products]))


_VARIABLES = "TRITON", "CUBLAS", "NVIDIA", "TORCH", "PYTORCH", "LD_"


def _packages() -> list[tuple[str, str]]:
    """What computes, with versions: also the libraries that pip may renew without torch."""
    names = "nvidia", "triton", "fla", "flash", "tokenspeed", "transformers"
    versions = ((package.name, package.version) for package in importlib.metadata.distributions())
    return sorted(pair for pair in versions if (pair[0] or "").startswith(names))
