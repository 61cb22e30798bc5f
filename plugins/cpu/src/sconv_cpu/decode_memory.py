"""What a decode step works in, kept from call to call with the views that it takes.

A fresh tensor of some hundred KiB is new to the process each time, and faulting its pages in costs
as much as the convolution. For few rows, making the views costs as much as the arithmetic.
"""

from __future__ import annotations

import torch

from . import onednn

__all__ = ["ManyRows", "SingleRow"]


class SingleRow:
    """Inputs and weight columns of one row in one tensor.

    So that one call gathers, transposes and converts them. float32 holds every other dtype.

    Attributes:
        rows: ``[2 * K, D]``, to be filled with a window, a token and the weight's columns.
        inputs: The K inputs among them, ``[1, D]`` each, oldest first.
        columns: The K columns.
        after: ``[K-1, D]``, the window after the step.
    """

    __slots__ = ("after", "columns", "inputs", "rows")

    def __init__(self, dim: int, width: int) -> None:
        # A tensor made under inference mode could not be written outside of it later.
        with torch.inference_mode(False):
            self.rows = torch.empty(2 * width, dim, dtype=torch.float32, device="cpu")
            parts = self.rows.split(1)
            self.after = self.rows[1:width]
        self.inputs, self.columns = parts[:width], parts[width:]


class ManyRows:
    """Inputs of all rows, and the weight, as oneDNN takes them.

    A residual is one tap more, of weight 1, on the current token: added before the only rounding.

    Attributes:
        before: ``[B, K-1, D]``, the windows before the step.
        token: ``[B, 1 or 2, D]``, the current token, twice with a residual.
        after: ``[B, K-1, D]``, the windows after the step.
        taps: ``[D, K]``, the weight.
        image: The inputs as :func:`sconv_cpu.onednn.convolve_image` takes them.
        kernel: The weight as it takes it, with the residual's tap.
    """

    __slots__ = ("after", "before", "image", "kernel", "taps", "token")

    def __init__(
        self, rows: int, dim: int, width: int, dtype: torch.dtype, *, residual: bool
    ) -> None:
        with torch.inference_mode(False):
            inputs = torch.empty((rows, width + residual, dim), dtype=dtype, device="cpu")
            weight = torch.ones((dim, width + residual), dtype=dtype, device="cpu")
            self.before, self.token = inputs[:, : width - 1], inputs[:, width - 1 :]
            self.after, self.taps = inputs[:, 1:width], weight[:, :width]
            self.image, self.kernel = onednn.as_image(inputs), onednn.as_kernel(weight)
