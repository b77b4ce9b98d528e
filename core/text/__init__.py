"""Text in and out of a model: tokenizer, chat template, and what a checkpoint says about its answers.

May import the files of the root alone; no model and no engine.
"""

from .byte_tokenizer import ByteTokenizer
from .chat import ChatTemplate
from .codec import GenerationDefaults, TextCodec

__all__ = ["TextCodec", "ByteTokenizer", "ChatTemplate", "GenerationDefaults"]
