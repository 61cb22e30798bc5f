"""Does an attached model on a GPU write what stock transformers writes, in graphs too?

    python engines/transformers/benchmarks/on_gpu.py --out results.json --prompts 20 --tokens 200

Runs the shipped model in float32 without TF32, greedy, and compares its text with stock's: through
``generate``, alone and with prompt lookup of 1 to 7 tokens in every layout of verify windows; and
through :mod:`small_engine`, whose whole step is captured in a CUDA graph, once eager and once
replayed. Also a small LFM2 whose decode forward, static cache and all, is one graph, and what plans
promise against what the allocator takes. A part that fails is in the results as its error.
``--device cpu`` runs all but the captures.

The text to compare with is written by stock transformers on ``--stock-device``, or read from the
file ``--stock`` if that exists, so that text of the CPU can be the measure for a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.resources import files
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers
from small_engine import EOS, SmallEngine
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
    parser.add_argument("--drafts", type=int, nargs="*", default=[0, 1, 2, 3, 4, 5, 6, 7])
    parser.add_argument("--jobs", type=int, default=1, help="processes that generate")
    parser.add_argument("--parts", nargs="*", default=["capture", "plan", "engine", "generate"])
    parser.add_argument("--stock", type=Path, default=Path("stock.json"))
    parser.add_argument("--stock-device", default="cpu")
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
    stock = stock_text(options)
    shipped = (device, stock, options.tokens, options.drafts)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "capture": lambda: captured_decode(device),
        "plan": lambda: planned_bytes(device),
        "engine": lambda: through_engine(*shipped),
        "generate": lambda: through_generate(*shipped, options.jobs),
    }
    for name in options.parts:
        part, start = parts[name], time.perf_counter()
        try:
            results[name] = part()
        except Exception as exc:
            traceback.print_exc()
            results[name] = {"error": f"{type(exc).__name__}: {exc}"}
        results[name]["seconds"] = round(time.perf_counter() - start, 1)
        print(name, json.dumps(results[name]), flush=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")


def load_shipped(device: torch.device, prompts: int) -> tuple[Any, list[list[int]]]:
    """The model on a device, and prompts as ids."""
    torch.backends.cuda.matmul.allow_tf32 = False
    folder = str(files("sconv_transformers").joinpath("models", "inkling_py"))
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).to(device).eval()
    texts = ["</s>" + STARTS[i % len(STARTS)] + " " * (i // len(STARTS)) for i in range(prompts)]
    return model, [tokenizer(text, add_special_tokens=False).input_ids for text in texts]


def write(model: Any, row: list[int], tokens: int, **changes: Any) -> list[int]:
    """New tokens of one prompt, by ``generate``."""
    inputs = torch.tensor([row], device=model.device)
    output = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=tokens, **changes
    )
    found: list[int] = output[0, len(row) :].tolist()
    return found


def stock_text(options: argparse.Namespace) -> list[list[int]]:
    """New tokens of every prompt as stock transformers writes them, up to the end of text."""
    if options.stock.exists():
        found: list[list[int]] = json.loads(options.stock.read_text())["tokens"]
        assert len(found) == options.prompts, f"{options.stock} is of {len(found)} prompts"
        return found
    model, ids = load_shipped(torch.device(options.stock_device), options.prompts)
    start = time.perf_counter()
    found = [ended(write(model, row, options.tokens)) for row in ids]
    seconds = round(time.perf_counter() - start, 2)
    text = {"device": options.stock_device, "seconds": seconds, "tokens": found}
    options.stock.write_text(json.dumps(text) + "\n")
    return found


def ended(tokens: list[int]) -> list[int]:
    """The tokens up to the end of text."""
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


def agreeing(texts: list[list[int]], stock: list[list[int]]) -> int:
    """How many texts are equal."""
    return sum(ended(one) == other for one, other in zip(texts, stock, strict=True))


def through_generate(
    device: torch.device, stock: list[list[int]], tokens: int, drafts: list[int], jobs: int
) -> dict[str, Any]:
    """Greedy text by ``generate`` of an attached model, drafted in every layout."""
    tasks = [(n, layout) for n in drafts for layout in (LAYOUTS if n else ("auto",))]
    arguments = [(device, len(stock), tokens, n, layout) for n, layout in tasks]
    if jobs == 1:
        outcomes = [generated(*one) for one in arguments]
    else:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            outcomes = list(pool.map(generated, *zip(*arguments, strict=True)))
    found: dict[str, Any] = {"processes": jobs, "runs": {}}
    for (n, layout), outcome in zip(tasks, outcomes, strict=True):
        equal = agreeing(outcome.pop("texts"), stock)
        name = f"{n} drafts, {layout}" if n else "no drafts"
        found["runs"][name] = {"equal_to_stock": equal, **outcome}
    return found


def generated(
    device: torch.device, prompts: int, tokens: int, drafts: int, layout: Any
) -> dict[str, Any]:
    """Texts of an attached model, and what it counted."""
    model, ids = load_shipped(device, prompts)
    options: dict[str, Any] = {"prompt_lookup_num_tokens": drafts} if drafts else {}
    with attach(
        model, device.type, max_requests=1, max_rollback=drafts, window_layout=layout
    ) as attachment:
        start = time.perf_counter()
        texts = [write(model, row, tokens, **options) for row in ids]
        counters = attachment.counters.as_dict()
        return {
            "texts": texts,
            "backend": attachment.backend.info.name,
            "window_layout": attachment.backend.pool.window_layout,
            "state_bytes": attachment.state_bytes,
            "seconds": round(time.perf_counter() - start, 2),
            "accept_length": round(1 + counters["accepted"] / max(counters["commits"], 1), 3),
            **counters,
        }


def through_engine(
    device: torch.device, stock: list[list[int]], tokens: int, drafts: list[int]
) -> dict[str, Any]:
    """The same by an engine of its own, all prompts in one batch: eager, and in graphs."""
    model, ids = load_shipped(device, len(stock))
    found: dict[str, Any] = {"tokens": sum(map(len, stock)), "runs": {}}
    for count in drafts:
        for layout in LAYOUTS if count else ("auto",):
            engine = SmallEngine(
                model, ids, backend=device.type, new_tokens=tokens, drafts=count, layout=layout
            )
            for graph in (False, True) if device.type == "cuda" else (False,):
                start = time.perf_counter()
                outcome = engine.run(graph=graph)
                how = "graph" if graph else "eager"
                name = f"{count} drafts, {outcome.windows}" if count else "no drafts"
                found["runs"][f"{name}, {how}"] = {
                    "equal_to_stock": agreeing(outcome.tokens, stock),
                    "accept_length": round(outcome.tokens_per_step, 3),
                    "accepted": {str(n): outcome.accepted[n] for n in sorted(outcome.accepted)},
                    "steps": outcome.steps,
                    "state_bytes": outcome.state_bytes,
                    "seconds": round(time.perf_counter() - start, 2),
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
