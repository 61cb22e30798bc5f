"""Every public call of plain torch's backend, with every kind of bad argument."""

from __future__ import annotations

import pytest

from sconv import Available, Backend, BackendInfo, Capabilities, ConvStatePool, StateSpec
from sconv.engine.loading import build
from sconv.testing.refusals import CALLS, Stage, assert_unchanged, check_refusals

INFO = BackendInfo(
    "plain",
    "cpu",
    (1, 0),
    "sconv.torch_backend.backend:TorchBackend",
    lambda: Available(1),
    Capabilities(window_layouts=("dense", "inputs", "dedup"), trees=True, rollback=True),
)


def load(*, spec: StateSpec, pool: ConvStatePool | None) -> Backend:
    return build(INFO, spec=spec, pool=pool)


@pytest.mark.parametrize("call", CALLS)
def test_err_3_a_refused_call_has_changed_nothing(call: str) -> None:
    check_refusals(call, load)


CHANGES = {
    "a window": lambda stage: stage.backend.pool.layers[1][2].fill_(7),
    "a request row": lambda stage: stage.backend.pool.req_to_slot[2:3].fill_(1),
    "a live slot": lambda stage: stage.backend.pool.alloc(1),
    "the prepared step": lambda stage: stage.backend.init_forward_metadata(stage.decode),
    "metadata": lambda stage: stage.backend.forward_metadata.writes.zero_(),
    "a verify window": lambda stage: stage.backend.pool.windows.layers[0][0].fill_(7),
    "a static buffer": lambda stage: stage.backend._impl._buffers._cache_indices.fill_(5),
    "the bound of a commit": lambda stage: setattr(stage.backend._impl, "verify_tokens", 3),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen(change: str) -> None:
    stage = Stage.build(load)
    before = stage.everything()
    assert_unchanged(before, stage.everything(), "nothing")
    CHANGES[change](stage)
    with pytest.raises(AssertionError, match="here"):
        assert_unchanged(before, stage.everything(), "here")
