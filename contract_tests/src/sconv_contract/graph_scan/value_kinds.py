"""What a value is to code that a graph records: a tensor, something that holds some, or neither."""

from __future__ import annotations

from typing import Final

__all__ = [
    "BATCH",
    "HOST",
    "MASK",
    "META",
    "SELF",
    "TENSOR",
    "TENSORS",
    "class_of",
    "element",
    "join",
    "object_kind",
    "of_annotation",
]

#: Known to the host, or unknown.
HOST: Final = "host"
TENSOR: Final = "tensor"
#: A tensor of bools.
MASK: Final = "mask"
#: A sequence of tensors.
TENSORS: Final = "tensors"
#: A ForwardBatch.
BATCH: Final = "batch"
#: A ShortConvMetadata.
META: Final = "metadata"
#: The backend itself.
SELF: Final = "self"


_OBJECT: Final = "object:"


def object_kind(path: str) -> str:
    """Return the kind of an object of a class, by the class's dotted path."""
    name = path.rpartition(".")[2]
    known = {"Tensor": TENSOR, "ForwardBatch": BATCH, "ShortConvMetadata": META}
    return known.get(name, f"{_OBJECT}{path}")


def class_of(kind: str) -> str | None:
    """Return the path of an object's class, or None if it is no object of a known class."""
    return kind.removeprefix(_OBJECT) if kind.startswith(_OBJECT) else None


def of_annotation(annotation: str) -> str:
    """Return what a parameter with this annotation is."""
    if "Tensor" in annotation:
        sequence = annotation.startswith(("Sequence", "list", "tuple", "List", "Iterable"))
        mapping = annotation.startswith(("dict", "Mapping", "Callable"))
        return HOST if mapping else TENSORS if sequence else TENSOR
    if "ForwardBatch" in annotation:
        return BATCH
    return META if "ShortConvMetadata" in annotation else HOST


def element(kind: str) -> str:
    """Return what iterating over a value gives."""
    return TENSOR if kind in (TENSORS, TENSOR, MASK) else HOST


def join(one: str, other: str) -> str:
    """Return what a value is that may be either."""
    if one == other or other == HOST:
        return one
    if one == HOST:
        return other
    tensors = {TENSOR, MASK, TENSORS}
    return TENSOR if {one, other} & tensors else HOST
