"""Text as byte tokens, cut into windows to train on and to measure on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from model import BYTE_OFFSET, EOS
from torch import Tensor
from torch.nn.functional import cross_entropy


def encode(texts: list[str]) -> Tensor:
    """All texts as one int16 token vector, each followed by the end-of-text token."""
    content = bytearray()
    ends = []
    for text in texts:
        content += text.encode() + b"\0"
        ends.append(len(content) - 1)
    tokens = torch.frombuffer(content, dtype=torch.uint8).to(torch.int16) + BYTE_OFFSET
    tokens[ends] = EOS
    return tokens


def batches(tokens: Tensor, batch: int, length: int, seed: int) -> Iterator[Tensor]:
    """Endless windows [batch, length + 1], int64.

    Each pass covers the text once, in a new order and from a new phase.
    """
    generator = torch.Generator().manual_seed(seed)
    span = torch.arange(length + 1, device=tokens.device)
    while True:
        phase = int(torch.randint(length, (), generator=generator))
        count = (len(tokens) - phase - 1) // length
        starts = torch.randperm(count, generator=generator) * length + phase
        for chosen in starts.to(tokens.device).split(batch):
            if len(chosen) == batch:
                yield tokens[chosen[:, None] + span].long()


def bits_per_byte(
    logits_of: Callable[[Tensor], Tensor], tokens: Tensor, length: int, batch: int
) -> float:
    """Bits per text byte over consecutive windows of `length` tokens, none seeing an earlier one.

    `logits_of` maps tokens [B, T] to logits [B, T, vocabulary]. End-of-text tokens cost bits and
    count no byte. A last, incomplete window is left out.
    """
    starts = torch.arange(0, len(tokens) - length, length, device=tokens.device)
    span = torch.arange(length + 1, device=tokens.device)
    nats = torch.zeros((), dtype=torch.float64, device=tokens.device)
    count = torch.zeros((), dtype=torch.int64, device=tokens.device)
    with torch.no_grad():
        for chosen in starts.split(batch):
            window = tokens[chosen[:, None] + span].long()
            target = window[:, 1:].flatten()
            logits = logits_of(window[:, :-1]).float().flatten(0, 1)
            nats += cross_entropy(logits, target, reduction="sum").double()
            count += (target >= BYTE_OFFSET).sum()
    return float(nats / count / math.log(2))
