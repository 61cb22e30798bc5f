"""What every launch of the gated delta rule is given: heads, and the tensors of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sconv import SpecError

from ..launch import ALIGNMENT
from ..layer import VECTOR

__all__ = ["Heads", "Inputs", "Records"]


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of a layer's recurrent state, ``[rows, values, value_dim, key_dim]``.

    Attributes:
        keys: Heads of queries and keys; value head h reads key head ``h // (values // keys)``.
        values: Heads of values, and of states.
        key_dim, value_dim: Powers of two from 16 to 256.
        channel: Whether a gate has one number per key channel (KDA), or one a head (GDN).
    """

    keys: int
    values: int
    key_dim: int
    value_dim: int
    channel: bool

    def __post_init__(self) -> None:
        """Refuse what the kernels do not serve.

        Raises:
            SpecError: A width is not such a power of two, or heads do not divide.
        """
        for name in ("key_dim", "value_dim"):
            size = getattr(self, name)
            if not 16 <= size <= 256 or size & (size - 1):
                raise SpecError(f"{name} is {size}; the kernels take 16, 32, 64, 128 and 256")
        if self.values % self.keys:
            raise SpecError(f"{self.values} value heads are no multiple of {self.keys} key heads")

    @property
    def constants(self) -> dict[str, Any]:
        """What a compilation depends on."""
        return {
            "H": self.keys,
            "HV": self.values,
            "DK": self.key_dim,
            "DV": self.value_dim,
            "CHANNEL": self.channel,
        }


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors of a layer's call, as the hook takes them.

    Attributes:
        q, k: ``[T, H, dk]``, unit last stride, any other strides, of one dtype with ``v``.
        v: ``[T, HV, dv]``, likewise.
        gate: Raw logits, ``[T, HV]``, or ``[T, HV, dk]`` with unit last stride.
        beta: Raw logits, ``[T, HV]``.
        A_log: ``[HV]``.
        dt_bias: ``[HV]`` or ``[HV, dk]``, or None.
        scale: Factor of the queries.
        lower_bound: Of the safe gate; None = the softplus gate.
        normalize: Whether queries and keys are scaled to unit length.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    beta: Tensor
    A_log: Tensor
    dt_bias: Tensor | None
    scale: float
    lower_bound: float | None
    normalize: bool

    def vector(self, *more: int) -> int:
        """Return :data:`VECTOR` if all rows and these numbers allow vector accesses, else 1."""
        wide = [self.q, self.k, self.v]
        if self.gate.ndim == 3:
            wide.append(self.gate)
        whole = all(number % VECTOR == 0 for number in more)
        for tensor in wide:
            whole &= tensor.data_ptr() % ALIGNMENT == 0
            whole &= all(step % VECTOR == 0 for step in tensor.stride()[:2])
        return VECTOR if whole else 1

    def arguments(self, vec: int) -> dict[str, Any]:
        """Return the tensors and their strides, by the names that kernels give them."""
        gate_vec = vec if self.gate.ndim == 3 else 1
        return {
            "q": self.q,
            "q_step": self.q.stride(0) // vec,
            "q_head": self.q.stride(1) // vec,
            "k": self.k,
            "k_step": self.k.stride(0) // vec,
            "k_head": self.k.stride(1) // vec,
            "v": self.v,
            "v_step": self.v.stride(0) // vec,
            "v_head": self.v.stride(1) // vec,
            "gate": self.gate,
            "gate_step": self.gate.stride(0) // gate_vec,
            "gate_head": self.gate.stride(1) // gate_vec,
            "beta_index": self.beta,
            "beta_step": self.beta.stride(0),
            "beta_head": self.beta.stride(1),
            "rate_log_index": self.A_log.contiguous(),
            "bias_index": (self.A_log if self.dt_bias is None else self.dt_bias).contiguous(),
            "has_bias": int(self.dt_bias is not None),
        }

    @property
    def constants(self) -> dict[str, Any]:
        """What a compilation depends on."""
        bound = self.lower_bound
        return {
            "SCALE": self.scale,
            "SAFE": bound is not None,
            "BOUND": 0.0 if bound is None else bound,
            "NORMALIZE": self.normalize,
        }


@dataclass(frozen=True, slots=True)
class Records:
    """What a verify step keeps of each token, of one layer or of all.

    ``S_t = S_{t-1} * exp(g) + u k^T`` with the raw key ``k``: ``u`` holds the key's norm.

    Attributes:
        u: ``[..., R, HV, P, dv]`` float32.
        k: ``[..., R, H, P, dk]``, a dtype that holds the activations' exactly.
        g: ``[..., R, HV, P]`` or ``[..., R, HV, P, dk]`` float32, the log decay of that token.
    """

    u: Tensor
    k: Tensor
    g: Tensor

    @property
    def places(self) -> int:
        """P: tokens that a row has room for."""
        return self.u.shape[-2]
