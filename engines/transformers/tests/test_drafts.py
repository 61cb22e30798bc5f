"""Assisted decoding: verification and rollback run through the verify step and its commit."""

from __future__ import annotations

import copy

import pytest
import torch

from sconv_transformers import attach


def _counted(attachment):
    return copy.copy(attachment.counters)


def test_prompt_lookup(pair, ids):
    prompt = ids(1, 6).repeat(1, 2)
    before = _counted(pair.attachment)
    out = pair.check(prompt, max_new_tokens=24, prompt_lookup_num_tokens=3, do_sample=False)
    after = pair.attachment.counters
    forwards = after.forwards - before.forwards
    assert after.commits - before.commits == forwards
    drafted, accepted = after.drafted - before.drafted, after.accepted - before.accepted
    assert 0 <= accepted <= drafted
    # Every forward yields one token of its own and the candidates that it accepts.
    assert out.sequences.shape[1] - prompt.shape[1] == forwards + accepted


def test_prompt_lookup_gives_the_tokens_of_plain_greedy(pair, ids):
    prompt = ids(1, 6).repeat(1, 2)
    plain = pair.stock.generate(prompt, max_new_tokens=24, do_sample=False)
    drafted = pair.attached.generate(
        prompt, max_new_tokens=24, do_sample=False, prompt_lookup_num_tokens=4
    )
    assert drafted.tolist() == plain.tolist()


@pytest.mark.parametrize("name", ["inkling", "lfm2"])
def test_drafts_that_are_right_are_accepted(make_model, name):
    """A head of zeros always answers token 0, so every draft from a prompt of zeros is right."""
    model = make_model(name)
    model.lm_head.weight.zero_()
    attachment = attach(model, max_requests=2, max_rollback=16)
    out = model.generate(
        torch.zeros((1, 9), dtype=torch.long),
        max_new_tokens=20,
        prompt_lookup_num_tokens=4,
        do_sample=False,
    )
    assert out[0, 9:].tolist() == [0] * 20
    counters = attachment.counters
    assert (counters.forwards, counters.drafted, counters.accepted) == (4, 16, 16)
    assert counters.commits == 4


def test_prompt_lookup_sampled(main_pair, ids):
    main_pair.check(
        ids(1, 5).repeat(1, 3),
        max_new_tokens=16,
        prompt_lookup_num_tokens=3,
        do_sample=True,
        seed=2,
    )


def test_prompt_lookup_from_one_token(main_pair, ids):
    main_pair.check(ids(1, 1), max_new_tokens=12, prompt_lookup_num_tokens=3, do_sample=False)


def test_a_prompt_longer_than_the_rollback_is_kept_for_certain_first(main_pair, ids):
    """Its first forward is the prompt and the first draft: one extend, one verify, two builds."""
    prompt = ids(1, 20).repeat(1, 2)
    before = _counted(main_pair.attachment)
    main_pair.check(prompt, max_new_tokens=12, prompt_lookup_num_tokens=3, do_sample=False)
    after = main_pair.attachment.counters
    forwards = after.forwards - before.forwards
    assert after.metadata_builds - before.metadata_builds == forwards + 1


@pytest.mark.parametrize("schedule", ["constant", "heuristic"])
@pytest.mark.parametrize("same_weights", [True, False])
@pytest.mark.parametrize("attached_assistant", [True, False])
def test_an_assistant_model(main_pair, make_model, ids, schedule, same_weights, attached_assistant):
    kind = "lfm2" if "lfm2" in main_pair.name else "inkling"
    assistant = make_model(kind) if same_weights else make_model(kind, hidden_size=16)
    assistant.generation_config.num_assistant_tokens = 5
    assistant.generation_config.num_assistant_tokens_schedule = schedule
    # Set by default; it needs scikit-learn and would make the number of drafts depend on it.
    assistant.generation_config.assistant_confidence_threshold = 0.0
    prompt = ids(1, 9)
    expected = main_pair.stock.generate(
        prompt, assistant_model=copy.deepcopy(assistant), max_new_tokens=24, do_sample=False
    )
    helper = attach(assistant, max_requests=2) if attached_assistant else None
    got = main_pair.attached.generate(
        prompt, assistant_model=assistant, max_new_tokens=24, do_sample=False
    )
    assert got.tolist() == expected.tolist()
    if helper is not None:
        assert helper.counters.commits > 0
        assert helper.rows_held == 0


