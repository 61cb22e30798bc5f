"""The model: configuration, start, saved form, and two operations made fast for training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import ByT5Tokenizer, GenerationConfig, InklingForCausalLM, InklingTextConfig
from transformers.models.inkling import modeling_inkling as stock

PAD, EOS, BYTE_OFFSET, VOCABULARY = 0, 1, 3, 259


def build_config() -> InklingTextConfig:
    """Four layers, both attention kinds, k/v convolutions of two widths (96 and 192 channels)."""
    layer_types = ["hybrid_sliding", "hybrid"] * 2
    return InklingTextConfig(
        vocab_size=VOCABULARY,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=EOS,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=len(layer_types),
        layer_types=layer_types,
        mlp_layer_types=["dense"] * len(layer_types),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=48,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=4,
        swa_head_dim=48,
        sliding_window_size=128,
        d_rel=8,
        rel_extent=512,
        conv_kernel_size=4,
        max_position_embeddings=8192,
        # The default divides the final hidden state by 24, which suits a hidden size of 6144.
        logits_mup_width_multiplier=1.0,
        initializer_range=0.05,
    )


def build_model(config: InklingTextConfig) -> InklingForCausalLM:
    """Initialise a float32 model, its residual branches scaled down by depth."""
    model = InklingForCausalLM(config).float()
    branch_scale = 1 / math.sqrt(2 * config.num_hidden_layers)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(branch_scale)
            layer.mlp.down_proj.weight.mul_(branch_scale)
    return model


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Decay the matrices; leave embeddings, norms, convolutions, profiles and scales alone."""
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = name.endswith(("_proj.weight", "lm_head.weight"))
        (decayed if is_matrix else free).append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]


def save_model(model: InklingForCausalLM, directory: Path) -> None:
    """Write weights, configuration and tokenizer for `from_pretrained`.

    Matrices are rounded to bfloat16, which halves the file; vectors and convolutions, a fiftieth of
    it, keep float32. The configuration says float32, so that is what they are computed in unless
    the caller asks for another type.
    """
    state = {
        name: tensor.detach().to("cpu", torch.bfloat16 if tensor.ndim == 2 else torch.float32)
        for name, tensor in model.state_dict().items()
    }
    model.generation_config = GenerationConfig(
        do_sample=False, pad_token_id=PAD, eos_token_id=EOS, max_new_tokens=128
    )
    model.save_pretrained(directory, state_dict=state)
    ByT5Tokenizer(extra_ids=0, padding_side="left").save_pretrained(directory)


def _position_bias(
    module: stock.InklingRelativeLogits, relative_states: Tensor, *positions: Tensor
) -> Tensor:
    """Relative position bias by a skewed reshape, [B, T, H, R] -> [B, H, T, T], from position 0.

    Stock gathers one value per query and key, and its backward scatters as many. Here column j of
    the profile product holds distance T-1-j; one zero column in front and a reshape to rows one
    shorter move distance q-k to column k. Entries with k > q are meaningless and must be masked, as
    causal attention does.
    """
    batch, length, heads, _ = relative_states.shape
    profiles = pad(module.proj, (0, max(0, length - module.rel_extent)))[:, :length].flip(-1)
    logits = relative_states.transpose(1, 2) @ profiles
    return pad(logits, (1, 0)).view(batch, heads, length + 1, length)[:, :, 1:]


def _short_convolution(
    module: stock.InklingShortConvolution, hidden_states: Tensor, **_: object
) -> Tensor:
    """Convolution plus residual over [B, T, D], as K float32 multiply-adds."""
    x = hidden_states.float()
    taps = module.conv1d.weight.squeeze(1)
    width, length = taps.shape[-1], x.shape[1]
    padded = pad(x, (0, 0, width - 1, 0))
    mixed = sum((padded[:, j : j + length] * taps[:, j] for j in range(width)), start=x)
    return mixed.to(hidden_states.dtype)


@contextmanager
def training_operations() -> Iterator[None]:
    """Swap in the two operations above: same function, for sequences without cache and padding."""
    originals = stock.InklingRelativeLogits.forward, stock.InklingShortConvolution.forward
    stock.InklingRelativeLogits.forward = _position_bias
    stock.InklingShortConvolution.forward = _short_convolution
    try:
        yield
    finally:
        stock.InklingRelativeLogits.forward, stock.InklingShortConvolution.forward = originals


def attention_masks(
    config: InklingTextConfig, length: int, device: torch.device
) -> dict[str, Tensor | None]:
    """Additive masks [1, 1, T, T] of both attention kinds, as the model takes them ready-made."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]

    def additive(allowed: Tensor) -> Tensor:
        lowest = torch.finfo(torch.float32).min
        return torch.zeros(allowed.shape, device=device).masked_fill(~allowed, lowest)[None, None]

    causal = distance >= 0
    return {
        "full_attention": additive(causal),
        "sliding_attention": additive(causal & (distance < config.sliding_window_size)),
        "linear_attention": None,
    }


def check_training_operations(model: InklingForCausalLM, tokens: Tensor) -> float:
    """Largest logit difference of stock and training operations on `tokens` [B, T], if small."""
    masks = attention_masks(model.config, tokens.shape[1], tokens.device)
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
        with training_operations():
            actual = model(tokens, attention_mask=masks, use_cache=False).logits
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
    return (actual - expected).abs().max().item()
