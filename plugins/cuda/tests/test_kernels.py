"""What the oracle tests do not see: digits, other shapes of a launch, and neighbours in a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import sconv
from sconv import ForwardBatch, StateSpec, Stream
from sconv.testing.harness import assert_same_bits

Load = Callable[..., sconv.Backend]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _backend(load: Load, windows: dict[int, list[float]], **spec: Any) -> sconv.Backend:
    """A backend with one channel of width 4, NaN in all slots but the given ones."""
    values: dict[str, Any] = {
        "num_layers": 1,
        "streams": [Stream("s", 1)],
        "kernel_size": 4,
        "num_slots": 6,
        "max_requests": 6,
        "dtype": torch.float32,
    }
    backend = load(StateSpec(**{**values, **spec}))
    (layer,) = backend.pool.layers
    layer.fill_(float("nan"))
    for slot, window in windows.items():
        layer[slot] = torch.tensor(window, dtype=layer.dtype, device=layer.device)[:, None]
    return backend


def _window(backend: sconv.Backend, slot: int) -> list[float]:
    return backend.pool.layers[0][slot].flatten().tolist()


def _conv(
    backend: sconv.Backend, batch: ForwardBatch, tokens: list[float], weights: list[float]
) -> list[float]:
    device = backend.device
    backend.init_forward_metadata(batch)
    y = backend.short_conv(
        torch.tensor(tokens, dtype=torch.float32, device=device)[:, None],
        torch.tensor([weights], dtype=torch.float32, device=device),
        layer_id=0,
        stream="s",
        forward_batch=batch,
        residual=False,
    )
    return y.flatten().tolist()


def test_padded_rows_are_zero_and_write_nothing_pad_1(load: Load, device: torch.device) -> None:
    backend = _backend(load, {2: [1, 2, 3], 4: [9, 9, 9]})
    batch = ForwardBatch.decode(slots=torch.tensor([2, -1, -1], device=device))
    assert _conv(backend, batch, [4, 8, 8], [1, 10, 100, 1000]) == [4321, 0, 0]
    assert _window(backend, 2) == [2, 3, 4]
    assert _window(backend, 4) == [9, 9, 9]
    assert torch.isnan(backend.pool.layers[0][0]).all()


@pytest.mark.parametrize("split", [[7], [3, 4], [2, 1, 1, 3], [1, 1, 5], [6, 1]])
def test_every_split_of_a_prompt_ends_the_same_len_2(
    load: Load, device: torch.device, split: list[int]
) -> None:
    backend, ys, done = _backend(load, {}), [], 0
    for length in split:
        batch = ForwardBatch.extend(
            slots=torch.tensor([5], device=device),
            extend_seq_lens=torch.tensor([length], device=device),
            extend_prefix_lens=torch.tensor([done], device=device),
            num_tokens=length,
        )
        tokens = [float(token) for token in range(done + 1, done + length + 1)]
        ys += _conv(backend, batch, tokens, [1, 10, 100, 1000])
        done += length
    assert ys == [1000, 2100, 3210, 4321, 5432, 6543, 7654]
    assert _window(backend, 5) == [5, 6, 7]


def test_a_tree_commits_the_window_of_its_node_spec_6(load: Load, device: torch.device) -> None:
    backend = _backend(load, {3: [1, 2, 3]}, max_draft_tokens=3, draft_topk=2)
    slots = torch.tensor([3], device=device)
    parents = torch.tensor([[-1, 0, 0]], dtype=torch.int32, device=device)
    batch = ForwardBatch.target_verify(
        slots=slots, seq_lens=slots, draft_token_num=3, parents=parents
    )
    assert _conv(backend, batch, [4, 5, 6], [1, 10, 100, 1000]) == [4321, 5432, 6432]
    assert _window(backend, 3) == [1, 2, 3]
    backend.update_mamba_state_after_mtp_verify(
        torch.tensor([2], device=device), req_pool_indices=slots
    )
    assert _window(backend, 3) == [3, 4, 6]


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("state_dtype", DTYPES)
def test_all_dtypes_mix_kern_4(
    load: Load,
    device: torch.device,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    state_dtype: torch.dtype,
) -> None:
    """Sums of these weights and tokens are exact in every dtype."""
    spec = StateSpec(1, [Stream("s", 16)], 4, 2, 2, dtype=state_dtype)
    backend = load(spec)
    weight = torch.tensor([1, 4, 16, 64], device=device).expand(16, 4).to(weight_dtype)
    ys = []
    for before, tokens in ((0, [1, 2]), (2, [3, 1])):
        batch = ForwardBatch.extend(
            slots=torch.tensor([2], device=device),
            extend_seq_lens=torch.tensor([2], device=device),
            extend_prefix_lens=torch.tensor([before], device=device),
            num_tokens=2,
        )
        backend.init_forward_metadata(batch)
        x = torch.tensor(tokens, device=device)[:, None].expand(2, 16).to(x_dtype)
        ys.append(
            backend.short_conv(
                x, weight, layer_id=0, stream="s", forward_batch=batch, residual=False
            )
        )
    y = torch.cat(ys)
    assert y.dtype == x_dtype
    assert y[:, 5].tolist() == [64, 144, 228, 121]
    assert backend.pool.layers[0][2, :, 5].tolist() == [2, 3, 1]


@pytest.mark.parametrize("mode", ["decode", "extend"])
def test_the_shape_of_a_launch_changes_no_bit_kern_3(
    load: Load, device: torch.device, mode: str
) -> None:
    from sconv_cuda.launch import Tile

    spec = StateSpec(1, [Stream("s", 300)], 4, 8, 8, dtype=torch.float32)
    lengths = [1] * 5 if mode == "decode" else [3, 0, 11, 1, 6]
    x = torch.randn(sum(lengths), 300, device=device)
    weight = torch.randn(300, 4, device=device)
    windows = torch.randn(9, 3, 300, device=device)
    found = []
    for block, warps, depth in ((64, 1, 1), (128, 2, 3), (256, 4, 4), (512, 8, 2)):
        backend = load(spec)
        backend.pool.layers[0].copy_(windows)
        slots = torch.tensor([4, 1, 7, 2, 8], device=device)
        batch = ForwardBatch.decode(slots=slots)
        if mode == "extend":
            batch = ForwardBatch.extend(
                slots=slots,
                extend_seq_lens=torch.tensor(lengths, device=device),
                extend_prefix_lens=torch.tensor([2, 5, 0, 1, 9], device=device),
                num_tokens=sum(lengths),
            )
        backend.init_forward_metadata(batch)
        convolutions: Any = backend._impl._convolutions
        (y,) = convolutions.run(
            backend.forward_metadata, 0, ("s",), (x,), (weight,), (None,), True, True,
            Tile(block, warps, depth),
        )  # fmt: skip
        found.append((y, backend.pool.layers[0]))
    for y, state in found[1:]:
        assert_same_bits(y, found[0][0], "outputs")
        assert_same_bits(state, found[0][1], "state")


def test_a_row_does_not_depend_on_its_batch_kern_14(load: Load, device: torch.device) -> None:
    spec = StateSpec(1, [Stream("s", 70)], 4, 8, 8, dtype=torch.float32)
    lengths = torch.tensor([3, 9, 1, 5], device=device)
    x = torch.randn(18, 70, device=device)
    x[3] = float("nan")  # another row's trouble
    weight, windows = torch.randn(70, 4, device=device), torch.randn(9, 3, 70, device=device)

    def run(rows: list[int]) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
        backend = load(spec)
        backend.pool.layers[0].copy_(windows)
        starts = [0, 3, 12, 13]
        parts = [x[starts[row] : starts[row] + int(lengths[row])] for row in rows]
        batch = ForwardBatch.extend(
            slots=torch.tensor([row + 2 for row in rows], device=device),
            extend_seq_lens=lengths[rows],
            extend_prefix_lens=torch.ones(len(rows), dtype=torch.int64, device=device),
            num_tokens=sum(part.shape[0] for part in parts),
        )
        backend.init_forward_metadata(batch)
        y = backend.short_conv(
            torch.cat(parts), weight, layer_id=0, stream="s", forward_batch=batch, activation="silu"
        )
        pieces = y.split([part.shape[0] for part in parts])
        return dict(zip(rows, pieces, strict=True)), backend.pool.layers[0]

    together, state = run([0, 1, 2, 3])
    shuffled, _ = run([3, 1, 0, 2])
    alone, alone_state = run([3])
    assert_same_bits(together[3], shuffled[3], "row 3 in another order")
    assert_same_bits(together[3], alone[3], "row 3 alone")
    assert_same_bits(state[5], alone_state[5], "state of row 3")
    assert not torch.isnan(together[3]).any()


def test_a_group_equals_its_streams_one_by_one(load: Load, device: torch.device) -> None:
    spec = StateSpec(2, [Stream("k", 24), Stream("v", 264)], 3, 4, 4, dtype=torch.float32)
    slots = torch.tensor([3, 1], device=device)
    xs = [torch.randn(2, 24, device=device), torch.randn(2, 264, device=device)]
    weights = [torch.randn(24, 3, device=device), torch.randn(264, 3, device=device)]
    states, outputs = [], []
    for group in (True, False):
        backend = load(spec)
        for layer in backend.pool.layers:
            layer.copy_(torch.arange(layer.numel(), device=device).view(layer.shape) % 7)
        batch = ForwardBatch.decode(slots=slots)
        backend.init_forward_metadata(batch)
        common: dict[str, Any] = {"layer_id": 1, "forward_batch": batch, "activation": "silu"}
        if group:
            ys = backend.short_conv_group(xs, weights, streams=["k", "v"], **common)
        else:
            ys = [
                backend.short_conv(x, weight, stream=name, **common)
                for x, weight, name in zip(xs, weights, ["k", "v"], strict=True)
            ]
        outputs.append(ys)
        states.append(backend.pool.stacked)
    for one, other in zip(*outputs, strict=True):
        assert_same_bits(one, other, "outputs")
    assert_same_bits(states[0], states[1], "state")


@pytest.mark.parametrize("layout", ["inputs", "dense", "dedup"])
def test_all_window_layouts_commit_the_same(load: Load, device: torch.device, layout: Any) -> None:
    spec = StateSpec(
        2, [Stream("s", 40)], 4, 6, 6, dtype=torch.float32, max_draft_tokens=4,
        window_layout=layout,
    )  # fmt: skip
    backend = load(spec)
    assert backend.pool.window_layout == layout
    generator = torch.Generator().manual_seed(3)
    windows = torch.randn(2, 7, 3, 40, generator=generator).to(device)
    x = torch.randn(2, 12, 40, generator=generator).to(device)
    weight = torch.randn(40, 4, generator=generator).to(device)
    assert backend.pool.stacked is not None
    backend.pool.stacked.copy_(windows)
    slots = torch.tensor([5, 2, 6], device=device)
    batch = ForwardBatch.target_verify(slots=slots, seq_lens=slots, draft_token_num=4)
    backend.init_forward_metadata(batch)
    for layer in range(2):
        backend.short_conv(x[layer], weight, layer_id=layer, stream="s", forward_batch=batch)
    steps, targets = [2, -1, 0], [1, 3, 4]
    backend.update_mamba_state_after_mtp_verify(
        torch.tensor(steps, device=device),
        torch.tensor(targets, device=device),
        torch.tensor([1, 0, 0], device=device),
        req_pool_indices=slots,
    )
    expected = windows.clone()
    for layer in range(2):
        for row, (slot, step) in enumerate(zip([5, 2, 6], steps, strict=True)):
            if step >= 0:
                history = torch.cat([windows[layer, slot], x[layer, 4 * row : 4 * row + 4]])
                expected[layer, slot] = history[step + 1 : step + 4]
                node = [1, 0, 0][row]
                expected[layer, targets[row]] = history[node + 1 : node + 4]
    assert_same_bits(backend.pool.stacked, expected, "state")


def test_adopted_dense_windows_are_used_as_they_are(load: Load, device: torch.device) -> None:
    spec = StateSpec(1, [Stream("s", 8)], 4, 3, 3, dtype=torch.float32, max_draft_tokens=2)
    state = torch.randn(4, 3, 8, device=device)
    before = state.clone()
    kept = torch.full((3, 2, 3, 8), -1.0, device=device)
    pool = sconv.ConvStatePool.adopt(spec, [state], windows=[kept])
    backend = load(spec, pool)
    slots = torch.tensor([2, -1], device=device)
    batch = ForwardBatch.target_verify(slots=slots, draft_token_num=2)
    backend.init_forward_metadata(batch)
    x = torch.randn(4, 8, device=device)
    weight = torch.randn(8, 4, device=device)
    backend.short_conv(x, weight, layer_id=0, stream="s", forward_batch=batch)
    assert_same_bits(kept[0, 0], torch.cat([before[2, 1:], x[:1]]), "window after the root")
    assert_same_bits(kept[0, 1], torch.cat([before[2, 2:], x[:2]]), "window after the draft")
    assert (kept[1:] == -1).all()
    assert_same_bits(state, before, "state")


def test_warmup_changes_nothing(load: Load) -> None:
    spec = StateSpec(
        2, [Stream("k", 8), Stream("v", 16)], 4, 4, 4, max_draft_tokens=4, draft_topk=2
    )
    backend = load(replace(spec, track_interval=8))
    before = [layer.clone() for layer in backend.pool.layers]
    backend.warmup()
    for layer, old in zip(backend.pool.layers, before, strict=True):
        assert_same_bits(layer, old, "state")
    assert backend.forward_metadata is None
