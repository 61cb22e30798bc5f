"""The model in the package: small, loadable offline, good enough to show drafts at work."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, InklingForCausalLM

from sconv_transformers.model_session import Session

MODEL = Path(__file__).parents[1] / "src" / "sconv_transformers" / "models" / "inkling_py"
MEGABYTE = 1_000_000
MAX_BITS_PER_BYTE = 1.0

# Written for this test, so no part of it is in the training text.
HELD_OUT = '''"""Count how often each word of a text file occurs."""

import argparse
import collections
import re


class WordCounter:
    """A table of words and the number of times that each was seen."""

    def __init__(self, ignore_case=True):
        self.ignore_case = ignore_case
        self.counts = collections.Counter()

    def feed(self, line):
        """Add all words of one line."""
        if self.ignore_case:
            line = line.lower()
        for word in re.findall(r"[a-z]+", line):
            self.counts[word] += 1

    def most_common(self, limit=None):
        """Return (word, count) pairs, the most frequent first."""
        return self.counts.most_common(limit)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("filename", help="the text file to read")
    parser.add_argument("--limit", type=int, default=10)
    args = parser.parse_args()

    counter = WordCounter()
    with open(args.filename, encoding="utf-8") as file:
        for line in file:
            counter.feed(line)
    for word, count in counter.most_common(args.limit):
        print(f"{count:8} {word}")


if __name__ == "__main__":
    main()
'''


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors this small gain nothing from threads and lose much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL, local_files_only=True)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(
        MODEL, local_files_only=True, dtype=torch.float32
    ).eval()


def tokens_of(text, tokenizer):
    """Tokens [1, T] of a text that starts a file: the end-of-text token stands before it."""
    ids = tokenizer(text, add_special_tokens=False).input_ids
    return torch.tensor([[tokenizer.eos_token_id, *ids]])


def test_weights_fit_in_four_megabytes():
    assert sum(file.stat().st_size for file in MODEL.glob("*.safetensors")) <= 4 * MEGABYTE


def test_layers_are_of_both_kinds_with_convolutions_of_width_four(model):
    assert isinstance(model, InklingForCausalLM)
    assert len(model.config.layer_types) >= 4
    assert set(model.config.layer_types) == {"hybrid_sliding", "hybrid"}
    assert model.config.conv_kernel_size == 4


def test_default_type_is_float32_and_decoding_is_greedy(model):
    default = AutoModelForCausalLM.from_pretrained(MODEL, local_files_only=True)
    assert default.dtype == torch.float32
    assert model.generation_config.do_sample is False
    assert (model.generation_config.pad_token_id, model.generation_config.eos_token_id) == (0, 1)


def test_tokenizer_round_trips_bytes_and_pads_left(tokenizer):
    text = "def f(x):\n\treturn 'äß€𝄞'\r\n  \x00\x7f"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids == [byte + 3 for byte in text.encode()]
    assert tokenizer.decode(ids) == text
    assert tokenizer.padding_side == "left"
    assert tokenizer.pad_token_id == 0
    assert tokenizer.eos_token_id == 1


def test_predicts_code_it_has_not_seen(model, tokenizer):
    tokens = tokens_of(HELD_OUT, tokenizer)
    with torch.no_grad():
        logits = model(tokens[:, :-1], use_cache=False).logits
    nats = cross_entropy(logits[0], tokens[0, 1:]).item()
    assert nats / math.log(2) < MAX_BITS_PER_BYTE


@pytest.mark.parametrize("starts_file", [True, False])
def test_a_function_goes_on_with_an_indented_body(model, tokenizer, starts_file):
    tokens = tokens_of("def fibonacci(n):", tokenizer)
    if not starts_file:
        tokens = tokens[:, 1:]
    result = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=40)
    body = tokenizer.decode(result[0, tokens.shape[1] :])
    assert body.startswith("\n    ")
    assert body.strip()


def test_prompt_lookup_accepts_drafts_and_keeps_the_text(model, tokenizer):
    tokens = tokens_of(HELD_OUT[:600], tokenizer)
    arguments = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 48}
    forwards = []
    hook = model.register_forward_pre_hook(lambda *_: forwards.append(1))
    drafted = model.generate(tokens, **arguments, prompt_lookup_num_tokens=4)
    hook.remove()
    assert torch.equal(drafted, model.generate(tokens, **arguments))
    assert len(forwards) < 40


def test_the_command_starts_a_prompt_as_a_file_starts():
    session = Session.load(str(MODEL), device=torch.device("cpu"), dtype=None)
    end = session.tokenizer.eos_token_id
    assert session.encode("x") == [end, ord("x") + 3]
    assert session.encode("</s>x") == [end, ord("x") + 3]
