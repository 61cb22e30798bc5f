"""Every generation mode of transformers gives the stock tokens and logits."""

from __future__ import annotations

import pytest
import torch


def test_greedy_of_one_prompt(pair, ids):
    pair.check(ids(1, 7), max_new_tokens=20, do_sample=False)


def test_greedy_of_a_ragged_batch(pair, ragged):
    tokens, mask = ragged([9, 2, 13, 5, 1])
    pair.check(tokens, attention_mask=mask, max_new_tokens=16, do_sample=False)


def test_prompts_shorter_than_the_kernel(pair, ragged):
    tokens, mask = ragged([1, 2, 3])
    pair.check(tokens, attention_mask=mask, max_new_tokens=8, do_sample=False)


def test_a_prompt_of_one_token(pair, ids):
    pair.check(ids(1, 1), max_new_tokens=8, do_sample=False)


def test_300_new_tokens(main_pair, ids):
    out = main_pair.check(ids(1, 5), max_new_tokens=300, do_sample=False)
    assert out.sequences.shape[1] == 305


def test_sampling_with_one_seed(main_pair, ragged):
    tokens, mask = ragged([6, 3])
    main_pair.check(tokens, attention_mask=mask, max_new_tokens=10, do_sample=True, seed=3)


def test_several_returned_sequences(main_pair, ids):
    out = main_pair.check(
        ids(2, 5), max_new_tokens=8, do_sample=True, num_return_sequences=3, seed=4
    )
    assert out.sequences.shape[0] == 6


@pytest.mark.parametrize("rows", [[5], [6, 2]])
@pytest.mark.parametrize("sample", [False, True])
def test_beams(main_pair, ragged, rows, sample):
    tokens, mask = ragged(rows)
    before = main_pair.attachment.counters.reorders
    main_pair.check(
        tokens,
        attention_mask=mask,
        max_new_tokens=10,
        num_beams=3,
        num_return_sequences=2,
        do_sample=sample,
        seed=5,
    )
    assert main_pair.attachment.counters.reorders == before + 10


@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_chunked_prefill(main_pair, ragged, size):
    tokens, mask = ragged([9, 4, 11])
    main_pair.check(
        tokens, attention_mask=mask, max_new_tokens=6, do_sample=False, prefill_chunk_size=size
    )


def test_streaming(main_pair, ids):
    from transformers.generation.streamers import BaseStreamer

    class Collect(BaseStreamer):
        def __init__(self):
            self.tokens, self.ended = [], False

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.ended = True

    streamer = Collect()
    prompt = ids(1, 5)
    out = main_pair.attached.generate(prompt, max_new_tokens=6, do_sample=False, streamer=streamer)
    expected = main_pair.stock.generate(prompt, max_new_tokens=6, do_sample=False)
    assert streamer.ended
    assert streamer.tokens == out[0].tolist() == expected[0].tolist()


def test_right_padding(main_pair, ids):
    tokens = ids(3, 8)
    mask = (torch.arange(8) < torch.tensor([8, 5, 2])[:, None]).long()
    expected = main_pair.stock(tokens, attention_mask=mask, use_cache=True)
    got = main_pair.attached(tokens, attention_mask=mask, use_cache=True)
    torch.testing.assert_close(got.logits, expected.logits, rtol=1e-5, atol=2e-5)
    step = ids(3, 1, seed=1)
    mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    expected = main_pair.stock(step, attention_mask=mask, cache=expected.cache)
    got = main_pair.attached(step, attention_mask=mask, cache=got.cache)
    torch.testing.assert_close(got.logits, expected.logits, rtol=1e-5, atol=2e-5)


def test_a_four_dimensional_mask(main_pair, ids):
    tokens = ids(2, 6)
    causal = torch.full((6, 6), torch.finfo(torch.float32).min).triu(1).expand(2, 1, 6, 6)
    expected = main_pair.stock(tokens, attention_mask=causal, use_cache=True)
    got = main_pair.attached(tokens, attention_mask=causal, use_cache=True)
    torch.testing.assert_close(got.logits, expected.logits, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("cast_weights", [False, True])
def test_bfloat16(make_model, cast_weights, tmp_path, ragged):
    """``from_pretrained`` keeps Inkling's convolutions in float32, ``to`` does not; both occur."""
    from copy import deepcopy

    from sconv_transformers import attach

    for name in ("inkling", "lfm2"):
        stock = make_model(name)
        if cast_weights:
            stock = stock.to(torch.bfloat16)
        else:
            stock.save_pretrained(tmp_path / name)
            stock = type(stock).from_pretrained(tmp_path / name, dtype=torch.bfloat16).eval()
        attached = deepcopy(stock)
        attachment = attach(attached, max_requests=4)
        assert attachment.backend.spec.dtype == torch.bfloat16
        tokens, mask = ragged([7, 3, 1])
        outs = [
            model.generate(
                tokens,
                attention_mask=mask,
                max_new_tokens=12,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
            for model in (stock, attached)
        ]
        assert outs[0].sequences.tolist() == outs[1].sequences.tolist()
        for expected, got in zip(outs[0].logits, outs[1].logits, strict=True):
            torch.testing.assert_close(got, expected, rtol=0.02, atol=0.05)


def test_one_model_is_used_under_inference_mode_and_without(new_pair, ids):
    pair = new_pair("inkling")
    with torch.inference_mode():
        pair.check(ids(1, 5), max_new_tokens=6, prompt_lookup_num_tokens=2, do_sample=False)
    pair.check(ids(1, 5), max_new_tokens=6, prompt_lookup_num_tokens=2, do_sample=False)
    pair.check(ids(2, 5), max_new_tokens=6, do_sample=False)
