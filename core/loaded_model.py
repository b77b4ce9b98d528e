"""A model with its text and its defaults, from a folder or a name on the hub."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .files import CONFIG, ModelFolderError, model_folder, read_object
from .inference.contexts.step_inputs import Model
from .models import HybridLM
from .models.weights import MODEL_TYPE, read_config
from .parallel_groups import ParallelGroups
from .params_and_results import SamplingParams
from .text import ByteTokenizer, ChatTemplate, GenerationDefaults, TextCodec


@dataclass(frozen=True)
class LoadedText:
    """What a model's folder says without the weights: enough for a server whose engines run elsewhere."""

    text: TextCodec | None  # None where the folder has no tokenizer
    generation: GenerationDefaults  # how answers are chosen, and where they end, unless a request says so
    folder: Path

    def __repr__(self) -> str:
        """One line: from where, and whether there is text."""
        return f"<LoadedText: {self.folder}, {self._described}>"

    @property
    def _described(self) -> str:
        if self.text is None:
            return "no tokenizer"
        return f"tokenizer, {'no chat template' if self.text.chat_template is None else 'chat template'}"

    @property
    def codec(self) -> TextCodec:
        """`text`; ValueError where the folder has no tokenizer."""
        if self.text is None:
            raise ValueError(f"{self.folder} has no tokenizer; accepted: token ids in place of text")
        return self.text

    def sampling_params(self, **overrides: Any) -> SamplingParams:
        """The model's defaults, and `overrides`, which are arguments of `SamplingParams`."""
        return self.generation.sampling_params(**overrides)


@dataclass(frozen=True)
class LoadedModel(LoadedText):
    """What a model's folder holds: `LoadedText`, and `model` for a `DynamicInferenceEngine`."""

    model: Model

    def __repr__(self) -> str:
        """One line: what was loaded, from where, and whether it has text."""
        return f"<LoadedModel: {type(self.model).__name__} from {self.folder}, {self._described}>"


def load(
    folder_or_name: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    *,
    groups: ParallelGroups | None = None,
) -> LoadedModel:
    """Load a `HybridLM`, or a model of transformers, which needs the extra `mambaslots[hf]`.

    Args:
        folder_or_name: a folder with `config.json`, or a name on the hub. A `HybridLM` has the `model_type`
            "mambaslots_hybrid_lm".
        device: where the weights go.
        dtype: of the weights; None for the dtype that its config names.
        groups: the ranks that the model is split over; None for one rank. All of them call this, each with
            its own device, and each reads its part of the weights.

    Raises:
        ValueError: the folder holds no model that can be loaded, or none that can be split over
            `groups`; the message names the file, the weight or the size.
        OSError: the hub cannot be reached, or its files cannot be written.
        ImportError: the folder is one of transformers, which is not installed.
    """
    folder = model_folder("folder_or_name", folder_or_name)
    loaded = load_text(folder)
    model: Model
    if read_object(folder / CONFIG).get("model_type") == MODEL_TYPE:
        model = HybridLM.from_pretrained(folder, device=device, dtype=dtype, groups=groups)
    else:
        from .hf import load as load_transformers

        model = load_transformers(folder, device, dtype, groups=groups)
    return LoadedModel(loaded.text, loaded.generation, folder, model)


def load_text(folder_or_name: str | Path) -> LoadedText:
    """Load tokenizer, chat template and defaults, not the weights. Raises what `load` raises."""
    folder = model_folder("folder_or_name", folder_or_name)
    config = read_object(folder / CONFIG)
    generation = GenerationDefaults.read(folder, config)
    if config.get("model_type") == MODEL_TYPE:
        return LoadedText(_byte_text(folder), generation, folder)
    from .hf.tokenizer import load_text as folder_text

    return LoadedText(folder_text(folder), generation, folder)


def stored_dtype(folder_or_name: str | Path) -> torch.dtype:
    """The dtype that a model's config names; reads no weights. Raises what `load` raises."""
    folder = model_folder("folder_or_name", folder_or_name)
    if read_object(folder / CONFIG).get("model_type") == MODEL_TYPE:
        return read_config(folder, None).dtype
    from .hf.load import stored_dtype as named_dtype

    return named_dtype(folder)


def _byte_text(folder: Path) -> TextCodec | None:
    """The text of a `HybridLM`, without transformers."""
    if not (folder / "tokenizer.json").is_file():
        return None
    tokenizer, template = ByteTokenizer.from_folder(folder), folder / "chat_template.jinja"
    try:
        chat = ChatTemplate(template.read_text("utf-8")) if template.is_file() else None
    except (ValueError, OSError) as error:
        raise ModelFolderError(f"{template}: {error}") from error
    return TextCodec(tokenizer, chat)
