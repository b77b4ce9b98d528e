"""What the versions of megatron-core call things, and which sources of its methods are known.

A source is known by a hash that ignores comments and layout; `python tools/recompute_sources.py` prints the
table for unpacked wheels.
"""

import ast
import functools
import hashlib
import inspect
import re
import textwrap
import warnings
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

DYNAMIC_CONTEXT = "megatron.core.inference.contexts.dynamic_context:DynamicInferenceContext"
DYNAMIC_ENGINE = "megatron.core.inference.engines.dynamic_engine:DynamicInferenceEngine"
STATE_CONFIG = "megatron.core.inference.config:MambaInferenceStateConfig"
KV_ALLOCATOR = "megatron.core.inference.contexts.kv_block_allocator:KVBlockAllocator"
MHA_METADATA = "megatron.core.inference.contexts.attention_context.mha_metadata:MHAMetadata"
MAMBA_METADATA = "megatron.core.inference.contexts.attention_context.mamba_metadata:MambaMetadata"
MAMBA_MIXER = "megatron.core.ssm.mamba_mixer:MambaMixer"
GATED_DELTA_NET = "megatron.core.ssm.gated_delta_net.gdn:GatedDeltaNet"
INFERENCE_REQUEST = "megatron.core.inference.inference_request"

TESTED_VERSIONS = ("0.19.0", "0.19.2", "0.20.0")
"""The versions of megatron-core that the tests run on; 0.20.0 is the main branch of August 2026."""

SERIES = ("0.19", "0.20")
"""Versions that call things alike. "0.20" has mended some faults: see `Override.series`."""


def series_of(kv_allocator_methods: Container[str]) -> str:
    """The series of a host, by what its KVBlockAllocator defines."""
    return "0.20" if "get_allocatable_count" in kv_allocator_methods else "0.19"


def num_free_blocks(kv_allocator: Any) -> int:
    """Free blocks of a host's KVBlockAllocator: `pool_avail` in 0.20, `total_avail` in 0.19."""
    return int(kv_allocator.pool_avail if hasattr(kv_allocator, "pool_avail") else kv_allocator.total_avail)


KNOWN_SOURCES: Mapping[str, tuple[str, ...]] = {
    "DynamicInferenceContext.__init__": ("1b85f7fa6906", "5332a915923d"),
    "DynamicInferenceContext._allocate_mamba_cache": ("8de33f45a913", "0b015282f82d"),
    "DynamicInferenceContext._compute_prefix_match": ("75443ab421ba",),
    "DynamicInferenceContext._execute_pending_mamba_ops": ("a2d4b745bb7b",),
    "DynamicInferenceContext.add_request": ("2972e743c72d", "b76e797d6081"),
    "DynamicInferenceContext.commit_sampled_tokens": ("f126a1138c7b",),
    "DynamicInferenceContext.deallocate_inference_state_buffers": ("e00620db8c52",),
    "DynamicInferenceContext.reinitialize_inference_state_buffers": ("13c01816012d",),
    "DynamicInferenceContext.release_memory_blocks_from_request_indexes": ("86b563b5708d",),
    "DynamicInferenceContext.reset_metadata": ("b00e03d114d2", "c22305e2da43"),
    "DynamicInferenceContext.resume_paused_requests": ("c3f9a29767ba",),
    "DynamicInferenceContext.update_requests": ("8824320f6b11", "ec7caa934999"),
    "GatedDeltaNet.forward": ("d5d252b0d7f2",),
    "GatedDeltaNet.ssm_prefill": ("f29629e3d874",),
    "KVBlockAllocator.register_kv_block_hashes": ("fe88abb8b311", "333edf2d4bf6"),
    "MHAMetadata.set_state_data": ("0bbbda3871e5",),
    "MambaInferenceStateConfig.from_model": ("177c5f3cb681", "32826d187cea"),
    "MambaMetadata._update_intermediate_metadata": ("0c1846bd6ff9",),
    "MambaMetadata.allocate_slot": ("954c20084d9b",),
    "MambaMetadata.batch_allocate_slots": ("7807ca751d15",),
    "MambaMetadata.compute_cpu_metadata": ("1a033751a4ef", "027b1bbc77e5"),
    "MambaMixer._ssm_prefill": ("b9d99a9d3c1e",),
}
"""Method -> the hashes of its known sources: of 0.19.0 to 0.19.2, and of 0.20.0 where that differs."""


@functools.cache
def source_hash(method: Callable[..., Any]) -> str:
    """12 hex digits of SHA-256 of a function's source without docstring, comments, decorators and layout."""
    try:
        tree = _parsed(textwrap.dedent(inspect.getsource(inspect.unwrap(method))))
    except (OSError, TypeError, SyntaxError):
        return "unreadable"
    return hash_of(tree.body[0])


def hash_of(function: ast.stmt) -> str:
    """As `source_hash`, for a parsed function."""
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return "unreadable"
    body = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
    function.body = body or [ast.Pass()]
    function.decorator_list = []
    return hashlib.sha256(ast.unparse(function).encode()).hexdigest()[:12]


def hashes_in(root: Path, owner: str) -> dict[str, str]:
    """Method -> hash, for the class `owner` ("module:Class") in the folder `root`; {} without it."""
    module, _, name = owner.partition(":")
    path = root.joinpath(*module.split(".")).with_suffix(".py")
    return {
        part.name: hash_of(part)
        for node in (_parsed(path.read_text()).body if path.is_file() else ())
        if isinstance(node, ast.ClassDef) and node.name == name
        for part in node.body
        if isinstance(part, ast.FunctionDef)
    }


def version_of_tree(root: Path) -> str:
    """What the megatron-core in the folder `root` says of its version, as "0.19.2"."""
    path = root / "megatron" / "core" / "package_info.py"
    source = path.read_text() if path.is_file() else ""
    parts = dict(re.findall(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE) = ['\"]?(\w*)", source, re.MULTILINE))
    return "{MAJOR}.{MINOR}.{PATCH}{PRE_RELEASE}".format(**parts) if len(parts) == 4 else "without a version"


def _parsed(source: str) -> ast.Module:
    with warnings.catch_warnings():  # for escapes in docstrings
        warnings.simplefilter("ignore", SyntaxWarning)
        return ast.parse(source)
