"""Caches that live longer than one generation: reuse, copies, repeats, resets, imports, exports."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import StaticSlidingWindowLayer

from sconv_transformers import attach


def _prefilled(model, tokens):
    cache = DynamicCache(config=model.config)
    model(tokens, cache=cache)
    return cache


def test_a_prompt_cache_is_copied_for_every_use(pair, ids):
    prefix = ids(1, 9)
    caches = {id(model): _prefilled(model, prefix) for model in (pair.stock, pair.attached)}
    for seed in (1, 2, 3):
        tokens = torch.cat([prefix, ids(1, 4, seed)], dim=1)
        pair.check(
            tokens,
            max_new_tokens=6,
            do_sample=False,
            cache_of=lambda model: copy.deepcopy(caches[id(model)]),
        )
    assert pair.attachment.rows_held == 1


def test_prompt_lookup_on_a_copy_of_a_prompt_cache(main_pair, ids):
    prefix = ids(1, 9).repeat(1, 2)
    caches = {
        id(model): _prefilled(model, prefix) for model in (main_pair.stock, main_pair.attached)
    }
    main_pair.check(
        torch.cat([prefix, ids(1, 2, 1)], dim=1),
        max_new_tokens=12,
        do_sample=False,
        prompt_lookup_num_tokens=3,
        cache_of=lambda model: copy.deepcopy(caches[id(model)]),
    )


def test_a_second_turn_continues_the_returned_cache(main_pair, ragged, ids):
    """Also with padding inside the second turn, which takes up places in the windows."""
    tokens, mask = ragged([6, 3, 5])
    first = main_pair.generate(tokens, attention_mask=mask, max_new_tokens=4, do_sample=False)
    turn, turn_mask = ragged([4, 1, 2], seed=8)
    outs = []
    for model, out in zip((main_pair.stock, main_pair.attached), first, strict=True):
        full = torch.cat([out.sequences, turn], dim=1)
        ones = torch.ones((3, 4), dtype=torch.long)
        full_mask = torch.cat([mask, ones, turn_mask], dim=1)
        outs.append(
            model.generate(
                full,
                attention_mask=full_mask,
                cache=out.cache,
                max_new_tokens=6,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
        )
    assert outs[0].sequences.tolist() == outs[1].sequences.tolist()
    for expected, got in zip(outs[0].logits, outs[1].logits, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)


def test_two_generations_interleave_forward_by_forward(main_pair, ids):
    def run(model):
        caches = [DynamicCache(config=model.config) for _ in range(2)]
        steps = [ids(2, 5, 1), ids(3, 4, 2)]
        logits = []
        for _ in range(6):
            for turn in range(2):
                out = model(steps[turn], cache=caches[turn])
                logits.append(out.logits[:, -1])
                steps[turn] = out.logits[:, -1:].argmax(-1)
        return logits

    for expected, got in zip(run(main_pair.stock), run(main_pair.attached), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)


def test_interleaved_drafts_of_two_caches(main_pair, ids):
    """Each verifies while the other has not committed: one pool has one set of verify windows."""

    def run(model):
        caches = [DynamicCache(config=model.config) for _ in range(2)]
        for cache in caches:
            cache.activate_past_recording()
        logits = []
        for step in range(5):
            for turn in range(2):
                tokens = ids(1, 4 + turn, 10 * step + turn)
                logits.append(model(tokens, cache=caches[turn]).logits)
            for turn in range(2):
                caches[turn].crop(-(step % 4))
        return logits

    for expected, got in zip(run(main_pair.stock), run(main_pair.attached), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)


def test_a_reset_cache_starts_afresh_with_any_batch(main_pair, ids):
    model = main_pair.attached
    cache = _prefilled(model, ids(2, 6))
    cache.reset()
    assert main_pair.attachment.rows_held == 0
    got = model(ids(3, 4, 1), cache=cache).logits
    expected = main_pair.stock(ids(3, 4, 1)).logits
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)


def test_a_prompt_cache_is_repeated_for_a_batch(main_pair, ids):
    """Stock fails here: its hybrid layers repeat keys only, its conv layers have no such method."""
    prefix = ids(1, 7)
    cache = _prefilled(main_pair.attached, prefix)
    cache.batch_repeat_interleave(3)
    turns = ids(3, 4, 1)
    got = main_pair.attached(turns, cache=cache).logits
    expected = main_pair.stock(torch.cat([prefix.repeat(3, 1), turns], dim=1)).logits[:, -4:]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("indices", [[2, 0], [1, 1, 1, 0], [-1]])
def test_rows_of_a_cache_are_selected(main_pair, ids, indices):
    prefix, turns = ids(3, 7), ids(len(indices), 4, 1)
    cache = _prefilled(main_pair.attached, prefix)
    cache.batch_select_indices(torch.tensor(indices))
    got = main_pair.attached(turns, cache=cache).logits
    expected = main_pair.stock(torch.cat([prefix[indices], turns], dim=1)).logits[:, -4:]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert main_pair.attachment.rows_held == len(indices)


def test_rows_are_selected_by_a_mask(main_pair, ids):
    cache = _prefilled(main_pair.attached, ids(3, 7))
    cache.batch_select_indices(torch.tensor([True, False, True]))
    assert main_pair.attachment.rows_held == 2


@pytest.mark.parametrize("name", ["inkling", "lfm2-bias-k5"])
def test_a_cache_of_another_batch_size_is_refused(all_pairs, name, ids):
    model = all_pairs[name].attached
    cache = _prefilled(model, ids(1, 5))
    with pytest.raises(ValueError, match=r"holds 1 rows, the batch has 3.*batch_repeat_interleave"):
        model(ids(3, 2), cache=cache)


@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize("length", [2, 11])
def test_a_cache_filled_by_stock_is_adopted(pair, ids, recording, length):
    prefix = ids(2, length)
    cache = DynamicCache(config=pair.stock.config)
    if recording:
        cache.activate_past_recording()
    pair.stock(prefix, cache=cache)
    twin = copy.deepcopy(cache)

    def step(tokens):
        expected, got = (
            model(tokens, cache=one).logits
            for model, one in ((pair.stock, twin), (pair.attached, cache))
        )
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)

    step(ids(2, 1, 1))
    if recording:
        # Back to what stock had recorded before the cache was adopted.
        for either in (cache, twin):
            either.crop(-2)
    step(ids(2, 5, 2))
    step(ids(2, 1, 3))


@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize("length", [2, 11])
def test_stock_continues_an_exported_cache(pair, ids, recording, length):
    caches = [DynamicCache(config=pair.stock.config) for _ in range(2)]
    for cache, model in zip(caches, (pair.stock, pair.attached), strict=True):
        if recording:
            cache.activate_past_recording()
        model(ids(2, length), cache=cache)
    pair.attachment.export(caches[1])
    assert pair.attachment.rows_held == 0
    assert [type(layer) for layer in caches[0].layers] == [
        type(layer) for layer in caches[1].layers
    ]
    if recording:
        for cache in caches:
            cache.crop(-1)
    for step in (ids(2, 1, 1), ids(2, 4, 2)):
        expected, got = (pair.stock(step, cache=cache).logits for cache in caches)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)


def test_stock_does_not_continue_a_pooled_cache_by_accident(main_pair, ids):
    cache = _prefilled(main_pair.attached, ids(1, 5))
    with pytest.raises(RuntimeError, match=r"Attachment\.export"):
        main_pair.stock(ids(1, 1), cache=cache)


def test_the_pool_of_another_model_is_refused(main_pair, new_pair, ids):
    other = new_pair(main_pair.name)
    cache = _prefilled(other.attached, ids(1, 5))
    with pytest.raises(ValueError, match="another attached model"):
        main_pair.attached(ids(1, 1), cache=cache)
    with pytest.raises(ValueError, match="not in this model's pool"):
        main_pair.attachment.export(cache)
    with pytest.raises(ValueError, match="not in this model's pool"):
        main_pair.attachment.export(DynamicCache())


def test_a_cache_without_a_config_is_refused(main_pair, ids):
    with pytest.raises(
        (TypeError, IndexError, ValueError), match=r"DynamicCache\(config=model.config\)"
    ):
        main_pair.attached(ids(1, 5), cache=DynamicCache())


def test_a_pooled_cache_cannot_be_pickled(main_pair, ids):
    cache = _prefilled(main_pair.attached, ids(1, 5))
    with pytest.raises(TypeError, match="export"):
        pickle.dumps(cache)


def test_slots_return_when_caches_die(main_pair, ids):
    attachment = main_pair.attachment
    cache = _prefilled(main_pair.attached, ids(2, 5))
    copies = [copy.deepcopy(cache) for _ in range(3)]
    assert attachment.rows_held == 8
    del copies
    assert attachment.rows_held == 2
    out = main_pair.attached.generate(
        ids(3, 4), max_new_tokens=3, do_sample=False, return_dict_in_generate=True
    )
    assert attachment.rows_held == 5
    del out, cache
    assert attachment.rows_held == 0


@pytest.mark.parametrize("layer", [0, -1])
def test_a_generation_that_fails_gives_its_slots_back(main_pair, ids, layer):
    module = main_pair.attachment.convolutions[layer].module

    def boom(*args):
        raise MemoryError("no memory")

    hook = module.register_forward_pre_hook(boom)
    try:
        with pytest.raises(MemoryError):
            main_pair.attached.generate(ids(2, 5), max_new_tokens=3, do_sample=False)
    finally:
        hook.remove()
    gc.collect()
    assert main_pair.attachment.rows_held == 0
    main_pair.check(ids(2, 5), max_new_tokens=3, do_sample=False)


def test_a_cache_of_an_aborted_forward_is_not_used_further(main_pair, ids):
    """Half of its layers have seen the tokens; stock would go on with that."""
    module = main_pair.attachment.convolutions[-1].module
    cache = _prefilled(main_pair.attached, ids(1, 5))

    def boom(*args):
        raise KeyboardInterrupt

    hook = module.register_forward_pre_hook(boom)
    with pytest.raises(KeyboardInterrupt):
        main_pair.attached(ids(1, 1), cache=cache)
    hook.remove()
    for use in (lambda: main_pair.attached(ids(1, 1), cache=cache), lambda: copy.deepcopy(cache)):
        with pytest.raises(RuntimeError, match="aborted half-way"):
            use()
    cache.reset()
    main_pair.attached(ids(1, 3), cache=cache)


def test_exhaustion_says_who_may_hold_the_slots(new_pair, ids):
    import sconv

    pair = new_pair("lfm2", max_requests=3)
    kept = _prefilled(pair.attached, ids(2, 5))
    with pytest.raises(sconv.PoolExhaustedError, match=r"2 of max_requests=3.*prompt caches"):
        pair.attached.generate(ids(2, 5), max_new_tokens=2, do_sample=False)
    gc.collect()
    assert pair.attachment.rows_held == 2
    with pytest.raises(sconv.PoolExhaustedError, match=r"batch of 4 rows.*max_requests=3"):
        pair.attached.generate(ids(4, 5), max_new_tokens=2, do_sample=False)
    with pytest.raises(sconv.PoolExhaustedError):
        copy.deepcopy(kept)
    assert pair.attachment.rows_held == 2
    pair.attached.generate(ids(1, 5), max_new_tokens=2, do_sample=False)
    with pytest.raises(sconv.PoolExhaustedError):
        kept.batch_repeat_interleave(2)
    assert pair.attachment.rows_held == 2


def test_a_cache_in_a_reference_cycle_does_not_exhaust_the_pool(new_pair, ids):
    """As the traceback of a caught exception makes one; the collector may not have run yet."""
    pair = new_pair("lfm2", max_requests=2)
    cache = _prefilled(pair.attached, ids(2, 5))
    cache.itself = cache
    gc.disable()
    try:
        del cache
        assert pair.attachment.rows_held == 2
        pair.attached.generate(ids(2, 5), max_new_tokens=2, do_sample=False)
    finally:
        gc.enable()


def test_beams_fit_in_exactly_their_rows(new_pair, ids):
    pair = new_pair("inkling", max_requests=4)
    pair.check(ids(1, 5), max_new_tokens=12, num_beams=4, do_sample=False)


def test_crop_to_less_than_a_window_then_extend(pair, ids):
    outs = []
    for model in (pair.stock, pair.attached):
        cache = DynamicCache(config=model.config)
        cache.activate_past_recording()
        model(ids(1, 6), cache=cache)
        cache.crop(-5)
        outs.append(model(ids(1, 4, 1), cache=cache).logits)
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-5, atol=2e-5)


def test_a_draft_cache_is_reordered_and_copied_before_its_crop(main_pair, ids):
    outs = []
    for model in (main_pair.stock, main_pair.attached):
        cache = DynamicCache(config=model.config)
        cache.activate_past_recording()
        model(ids(3, 6), cache=cache)
        cache.crop(0)
        model(ids(3, 4, 1), cache=cache)
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        twin = copy.deepcopy(cache)
        logits = []
        for removed, one in ((1, cache), (3, twin)):
            one.crop(-removed)
            logits.append(model(ids(3, 2, 2), cache=one).logits)
        outs.append(torch.cat(logits))
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-5, atol=2e-5)


def test_recording_that_is_switched_off_without_a_crop_keeps_everything(main_pair, ids):
    """Stock keeps its recorded state longer than a window there and trips over it."""
    model = main_pair.attached
    cache, plain = (DynamicCache(config=model.config) for _ in range(2))
    cache.activate_past_recording()
    steps = [ids(2, 6), ids(2, 1, 1), ids(2, 3, 2)]
    for step in steps:
        expected, got = (model(step, cache=one).logits for one in (plain, cache))
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)
        for layer in cache.layers:
            if hasattr(layer, "record_past"):
                layer.record_past = False


def test_a_static_cache_of_lfm2(all_pairs, ragged):
    tokens, mask = ragged([6, 3])
    all_pairs["lfm2"].check(
        tokens,
        attention_mask=mask,
        max_new_tokens=8,
        do_sample=False,
        cache_implementation="static",
        disable_compile=True,
    )


#: Before 5.24 a static layer does not say whether its cache is longer than its window.
SAYS_ITS_LENGTH = isinstance(vars(StaticSlidingWindowLayer).get("is_croppable"), property)


def test_a_static_cache_of_sliding_inkling(make_model, ids):
    stock = make_model("inkling", layer_types=["hybrid_sliding"] * 3, sliding_window_size=64)
    attached = copy.deepcopy(stock)
    attach(attached, max_requests=2)
    options = {"cache_implementation": "static", "disable_compile": True, "do_sample": False}
    if not SAYS_ITS_LENGTH:
        with pytest.raises(ValueError, match="static cache is refused"):
            attached.generate(ids(2, 7), max_new_tokens=8, **options)
        return
    outs = [model.generate(ids(2, 7), max_new_tokens=8, **options) for model in (stock, attached)]
    assert outs[0].tolist() == outs[1].tolist()


def test_a_static_cache_is_compiled(make_model, ids):
    """The bookkeeping breaks the graph; around it dynamo compiles as before."""
    from transformers.generation import CompileConfig

    stock = make_model("lfm2", num_hidden_layers=2, layer_types=["conv", "full_attention"])
    attached = copy.deepcopy(stock)
    attachment = attach(attached, max_requests=2)
    compile_config = CompileConfig(backend="eager", mode="default", fullgraph=False)
    compile_config._compile_all_devices = True
    expected = stock.generate(ids(1, 5), max_new_tokens=4, do_sample=False)
    got = attached.generate(
        ids(1, 5),
        max_new_tokens=4,
        do_sample=False,
        cache_implementation="static",
        compile_config=compile_config,
    )
    assert got.tolist() == expected.tolist()
    assert attachment.counters.forwards == attachment.counters.metadata_builds == 4


@pytest.mark.parametrize(
    ("layer_types", "window", "reason"),
    [
        (["hybrid_sliding", "hybrid", "hybrid"], 64, "position|masks"),
        (["hybrid_sliding"] * 3, 6, "masks"),
    ],
)
def test_a_static_cache_that_stock_gets_wrong_is_refused(
    make_model, ids, layer_types, window, reason
):
    model = make_model("inkling", layer_types=layer_types, sliding_window_size=window)
    attachment = attach(model, max_requests=2)
    with pytest.raises(ValueError, match=f"static cache is refused.*({reason})"):
        model.generate(
            ids(1, 7),
            max_new_tokens=8,
            do_sample=False,
            cache_implementation="static",
            disable_compile=True,
        )
    assert attachment.rows_held == 0


def test_static_and_assisted_is_refused(all_pairs, ids):
    with pytest.raises(ValueError, match=r"assisted .* with (a )?[Ss]tatic cache"):
        all_pairs["lfm2"].attached.generate(
            ids(1, 7),
            max_new_tokens=8,
            do_sample=False,
            cache_implementation="static",
            prompt_lookup_num_tokens=3,
            disable_compile=True,
        )
    gc.collect()
    assert all_pairs["lfm2"].attachment.rows_held == 0
