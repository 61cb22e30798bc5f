"""Loading a model, and running it over prompts: attached, or stock for comparison."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.generation.streamers import BaseStreamer

import sconv

from .errors import UsageError

__all__ = ["Generation", "Sampling", "Session"]

#: No model has so many; building the modules of an absurd number would take for ever.
_MOST_LAYERS = 4096

#: Characters of what transformers says that are shown.
_MOST_TEXT = 300

_log = logging.getLogger("sconv")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: None = greedy.
        seed: Seed of torch's generators, for every batch.
    """

    temperature: float | None = None
    seed: int = 0


@dataclass(slots=True)
class Generation:
    """New tokens of every prompt, up to the end of its text, and the time that they took."""

    tokens: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0


class Session:
    """A model and its tokenizer.

    Attributes:
        model: On its device, in eval mode.
        tokenizer: Its tokenizer.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model = model
        self.tokenizer = tokenizer

    @classmethod
    def load(cls, name: str, *, device: torch.device, dtype: torch.dtype | None) -> Session:
        """Load from a folder, without a look at any hub, or from the hub. No code of it runs.

        Args:
            name: A folder or a hub id.
            device: Where the model goes.
            dtype: None = float32 on the CPU, the checkpoint's own elsewhere.

        Raises:
            UsageError: There is no such model, its architecture is not supported, or its files are
                damaged, or need code to be read.
        """
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        local = _is_folder(name)
        if local:
            # The tokenizer asks the hub about a folder too, unless told not to.
            os.environ.setdefault("HF_HUB_OFFLINE", "1")
        if dtype is None and device.type == "cpu":
            dtype = torch.float32
        try:
            config = AutoConfig.from_pretrained(
                name, local_files_only=local, trust_remote_code=False
            )
            _check_family(name, config)
            model = AutoModelForCausalLM.from_pretrained(
                name,
                config=config,
                local_files_only=local,
                dtype="auto" if dtype is None else dtype,
                # Neither code of the model's nor a pickle, which is code as well.
                trust_remote_code=False,
                use_safetensors=True,
            )
            tokenizer = AutoTokenizer.from_pretrained(
                name, local_files_only=local, trust_remote_code=False
            )
        except UsageError:
            raise
        except Exception as exc:
            # Files of a stranger: what a wrong one raises has no one type.
            _log.debug("the model cannot be loaded", exc_info=True)
            raise UsageError(f"cannot load the model {name!r}: {_reason(exc)}") from exc
        return cls(model.to(device).eval(), tokenizer)

    def encode(self, prompt: str) -> list[int]:
        """Return a prompt's tokens: what starts a text in front, and no end of text.

        Raises:
            UsageError: The prompt is empty.
        """
        tokens: list[int] = self.tokenizer(prompt).input_ids
        if tokens and tokens[-1] == self.tokenizer.eos_token_id:
            # ByT5 for one closes every text, and a closed text is not continued.
            tokens.pop()
        if not tokens:
            raise UsageError("a prompt is empty: give at least one character")
        start = self.tokenizer.bos_token_id
        if start is not None and tokens[0] != start:
            # A tokenizer may know the token that texts start with and leave it to the caller.
            tokens.insert(0, start)
        return tokens

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def generate(
        self,
        batches: Sequence[Sequence[list[int]]],
        *,
        max_new_tokens: int,
        draft_tokens: int,
        sampling: Sampling,
        streamer_of: Callable[[int], BaseStreamer] | None = None,
    ) -> Generation:
        """Continue prompts, batch by batch.

        Args:
            batches: Encoded prompts.
            max_new_tokens: Most new tokens per prompt.
            draft_tokens: Tokens drafted by prompt lookup, 0 = none; batches of one prompt only.
            sampling: How tokens are chosen.
            streamer_of: Gives a batch's streamer, from the number of its first prompt.
        """
        result = Generation()
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}
        if sampling.temperature is not None:
            # Top-k and top-p of the checkpoint's own generation config stay out of it.
            options |= {"do_sample": True, "temperature": sampling.temperature}
            options |= {"top_k": 0, "top_p": 1.0}
        if draft_tokens:
            options["prompt_lookup_num_tokens"] = draft_tokens
        for batch in batches:
            ids, mask = self._pad(batch)
            if streamer_of is not None:
                options["streamer"] = streamer_of(len(result.tokens))
            torch.manual_seed(sampling.seed)
            start = time.perf_counter()
            output = self.model.generate(
                ids, attention_mask=mask, pad_token_id=self._pad_token(), **options
            )
            rows = output[:, ids.shape[1] :].tolist()
            result.seconds += time.perf_counter() - start
            result.tokens += [self._until_end(row) for row in rows]
        return result

    def _pad(self, batch: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
        """Return ids and mask ``[B, T]``, padded on the left."""
        width = max(map(len, batch))
        pad = self._pad_token()
        ids = [[pad] * (width - len(tokens)) + tokens for tokens in batch]
        mask = [[0] * (width - len(tokens)) + [1] * len(tokens) for tokens in batch]
        device = self.model.device
        return torch.tensor(ids, device=device), torch.tensor(mask, device=device)

    def _pad_token(self) -> int:
        for token in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        return 0

    def _until_end(self, tokens: list[int]) -> list[int]:
        """Cut after the first end-of-text token: the rest is padding of a longer neighbour."""
        ends = self.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        for index, token in enumerate(tokens):
            if token in ends:
                return tokens[: index + 1]
        return tokens


def _is_folder(name: str) -> bool:
    """Whether a model name means a folder.

    Raises:
        UsageError: It looks like one, and there is none.
    """
    if Path(name).is_dir():
        return True
    if Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise UsageError(f"there is no model folder {name!r}")
    return False


def _check_family(name: str, config: Any) -> None:
    """Refuse a model that cannot be attached, before its weights are read."""
    family = sconv.linear_attn_spec(config)
    if family is None or not family.conv_modules:
        known = [arch for spec in sconv.linear_attn_specs() for arch in spec.arch_names]
        names = config.architectures or ["an unnamed architecture"]
        raise UsageError(
            f"the model {name!r} is {', '.join(names)}: supported are {', '.join(known)}"
        )
    layers = getattr(config, "num_hidden_layers", 1)
    if not isinstance(layers, int) or not 0 < layers <= _MOST_LAYERS:
        raise UsageError(
            f"the model {name!r} has num_hidden_layers={layers!r}: expected 1 to {_MOST_LAYERS}"
        )


def _reason(error: Exception) -> str:
    text = str(error).strip()
    if "trust_remote_code" in text:
        return "it needs code from the model's own files, which this command never runs"
    if "safetensors" in text and isinstance(error, OSError):
        return (
            "it has no model.safetensors; other weights are pickles, which can run code and are "
            "never read: save it with save_pretrained(safe_serialization=True)"
        )
    if "ignore_mismatched_sizes" in text:
        return "its weights have other shapes than its config.json says"
    line = " ".join(text.split())
    line = line if len(line) <= _MOST_TEXT else line[:_MOST_TEXT] + " ..."
    return line if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {line}"
