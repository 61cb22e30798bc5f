"""Train the default model and write it, with its loss curve, to a directory."""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from pathlib import Path

import torch
import transformers
from data import Corpus
from model import (
    attention_masks,
    build_config,
    build_model,
    check_training_operations,
    parameter_groups,
    save_model,
    training_operations,
)
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import InklingForCausalLM
from windows import batches, bits_per_byte, encode

WARM_UP = 0.02
FINAL_RATE = 0.01


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up, then a cosine down to a hundredth of the peak; `progress` is in 0..1."""
    if progress < WARM_UP:
        return peak * progress / WARM_UP
    fall = (min(progress, 1.0) - WARM_UP) / (1 - WARM_UP)
    return peak * (FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * fall)))


class Trainer:
    """One model, its optimiser and its data on one device; float32, with bfloat16 products."""

    def __init__(self, options: argparse.Namespace, corpus: Corpus) -> None:
        self.options = options
        self.device = torch.device(options.device)
        torch.manual_seed(options.seed)
        self.model = build_model(build_config())
        self.model.set_attn_implementation("eager")
        train_tokens = encode(corpus.train)
        self.operations_error = check_training_operations(
            self.model, train_tokens[: 2 * 600].view(2, 600).long()
        )
        self.model.to(self.device)
        self.train_tokens = train_tokens.to(self.device)
        self.held_out_tokens = encode(corpus.held_out).to(self.device)
        self.masks = attention_masks(self.model.config, options.length, self.device)
        self.compiled = options.compile
        self.forward = torch.compile(self.model, dynamic=False) if options.compile else self.model
        self.reset()

    def reset(self) -> None:
        """Start optimiser and data order anew."""
        options = self.options
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.model, options.weight_decay),
            betas=(0.9, 0.95),
            fused=self.device.type == "cuda",
        )
        self.batches = batches(self.train_tokens, options.batch, options.length, options.seed)

    def logits(self, model: torch.nn.Module, tokens: Tensor) -> Tensor:
        """Logits in mixed precision; the masks are shared by all steps."""
        with torch.autocast(self.device.type, torch.bfloat16):
            return model(tokens, attention_mask=self.masks, use_cache=False).logits

    def step(self, rate: float) -> Tensor:
        """Update once at learning rate `rate`; the loss, in nats per token, stays on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        window = next(self.batches)
        logits = self.logits(self.forward, window[:, :-1])
        loss = cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def seconds_per_step(self, steps: int) -> float:
        """Time some steps at rate 0, then reset; without the compiler if compiling fails."""
        try:
            self.step(0.0).item()
        except Exception as error:
            if not self.compiled:
                raise
            print(f"not compiled: {type(error).__name__}: {str(error)[:300]}")
            self.compiled, self.forward = False, self.model
            self.optimizer.zero_grad(set_to_none=True)
        for _ in range(3):
            self.step(0.0).item()
        start = time.perf_counter()
        for _ in range(steps):
            loss = self.step(0.0)
        loss.item()
        seconds = (time.perf_counter() - start) / steps
        self.reset()
        return seconds

    def held_out(self, windows: int) -> float:
        """Held-out bits per byte in training precision, over the first `windows` windows."""
        length, batch = self.options.length, self.options.batch
        tokens = self.held_out_tokens[: windows * length + 1]
        return bits_per_byte(lambda x: self.logits(self.model, x), tokens, length, batch)


