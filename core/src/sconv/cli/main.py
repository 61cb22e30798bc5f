"""The ``sconv`` command: what is installed, and the subcommands that other distributions bring.

A distribution adds a subcommand by an entry point of the group ``sconv.commands``: its name is the
subcommand's name, its value a function ``main(argv: list[str]) -> int``. Nothing is imported before
it is called, so that one broken or slow distribution does not touch the others.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Final, cast

from ..discovery.installed import Entry, entries, import_attribute
from ..discovery.torch_failure import torch_failure
from ..errors import PluginError, SconvError, TorchUnavailableError
from ..messages import did_you_mean, one_line, one_line_error
from .terminal import CommandParser, discard_output, flush_output, prepare_output

__all__ = ["COMMANDS", "main"]

COMMANDS: Final = "sconv.commands"

#: Subcommands whose distribution may be missing: where they come from and what they do.
_KNOWN: Final = {
    "generate": ("sconv-transformers", "generate text with a Hugging Face model"),
    "verify": ("sconv-contract", "check that a plugin keeps the contract"),
    "new-plugin": ("sconv-contract", "start a plugin for new hardware"),
}

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
    parser = CommandParser(
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
        # Here: what asks plugins in a child process is of no use to the other commands.
        from .backends import report_backends

        return report_backends(options.arguments)
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


def _fail(message: str, *, code: int = 1) -> int:
    print(f"sconv: {one_line(message)}", file=sys.stderr)
    return code
