"""``sconv plan``: the flags of a spec, and the table of what fits."""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from ..engine.planning import LayoutPlan, Plan, parse_bytes, plan
from ..errors import SpecError
from ..state.spec import StateSpec, Stream
from ..state.windows import LAYOUTS, choose_layout
from .terminal import CommandParser

__all__ = ["report"]


def report(argv: list[str]) -> str:
    """Return what the command prints.

    Raises:
        SpecError: Not one request fits.
        SystemExit: The arguments are not understood, or no spec has such values.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        spec = StateSpec(
            num_layers=options.layers,
            streams=options.stream,
            kernel_size=options.kernel_size,
            # Their difference is all that a plan reads of the two.
            num_slots=1 + options.snapshots,
            max_requests=1,
            dtype=getattr(torch, options.dtype),
            window_axis=options.window_axis,
            max_draft_tokens=options.draft_tokens,
            draft_topk=options.draft_topk,
            window_layout=options.layout or "auto",
        )
        choose_layout(spec, tuple(LAYOUTS), backend="the plan")
    except SpecError as exc:
        parser.error(str(exc))
    found = plan(spec, memory=options.memory, slots_per_request=options.slots_per_request)
    return json.dumps(_json(found), indent=2) if options.json else _table(found)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="sconv plan",
        description="Say how many requests fit in a memory, for each layout of the verify windows.",
        epilog="Sizes are of one tensor-parallel rank.",
    )
    parser.add_argument(
        "--memory", type=_memory, required=True, help="bytes, or for example 4GiB or 800MB"
    )
    parser.add_argument(
        "--layers", type=_positive, required=True, metavar="N", help="convolution layers"
    )
    parser.add_argument(
        "--stream",
        type=_stream,
        action="append",
        required=True,
        metavar="NAME=DIM",
        help="a convolution of every layer and its channels; may be given several times",
    )
    parser.add_argument("--kernel-size", type=int, default=4, metavar="K", help="default 4")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="of the state",
    )
    parser.add_argument("--window-axis", choices=("time", "channel"), default="time")
    parser.add_argument(
        "--draft-tokens",
        type=_positive,
        default=1,
        metavar="N",
        help="tokens of a row in a verify step, the root included; default 1, no speculation",
    )
    parser.add_argument(
        "--draft-topk",
        type=_positive,
        default=1,
        metavar="N",
        help="children of a node; default 1, chains",
    )
    parser.add_argument(
        "--slots-per-request",
        type=_positive,
        default=1,
        metavar="N",
        help="slots that a request takes while it runs: its own, those that its snapshots take "
        "turns in, those of steps in flight; default 1",
    )
    parser.add_argument(
        "--snapshots",
        type=_count,
        default=0,
        metavar="N",
        help="slots beyond those of the requests; default 0",
    )
    parser.add_argument("--layout", choices=tuple(LAYOUTS), help="plan this layout alone")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _stream(text: str) -> Stream:
    name, _, dim = text.partition("=")
    if not name or not dim.isdecimal() or int(dim) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=DIM, for example k=1024")
    return Stream(name, int(dim))


def _memory(text: str) -> int:
    try:
        size = parse_bytes(text)
    except SpecError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no memory: expected a byte at least")
    return size


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number, 0 or more")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number, 1 or more")
    return int(text)


def _json(found: Plan) -> dict[str, Any]:
    return {
        "memory": found.memory,
        "best": found.best.layout,
        "layouts": [
            {
                "layout": each.layout,
                "requests": each.requests,
                "slots": each.slots,
                "slots_per_request": each.slots_per_request,
                "slot_bytes": each.slot_bytes,
                "row_bytes": each.row_bytes,
                "step_bytes": each.step_bytes,
                "state_bytes": each.state_bytes,
                "window_bytes": each.window_bytes,
            }
            for each in found.layouts
        ],
    }


def _table(found: Plan) -> str:
    heads = ("LAYOUT", "REQUESTS", "SLOTS", "PER SLOT", "PER ROW", "STATE", "WINDOWS", "TOTAL")
    rows = [heads, *map(_cells, found.layouts)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    first = found.layouts[0]
    lines += [
        f"{each.layout}: {each.requests - first.requests:+d} requests against {first.layout}"
        for each in found.layouts[1:]
    ]
    return "\n".join(lines)


def _cells(each: LayoutPlan) -> tuple[str, ...]:
    sizes = (each.slot_bytes, each.row_bytes, each.state_bytes, each.window_bytes, each.nbytes)
    return (each.layout, str(each.requests), str(each.slots), *map(_size, sizes))


def _size(count: int) -> str:
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        del units[0]
    return f"{count} B" if units[0] == "B" else f"{value:.2f} {units[0]}"
