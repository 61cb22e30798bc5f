"""What torch's functions and methods mean for code that a graph records. Tables alone."""

from __future__ import annotations

from typing import Final

__all__ = [
    "ALLOCATING",
    "BOOLEAN",
    "DYNAMIC",
    "HOST_FUNCTIONS",
    "HOST_METHODS",
    "LOGGING",
    "SEQUENCES",
    "SYNCING_FUNCTIONS",
    "SYNCING_METHODS",
    "VIEWS",
]

#: Methods that hand values to the host, whatever they are called on.
SYNCING_METHODS: Final = frozenset(
    {
        "__bool__",
        "__float__",
        "__index__",
        "__int__",
        "cpu",
        "item",
        "numpy",
        "synchronize",
        "tolist",
    }
)

#: Functions of torch, and methods of a tensor, whose result is a Python value.
SYNCING_FUNCTIONS: Final = frozenset({"allclose", "equal", "is_nonzero", "synchronize"})

#: Results whose shape depends on values.
DYNAMIC: Final = frozenset(
    {
        "argwhere",
        "bincount",
        "masked_select",
        "nonzero",
        "nonzero_numpy",
        "unique",
        "unique_consecutive",
    }
)

#: Functions that make a tensor out of nothing.
ALLOCATING: Final = frozenset(
    {
        "Tensor",
        "arange",
        "as_tensor",
        "empty",
        "empty_like",
        "empty_strided",
        "eye",
        "from_numpy",
        "full",
        "full_like",
        "linspace",
        "new_empty",
        "new_full",
        "new_ones",
        "new_tensor",
        "new_zeros",
        "ones",
        "ones_like",
        "rand",
        "randint",
        "randn",
        "tensor",
        "zeros",
        "zeros_like",
    }
)

#: Functions of torch that answer from what the host knows.
HOST_FUNCTIONS: Final = frozenset(
    {
        "Generator",
        "Size",
        "can_cast",
        "device",
        "finfo",
        "get_default_dtype",
        "iinfo",
        "inference_mode",
        "is_floating_point",
        "is_grad_enabled",
        "is_tensor",
        "no_grad",
        "numel",
        "promote_types",
        "result_type",
    }
)

#: Methods and attributes of a tensor that the host knows.
HOST_METHODS: Final = frozenset(
    {
        "data_ptr",
        "dim",
        "element_size",
        "get_device",
        "is_complex",
        "is_contiguous",
        "is_floating_point",
        "is_pinned",
        "nelement",
        "ndimension",
        "numel",
        "size",
        "storage_offset",
        "stride",
        "untyped_storage",
    }
)

#: Attributes of a tensor that are tensors.
VIEWS: Final = frozenset({"H", "T", "data", "grad", "imag", "mH", "mT", "real"})

#: Functions and methods whose result is a mask.
BOOLEAN: Final = frozenset(
    {
        "bool",
        "eq",
        "ge",
        "gt",
        "isfinite",
        "isin",
        "isinf",
        "isnan",
        "le",
        "logical_and",
        "logical_not",
        "logical_or",
        "logical_xor",
        "lt",
        "ne",
    }
)

#: Functions and methods whose result is a sequence of tensors.
SEQUENCES: Final = frozenset({"chunk", "split", "tensor_split", "unbind"})

LOGGING: Final = frozenset(
    {"critical", "debug", "error", "exception", "info", "log", "warn", "warning"}
)
