"""The oracle: every mode in float64 and plain loops, written to be read and believed.

The names here are those of the short convolution, see :mod:`sconv.reference.convolution`;
:mod:`sconv.reference.gated_delta` is the oracle of the recurrent state.
"""

from __future__ import annotations

from . import gated_delta
from .convolution import (
    commit,
    crossing_tokens,
    decode,
    draft_extend,
    extend,
    metadata,
    row_conv,
    time_axis,
    verify,
)

__all__ = [
    "commit",
    "crossing_tokens",
    "decode",
    "draft_extend",
    "extend",
    "gated_delta",
    "metadata",
    "row_conv",
    "time_axis",
    "verify",
]
