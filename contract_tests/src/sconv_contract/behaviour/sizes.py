"""What random steps are too small for, and weights that are laid out in another way."""

# The names of the tests say what they ask.
# ruff: noqa: D102

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import pytest
from torch import Tensor

from sconv import ForwardMode, StateSpec, Stream
from sconv.testing.captures import captured_spec
from sconv.testing.harness import Harness
from sconv.testing.steps import Step

from .rule_marks import keeps
from .subject import Subject

__all__ = ["Sizes"]

#: One channel more than a power of two, and more rows and tokens than random steps have.
_DIM: Final = 2049
_ROWS: Final = 33
_LONG: Final = 200


def _transposed(weight: Tensor) -> Tensor:
    return weight.t().contiguous().t()


def _sliced(weight: Tensor) -> Tensor:
    wide = weight.new_full((2 * len(weight), weight.shape[1] + 3), 777.0)
    part = wide[::2, 2:-1]
    part.copy_(weight)
    return part


_FORMS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "[D, 1, K]": lambda weight: weight[:, None, :],
    "transposed": _transposed,
    "sliced": _sliced,
    "[D, 1, K] transposed": lambda weight: _transposed(weight)[:, None, :],
}


class Sizes:
    """Tests of :class:`sconv_contract.BackendContract`."""

    def _large(self, subject: Subject) -> Harness:
        spec = StateSpec(
            num_layers=1,
            streams=[Stream("a", _DIM)],
            kernel_size=4,
            num_slots=_ROWS + 2,
            max_requests=_ROWS + 2,
            max_draft_tokens=2,
        )
        backend = subject.build(subject.fit(spec))
        return Harness(backend, seed=3, live=range(_ROWS, 0, -1), activation="silu")

    @keeps("SCV402")
    def test_a_decode_of_many_rows_and_channels(self, subject: Subject) -> None:
        harness = self._large(subject)
        slots = tuple(harness.live)
        harness.run(Step(ForwardMode.DECODE, slots, (1,) * _ROWS, (7,) * _ROWS))

    @keeps("SCV403")
    def test_an_extend_of_many_rows_and_a_long_one(self, subject: Subject) -> None:
        harness = self._large(subject)
        slots, few = tuple(harness.live), _ROWS - 1
        before = tuple(row % 3 for row in range(_ROWS))
        harness.run(Step(ForwardMode.EXTEND, slots, (2,) * few + (_LONG,), before))

    @keeps("SCV405")
    def test_a_verify_of_many_rows_and_channels(self, subject: Subject) -> None:
        subject.needs("rollback")
        harness = self._large(subject)
        slots, mode = tuple(harness.live), ForwardMode.TARGET_VERIFY
        harness.run(Step(mode, slots, (2,) * _ROWS, (7,) * _ROWS, draft_tokens=2))

    @keeps("SCV433")
    @pytest.mark.parametrize("form", _FORMS)
    def test_weights_and_biases_of_any_form(self, subject: Subject, form: str) -> None:
        """A decode, an extend and a verify step, one by one and in a group."""
        spec = subject.fit(captured_spec())
        for group in (False, True):
            harness = Harness(subject.build(spec), seed=5, live=(9, 2, 7, 4), group=group)
            plain = harness.layers
            given = {}
            for key, layer in plain.items():
                assert layer.bias is not None
                bias = _sliced(layer.bias[:, None])[:, 0]
                given[key] = replace(layer, weight=_FORMS[form](layer.weight), bias=bias)
            common: dict[str, Any] = {"slots": (9, 2, 7), "before": (7, 0, 2)}
            steps = [
                Step(ForwardMode.DECODE, lengths=(1, 1, 1), **common),
                Step(ForwardMode.EXTEND, lengths=(3, 6, 1), **common),
            ]
            if subject.can.rollback:
                verify = ForwardMode.TARGET_VERIFY
                steps.append(Step(verify, lengths=(3, 3, 3), draft_tokens=3, **common))
            for step in steps:
                inputs, before = harness.inputs(step.num_tokens), harness.state()
                batch = harness.batch(step)
                harness.backend.init_forward_metadata(batch)
                harness.layers = given
                outputs = harness.convolve(batch, inputs)
                harness.layers = plain
                harness.check(step, inputs, before, outputs)
