"""The same steps of every kind, each time that they are asked for, and all that comes out.

Two runs of one seed can be compared bit for bit: of two threads, or under two settings of the
process. What is right is left to the oracle of :mod:`sconv.testing.harness`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ..engine.backend import Backend
from ..step.batch import ForwardBatch
from .captures import FREE, KINDS, ROWS, captured_step, load_into, refill, sized_harness
from .comparison import assert_same_bits

__all__ = ["EveryStep", "assert_same_results"]

_VERIFIES: Final = ("chain", "tree", "links")


class EveryStep:
    """A backend and steps for it: every kind that it supports, commits, snapshots and a replay."""

    def __init__(
        self,
        backend: Backend,
        *,
        seed: int = 1,
        capture: Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]] | None = None,
    ) -> None:
        """Size the backend's static buffers and fill its live slots.

        Args:
            backend: A fresh backend of :func:`sconv.testing.captures.captured_spec`.
            seed: Of all steps and values.
            capture: Captures a call and returns what replays it, and the call's result. None: no
                step is captured.
        """
        self._seed, self._capture = seed, capture
        self._backend = backend
        self._harness = sized_harness(backend, seed=seed)

    def results(self) -> dict[str, Tensor]:
        """Run the steps, each from the state that the one before left.

        Returns:
            Outputs and state after each step, on the host, by what they are. Left out is what means
            nothing: the dummy slot, and outputs of rows on it.
        """
        can, found = self._backend.info.capabilities, dict[str, Tensor]()
        for number, kind in enumerate(KINDS):
            if kind in _VERIFIES and not can.rollback:
                continue
            if kind in ("tree", "links") and not can.trees:
                continue
            # Some settings reach one dtype of the inputs, some another.
            self._harness.x_dtype = (torch.float32, torch.float16)[number % 2]
            self._keep(found, kind, self._eager(kind, self._seed + number))
        self._harness.x_dtype = torch.float32
        self._keep(found, "one row", self._one_row())
        if self._capture is not None:
            self._keep(found, "a replay", self._replay(self._capture))
        return found

    def _keep(
        self, found: dict[str, Tensor], name: str, outputs: dict[tuple[int, str], Tensor]
    ) -> None:
        for key, value in outputs.items():
            found[f"{name}: output of {key}"] = value
        for key, value in self._harness.state().items():
            found[f"{name}: state of {key}"] = value[1:]

    def _eager(self, kind: str, seed: int) -> dict[tuple[int, str], Tensor]:
        harness, backend = self._harness, self._backend
        step = captured_step(kind, seed)
        batch = harness.batch(step)
        backend.init_forward_metadata(batch)
        outputs = harness.convolve(batch, harness.inputs(step.num_tokens))
        if kind in _VERIFIES:
            kept, targets = self._ints([row % 2 for row in range(ROWS)]), self._ints(FREE[:ROWS])
            assert batch.req_pool_indices is not None
            backend.update_mamba_state_after_mtp_verify(
                kept, targets, kept, req_pool_indices=batch.req_pool_indices
            )
        return _meant(step.slots, step.lengths, outputs)

    def _one_row(self) -> dict[tuple[int, str], Tensor]:
        """A batch of one row that resumes, for which a backend may have a way of its own."""
        batch = ForwardBatch.decode(slots=self._ints(self._harness.live[:1]))
        self._backend.init_forward_metadata(batch)
        outputs = self._harness.convolve(batch, self._harness.inputs(1))
        return _meant((self._harness.live[0],), (1,), outputs)

    def _replay(
        self, capture: Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]
    ) -> dict[tuple[int, str], Tensor]:
        harness, backend = self._harness, self._backend
        first, other = captured_step("decode", 0), captured_step("decode", self._seed)
        batch, inputs = harness.batch(first), harness.inputs(first.num_tokens)

        def step() -> dict[tuple[int, str], Tensor]:
            backend.init_forward_metadata_in_graph(batch)
            return harness.convolve(batch, inputs)

        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        replay, outputs = capture(step)
        refill(harness)
        load_into(batch, harness.batch(other))
        backend.init_forward_metadata_out_graph(batch)
        replay()
        return _meant(other.slots, other.lengths, outputs)

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._backend.device)


def assert_same_results(found: dict[str, Tensor], plain: dict[str, Tensor], what: str) -> None:
    """Raise AssertionError with the first of two runs' results that differs in a bit."""
    assert found.keys() == plain.keys(), f"{what}: {found.keys() ^ plain.keys()}"
    for name, value in found.items():
        assert_same_bits(value, plain[name], f"{what}: {name}")


def _meant(
    slots: Sequence[int], lengths: Sequence[int], outputs: dict[tuple[int, str], Tensor]
) -> dict[tuple[int, str], Tensor]:
    found = {key: y.cpu().clone() for key, y in outputs.items()}
    start = 0
    for slot, length in zip(slots, lengths, strict=True):
        if slot == 0:
            for y in found.values():
                y[start : start + length] = 0
        start += length
    return found
