"""What a recurrent state is: the heads, the gate and the memory of a gated delta rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

import torch

from ..errors import SpecError

__all__ = ["GatedDelta", "RecordLayout"]

RecordLayout: TypeAlias = Literal["corrections", "snapshots"]
Gate: TypeAlias = Literal["scalar", "channel"]

_STATE_DTYPES: Final = (torch.float32, torch.bfloat16)
_KEY_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class GatedDelta:
    """The recurrent matrices of every layer, on one tensor-parallel rank.

    Value head ``h`` has a state of ``[value_dim, key_dim]`` and reads key head
    ``h // (value_heads // key_heads)``.

    Attributes:
        key_heads: Heads of queries and keys.
        value_heads: Heads of values, of gates and of the state: a multiple of ``key_heads``.
        key_dim: Width of a query and a key.
        value_dim: Width of a value.
        gate: ``"scalar"``: one decay per head and token (GDN: Qwen3-Next, Qwen3.5).
            ``"channel"``: one for each of the ``key_dim`` channels (KDA: Kimi-Linear).
        dtype: Dtype of the state: float32 or bfloat16. Arithmetic is float32 either way.
        records: What a verify step keeps for the commit. ``"corrections"``: for each token a value,
            a key and a gate, of which the commit makes the state. ``"snapshots"``: the whole state
            after each token, some 40 times as much.
        key_dtype: Dtype of the keys in records. It must hold those of the model exactly: float32
            holds any, bfloat16 those of a bfloat16 model in half the memory.
        log: Records of accepted tokens that a slot may hold before they are folded into its state;
            0 = the commit folds them. Its memory is per slot, see ``sconv plan``.

    Raises:
        SpecError: A value is out of the contract's range; the message names it.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    gate: Gate = "scalar"
    dtype: torch.dtype = torch.float32
    records: RecordLayout = "corrections"
    key_dtype: torch.dtype = torch.float32
    log: int = 0

    def __post_init__(self) -> None:
        for name in ("key_heads", "value_heads", "key_dim", "value_dim", "log"):
            value, least = getattr(self, name), int(name != "log")
            if isinstance(value, bool) or not isinstance(value, int):
                raise SpecError(f"{name}={value!r}: expected an int")
            if value < least:
                raise SpecError(f"{name}={value}: expected at least {least}")
        if self.value_heads % self.key_heads:
            raise SpecError(
                f"value_heads={self.value_heads} is not a multiple of key_heads={self.key_heads}: "
                "each key head serves as many value heads"
            )
        for name, kinds in (("gate", Gate), ("records", RecordLayout)):
            if getattr(self, name) not in get_args(kinds):
                raise SpecError(
                    f"{name}={getattr(self, name)!r}: expected "
                    + " or ".join(map(repr, get_args(kinds)))
                )
        if self.dtype not in _STATE_DTYPES:
            raise SpecError(f"dtype={self.dtype}: a recurrent state is float32 or bfloat16")
        if self.key_dtype not in _KEY_DTYPES:
            raise SpecError(f"key_dtype={self.key_dtype}: expected float32, bfloat16 or float16")
        if self.log and self.records == "snapshots":
            raise SpecError(f"log={self.log} needs records='corrections': snapshots are no log")

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of one slot of one layer: ``(value_heads, value_dim, key_dim)``."""
        return (self.value_heads, self.value_dim, self.key_dim)

    @property
    def gate_shape(self) -> tuple[int, ...]:
        """Shape of one token's gate: ``(value_heads,)`` or ``(value_heads, key_dim)``."""
        if self.gate == "scalar":
            return (self.value_heads,)
        return (self.value_heads, self.key_dim)

    @property
    def state_nbytes(self) -> int:
        """Bytes of the state of one slot of one layer."""
        return self.value_heads * self.value_dim * self.key_dim * self.dtype.itemsize

    def record_nbytes(self) -> int:
        """Bytes that one token's record takes in one layer."""
        if self.records == "snapshots":
            return self.state_nbytes
        gates = self.value_heads * (self.key_dim if self.gate == "channel" else 1)
        keys = self.key_heads * self.key_dim * self.key_dtype.itemsize
        return 4 * self.value_heads * self.value_dim + keys + 4 * gates
