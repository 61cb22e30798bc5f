"""Tiny random models in pairs: one stays stock, its copy is attached."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from sconv_transformers.torch_extensions import hide_broken_extensions

if find_spec("torch_npu") is not None:
    # transformers would import it with its models, and fail where it cannot be loaded.
    hide_broken_extensions()

import transformers
from transformers import GenerationMixin, Lfm2Config, Lfm2ForCausalLM
from transformers.models.inkling.configuration_inkling import InklingTextConfig
from transformers.models.inkling.modeling_inkling import InklingForCausalLM
from transformers.utils import ModelOutput

from sconv_transformers import Attachment, attach

transformers.logging.set_verbosity_error()


def _names_of_5_24() -> None:
    """Let the tests say ``cache`` to an older release, which says ``past_key_values``."""

    def renamed(function: Any) -> Any:
        @functools.wraps(function)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if "cache" in kwargs:
                kwargs["past_key_values"] = kwargs.pop("cache")
            return function(self, *args, **kwargs)

        return call

    for owner, name in (
        (InklingForCausalLM, "forward"),
        (Lfm2ForCausalLM, "forward"),
        (GenerationMixin, "generate"),
    ):
        setattr(owner, name, renamed(getattr(owner, name)))
    ModelOutput.cache = property(lambda self: self.past_key_values)


if "cache" not in inspect.signature(Lfm2ForCausalLM.forward).parameters:
    _names_of_5_24()

VOCAB = 96
#: Smallest rollback bound that the tests below need; short, so that long prompts are cheap.
MAX_ROLLBACK = 24


def _inkling(**changes: Any) -> InklingForCausalLM:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "sliding_window_size": 16,
        "d_rel": 4,
        "rel_extent": 64,
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
        "mlp_layer_types": ["dense", "sparse", "dense"],
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "conv_kernel_size": 4,
        "logits_mup_width_multiplier": 1.0,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    torch.manual_seed(1)
    return InklingForCausalLM(InklingTextConfig(**(sizes | changes))).eval()


def _lfm2(**changes: Any) -> Lfm2ForCausalLM:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "layer_types": ["full_attention", "conv", "full_attention", "conv"],
        "conv_L_cache": 3,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    torch.manual_seed(1)
    return Lfm2ForCausalLM(Lfm2Config(**(sizes | changes))).eval()


MAKERS: dict[str, Callable[[], torch.nn.Module]] = {
    "inkling": _inkling,
    "inkling-k2": lambda: _inkling(conv_kernel_size=2, sliding_window_size=256),
    "lfm2": _lfm2,
    "lfm2-bias-k5": lambda: _lfm2(
        conv_bias=True, conv_L_cache=5, layer_types=["conv", "full_attention", "conv", "conv"]
    ),
}


@dataclass(frozen=True)
class Pair:
    """A stock model and an attached copy of it."""

    name: str
    stock: Any
    attached: Any
    attachment: Attachment

    def generate(self, ids: torch.Tensor, **options: Any) -> tuple[Any, Any]:
        """Run both; ``seed`` and ``cache_of`` (a function of the model) are the only extras."""
        seed = options.pop("seed", 0)
        cache_of = options.pop("cache_of", None)
        outputs = []
        for model in (self.stock, self.attached):
            torch.manual_seed(seed)
            extra = {} if cache_of is None else {"cache": cache_of(model)}
            outputs.append(
                model.generate(
                    ids, **options, **extra, return_dict_in_generate=True, output_logits=True
                )
            )
        return outputs[0], outputs[1]

    def check(self, ids: torch.Tensor, **options: Any) -> Any:
        """Run both, require the same tokens and logits, and return the attached output."""
        stock, pooled = self.generate(ids, **options)
        assert stock.sequences.tolist() == pooled.sequences.tolist()
        assert len(stock.logits) == len(pooled.logits)
        for expected, got in zip(stock.logits, pooled.logits, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)
        return pooled


def make_pair(name: str, **options: Any) -> Pair:
    stock = MAKERS[name]()
    attached = copy.deepcopy(stock)
    options = {"max_requests": 12, "max_rollback": MAX_ROLLBACK} | options
    return Pair(name, stock, attached, attach(attached, **options))


class Pairs(dict[str, Pair]):
    """Pairs by name, with a short text: a failing property test prints its arguments."""

    def __repr__(self) -> str:
        return f"Pairs({', '.join(self)})"


@pytest.fixture(scope="session")
def all_pairs() -> Pairs:
    return Pairs({name: make_pair(name) for name in MAKERS})


@pytest.fixture(params=list(MAKERS))
def pair(request: pytest.FixtureRequest, all_pairs: Pairs) -> Iterator[Pair]:
    """Each of the four configurations; the test must give all slots back."""
    found = all_pairs[request.param]
    yield found
    gc.collect()
    assert found.attachment.rows_held == 0


@pytest.fixture(params=["inkling", "lfm2"])
def main_pair(request: pytest.FixtureRequest, all_pairs: Pairs) -> Iterator[Pair]:
    """One configuration of each family; the test must give all slots back."""
    found = all_pairs[request.param]
    yield found
    gc.collect()
    assert found.attachment.rows_held == 0


@pytest.fixture
def new_pair() -> Callable[..., Pair]:
    """Make a pair of one's own, to break or to size: ``new_pair(name, **attach_options)``."""
    return make_pair


@pytest.fixture
def make_model() -> Callable[..., Any]:
    """Make a stock model: ``make_model("inkling", **config_changes)``."""

    def make(name: str, **changes: Any) -> Any:
        return {"inkling": _inkling, "lfm2": _lfm2}[name](**changes)

    return make


@pytest.fixture
def ids() -> Callable[..., torch.Tensor]:
    """Random token ids: ``ids(rows, length, seed=0)``."""

    def make(rows: int, length: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(2, VOCAB, (rows, length), generator=generator)

    return make


@pytest.fixture
def ragged(ids: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Left-padded prompts: ``ragged([3, 1, 7])`` -> ids, mask."""

    def make(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(lengths)
        tokens = ids(len(lengths), width, seed)
        place = torch.arange(width)
        mask = (place >= width - torch.tensor(lengths)[:, None]).long()
        return tokens * mask, mask

    return make


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad(), warnings.catch_warnings():
        yield
