"""Which sources of megatron-core's methods we know, by a hash that ignores comments and layout.

`recompute_sources` prints the table anew from unpacked wheels.
"""

import ast
import functools
import hashlib
import inspect
import textwrap
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

TESTED_VERSIONS = ("0.18.2", "0.19.0", "0.19.2")
"""The versions of megatron-core that the tests run on."""

KNOWN_SOURCES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "ContextGPUView.__init__": {
        "117c39b75b90": ("0.18.0", "0.18.1", "0.18.2"),
        "e1bc5696d06a": ("0.19.0", "0.19.1", "0.19.2"),
    },
    "DynamicInferenceContext.__init__": {
        "c6f433deff44": ("0.18.0", "0.18.1", "0.18.2"),
        "1b85f7fa6906": ("0.19.0", "0.19.1", "0.19.2"),
    },
    "DynamicInferenceContext._allocate_mamba_cache": {
        "1f6bced83aba": ("0.18.0", "0.18.1", "0.18.2"),
        "8de33f45a913": ("0.19.0", "0.19.1", "0.19.2"),
    },
    "DynamicInferenceContext._allocate_mamba_states": {
        "1814a7096a5f": ("0.18.0", "0.18.1", "0.18.2"),
        "9c78e1cab79c": ("0.19.0", "0.19.1", "0.19.2"),
    },
    "DynamicInferenceContext._compute_prefix_match": {
        "e614e0b4210d": ("0.18.0", "0.18.1", "0.18.2"),
        "75443ab421ba": ("0.19.0", "0.19.1", "0.19.2"),
    },
    "DynamicInferenceContext._execute_pending_mamba_ops": {
        "a2d4b745bb7b": ("0.18.0", "0.18.1", "0.18.2", "0.19.0", "0.19.1", "0.19.2"),
    },
    "DynamicInferenceContext.add_request": {
        "b3cd47a40791": ("0.18.0", "0.18.1", "0.18.2"),
        "2972e743c72d": ("0.19.0", "0.19.1", "0.19.2"),
    },
    "DynamicInferenceContext.commit_sampled_tokens": {
        "f126a1138c7b": ("0.19.0", "0.19.1", "0.19.2"),
    },
    "DynamicInferenceContext.deallocate_inference_state_buffers": {
        "e00620db8c52": ("0.18.0", "0.18.1", "0.18.2", "0.19.0", "0.19.1", "0.19.2"),
    },
    "DynamicInferenceContext.reinitialize_inference_state_buffers": {
        "13c01816012d": ("0.18.0", "0.18.1", "0.18.2", "0.19.0", "0.19.1", "0.19.2"),
    },
    "DynamicInferenceContext.release_memory_blocks_from_request_indexes": {
        "86b563b5708d": ("0.18.0", "0.18.1", "0.18.2", "0.19.0", "0.19.1", "0.19.2"),
    },
    "DynamicInferenceContext.reset_metadata": {
        "2bf61193a0bd": ("0.18.0", "0.18.1", "0.18.2"),
        "b00e03d114d2": ("0.19.0", "0.19.1", "0.19.2"),
    },
    "DynamicInferenceContext.resume_paused_requests": {
        "c3f9a29767ba": ("0.18.0", "0.18.1", "0.18.2", "0.19.0", "0.19.1", "0.19.2"),
    },
    "DynamicInferenceContext.update_requests": {
        "8824320f6b11": ("0.18.0", "0.18.1", "0.18.2", "0.19.0", "0.19.1", "0.19.2"),
    },
    "KVBlockAllocator.register_kv_block_hashes": {
        "ce92979f18a8": ("0.18.0", "0.18.1", "0.18.2"),
        "fe88abb8b311": ("0.19.0", "0.19.1", "0.19.2"),
    },
    "KVBlockAllocator.release_memory_blocks": {
        "b87f56a9059a": ("0.18.0", "0.18.1", "0.18.2"),
    },
    "MHAMetadata.set_state_data": {
        "0bbbda3871e5": ("0.18.0", "0.18.1", "0.18.2", "0.19.0", "0.19.1", "0.19.2"),
    },
    "MambaInferenceStateConfig.from_model": {
        "177c5f3cb681": ("0.18.0", "0.18.1", "0.18.2", "0.19.0", "0.19.1", "0.19.2"),
    },
    "MambaMetadata._update_intermediate_metadata": {
        "1d3f5409d647": ("0.18.0", "0.18.1", "0.18.2"),
        "0c1846bd6ff9": ("0.19.0", "0.19.1", "0.19.2"),
    },
    "MambaMetadata.allocate_slot": {
        "954c20084d9b": ("0.18.0", "0.18.1", "0.18.2", "0.19.0", "0.19.1", "0.19.2"),
    },
    "MambaMetadata.batch_allocate_slots": {
        "7807ca751d15": ("0.18.0", "0.18.1", "0.18.2", "0.19.0", "0.19.1", "0.19.2"),
    },
    "MambaMetadata.compute_cpu_metadata": {
        "1a033751a4ef": ("0.18.0", "0.18.1", "0.18.2", "0.19.0", "0.19.1", "0.19.2"),
    },
    "MambaMixer._ssm_prefill": {
        "34e03eb28cfe": ("0.18.0", "0.18.1", "0.18.2"),
        "b9d99a9d3c1e": ("0.19.0", "0.19.1", "0.19.2"),
    },
}
"""Method -> hash of its source -> the megatron-core versions that have it."""

MENDED_SOURCES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "KVBlockAllocator.release_memory_blocks": {
        "272cef05cd40": ("0.19.0", "0.19.1", "0.19.2"),
    },
}
"""As `KNOWN_SOURCES`, for sources that no longer need the correction and are left alone."""


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


def _parsed(source: str) -> ast.Module:
    with warnings.catch_warnings():  # for escapes in docstrings
        warnings.simplefilter("ignore", SyntaxWarning)
        return ast.parse(source)


def hashes_of_class(root: Path, owner: str) -> dict[str, str]:
    """Method -> hash, for the class `owner` ("module:Class") in an unpacked wheel."""
    module, _, name = owner.partition(":")
    source = root.joinpath(*module.split(".")).with_suffix(".py").read_text()
    return {
        part.name: hash_of(part)
        for node in _parsed(source).body
        if isinstance(node, ast.ClassDef) and node.name == name
        for part in node.body
        if isinstance(part, ast.FunctionDef)
    }
