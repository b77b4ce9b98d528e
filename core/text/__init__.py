"""Text in and out of a model: tokenizer, chat template, and what a model says about its answers.

codec, detokenizer      text to tokens and back, also while they come; a model's defaults
chat_template           chat templates, and where chats that begin alike branch
byte_tokenizer          the tokenizer of models whose tokens are bytes
"""

from .byte_tokenizer import ByteTokenizer
from .chat_template import ChatTemplate
from .codec import GenerationDefaults, TextCodec

__all__ = ["TextCodec", "ByteTokenizer", "ChatTemplate", "GenerationDefaults"]
