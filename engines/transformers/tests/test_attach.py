"""attach and detach: what changes, what does not, and what is refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from transformers import DynamicCache

import sconv
import sconv_transformers
from sconv_transformers import attach


@pytest.mark.parametrize("name", ["inkling", "lfm2"])
def test_the_state_dict_and_the_saved_files_stay_the_same(make_model, name, tmp_path):
    model = make_model(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.save_pretrained(tmp_path / "before")
    with attach(model):
        after = model.state_dict()
        assert list(before) == list(after)
        assert all(torch.equal(before[key], after[key]) for key in before)
        model.save_pretrained(tmp_path / "while")
    files = sorted(path.name for path in (tmp_path / "before").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "while").iterdir())
    for file in files:
        assert (tmp_path / "before" / file).read_bytes() == (tmp_path / "while" / file).read_bytes()


@pytest.mark.parametrize("name", ["inkling", "lfm2"])
def test_detach_restores_the_model(make_model, name, ids):
    model = make_model(name)
    classes = [type(module) for module in model.modules()]
    keys = [sorted(vars(module)) for module in model.modules()]
    expected = model.generate(ids(1, 5), max_new_tokens=6, do_sample=False)
    attachment = attach(model)
    kinds = [type(module) for module in model.modules()]
    assert kinds != classes
    assert all(issubclass(kind, stock) for kind, stock in zip(kinds, classes, strict=True))
    attachment.detach()
    attachment.detach()
    assert not attachment.attached
    assert [type(module) for module in model.modules()] == classes
    assert [sorted(vars(module)) for module in model.modules()] == keys
    assert not model._forward_pre_hooks
    assert (
        model.generate(ids(1, 5), max_new_tokens=6, do_sample=False).tolist() == expected.tolist()
    )
    assert attachment.counters.forwards == 0


def test_a_cache_is_exported_after_detach(make_model, ids):
    model = make_model("lfm2")
    attachment = attach(model)
    cache = DynamicCache(config=model.config)
    model(ids(1, 5), cache=cache)
    attachment.detach()
    with pytest.raises(RuntimeError, match="export"):
        model(ids(1, 1, 1), cache=cache)
    attachment.export(cache)


def test_what_an_attachment_says(make_model):
    model = make_model("inkling")
    attachment = attach(model, "cpu", max_requests=5, max_rollback=7)
    spec = attachment.backend.spec
    assert attachment.backend.info.name == "cpu"
    assert (spec.num_layers, spec.kernel_size, spec.num_slots) == (3, 4, 5)
    # What may be taken back, and the token that is always kept.
    assert spec.max_draft_tokens == 8
    assert spec.window_axis == "time"
    widths = [[stream.dim for stream in spec.layer_streams(layer)] for layer in range(3)]
    # The key and value widths of sliding and full-attention layers differ.
    assert widths == [[16, 16, 32, 32], [8, 8, 32, 32], [16, 16, 32, 32]]
    channels = sum(map(sum, widths))
    assert attachment.state_bytes == attachment.backend.pool.nbytes
    assert attachment.backend.pool.nbytes_by_part["state"] == 6 * 3 * channels * 4
    assert len(attachment.convolutions) == 12


def test_the_convolution_layers_of_lfm2_are_numbered_densely(make_model):
    model = make_model("lfm2")
    attachment = attach(model)
    assert [(conv.layer_id, conv.cache_layer) for conv in attachment.convolutions] == [
        (0, 1),
        (1, 3),
    ]
    assert attachment.backend.spec.window_axis == "channel"


def test_one_build_of_metadata_per_forward(make_model, ids):
    """Counted by an observer of the backend, in every mode, for 12 convolutions a forward."""

    class Builds:
        def __init__(self):
            self.builds = self.convolutions = 0

        @sconv.hookimpl(wrapper=True)
        def init_forward_metadata(self):
            self.builds += 1
            return (yield)

        @sconv.hookimpl(wrapper=True)
        def short_conv(self):
            self.convolutions += 1
            return (yield)

    model = make_model("inkling")
    attachment = attach(model, max_requests=6, max_rollback=32)
    seen = Builds()
    attachment.backend.add_observer(seen)
    for options in (
        {"max_new_tokens": 9},
        {"max_new_tokens": 9, "num_beams": 3},
        {"max_new_tokens": 9, "prefill_chunk_size": 3},
        {"max_new_tokens": 9, "prompt_lookup_num_tokens": 3},
    ):
        before = (seen.builds, seen.convolutions, attachment.counters.forwards)
        model.generate(ids(1, 6).repeat(1, 2), do_sample=False, **options)
        forwards = attachment.counters.forwards - before[2]
        assert seen.builds - before[0] == forwards > 0
        assert seen.convolutions - before[1] == 12 * forwards
    assert attachment.counters.metadata_builds == seen.builds


def test_without_a_cache_and_in_training_the_model_is_stock(main_pair, ids):
    tokens = ids(2, 7)
    before = main_pair.attachment.counters.forwards
    expected = main_pair.stock(tokens, use_cache=False).logits
    assert torch.equal(main_pair.attached(tokens, use_cache=False).logits, expected)
    grads = []
    with torch.enable_grad():
        for model in (main_pair.stock, main_pair.attached):
            model.train()
            model(tokens, labels=tokens, use_cache=False).loss.backward()
            grads.append([parameter.grad for parameter in model.parameters()])
            model.zero_grad()
            model.eval()
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True) if a is not None)
    assert main_pair.attachment.counters.forwards == before


def test_a_forward_with_gradients_enabled_works_but_its_backward_says_why_not(main_pair, ids):
    with torch.enable_grad():
        out = main_pair.attached(ids(1, 6), use_cache=True)
        expected = main_pair.stock(ids(1, 6), use_cache=True)
        torch.testing.assert_close(out.logits, expected.logits, rtol=1e-5, atol=2e-5)
        with pytest.raises(RuntimeError, match="use_cache=False"):
            out.logits.sum().backward()
        for layer in main_pair.attachment.backend.pool.layers:
            assert not layer.requires_grad
    main_pair.attached.zero_grad()


def test_a_copy_of_an_attached_model_shares_its_pool(new_pair, ids):
    pair = new_pair("lfm2")
    twin = copy.deepcopy(pair.attached)
    expected = pair.stock.generate(ids(1, 5), max_new_tokens=5, do_sample=False)
    assert twin.generate(ids(1, 5), max_new_tokens=5, do_sample=False).tolist() == expected.tolist()
    assert pair.attachment.counters.forwards == 5


def test_an_attached_model_cannot_be_pickled(main_pair):
    with pytest.raises(TypeError, match="detach"):
        pickle.dumps(main_pair.attached)


def test_an_unsupported_model_is_refused():
    with pytest.raises(
        TypeError, match="Linear: supported are InklingForCausalLM, Lfm2ForCausalLM"
    ):
        attach(torch.nn.Linear(2, 2))


def test_a_model_without_convolutions_is_refused(make_model):
    model = make_model("lfm2", layer_types=["full_attention"] * 4)
    with pytest.raises(ValueError, match="no convolution layers"):
        attach(model)


def test_a_model_is_attached_once(main_pair):
    with pytest.raises(ValueError, match="attached already"):
        attach(main_pair.attached)


def test_a_backend_that_is_not_installed(make_model):
    model = make_model("lfm2")
    with pytest.raises(sconv.BackendNotFoundError, match="nosuch"):
        attach(model, "nosuch")
    # Nothing changed.
    attach(model).detach()


def test_a_model_on_no_device_is_refused(make_model):
    with pytest.raises(ValueError, match="are on meta"):
        attach(make_model("lfm2").to("meta"))


def test_a_cast_after_attach_is_refused(make_model, ids):
    model = make_model("lfm2").to(torch.bfloat16)
    attach(model)
    model.to(torch.float32)
    with pytest.raises(ValueError, match=r"computes in torch.float32.*made for torch.bfloat16"):
        model.generate(ids(1, 4), max_new_tokens=2, do_sample=False)


def test_a_layer_called_on_its_own_is_refused(main_pair):
    conv = main_pair.attachment.convolutions[-1]
    cache = DynamicCache(config=main_pair.attached.config)
    x = torch.zeros(1, 3, 32)
    with pytest.raises(RuntimeError, match="call the model, not its layers"):
        conv.module(x, cache=cache)


def test_packed_sequences_with_a_cache_are_refused(new_pair):
    pair = new_pair("lfm2")
    cache = DynamicCache(config=pair.attached.config)
    module = pair.attachment.convolutions[0].module
    with pytest.raises(ValueError, match="seq_idx packs"):
        module(torch.zeros(1, 3, 32), cache=cache, seq_idx=torch.zeros(1, 3, dtype=torch.int32))


def test_the_stock_classes_stay_in_charge_of_new_caches(main_pair, ids):
    """A cache layer class that registers itself would replace the stock class for every model."""
    main_pair.attached.generate(ids(1, 4), max_new_tokens=2, do_sample=False)
    cache = DynamicCache(config=main_pair.stock.config)
    assert {type(layer).__module__ for layer in cache.layers} == {"transformers.cache_utils"}


def test_names_are_imported_when_used():
    with pytest.raises(AttributeError, match="nothing"):
        sconv_transformers.nothing  # noqa: B018
    assert sconv_transformers.Counters().as_dict()["forwards"] == 0
