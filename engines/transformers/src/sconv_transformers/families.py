"""The model families that come with this package, as sconv's registry knows them. No torch."""

from __future__ import annotations

import sconv

__all__ = ["register_families"]

_MODELS = "transformers.models"


def register_families() -> None:
    """Register them, to be asked after what a user registers."""
    for config_class, architecture, conv_module in (
        (
            f"{_MODELS}.inkling.configuration_inkling.InklingTextConfig",
            "InklingForCausalLM",
            f"{_MODELS}.inkling.modeling_inkling.InklingShortConvolution",
        ),
        (
            f"{_MODELS}.lfm2.configuration_lfm2.Lfm2Config",
            "Lfm2ForCausalLM",
            f"{_MODELS}.lfm2.modeling_lfm2.Lfm2ShortConv",
        ),
    ):
        spec = sconv.LinearAttnModelSpec(
            config_class, arch_names=(architecture,), conv_modules=(conv_module,)
        )
        sconv.register_linear_attn_model(spec, built_in=True)
