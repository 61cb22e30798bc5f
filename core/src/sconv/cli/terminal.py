"""Standard output of a command: whatever it is connected to, nothing ends in a traceback."""

from __future__ import annotations

import argparse
import io
import os
import sys
from contextlib import suppress
from typing import NoReturn

from ..errors import SconvError
from ..messages import one_line

__all__ = ["CommandParser", "discard_output", "flush_output", "prepare_output"]


class CommandParser(argparse.ArgumentParser):
    """A parser whose complaint is one line, in which what is not printable is escaped."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, and leave with exit code 2."""
        super().error(one_line(message))


def prepare_output() -> None:
    """Make every character printable: as an escape where the terminal does not have it.

    Raises:
        SconvError: Standard output is closed, and what a command says would be lost.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        raise SconvError("standard output is closed: redirect it to /dev/null to discard it")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def flush_output() -> None:
    """Write what is buffered; while the interpreter ends it is too late to say that it failed."""
    if sys.stdout is not None:
        sys.stdout.flush()


def discard_output() -> None:
    """Discard what is buffered and cannot be written, before the interpreter tries once more."""
    try:
        flush_output()
    except OSError:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
