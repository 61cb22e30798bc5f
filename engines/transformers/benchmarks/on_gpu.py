"""Does an attached model on a GPU write what stock transformers writes, in graphs too?

    python engines/transformers/benchmarks/on_gpu.py --out results.json --prompts 20 --tokens 200

Runs the shipped model in float32 without TF32, greedy, alone and with prompt-lookup drafts in every
layout of verify windows, and a small LFM2 whose decode forward, static cache and all, is captured
in one CUDA graph and replayed. Every part compares tokens with stock and says what it saw; a part
that fails is in the results as its error. ``--device cpu`` runs all but the capture.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import traceback
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, Lfm2Config, Lfm2ForCausalLM
from transformers.cache_utils import StaticCache

import sconv
from sconv_transformers import attach

STARTS = [
    "def fibonacci(n):",
    "import os\n",
    "class Point:\n    def __init__(self, x, y):",
    "def main(argv=None):",
    "for line in lines:",
    "try:\n    import json",
    '"""A module that reads tables.',
    "def test_empty(self):",
    "from collections import OrderedDict\n",
    "if __name__ == '__main__':",
]
LAYOUTS = ("inputs", "dedup", "dense")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device(options.device)
    results: dict[str, Any] = {
        "card": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "prompts": options.prompts,
        "tokens": options.tokens,
    }
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "capture": lambda: captured_decode(device),
        "plan": lambda: planned_bytes(device),
        "shipped_model": lambda: shipped_model(device, options.prompts, options.tokens),
    }
    for name, part in parts.items():
        start = time.perf_counter()
        try:
            results[name] = part()
        except Exception as exc:
            traceback.print_exc()
            results[name] = {"error": f"{type(exc).__name__}: {exc}"}
        results[name]["seconds"] = round(time.perf_counter() - start, 1)
        print(name, json.dumps(results[name]), flush=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")


def shipped_model(device: torch.device, prompts: int, tokens: int) -> dict[str, Any]:
    """Greedy text of the shipped model: stock, attached, and drafted in every layout."""
    folder = str(files("sconv_transformers").joinpath("models", "inkling_py"))
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).to(device).eval()
    texts = ["</s>" + STARTS[i % len(STARTS)] + " " * (i // len(STARTS)) for i in range(prompts)]
    ids = [tokenizer(t, add_special_tokens=False).input_ids for t in texts]

    def run(row: list[int], **changes: Any) -> list[int]:
        inputs = torch.tensor([row], device=device)
        output = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=tokens, **changes
        )
        return output[0, len(row) :].tolist()

    start = time.perf_counter()
    stock = [run(row) for row in ids]
    found: dict[str, Any] = {"stock_seconds": round(time.perf_counter() - start, 2), "runs": {}}
    for layout in (None, *LAYOUTS):
        drafts = {} if layout is None else {"prompt_lookup_num_tokens": 7}
        rollback, kept = (0, "auto") if layout is None else (7, layout)
        with attach(
            model, device.type, max_requests=1, max_rollback=rollback, window_layout=kept
        ) as attachment:
            start = time.perf_counter()
            texts_now = [run(row, **drafts) for row in ids]
            counters = attachment.counters.as_dict()
            found["runs"][layout or "no drafts"] = {
                "equal_to_stock": sum(a == b for a, b in zip(texts_now, stock, strict=True)),
                "backend": attachment.backend.info.name,
                "window_layout": attachment.backend.pool.window_layout,
                "state_bytes": attachment.state_bytes,
                "seconds": round(time.perf_counter() - start, 2),
                **counters,
            }
    return found


def planned_bytes(device: torch.device) -> dict[str, Any]:
    """Bytes that a plan promises against those that the allocator takes, per layout."""
    found: dict[str, Any] = {}
    for layout in LAYOUTS:
        spec = sconv.StateSpec(
            num_layers=36,
            streams=[sconv.Stream("conv", 8192)],
            kernel_size=4,
            num_slots=48,
            max_requests=48,
            max_draft_tokens=4,
            window_layout=layout,
        )
        # The backend before is garbage in a cycle; freed between two readings it would count here.
        gc.collect()
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        backend = sconv.load_backend(device.type, spec=spec)
        nbytes = backend.pool.nbytes
        taken = torch.cuda.memory_allocated() - before if device.type == "cuda" else nbytes
        found[layout] = {"pool": nbytes, "allocated": taken, "parts": backend.pool.nbytes_by_part}
        del backend
    return found


def captured_decode(device: torch.device, steps: int = 40) -> dict[str, Any]:
    """One decode forward of a small LFM2 with a static cache, captured and replayed."""
    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=97,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "conv", "full_attention"] * 2,
        conv_L_cache=3,
        max_position_embeddings=256,
    )
    model = Lfm2ForCausalLM(config).to(device).eval()
    prompts = torch.randint(3, 97, (4, 9), device=device)

    def prefill() -> tuple[StaticCache, torch.Tensor]:
        cache = StaticCache(config=config, max_cache_len=9 + steps + 4)
        logits = model(prompts, cache=cache).logits[:, -1:]
        return cache, logits.argmax(-1)

    def eager() -> list[list[int]]:
        cache, token = prefill()
        rows = [token]
        for _ in range(steps):
            token = model(token, cache=cache).logits.argmax(-1)
            rows.append(token)
        return torch.cat(rows, 1).tolist()

    with torch.no_grad():
        stock = eager()
        with attach(model, device.type, max_requests=8, max_rollback=0) as attachment:
            attached = eager()
            found: dict[str, Any] = {
                "backend": attachment.backend.info.name,
                "eager_equal": attached == stock,
            }
            if device.type != "cuda":
                return found
            cache, token = prefill()
            found["captured_equal"] = _captured(model, cache, token, steps) == stock
    return found


def _captured(
    model: Lfm2ForCausalLM, cache: StaticCache, token: torch.Tensor, steps: int
) -> list[list[int]]:
    rows = [token.clone()]
    static_token = token.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        # Two real steps warm everything up that a capture must not meet first.
        for _ in range(2):
            static_token.copy_(model(static_token, cache=cache).logits.argmax(-1))
            rows.append(static_token.clone())
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static_token.copy_(model(static_token, cache=cache).logits.argmax(-1))
    for _ in range(steps - 2):
        graph.replay()
        rows.append(static_token.clone())
    return torch.cat(rows, 1).tolist()


if __name__ == "__main__":
    main()
