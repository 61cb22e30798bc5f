"""``python -m sconv_contract.simulated_npu -- pytest …``: a command on the simulated device."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .child import run


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m sconv_contract.simulated_npu",
        description="Run Python in a process of its own that has a simulated npu device.",
    )
    parser.add_argument("--devices", type=int, default=2, metavar="N", help="default 2")
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND",
        help="a module and its arguments, as in: pytest tests; or -m MODULE, -c CODE, FILE.py",
    )
    options = parser.parse_args(argv)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    command = command[1:] if command[:1] in (["python"], ["python3"]) else command
    if not command:
        parser.error("name a command, as in: -- pytest tests")
    return run(command, options.devices)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