def train(trainer: Trainer, record: dict[str, object]) -> None:
    """Train for the given minutes, and keep the newest model and curve in the output directory."""
    options = trainer.options
    seconds_per_step = trainer.seconds_per_step(options.trial_steps)
    limit = options.minutes * 60
    steps = options.steps or int(limit / seconds_per_step)
    tokens_per_step = options.batch * options.length
    record |= {
        "compiled": trainer.compiled,
        "steps": steps,
        "tokens_per_step": tokens_per_step,
        "trial_tokens_per_second": round(tokens_per_step / seconds_per_step),
    }
    curve: list[dict[str, float]] = []
    record["curve"] = curve
    print(json.dumps(record | {"curve": "follows"}), flush=True)
    start = saved = time.perf_counter()
    losses: list[Tensor] = []
    for step in range(1, steps + 1):
        losses.append(trainer.step(learning_rate(step / steps, options.rate)))
        if step % options.log_every and step < steps:
            continue
        loss = torch.stack(losses).mean().item()
        losses.clear()
        now = time.perf_counter()
        point = {
            "step": step,
            "seconds": round(now - start, 1),
            "train_bits_per_token": round(loss / math.log(2), 4),
        }
        curve.append(point)
        late = now - start > 1.1 * limit
        if now - saved > options.save_seconds or step == steps or late:
            point["held_out_bits_per_byte"] = round(trainer.held_out(8 * options.batch), 4)
            write(trainer.model, record, options.out)
            saved = time.perf_counter()
        print(json.dumps(point), flush=True)
        if late:
            print(f"stopped late, at step {step} of {steps}")
            break
    record["seconds"] = round(time.perf_counter() - start, 1)


def write(model: InklingForCausalLM, record: dict[str, object], out: Path) -> None:
    """Write the model beside its record; a run cut off later leaves this state behind."""
    save_model(model, out)
    (out / "loss.json").write_text(json.dumps(record, indent=1) + "\n")


def evaluate(options: argparse.Namespace, corpus: Corpus) -> dict[str, float]:
    """Held-out bits per byte of the written model by context length; stock forward, float32."""
    model = InklingForCausalLM.from_pretrained(options.out, dtype=torch.float32)
    model.to(options.device).eval()
    tokens = encode(corpus.held_out).to(options.device)

    def logits_of(window: Tensor) -> Tensor:
        return model(window, use_cache=False).logits

    return {
        str(length): round(bits_per_byte(logits_of, tokens, length, 2**15 // length), 4)
        for length in options.contexts
    }


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory for model and curve")
    parser.add_argument("--corpus", type=Path, help="file of data.py; default: this interpreter")
    parser.add_argument("--minutes", type=float, default=6.0, help="training time")
    parser.add_argument("--steps", type=int, help="instead of as many as fit in the minutes")
    parser.add_argument("--batch", type=int, default=32, help="sequences per step")
    parser.add_argument("--length", type=int, default=1024, help="tokens per sequence")
    parser.add_argument("--rate", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--trial-steps", type=int, default=20, help="steps that are timed first")
    parser.add_argument("--log-every", type=int, default=50, help="steps per point of the curve")
    parser.add_argument("--save-seconds", type=float, default=60.0)
    parser.add_argument("--contexts", type=int, nargs="*", default=[256, 512, 1024, 2048, 4096])
    return parser.parse_args()


def main() -> None:
    """Check, train, write, measure."""
    options = parse_arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    # Without this, stock convolutions round their inputs to TF32 on NVIDIA cards.
    torch.backends.cudnn.allow_tf32 = False
    corpus = Corpus.load(options.corpus) if options.corpus else Corpus.of_this_interpreter()
    trainer = Trainer(options, corpus)
    on_cuda = trainer.device.type == "cuda"
    record: dict[str, object] = {
        "card": torch.cuda.get_device_name() if on_cuda else platform.processor() or "CPU",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "corpus": corpus.describe(),
        "seed": options.seed,
        "batch": options.batch,
        "length": options.length,
        "peak_rate": options.rate,
        "weight_decay": options.weight_decay,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "training_operations_error": trainer.operations_error,
    }
    with training_operations():
        train(trainer, record)
    record["held_out_bits_per_byte_by_context"] = evaluate(options, corpus)
    write(trainer.model, record, options.out)
    print(json.dumps(record["held_out_bits_per_byte_by_context"]), flush=True)


if __name__ == "__main__":
    main()
