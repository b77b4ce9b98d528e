"""Text in and out of a model: tokenizer, chat template, and what a checkpoint says about its answers."""

from .byte_tokenizer import ByteTokenizer
from .chat_template import ChatTemplate
from .codec import TextCodec, Tokenizer
from .detokenizer import Detokenizer
from .generation_defaults import GenerationDefaults

__all__ = ["TextCodec", "Tokenizer", "ByteTokenizer", "ChatTemplate", "Detokenizer", "GenerationDefaults"]
