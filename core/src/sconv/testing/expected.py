"""What the oracle says of a step: :mod:`sconv.reference` in the terms of :class:`.steps.Step`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import reference
from ..step.batch import ForwardMode
from .steps import Step

__all__ = ["Layer", "expected_step"]


@dataclass(frozen=True)
class Layer:
    """What a model brings to one convolution."""

    weight: Tensor
    bias: Tensor | None
    activation: str | None
    residual: bool


def expected_step(
    step: Step, grid: int | None, x: Tensor, pool: Tensor, layer: Layer
) -> tuple[Tensor, Tensor]:
    """Return the exact outputs ``[T, D]`` of a step, in float64, and the state after it.

    Args:
        step: The step.
        grid: ``track_grid`` of the spec.
        x: ``[T, D]`` activations.
        pool: ``[rows, K-1, D]`` state before the step.
        layer: Weights and how they are applied.
    """
    common = {
        "x": x,
        "pool": pool,
        "weight": layer.weight,
        "slots": step.slots,
        "bias": layer.bias,
        "activation": layer.activation,
        "residual": layer.residual,
    }
    targets = step.snapshot_targets
    match step.mode:
        case ForwardMode.IDLE:
            return torch.zeros(x.shape, dtype=torch.float64, device="cpu"), pool
        case ForwardMode.DECODE:
            return reference.decode(
                **common,  # type: ignore[arg-type]
                has_initial=step.resumes,
                track_slots=targets,
            )
        case ForwardMode.TARGET_VERIFY:
            y, _ = reference.verify(
                **common,  # type: ignore[arg-type]
                draft_token_num=step.draft_tokens,
                has_initial=step.resumes,
                parents=step.parents,
            )
            return y, pool
        case ForwardMode.DRAFT_EXTEND:
            assert step.accepts is not None
            crossings = None
            if grid is not None and step.track_slots is not None:
                crossings = reference.crossing_tokens(
                    seq_lens=step.before, accepts=step.accepts, grid=grid
                )
            return reference.draft_extend(
                **common,  # type: ignore[arg-type]
                draft_token_num=step.draft_tokens,
                accepts=step.accepts,
                has_initial=step.resumes,
                track_slots=targets,
                track_tokens=crossings,
            )
        case _:
            tokens = None
            if step.track_lengths is not None:
                tokens = [
                    length - before if length >= 0 else -1
                    for length, before in zip(step.track_lengths, step.before, strict=True)
                ]
            return reference.extend(
                **common,  # type: ignore[arg-type]
                lengths=step.lengths,
                has_initial=step.resumes,
                track_slots=targets,
                track_tokens=tokens,
            )
