"""Streamers for ``generate``: text as it comes, or a count where several rows come at once."""

from __future__ import annotations

from typing import TextIO

from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer, TextStreamer

from .progress import TokenCounter

__all__ = ["CountingStreamer", "PromptStreamer"]


class PromptStreamer(TextStreamer):
    """Writes the continuation of one prompt to a stream as soon as it is text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, out: TextIO) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._out = out

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Write text that no later token changes."""
        self._out.write(text)
        self._out.flush()


class CountingStreamer(BaseStreamer):
    """Counts the tokens of every row; the first call, which is the prompt, does not count."""

    def __init__(self, counter: TokenCounter) -> None:
        self._counter = counter
        self._seen_prompt = False

    def put(self, value: Tensor) -> None:
        """Take the tokens of a step."""
        if self._seen_prompt:
            self._counter.advance(value.numel())
        self._seen_prompt = True

    def end(self) -> None:
        """Do nothing: the bar ends with its block."""
