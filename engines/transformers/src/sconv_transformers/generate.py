"""``sconv generate``: text from a Hugging Face model whose convolution state lives in sconv."""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.resources import files
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from .errors import UsageError

if TYPE_CHECKING:
    import torch
    from transformers.generation.streamers import BaseStreamer

    from .attachment import Attachment
    from .model_session import Generation, Session
    from .report import Report

__all__ = ["main"]

_log = logging.getLogger("sconv")

_DTYPES = ("auto", "float32", "bfloat16", "float16")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command: 0 done, 1 the stock path gave other tokens, 2 it cannot be done."""
    options = _parse(argv)
    # Only now: `--help` and a mistyped option need neither torch nor transformers.
    import sconv

    try:
        report = _run(options)
    except (UsageError, sconv.SconvError) as exc:
        message = " ".join(str(exc).split())
        sys.stderr.write(f"sconv generate: {message}\n")
        return 2
    sys.stdout.write(report.as_json() + "\n" if options.json else "\n" + report.table())
    compared = report.compare
    return 0 if compared is None or compared.difference is None else 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="sconv generate",
        description="Continue prompts; the convolution state of the model lives in sconv.",
        epilog="Without --model, a small model of Python source that comes with this package.",
    )
    parser.add_argument("--model", metavar="DIR_OR_ID", help="a folder, or a model on the hub")
    parser.add_argument(
        "--prompt",
        type=_text,
        action="append",
        required=True,
        metavar="TEXT",
        help="may be given several times",
    )
    parser.add_argument(
        "--max-new-tokens", type=_positive, default=128, metavar="N", help="default 128"
    )
    parser.add_argument(
        "--draft",
        choices=("none", "prompt-lookup"),
        default="none",
        help="draft tokens from earlier text and verify them together; one prompt at a time",
    )
    parser.add_argument(
        "--draft-tokens", type=_positive, default=8, metavar="N", help="tokens per draft, default 8"
    )
    parser.add_argument(
        "--sample",
        action="store_true",
        help="sample at --temperature instead of taking the best token",
    )
    parser.add_argument(
        "--temperature", type=_temperature, metavar="T", help="default 1.0; implies --sample"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of --sample, default 0"
    )
    parser.add_argument("--backend", default="auto", metavar="NAME", help="see `sconv backends`")
    parser.add_argument(
        "--window-layout",
        choices=("auto", "dense", "dedup", "inputs"),
        default="auto",
        help="how drafts are kept until they are accepted; auto: the backend's choice",
    )
    parser.add_argument("--device", metavar="DEVICE", help="default: the backend's")
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        default="auto",
        help="auto: float32 on the CPU, the checkpoint's elsewhere",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="also run stock transformers, and exit with 1 if its greedy tokens differ",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )
    options = parser.parse_args(argv)
    options.sample |= options.temperature is not None
    if options.compare and options.sample:
        parser.error("--compare compares greedy tokens: leave --sample and --temperature out")
    return options


def _run(options: argparse.Namespace) -> Report:
    from .progress import status

    name = options.model if options.model is not None else _default_model()
    with status("loading PyTorch and transformers"):
        _start_torch(options)
        from .model_session import Session

        device = _device(options)
    with status(f"loading {PurePath(name).name}"):
        session = Session.load(name, device=device, dtype=_dtype(options.dtype))
        prompts = [session.encode(prompt) for prompt in options.prompt]
    drafts = options.draft_tokens if options.draft == "prompt-lookup" else 0
    # transformers drafts for one sequence at a time.
    batches = [[prompt] for prompt in prompts] if drafts else [prompts]
    if drafts and len(prompts) > 1 and not options.json:
        sys.stderr.write("drafts are made for one sequence at a time: the prompts run one by one\n")
    with status("preparing the backend"):
        attachment = _attach(session, options, rows=len(batches[0]), rollback=drafts)
    try:
        generation = _generate(session, batches, options, drafts, stream=not options.json)
    except Exception as exc:
        # Any error there may be: a config may be wrong in ways that only a forward meets.
        _log.debug("the model failed", exc_info=True)
        raise UsageError(f"the model {name!r} failed: {type(exc).__name__}: {exc}") from exc
    attachment.detach()
    stock = None
    if options.compare:
        with status("running stock transformers"):
            stock = _generate(session, batches, options, drafts, stream=False)
    return _report(name, session, attachment, options, generation, stock)


def _start_torch(options: argparse.Namespace) -> None:
    """Import torch, and see that transformers can be imported next, in a release that is supported.

    Raises:
        UsageError: An installed extension of torch keeps it from starting, or transformers is of
            another release.
    """
    import sconv

    from .torch_extensions import hide_broken_extensions
    from .transformers_range import check_transformers

    try:
        check_transformers()
    except RuntimeError as exc:
        raise UsageError(str(exc)) from exc
    try:
        hide_broken_extensions()
    except RuntimeError as exc:
        reason = sconv.torch_failure(exc, backend=_asked_for(options))
        if reason is None:
            raise
        raise UsageError(reason) from exc


def _asked_for(options: argparse.Namespace) -> str | None:
    """Return the backend that the options name, before torch can be asked; None = any."""
    if options.backend != "auto":
        return str(options.backend)
    return "ascend" if (options.device or "").partition(":")[0] == "npu" else None


def _default_model() -> str:
    folder = files(__package__).joinpath("models", "inkling_py")
    if not folder.joinpath("config.json").is_file():
        raise UsageError(
            f"the default model is missing ({folder}): give --model, or reinstall the package"
        )
    return str(folder)


def _device(options: argparse.Namespace) -> torch.device:
    """Return where to run; the backend's name is checked before a model is loaded for it."""
    import sconv

    try:
        return sconv.choose_device(options.backend, options.device)
    except sconv.SconvError as exc:
        if options.device is None:
            raise
        raise UsageError(f"--device {options.device}: {exc}") from exc


