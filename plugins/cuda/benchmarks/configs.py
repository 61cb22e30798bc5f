"""What the random cases of :mod:`check` are compiled for: widths, dtypes, layouts and options."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["CONFIGS", "DRAFTS", "ROWS", "TOKENS", "Config"]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

#: Rows and tokens of a captured step, and tokens per row of a verify or draft-extend step.
ROWS, TOKENS, DRAFTS = 7, 160, 4


@dataclass(frozen=True)
class Config:
    """One configuration.

    Attributes:
        kernel_size: K.
        dims: Channels of each stream.
        axis: How windows are stored.
        state: Dtype of the windows.
        x: Dtype of the activations.
        weight: Dtype of weights and biases.
        flags: Which of bias, silu, residual, strided, group, tree and links hold.
        layout: Layout of the verify windows.
    """

    kernel_size: int
    dims: tuple[int, ...]
    axis: str
    state: torch.dtype
    x: torch.dtype
    weight: torch.dtype
    flags: str = ""
    layout: str = "auto"

    def has(self, flag: str) -> bool:
        return flag in self.flags.split()


CONFIGS = [
    Config(4, (64, 136), "time", BF16, BF16, BF16, "residual"),
    Config(4, (64, 136), "time", BF16, BF16, BF16, "silu group tree"),
    Config(4, (1024,), "time", BF16, BF16, BF16, "bias silu residual strided tree links"),
    Config(4, (64, 136), "channel", BF16, BF16, BF16, "silu group"),
    Config(4, (130, 3), "time", BF16, BF16, BF16, "residual group tree"),
    Config(4, (1, 65), "channel", FP32, FP32, FP32, "bias silu strided tree"),
    Config(4, (512,), "time", FP32, FP32, FP32, "bias residual"),
    Config(4, (512, 8), "time", FP32, BF16, FP32, "bias residual group tree links"),
    Config(2, (264, 64), "time", BF16, BF16, BF16, "silu"),
    Config(2, (33,), "channel", FP16, FP16, FP16, "bias tree"),
    Config(3, (2048,), "channel", BF16, BF16, BF16, "bias tree"),
    Config(3, (264,), "time", FP16, FP16, FP16, "silu residual strided"),
    Config(8, (136, 264), "time", BF16, BF16, BF16, "bias silu residual group tree"),
    Config(8, (130,), "channel", BF16, FP32, BF16, "residual strided"),
    Config(5, (64,), "time", FP16, BF16, FP32, "bias residual tree"),
    Config(7, (72, 64), "time", FP32, FP16, BF16, "silu strided group tree links"),
    Config(4, (64, 136), "time", BF16, BF16, BF16, "silu residual group", layout="dedup"),
    Config(3, (130,), "channel", FP16, FP16, FP16, "bias", layout="dedup"),
    Config(4, (264,), "time", BF16, BF16, BF16, "bias residual strided tree", layout="dense"),
    Config(5, (64, 33), "channel", FP32, BF16, FP32, "silu group tree links", layout="dense"),
]
