"""Which operators the backend uses: an NPU that has a kernel for each of them can run it.

torch_npu runs an operator without an NPU kernel on the CPU, with a copy there and one back, and
says so once in a warning. So the list is kept, and every test on the simulated device asks for it.
Sources, dtypes and products are in ``docs/reference/ascend-operators.md``.
"""

from __future__ import annotations

from typing import Final

__all__ = ["OPERATORS", "OUT_OF_GRAPH"]

#: What the recordable part of a step, its convolutions and the commit use. All of them have a
#: kernel in torch_npu 2.13, and none reads a value on the host.
OPERATORS: Final = frozenset(
    f"aten::{name}"
    for name in (
        # Lookup and writes of whole rows.
        "index_select",
        "index_copy_",
        "gather",
        "scatter_add_",
        # Selection.
        "where",
        "masked_fill_",
        "minimum",
        "clamp",
        "clamp_",
        "amax",
        # Comparison and logic.
        "eq",
        "ge",
        "gt",
        "le",
        "lt",
        "bitwise_and",
        "bitwise_and_",
        "bitwise_not",
        "logical_and",
        "logical_and_",
        # Arithmetic.
        "add",
        "add_",
        "sub",
        "mul",
        "neg",
        "exp_",
        "div_",
        "addcmul_",
        "floor_divide",
        "cumsum",
        # Memory.
        "arange",
        "zeros",
        "ones_like",
        "zero_",
        "fill_",
        "copy_",
        "clone",
        "contiguous",
        "cat",
    )
)

#: What a pool and the host part of a step use besides, outside of any graph.
OUT_OF_GRAPH: Final = frozenset(
    f"aten::{name}" for name in ("any", "index_fill_", "isin", "sort", "sum", "_local_scalar_dense")
)
