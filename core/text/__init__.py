"""Text in and out of a model: tokenizer, chat template, and what a checkpoint says about its answers."""

from .byte_tokenizer import ByteTokenizer
from .chat_template import ChatTemplate
from .codec import BoundedTokenizer, CuttingTokenizer, PromptTooLongError, TextCodec, Tokenizer
from .detokenizer import Detokenizer
from .generation_defaults import GenerationDefaults
from .marked_prompt import MarkedPrompt
from .token_cuts import Cut

__all__ = [
    "TextCodec", "Tokenizer", "CuttingTokenizer", "BoundedTokenizer", "Cut", "ByteTokenizer", "ChatTemplate",
    "MarkedPrompt", "PromptTooLongError", "Detokenizer", "GenerationDefaults",
]  # fmt: skip
