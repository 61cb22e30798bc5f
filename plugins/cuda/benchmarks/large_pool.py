"""A pool of more than 2^31 elements, and tokens past 2^31 too: offsets are 64 bits (KERN-2).

Two slots at the end are used: the base of the last one does not fit 32 bits, and that of the one
before it does while its end does not.
"""

from __future__ import annotations

import torch
from harness import build

from sconv import ForwardBatch, StateSpec, Stream

DIM, ROWS, K = 8192, 87383, 4


def main() -> None:
    spec = StateSpec(
        1, [Stream("s", DIM)], K, ROWS - 1, 4, dtype=torch.bfloat16, max_draft_tokens=4
    )
    backend = build(spec)
    (layer,) = backend.pool.layers
    assert layer.numel() > 2**31
    last = [ROWS - 1, ROWS - 2]
    watched = [0, 1, ROWS - 3]
    generator = torch.Generator("cuda").manual_seed(1)
    weight = torch.randn(DIM, K, generator=generator, device="cuda").bfloat16()

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    layer[last] = draw(2, K - 1, DIM)
    slots = torch.tensor(last, device="cuda")
    before = layer[watched].clone()

    def check(
        what: str, batch: ForwardBatch, x: torch.Tensor, lengths: list[int], kept: list[int] | None
    ) -> None:
        old = layer[last].double()
        backend.init_forward_metadata(batch)
        y = backend.short_conv(x, weight, layer_id=0, stream="s", forward_batch=batch)
        start = 0
        for row, length in enumerate(lengths):
            history = torch.cat([old[row], x[start : start + length].double()])
            taps = history.unfold(0, K, 1)  # [length, D, K]
            expected = (taps * weight.double()).sum(2) + x[start : start + length].double()
            error = (y[start : start + length].double() - expected).norm() / expected.norm()
            assert error < 2e-3, f"{what}: relative error {float(error)}"
            end = length if kept is None else kept[row]
            window = history[end : end + K - 1].to(layer.dtype)
            assert torch.equal(layer[last[row]], window), f"{what}: state of row {row}"
            start += length
        assert torch.equal(layer[watched], before), f"{what}: another slot changed"
        print(what, "ok", flush=True)

    check("decode", ForwardBatch.decode(slots=slots), draw(2, DIM), [1, 1], None)
    lengths = [5, 2]
    batch = ForwardBatch.extend(
        slots=slots,
        extend_seq_lens=torch.tensor(lengths, device="cuda"),
        extend_prefix_lens=torch.tensor([9, 9], device="cuda"),
        num_tokens=7,
    )
    check("extend", batch, draw(7, DIM), lengths, None)
    accepts = torch.tensor([3, 0], dtype=torch.int32, device="cuda")
    batch = ForwardBatch.draft_extend(
        slots=slots, seq_lens=slots, draft_token_num=4, num_accept_tokens=accepts
    )
    check("draft-extend", batch, draw(8, DIM), [4, 4], [3, 0])
    x = draw(8, DIM)
    old = layer[last].clone()
    batch = ForwardBatch.target_verify(slots=slots, seq_lens=slots, draft_token_num=4)
    check("verify", batch, x, [4, 4], [0, 0])
    backend.update_mamba_state_after_mtp_verify(
        torch.tensor([1, 3], device="cuda"), req_pool_indices=slots
    )
    for row, node in enumerate((1, 3)):
        history = torch.cat([old[row], x[4 * row : 4 * row + 4]])
        assert torch.equal(layer[last[row]], history[node + 1 : node + K]), f"commit of row {row}"
    assert torch.equal(layer[watched], before), "commit: another slot changed"
    print("commit ok", flush=True)

    # 262,151 x 8,192 inputs: the last row of the batch begins past 2^31 elements.
    tokens = 262151
    x = torch.empty(tokens, DIM, dtype=torch.bfloat16, device="cuda").normal_(generator=generator)
    lengths = [tokens - 6, 6]
    batch = ForwardBatch.extend(
        slots=slots,
        extend_seq_lens=torch.tensor(lengths, device="cuda"),
        extend_prefix_lens=torch.tensor([0, 9], device="cuda"),
        num_tokens=tokens,
    )
    old = layer[last].double()
    backend.init_forward_metadata(batch)
    y = backend.short_conv(x, weight, layer_id=0, stream="s", forward_batch=batch)
    tail = torch.cat([old[1], x[-6:].double()]).unfold(0, K, 1)
    expected = (tail * weight.double()).sum(2) + x[-6:].double()
    assert (y[-6:].double() - expected).norm() / expected.norm() < 2e-3
    middle = x[-20:-6].double().unfold(0, K, 1)
    expected = (middle * weight.double()).sum(2) + x[-17:-6].double()
    assert (y[-17:-6].double() - expected).norm() / expected.norm() < 2e-3
    assert torch.equal(layer[last[1]], x[-3:])
    assert torch.equal(layer[last[0]], x[-9:-6])
    assert torch.equal(layer[watched], before)
    print("extend past 2^31 inputs ok", flush=True)


if __name__ == "__main__":
    main()
