"""Argument checks, the same for every backend: shapes, dtypes, devices, and what goes with what.

These are host facts and are always checked; values are :mod:`sconv.step.value_checks`'s.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ..errors import BatchError, GraphBufferError, MetadataError
from ..messages import kind_of
from ..state.pool import ConvStatePool
from ..state.spec import StateSpec
from ..state.tensor_memory import memory_fault
from .batch import ForwardBatch, ForwardMode
from .value_checks import MOST_TOKENS, check_values, values_are_checked

__all__ = ["check_batch", "check_commit"]

_INDEX: Final = (torch.int32, torch.int64)


def check_batch(
    batch: ForwardBatch,
    spec: StateSpec,
    pool: ConvStatePool,
    max_rows: int,
    *,
    values: bool = True,
) -> None:
    """Check a step against a backend. Out of graph; without the values also in graph.

    Raises:
        PoolError: An adopted pool has no state yet.
        BatchError: The message says what is wrong, what was expected and what to do.
        GraphBufferError: An engine's verify windows have fewer rows than the batch.
    """
    rows = batch.batch_size
    if rows > max_rows:
        raise BatchError(
            f"the batch has {rows} rows, this backend takes {max_rows}: raise max_requests of the "
            "StateSpec, or max_bs of init_graph_state for padded batches"
        )
    if batch.num_tokens is not None:
        if isinstance(batch.num_tokens, bool) or not isinstance(batch.num_tokens, int):
            raise BatchError(f"num_tokens={batch.num_tokens!r}: expected an int")
        if not 0 <= batch.num_tokens <= MOST_TOKENS:
            raise BatchError(
                f"num_tokens={batch.num_tokens}: expected 0 to {MOST_TOKENS} tokens in a step"
            )
    _ = pool.layers
    device = pool.device
    for name in (
        "req_pool_indices",
        "slots",
        "seq_lens",
        "extend_seq_lens",
        "extend_prefix_lens",
        "num_accept_tokens",
        "mamba_track_indices",
        "mamba_track_seqlens",
    ):
        if (value := getattr(batch, name)) is not None:
            _check_vector(name, value, (rows,), _INDEX, device)
    _check_vector("mamba_track_mask", batch.mamba_track_mask, (rows,), (torch.bool,), device)
    if batch.mamba_track_indices is None and (
        batch.mamba_track_mask is not None or batch.mamba_track_seqlens is not None
    ):
        raise BatchError("mamba_track_indices is missing: the mask and the lengths need the slots")
    per_row = batch.tokens_per_row or 0
    for name in ("parents", "next_token", "next_sibling"):
        if (value := getattr(batch, name)) is not None:
            _check_vector(name, value, (rows, per_row), _INDEX, device)
    if batch.forward_mode is ForwardMode.TARGET_VERIFY:
        _check_verify(batch, per_row, spec, pool)
    if values and values_are_checked(device):
        check_values(batch, spec, pool)


def check_commit(
    rows: int,
    pool: ConvStatePool,
    verify_tokens: int,
    verify_rows: int,
    *,
    last_correct_step_indices: Tensor,
    mamba_track_indices: Tensor | None,
    mamba_steps_to_track: Tensor | None,
    req_pool_indices: Tensor,
) -> None:
    """Check a commit against the last verify step. Host facts only; in or out of graph.

    Raises:
        BatchError: An argument has the wrong shape, dtype or device.
        MetadataError: No verify step was prepared.
    """
    if verify_tokens == 0:
        raise MetadataError("nothing to commit: no verify step was prepared on this backend")
    for name, value in (
        ("last_correct_step_indices", last_correct_step_indices),
        ("mamba_track_indices", mamba_track_indices),
        ("mamba_steps_to_track", mamba_steps_to_track),
        ("req_pool_indices", req_pool_indices),
    ):
        _check_vector(name, value, (rows,), _INDEX, pool.device)
    if (mamba_track_indices is None) != (mamba_steps_to_track is None):
        raise BatchError(
            "mamba_track_indices and mamba_steps_to_track come together, or neither does"
        )
    if rows > verify_rows:
        raise BatchError(
            f"the commit has {rows} rows, the last verify step had {verify_rows}: give the rows of "
            "that step, in its order"
        )


def _check_vector(
    name: str,
    value: Tensor | None,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    if value is None:
        return
    if not isinstance(value, Tensor):
        raise BatchError(f"{name} is {kind_of(value)}: expected a tensor on {device}")
    if type(value) is not Tensor or value.layout is not torch.strided:
        fault = memory_fault(value)
        if fault is not None:
            raise BatchError(f"{name} {fault}")
    if tuple(value.shape) != shape:
        raise BatchError(f"{name} has shape {list(value.shape)}: expected {list(shape)}")
    if value.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise BatchError(f"{name} is {value.dtype}: expected {expected}")
    if value.device != device:
        raise BatchError(f"{name} is on {value.device}, the state is on {device}")


def _check_verify(batch: ForwardBatch, per_row: int, spec: StateSpec, pool: ConvStatePool) -> None:
    rows = batch.batch_size
    if spec.max_draft_tokens == 1:
        raise BatchError(
            "target_verify needs verify windows, and max_draft_tokens=1 means no speculation: "
            "raise it in the StateSpec"
        )
    if per_row > spec.max_draft_tokens:
        raise BatchError(
            f"draft_token_num={per_row}, but the backend keeps windows for "
            f"max_draft_tokens={spec.max_draft_tokens}: raise it in the StateSpec"
        )
    if batch.is_tree and not pool.windows.takes_trees:
        raise BatchError(
            f"the batch has a tree, and verify windows in the layout {pool.window_layout!r} hold "
            "chains alone: give no parents or links, or build the backend with draft_topk=2 or more"
        )
    if rows > pool.windows.rows:
        raise GraphBufferError(
            "the verify windows are too few", have={"rows": pool.windows.rows}, need={"rows": rows}
        )