def test_a_model_that_assists_itself(main_pair, ids):
    """Two caches of one pool: the target verifies between the assistant's steps and their crop."""
    prompt = ids(1, 9)
    expected = main_pair.stock.generate(prompt, max_new_tokens=24, do_sample=False)
    saved = copy.deepcopy(main_pair.attached.generation_config)
    main_pair.attached.generation_config.num_assistant_tokens = 4
    main_pair.attached.generation_config.assistant_confidence_threshold = 0.0
    got = main_pair.attached.generate(
        prompt, assistant_model=main_pair.attached, max_new_tokens=24, do_sample=False
    )
    main_pair.attached.generation_config = saved
    assert got.tolist() == expected.tolist()


def test_the_draft_layers_of_a_model_run_stock_beside_it(make_model, ids, monkeypatch):
    """Multi-token prediction makes new layers of the model's class, with a cache of their own."""
    from transformers.modeling_layers import MtpModel

    def from_nothing(cls, main_model, **kwargs):
        torch.manual_seed(7)
        return cls(main_model, 2).eval()

    monkeypatch.setattr(MtpModel, "from_pretrained", classmethod(from_nothing))
    stock = make_model("inkling", num_mtp_layers=2)
    attached = copy.deepcopy(stock)
    attachment = attach(attached, max_requests=2)
    expected, got = (
        model.generate(ids(1, 7), max_new_tokens=16, do_sample=False, use_mtp=True)
        for model in (stock, attached)
    )
    assert expected.tolist() == got.tolist()
    assert attachment.counters.drafted > 0
    assert attachment.rows_held == 0


def test_a_cache_goes_on_after_assisted_decoding(main_pair, ids):
    """transformers never switches recording off again, so the next forwards record too."""
    prompt = ids(1, 8).repeat(1, 2)
    stock, pooled = main_pair.generate(
        prompt, max_new_tokens=10, prompt_lookup_num_tokens=3, do_sample=False
    )
    assert stock.sequences.tolist() == pooled.sequences.tolist()
    more = torch.cat([stock.sequences, ids(1, 3, seed=9)], dim=1)
    outs = [
        model.generate(more, cache=out.cache, max_new_tokens=40, do_sample=False)
        for model, out in ((main_pair.stock, stock), (main_pair.attached, pooled))
    ]
    assert outs[0].tolist() == outs[1].tolist()


def test_a_rollback_deeper_than_the_bound_names_the_option(new_pair, ids):
    pair = new_pair("lfm2", max_rollback=4)
    cache = _recording_cache(pair.attached)
    pair.attached(ids(1, 9), cache=cache)
    with pytest.raises(ValueError, match=r"deeper than max_rollback=4.*max_rollback=6"):
        cache.crop(-6)


def test_a_second_crop_is_refused(main_pair, ids):
    cache = _recording_cache(main_pair.attached)
    main_pair.attached(ids(1, 9), cache=cache)
    cache.crop(-2)
    with pytest.raises(ValueError, match="recorded 0 since the last crop"):
        cache.crop(-1)


def test_a_crop_without_recording_is_refused(main_pair, ids):
    cache = main_pair.attached(ids(1, 5), use_cache=True).cache
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-1)


def test_a_positive_crop_is_refused(main_pair, ids):
    cache = _recording_cache(main_pair.attached)
    main_pair.attached(ids(1, 5), cache=cache)
    with pytest.raises((RuntimeError, ValueError), match="negative"):
        cache.crop(1)


def test_drafts_are_refused_without_room_for_a_rollback(new_pair, ids):
    pair = new_pair("lfm2", max_rollback=0)
    assert pair.attachment.backend.spec.max_draft_tokens == 1
    pair.check(ids(1, 5), max_new_tokens=5, do_sample=False)
    with pytest.raises(ValueError, match="max_rollback=0"):
        pair.attached.generate(
            ids(1, 5), max_new_tokens=5, prompt_lookup_num_tokens=2, do_sample=False
        )


def _recording_cache(model):
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    return cache
