"""A model of one's own, registered with sconv and attached."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import DynamicCache, GenerationMixin, Lfm2Config, Lfm2ForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

import sconv
from sconv_transformers import attach

DIM, VOCAB = 16, 64


class TinyConfig(Lfm2Config):
    model_type = "tiny_of_the_tests"


class TinyConv(nn.Module):
    """SiLU of a convolution of four taps with a bias: nothing that the package knows."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.taps = nn.Conv1d(DIM, DIM, 4, groups=DIM, padding=3, bias=True)

    def forward(self, x, *, cache=None, keep=None):
        x = x if keep is None else x * keep[:, :, None]
        tokens, inputs = x.shape[1], x.transpose(1, 2)
        if cache is not None:
            inputs = cache.update_conv_state(inputs, self.layer_idx, conv_kernel_size=4)
        y = self.taps(inputs)[:, :, : inputs.shape[2]]
        return nn.functional.silu(y[:, :, -tokens:]).transpose(1, 2)


class ForgetfulConv(TinyConv):
    """Keeps no state in the cache."""

    def forward(self, x, *, cache=None, keep=None):
        return super().forward(x, keep=keep)


class TinyForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = TinyConfig
    conv_class: type[TinyConv] = TinyConv

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(VOCAB, DIM)
        self.convs = nn.ModuleList(self.conv_class(index) for index in range(2))
        self.head = nn.Linear(DIM, VOCAB)
        self.post_init()

    def forward(
        self,
        input_ids,
        attention_mask=None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        use_cache=True,
        logits_to_keep=0,
        **_,
    ):
        cache = past_key_values if cache is None else cache
        if cache is None and use_cache:
            cache = DynamicCache(config=self.config)
        tokens = input_ids.shape[1]
        keep = None if attention_mask is None else attention_mask[:, -tokens:]
        x = self.embed(input_ids)
        for conv in self.convs:
            x = x + conv(x, cache=cache, keep=keep)
        if cache is not None:
            # What an attention layer does for the length of the cache.
            cache.update(x[:, None, :, :1], x[:, None, :, :1], 2)
        return CausalLMOutputWithPast(None, self.head(x[:, -logits_to_keep:]), cache)


def _model(model_class: type[TinyForCausalLM] = TinyForCausalLM) -> TinyForCausalLM:
    config = TinyConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        layer_types=["conv", "conv", "full_attention"],
        initializer_range=1.0,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(2)
    return model_class(config).eval()


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    monkeypatch.setattr("sconv.engine.registry._SPECS", [])


def _register(*conv_modules, config_class=TinyConfig):
    spec = sconv.LinearAttnModelSpec(config_class, conv_modules=conv_modules)
    sconv.register_linear_attn_model(spec)
    return spec


def _step(model, tokens, cache):
    return model(tokens, cache=cache).logits


@pytest.mark.parametrize("named", [TinyConv, f"{__name__}.TinyConv"])
def test_a_registered_model_gives_the_stock_tokens(ids, ragged, named):
    stock = _model()
    attached = copy.deepcopy(stock)
    spec = _register(named)
    tokens, mask = ragged([9, 2, 5])
    tokens = tokens % VOCAB
    with attach(attached, max_requests=6) as attachment:
        assert attachment.family is spec
        for options in ({}, {"num_beams": 2}, {"do_sample": True}):
            torch.manual_seed(0)
            expected = stock.generate(tokens, attention_mask=mask, max_new_tokens=9, **options)
            torch.manual_seed(0)
            got = attached.generate(tokens, attention_mask=mask, max_new_tokens=9, **options)
            assert got.tolist() == expected.tolist()
        assert attachment.counters.forwards == 27
        assert len(set(expected.flatten().tolist())) > 5
    assert type(attached.convs[0]) is TinyConv
    assert attachment.rows_held == 0


def test_a_registered_model_rolls_back(ids):
    stock = _model()
    attached = copy.deepcopy(stock)
    _register(TinyConv)
    attachment = attach(attached, max_requests=2, max_rollback=5)
    caches = [DynamicCache(config=stock.config) for _ in range(2)]
    for cache in caches:
        cache.activate_past_recording()
    for tokens, removed in ((9, 0), (4, 3), (1, 0), (5, 5), (3, 1), (2, 0)):
        step = ids(2, tokens, seed=tokens) % VOCAB
        expected, got = (
            _step(model, step, cache)
            for model, cache in zip((stock, attached), caches, strict=True)
        )
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        for cache in caches:
            cache.crop(-removed)
    assert attachment.counters.commits == 6
    attachment.export(caches[1])
    step = ids(2, 2) % VOCAB
    torch.testing.assert_close(*(_step(stock, step, cache) for cache in caches))


def test_a_convolution_that_keeps_its_state_elsewhere_is_refused_at_its_first_forward(ids):
    class Forgetful(TinyForCausalLM):
        conv_class = ForgetfulConv

    _register(ForgetfulConv)
    model = _model(Forgetful)
    attach(model)
    with pytest.raises(RuntimeError, match=r"ForgetfulConv of cache layer 0 did not call cache"):
        model(ids(1, 3) % VOCAB)


def test_a_model_that_is_not_registered_is_refused():
    """Its configuration is a Lfm2Config, so LFM2's convolutions are looked for."""
    with pytest.raises(ValueError, match=r"no convolution layers \(modules of Lfm2ShortConv\)"):
        attach(_model())


def test_a_registration_of_ones_own_comes_before_what_is_built_in(make_model, ids):
    """Also for a configuration and an architecture that the package knows."""

    class Halved(Lfm2ShortConv):
        def forward(self, *args, **kwargs):
            return 0.5 * super().forward(*args, **kwargs)

    model = make_model("lfm2")
    for layer in (1, 3):
        model.model.layers[layer].conv.__class__ = Halved
    model.config.architectures = [Lfm2ForCausalLM.__name__]
    expected = model.generate(ids(1, 5), max_new_tokens=6, do_sample=False).tolist()
    _register(Halved, config_class=Lfm2Config)
    with attach(model) as attachment:
        assert model.generate(ids(1, 5), max_new_tokens=6, do_sample=False).tolist() == expected
        assert attachment.counters.forwards == 6
    assert type(model.model.layers[1].conv) is Halved


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda conv: delattr(conv, "layer_idx"), TypeError, "does not say where its state is"),
        (lambda conv: setattr(conv, "taps", nn.Conv1d(DIM, DIM, 4)), ValueError, "depthwise"),
        (
            lambda conv: setattr(conv, "taps", nn.Conv1d(DIM, DIM, 3, groups=DIM)),
            ValueError,
            r"widths \[3, 4\]",
        ),
    ],
)
def test_modules_that_are_no_short_convolutions_are_refused(change, error, says):
    model = _model()
    change(model.convs[1])
    _register(TinyConv)
    with pytest.raises(error, match=says):
        attach(model)
