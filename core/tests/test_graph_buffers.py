"""Static buffers: their sizes, their slices, and what they refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sconv import ForwardBatch, GraphBufferError, StateSpec, Stream
from sconv.step.metadata import MetadataBuffers
from sconv.testing.captures import tensors_of
from sconv.testing.harness import assert_same_bits
from sconv.torch_backend.backend import TorchBackend

SPEC = StateSpec(
    num_layers=1,
    streams=[Stream("a", 2)],
    kernel_size=4,
    num_slots=8,
    max_requests=3,
    max_draft_tokens=3,
    draft_topk=2,
    track_interval=4,
    chunk_size=2,
)
CPU = torch.device("cpu")


def batches() -> dict[str, ForwardBatch]:
    slots, two = torch.tensor([5, 2]), torch.tensor([2, 3])
    return {
        "decode": ForwardBatch.decode(slots=slots, mamba_track_indices=two + 4),
        "extend": ForwardBatch.extend(None, two, two, slots=slots, num_tokens=7),
        "verify": ForwardBatch.target_verify(None, two, 3, slots=slots),
        "tree": ForwardBatch.target_verify(
            None, two, 3, slots=slots, parents=torch.tensor([[-1, 0, 0], [-1, 0, 1]])
        ),
        "draft_extend": ForwardBatch.draft_extend(
            None, two, 3, two - 1, slots=slots, mamba_track_indices=two + 4
        ),
        "idle": ForwardBatch.idle(2),
    }


@pytest.mark.parametrize("kind", batches())
def test_a_static_step_equals_an_eager_one(kind: str) -> None:
    """Whatever the buffers held before."""
    backend = TorchBackend(spec=SPEC, device=CPU, pool=None)
    backend.init_graph_state(4, 16)
    batch = batches()[kind]
    backend.init_forward_metadata(batch)
    assert backend.forward_metadata is not None
    eager = tensors_of(backend.forward_metadata)
    for other in batches().values():
        backend.init_forward_metadata_out_graph(other, True)
        backend.init_forward_metadata_in_graph(other)
    backend.init_forward_metadata_out_graph(batch, False)
    backend.init_forward_metadata_in_graph(batch)
    static = tensors_of(backend.forward_metadata)
    assert static.keys() == eager.keys()
    for name, value in static.items():
        assert_same_bits(value, eager[name], name)
        assert value.data_ptr() != eager[name].data_ptr() or value.numel() == 0


def test_slices_start_at_zero_and_never_move() -> None:
    buffers = MetadataBuffers(SPEC, 4, 16, CPU)
    starts: dict[str, set[int]] = {}
    for batch in batches().values():
        tokens = batch.num_tokens
        assert tokens is not None
        for name, value in tensors_of(buffers.step(batch, tokens, padded=True)).items():
            if value.numel():
                starts.setdefault(name, set()).add(value.data_ptr())
    assert len(starts) == 12
    assert all(len(addresses) == 1 for addresses in starts.values())
    distinct = set().union(*starts.values())
    assert len(distinct) == len(starts)


def test_taps_of_fewer_draft_tokens_are_packed() -> None:
    """Their shape follows the step, so that kernels need no second stride."""
    buffers = MetadataBuffers(SPEC, 4, 16, CPU)
    rows = torch.tensor([5, 2])
    batch = ForwardBatch.target_verify(
        None, rows, 2, slots=rows, parents=torch.tensor([[-1, 0], [-1, 0]])
    )
    taps = buffers.step(batch, 4, padded=True).tree_taps
    assert taps is not None
    assert tuple(taps.shape) == (2, 2, 4)
    assert taps.is_contiguous()


def test_links_of_a_chain_get_taps_although_its_spec_has_no_trees() -> None:
    """At the first such step; they stay where they are, also out of inference mode."""
    backend = TorchBackend(
        spec=replace(SPEC, draft_topk=1, window_layout="inputs"), device=CPU, pool=None
    )
    backend.init_graph_state(4, 16)
    slots = torch.tensor([5, 2])
    batch = ForwardBatch.target_verify(
        None, slots, 3, slots=slots, parents=torch.tensor([[-1, 0, 1], [-1, 0, 1]])
    )
    backend.init_forward_metadata(batch)
    assert backend.forward_metadata is not None
    eager = backend.forward_metadata.tree_taps
    assert eager is not None
    addresses = set()
    for inference in (True, False):
        with torch.inference_mode(inference):
            backend.init_forward_metadata_out_graph(batch, True)
            backend.init_forward_metadata_in_graph(batch)
        static = backend.forward_metadata.tree_taps
        assert static is not None
        assert_same_bits(static, eager, "tree_taps")
        addresses.add(static.data_ptr())
    assert len(addresses) == 1
    assert eager.data_ptr() not in addresses


@pytest.mark.parametrize(("rows", "tokens"), [(5, 5), (2, 17), (5, 17)])
def test_what_does_not_fit_names_both_sizes(rows: int, tokens: int) -> None:
    buffers = MetadataBuffers(SPEC, 4, 16, CPU)
    with pytest.raises(GraphBufferError) as error:
        buffers.check(rows, tokens)
    assert error.value.have == {"max_bs": 4, "max_num_tokens": 16}
    assert error.value.need == {"max_bs": rows, "max_num_tokens": tokens}
    assert f"have max_bs=4, max_num_tokens=16, need max_bs={rows}, max_num_tokens={tokens}" in str(
        error.value
    )
    buffers.check(4, 16)


@pytest.mark.parametrize("drafts", [1, 3])
@pytest.mark.parametrize("rows", [10**14, 10**30])
def test_sizes_that_no_memory_holds(rows: int, drafts: int) -> None:
    """Past what any address space has, and past what a tensor can be asked for."""
    spec = replace(SPEC, max_draft_tokens=drafts, draft_topk=1)
    backend = TorchBackend(spec=spec, device=CPU, pool=None)
    windows = backend.pool.windows
    before = (windows.rows, windows.nbytes)
    nbytes = rows * MetadataBuffers.row_nbytes(spec) + 16
    message = rf"metadata of captured steps, {nbytes} bytes: .* need max_bs={rows}"
    with pytest.raises(GraphBufferError, match=message):
        backend.init_graph_state(rows, rows * drafts)
    assert (windows.rows, windows.nbytes) == before
    backend.init_graph_state(4, 16)
    assert backend.max_rows == 4


def test_windows_that_no_memory_holds_leave_no_buffers_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = TorchBackend(spec=SPEC, device=CPU, pool=None)
    windows = backend.pool.windows

    def refuse(rows: int) -> None:
        raise RuntimeError(f"{rows} rows do not fit")

    with monkeypatch.context() as patch:
        patch.setattr(windows, "_allocate", refuse)
        with pytest.raises(GraphBufferError, match="no memory for verify windows of"):
            backend.init_graph_state(6, 18)
    assert (windows.rows, backend.max_rows) == (3, SPEC.max_requests)
    backend.init_graph_state(4, 16)
    assert (windows.rows, backend.max_rows) == (4, 4)


def test_buffers_are_sized_once() -> None:
    backend = TorchBackend(spec=SPEC, device=CPU, pool=None)
    with pytest.raises(GraphBufferError, match="at least one row and a token per row"):
        backend.init_graph_state(4, 3)
    assert backend.max_rows == SPEC.max_requests
    backend.init_graph_state(4, 16)
    assert backend.max_rows == 4
    batch = batches()["tree"]
    backend.init_forward_metadata_out_graph(batch, True)
    backend.init_forward_metadata_in_graph(batch)
    assert backend.forward_metadata is not None
    before = {
        name: value.data_ptr() for name, value in tensors_of(backend.forward_metadata).items()
    }
    backend.init_graph_state(3, 8)
    with pytest.raises(GraphBufferError, match=r"max_bs=4.*need max_bs=8"):
        backend.init_graph_state(8, 16)
    backend.init_forward_metadata_in_graph(batch)
    after = {name: value.data_ptr() for name, value in tensors_of(backend.forward_metadata).items()}
    assert after == before


def test_buffers_make_room_for_padded_verify_rows() -> None:
    backend = TorchBackend(spec=SPEC, device=CPU, pool=None)
    assert backend.pool.windows.rows == 3
    backend.init_graph_state(6, 18)
    assert backend.pool.windows.rows == 6


def test_buffers_made_under_inference_mode_can_be_filled_outside() -> None:
    backend = TorchBackend(spec=SPEC, device=CPU, pool=None)
    with torch.inference_mode():
        backend.init_graph_state(4, 16)
    for batch in batches().values():
        backend.init_forward_metadata_out_graph(batch, True)
        backend.init_forward_metadata_in_graph(batch)
        assert backend.forward_metadata is not None
        assert backend.forward_metadata.batch_size == 2
