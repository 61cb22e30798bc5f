"""A child process in which plugins are asked, so that none of them can harm the command.

A plugin that hangs, ends or crashes its process, or prints, does so in the child. The parent knows
which plugin it asked for last, gives the reason, and goes on with another child.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import astuple
from types import TracebackType
from typing import IO, Any, Final

from ..discovery.installed import Entry
from ..discovery.selection import broken
from ..errors import SconvError
from ..hookspecs import Available, BackendInfo, Broken, Capabilities, Origin, Unavailable
from ..messages import one_line

__all__ = ["LIMIT", "NoAnswerError", "PluginProcess"]

#: Seconds that a plugin may take to be imported and probed; those that behave take milliseconds.
LIMIT: Final = 10.0

#: Characters of the last line that a child printed before it ended.
_TAIL: Final = 500

#: The parent's path comes first; core itself may have been found on the child's.
_START: Final = (
    "import json, sys; given = json.loads(sys.argv[1]);"
    " sys.path[:] = given + [one for one in sys.path if one not in given];"
    " from sconv.cli.plugin_child import main; main()"
)


class NoAnswerError(SconvError):
    """The child ended, or took too long. The text says which, and follows the plugin's name."""


class PluginProcess:
    """Asks plugins in a child process; a context manager, at whose end the child is stopped.

    Args:
        limit: Seconds that one answer may take.
    """

    def __init__(self, *, limit: float = LIMIT) -> None:
        self._limit = limit
        self._number = 0
        self._answered = 0
        self._known: dict[Entry, BackendInfo] = {}
        self._child = _Child()

    def __enter__(self) -> PluginProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._child.stop()

    def describe(self, entry: Entry) -> BackendInfo:
        """Return what a plugin says of itself, asked once; one that fails is :class:`Broken`."""
        if entry not in self._known:
            try:
                self._known[entry] = _info(entry, self.ask(entry))
            except NoAnswerError as exc:
                self._known[entry] = broken(entry, f"its import or probe {exc}")
        return self._known[entry]

    def ask(self, entry: Entry, *, trial: bool = False) -> dict[str, Any]:
        """Return a plugin's answer: its description, or how its trial ended.

        Raises:
            NoAnswerError: There is none. The next call starts another child.
        """
        while True:
            alone = not self._answered
            try:
                found = self._ask(entry, trial=trial)
            except _EndedError as exc:
                self._restart()
                # A plugin that was asked earlier may have ended it, from a thread for example.
                if alone:
                    raise NoAnswerError(str(exc)) from None
            except NoAnswerError:
                self._restart()
                raise
            else:
                self._answered += 1
                return found

    def _ask(self, entry: Entry, *, trial: bool) -> dict[str, Any]:
        self._number += 1
        self._child.send({"number": self._number, "entry": astuple(entry), "trial": trial})
        deadline = time.monotonic() + self._limit
        while True:
            try:
                line = self._child.lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise NoAnswerError(f"gave no answer within {self._limit:g} s") from None
            if line is None:
                raise _EndedError(f"ended its process {self._child.end()}")
            # A plugin that forks leaves two processes that answer.
            with suppress(ValueError):
                found = json.loads(line)
                if found["number"] == self._number:
                    return dict(found["answer"])

    def _restart(self) -> None:
        self._child.stop()
        self._child = _Child()
        self._answered = 0


class _EndedError(NoAnswerError):
    """The child ended."""


class _Child:
    """The process, and two threads that read what it writes.

    Attributes:
        lines: What it answered, line by line; None when it can answer no more.
    """

    def __init__(self) -> None:
        self.lines: queue.Queue[str | None] = queue.Queue()
        self._errors = b""
        path = [one for one in sys.path if isinstance(one, str)]
        self._process = subprocess.Popen(
            [sys.executable, *_flags(), "-P", "-c", _START, json.dumps(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Without the terminal: a plugin could write to it by its name.
            start_new_session=True,
        )
        self._readers = [
            threading.Thread(target=reader, args=(stream,), daemon=True)
            for reader, stream in (
                (self._read_answers, self._process.stdout),
                (self._read_errors, self._process.stderr),
            )
        ]
        for reader in self._readers:
            reader.start()

    def send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        # If it has ended, its answers have, too, and that is where it is noticed.
        with suppress(OSError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def end(self) -> str:
        """Return how it ended, and the last line that it wrote to its errors."""
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "without ending it: it closed files that are not its own"
        self._readers[1].join(timeout=1.0)
        how = f"with exit code {code}"
        if code < 0:
            known = {one.value: one.name for one in signal.Signals}
            how = f"by {known.get(-code, f'signal {-code}')}"
        last = one_line(self._errors.decode(errors="replace").rstrip().rpartition("\n")[2])
        return f"{how}: {last}" if last else how

    def stop(self) -> None:
        """End it with whatever it started."""
        with suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
        self._process.wait()
        for reader in self._readers:
            reader.join(timeout=1.0)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            with suppress(OSError):
                if stream is not None and not any(one.is_alive() for one in self._readers):
                    stream.close()

    def _read_answers(self, stream: IO[bytes]) -> None:
        for line in stream:
            self.lines.put(line.decode(errors="replace"))
        self.lines.put(None)

    def _read_errors(self, stream: IO[bytes]) -> None:
        while chunk := os.read(stream.fileno(), 65536):
            self._errors = (self._errors + chunk)[-_TAIL:]


def _flags() -> list[str]:
    """The interpreter's flags that decide what can be imported."""
    chosen = {"-S": sys.flags.no_site, "-I": sys.flags.isolated, "-s": sys.flags.no_user_site}
    return [flag for flag, given in chosen.items() if given]


def _info(entry: Entry, fields: dict[str, Any]) -> BackendInfo:
    state: Available | Unavailable
    if fields["state"] == "available":
        state = Available(fields["priority"])
    else:
        state = (Broken if fields["state"] == "broken" else Unavailable)(fields["reason"])
    return BackendInfo(
        name=entry.name,
        device_type=fields["device_type"],
        contract=tuple(fields["contract"]),
        factory=fields["factory"],
        probe=lambda: state,
        capabilities=Capabilities(**fields["capabilities"]),
        origin=Origin(entry.distribution, entry.version, entry.value),
        availability=state,
    )
