"""Every public call, with every kind of bad argument: refused in words, and nothing has changed."""

from __future__ import annotations

import pytest

from sconv import Backend, ConvStatePool, StateSpec, load_backend
from sconv.testing.refusals import CALLS, check_refusals


def load(*, spec: StateSpec, pool: ConvStatePool | None) -> Backend:
    return load_backend("cpu", spec=spec, pool=pool)


@pytest.mark.parametrize("call", CALLS)
def test_err_3_a_refused_call_has_changed_nothing(call: str) -> None:
    check_refusals(call, load)