def _dtype(name: str) -> torch.dtype | None:
    import torch

    dtype: torch.dtype | None = None if name == "auto" else getattr(torch, name)
    return dtype


def _attach(
    session: Session, options: argparse.Namespace, *, rows: int, rollback: int
) -> Attachment:
    from .attachment import attach

    try:
        return attach(
            session.model,
            options.backend,
            max_requests=rows,
            max_rollback=rollback,
            window_layout=options.window_layout,
        )
    except (TypeError, ValueError) as exc:
        raise UsageError(f"cannot attach the model: {exc}") from exc


def _generate(
    session: Session,
    batches: list[list[list[int]]],
    options: argparse.Namespace,
    drafts: int,
    *,
    stream: bool,
) -> Generation:
    from .model_session import Sampling
    from .progress import token_bar
    from .streaming import CountingStreamer, PromptStreamer

    temperature = (options.temperature or 1.0) if options.sample else None
    settings: dict[str, Any] = {
        "max_new_tokens": options.max_new_tokens,
        "draft_tokens": drafts,
        "sampling": Sampling(temperature, options.seed),
    }
    alone = len(batches[0]) == 1
    if stream and alone:

        def streamer_of(number: int) -> BaseStreamer:
            heading = _heading(number, len(batches)) if len(batches) > 1 else ""
            sys.stdout.write(heading + options.prompt[number])
            return PromptStreamer(session.tokenizer, sys.stdout)

        generation = session.generate(batches, streamer_of=streamer_of, **settings)
        sys.stdout.write("\n")
        return generation
    with ExitStack() as stack:
        total = options.max_new_tokens * sum(map(len, batches))
        counter = stack.enter_context(token_bar("generating", total))
        generation = session.generate(
            batches, streamer_of=lambda number: CountingStreamer(counter), **settings
        )
    if stream:
        for number, (prompt, tokens) in enumerate(
            zip(options.prompt, generation.tokens, strict=True)
        ):
            heading = _heading(number, len(options.prompt))
            sys.stdout.write(heading + prompt + session.decode(tokens) + "\n")
    return generation


def _heading(number: int, count: int) -> str:
    return ("\n" if number else "") + f"--- prompt {number + 1} of {count} ---\n"


def _report(
    name: str,
    session: Session,
    attachment: Attachment,
    options: argparse.Namespace,
    generation: Generation,
    stock: Generation | None,
) -> Report:
    from .report import Comparison, Difference, Output, Report

    def speed(run: Generation) -> float:
        return sum(map(len, run.tokens)) / run.seconds if run.seconds else math.inf

    compare = None
    if stock is not None:
        difference = Difference.first(generation.tokens, stock.tokens)
        compare = Comparison(stock.seconds, speed(stock), difference)
    backend, counters = attachment.backend, attachment.counters
    return Report(
        model=name,
        backend=backend.info.name,
        device=str(backend.pool.device),
        dtype=str(backend.spec.dtype).removeprefix("torch."),
        layers=backend.spec.num_layers,
        streams=len(backend.spec.layer_streams(0)),
        state_bytes=attachment.state_bytes,
        steps=counters.forwards,
        metadata_builds=counters.metadata_builds,
        draft=options.draft,
        drafted=counters.drafted,
        accepted=counters.accepted,
        new_tokens=sum(map(len, generation.tokens)),
        seconds=generation.seconds,
        outputs=[
            Output(prompt, session.decode(tokens), tokens)
            for prompt, tokens in zip(options.prompt, generation.tokens, strict=True)
        ],
        compare=compare,
    )


def _text(argument: str) -> str:
    """Return the text of an argument, whose bytes are UTF-8 whatever the locale took them for."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        try:
            return os.fsencode(argument).decode()
        except UnicodeError:
            raise argparse.ArgumentTypeError(f"{argument!a} is not valid UTF-8") from None
    return argument


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _temperature(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError
    return value


_positive.__name__ = "positive number"
_temperature.__name__ = "temperature"
