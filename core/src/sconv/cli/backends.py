"""``sconv backends``: what is installed, which of it can run here, and which one would be used."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from ..discovery.installed import damaged_metadata
from ..discovery.name_conflicts import OWNERS
from ..discovery.selection import ENVIRONMENT, choose, list_backends
from ..errors import PluginError
from ..hookspecs import Available, BackendInfo, Broken, Unavailable
from ..messages import one_line
from . import plugin_process
from .plugin_process import PluginProcess
from .terminal import CommandParser

__all__ = ["report_backends"]

#: A device file that tells that hardware is here, and the backend that serves it.
_DEVICES: Final = {"/dev/nvidia0": "cuda", "/dev/davinci0": "ascend"}


def report_backends(argv: list[str]) -> int:
    """Run ``sconv backends``: 0, whatever the plugins do."""
    parser = CommandParser(
        prog="sconv backends",
        description="List the installed backends, best first, and say which one would be used.",
        epilog=f"{ENVIRONMENT}=NAME chooses one.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--probe",
        action="store_true",
        help="also build each one and decode a token, in a separate process; takes seconds",
    )
    options = parser.parse_args(argv)
    selected, error = None, None
    with PluginProcess(limit=plugin_process.LIMIT) as process:
        infos = list_backends(process.describe)
        try:
            selected = choose(ask=process.describe)[0]
        except PluginError as exc:
            error = one_line(str(exc))
    report = {
        "backends": [
            _row(info, selected) | (_try(info) if options.probe else {}) for info in infos
        ],
        "selected": None if selected is None else selected.name,
        "error": error,
        "notes": [one_line(note) for note in (*_hints(infos), *damaged_metadata())],
    }
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        _print_table(report)
    return 0


def _row(info: BackendInfo, selected: BackendInfo | None) -> dict[str, Any]:
    state = info.availability
    if selected is not None and (info.name, info.origin) == (selected.name, selected.origin):
        word = "selected"
    elif isinstance(state, Available):
        word = "available"
    else:
        word = "broken" if isinstance(state, Broken) else "unavailable"
    known = info.contract != (0, 0)
    return {
        # A terminal would act on escape sequences in what a distribution says of itself.
        "name": one_line(info.name),
        "distribution": one_line(info.origin.distribution) if info.origin else None,
        "version": one_line(info.origin.version) if info.origin else None,
        "contract": ".".join(map(str, info.contract)) if known else None,
        "device": one_line(info.device_type) if known else None,
        "state": word,
        "priority": state.priority if isinstance(state, Available) else None,
        "reason": state.reason if isinstance(state, Unavailable) else None,
        "capabilities": asdict(info.capabilities) if known else None,
    }


def _try(info: BackendInfo) -> dict[str, Any]:
    # Here, since listing without a trial starts no process and stays quick.
    from .try_backend import try_backend

    return {"tried": asdict(try_backend(info))}


def _hints(infos: Sequence[BackendInfo]) -> list[str]:
    present = {info.name for info in infos}
    return [
        f"{path} is here and no {name!r} backend is: pip install {OWNERS[name]}"
        for path, name in _DEVICES.items()
        if name not in present and os.path.exists(path)
    ]


def _print_table(report: dict[str, Any]) -> None:
    rows = [("NAME", "DISTRIBUTION", "VERSION", "CONTRACT", "DEVICE", "STATE")]
    for row in report["backends"]:
        detail = f": {row['reason']}" if row["reason"] else f" (priority {row['priority']})"
        cells = (
            row[key] or "-" for key in ("name", "distribution", "version", "contract", "device")
        )
        rows.append((*cells, row["state"] + detail))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows if report["backends"] else ():
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    for row in report["backends"]:
        if tried := row.get("tried"):
            print(
                f"tried {row['name']}: " + one_line(tried["error"] or f"works on {tried['device']}")
            )
    if report["error"]:
        print(f"none selected: {report['error']}")
    for note in report["notes"]:
        print(f"note: {note}")
