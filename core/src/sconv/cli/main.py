"""The ``sconv`` command: what is installed, and the subcommands that other distributions bring.

A distribution adds a subcommand by an entry point of the group ``sconv.commands``: its name is the
subcommand's name, its value a function ``main(argv: list[str]) -> int``. Nothing is imported before
it is called, so that one broken or slow distribution does not touch the others.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Final, cast

from ..discovery.info import Available, BackendInfo, Broken, Unavailable
from ..discovery.installed import Entry, damaged_metadata, entries, import_attribute
from ..discovery.name_conflicts import OWNERS
from ..discovery.selection import ENVIRONMENT, backends, choose
from ..discovery.torch_failure import torch_failure
from ..errors import PluginError, SconvError, TorchUnavailableError
from ..messages import did_you_mean, one_line, one_line_error
from .terminal import discard_output, flush_output, prepare_output

__all__ = ["COMMANDS", "main"]

COMMANDS: Final = "sconv.commands"

#: Subcommands whose distribution may be missing: where they come from and what they do.
_KNOWN: Final = {
    "generate": ("sconv-transformers", "generate text with a Hugging Face model"),
    "verify": ("sconv-contract", "check that a plugin keeps the contract"),
    "new-plugin": ("sconv-contract", "start a plugin for new hardware"),
}

#: A device file that tells that hardware is here, and the backend that serves it.
_DEVICES: Final = {"/dev/nvidia0": "cuda", "/dev/davinci0": "ascend"}

#: Core's own, which no other distribution can take.
_OWN: Final = {
    "backends": "list the installed backends",
    "plan": "say how many requests fit in a memory",
}

_INTERRUPTED: Final = 130
_BROKEN_PIPE: Final = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 done, 1 failed, 2 not understood."""
    try:
        prepare_output()
        try:
            return _dispatch(sys.argv[1:] if argv is None else list(argv))
        finally:
            # Also after --help, which leaves by an exception.
            flush_output()
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        discard_output()
        return _BROKEN_PIPE
    except OSError as exc:
        discard_output()
        return _fail(one_line_error(exc))
    except TorchUnavailableError as exc:
        return _fail(str(exc), code=2)
    except SconvError as exc:
        return _fail(str(exc))
    except RuntimeError as exc:
        reason = torch_failure(exc)
        if reason is None:
            raise
        return _fail(reason, code=2)


def _dispatch(argv: list[str]) -> int:
    offered = [entry for entry in entries(COMMANDS) if entry.name not in _OWN]
    parser = argparse.ArgumentParser(
        prog="sconv",
        description="Short-convolution state for hybrid LLM inference.",
        epilog=_command_list(offered),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.add_argument("command", nargs="?", help="one of the commands below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="handed to the command")
    options = parser.parse_args(argv)
    if options.version:
        from .. import __version__

        print(f"sconv {__version__}")
        return 0
    if options.command is None:
        parser.print_help()
        return 2
    if options.command == "backends":
        return _backends(options.arguments)
    if options.command == "plan":
        return _plan(options.arguments)
    return _run(options.command, options.arguments, offered)


def _command_list(offered: Sequence[Entry]) -> str:
    rows = [(name, f"{text} (sconv-core)") for name, text in _OWN.items()]
    for entry in offered:
        text = _KNOWN[entry.name][1] + " " if entry.name in _KNOWN else ""
        rows.append((entry.name, f"{text}({entry.distribution})"))
    present = {entry.name for entry in offered}
    for name, (distribution, text) in _KNOWN.items():
        if name not in present:
            rows.append((name, f"{text} (not installed: pip install {distribution})"))
    return "commands:\n" + "\n".join(f"  {name:<14}{text}" for name, text in sorted(rows))


def _run(name: str, arguments: list[str], offered: Sequence[Entry]) -> int:
    matches = [entry for entry in offered if entry.name == name]
    if not matches and name in _KNOWN:
        distribution = _KNOWN[name][0]
        return _fail(f"{name!r} comes with {distribution}: pip install {distribution}", code=2)
    if not matches:
        known = [*_OWN, *_KNOWN, *(entry.name for entry in offered)]
        return _fail(
            f"no command {name!r}{did_you_mean(name, known)}; sconv --help lists them", code=2
        )
    if len(matches) > 1:
        who = " and ".join(map(str, matches))
        return _fail(f"the command {name!r} is claimed by {who}: uninstall one")
    try:
        command = import_attribute(matches[0].value)
    except PluginError as exc:
        return _fail(f"the command {name!r} of {matches[0]} is broken: {exc}")
    if not callable(command):
        return _fail(f"the command {name!r} of {matches[0]} is broken: {command!r} is no function")
    return cast(Callable[[list[str]], int], command)(arguments)


def _plan(argv: list[str]) -> int:
    try:
        # A spec has a torch dtype; the other commands work without torch.
        from .plan import report
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.partition(".")[0] != "torch":
            raise
        return _fail(
            "'plan' needs torch, which arrives with a plugin: pip install sconv-plugin-cpu", code=2
        )
    print(report(argv))
    return 0


def _backends(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="sconv backends",
        description="List the installed backends, best first, and say which one would be used.",
        epilog=f"{ENVIRONMENT}=NAME chooses one.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--probe",
        action="store_true",
        help="also build each one and decode a token, in a process of its own; takes seconds",
    )
    options = parser.parse_args(argv)
    infos = backends()
    selected, error = None, None
    try:
        selected = choose()[0]
    except PluginError as exc:
        error = one_line(str(exc))
    report = {
        "backends": [
            _row(info, selected) | (_try(info) if options.probe else {}) for info in infos
        ],
        "selected": None if selected is None else selected.name,
        "error": error,
        "notes": [*_hints(infos), *damaged_metadata()],
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
        "name": info.name,
        "distribution": info.origin.distribution if info.origin else None,
        "version": info.origin.version if info.origin else None,
        "contract": ".".join(map(str, info.contract)) if known else None,
        "device": info.device_type if known else None,
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
            print(f"tried {row['name']}: " + (tried["error"] or f"works on {tried['device']}"))
    if report["error"]:
        print(f"none selected: {report['error']}")
    for note in report["notes"]:
        print(f"note: {note}")


def _fail(message: str, *, code: int = 1) -> int:
    print(f"sconv: {message}", file=sys.stderr)
    return code
