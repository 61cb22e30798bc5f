"""The child's half of :mod:`sconv.cli.plugin_process`: answers requests, one line each.

Requests come and answers go through copies of standard input and output. The plugin gets an empty
input and an output that is discarded, so that nothing that it prints is taken for an answer.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Any, Final

from ..discovery.installed import Entry
from ..discovery.selection import broken, describe
from ..hookspecs import Available, BackendInfo, Broken, Unavailable
from ..messages import one_line_error

__all__ = ["main"]

_STATES: Final = {Available: "available", Unavailable: "unavailable", Broken: "broken"}


def main() -> None:
    """Answer until there are no more requests, then end without running what plugins left over."""
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    empty = os.open(os.devnull, os.O_RDWR)
    os.dup2(empty, 0)
    os.dup2(empty, 1)
    for line in requests:
        request = json.loads(line)
        ask = _try if request["trial"] else _describe
        answer = ask(Entry(*request["entry"]))
        answers.write(json.dumps({"number": request["number"], "answer": answer}) + "\n")
        answers.flush()
    os._exit(0)


def _describe(entry: Entry) -> dict[str, Any]:
    try:
        found = _fields(describe(entry))
        # What is not JSON, and what another reader of it would refuse (NaN), fails here.
        json.dumps(found, allow_nan=False)
    except BaseException as exc:
        # An interrupt, too: the user's reaches the parent, so this one is the plugin's own.
        return _fields(broken(entry, one_line_error(exc)))
    return found


def _try(entry: Entry) -> dict[str, Any]:
    # Here, since it needs torch.
    from .try_backend import Trial, decode_one_token

    try:
        return asdict(decode_one_token(describe(entry)))
    except BaseException as exc:
        return asdict(Trial(None, one_line_error(exc)))


def _fields(info: BackendInfo) -> dict[str, Any]:
    state = info.availability
    return {
        "device_type": info.device_type,
        "contract": info.contract,
        "factory": info.factory,
        "capabilities": asdict(info.capabilities),
        "state": _STATES[type(state)] if state is not None else None,
        "priority": state.priority if isinstance(state, Available) else None,
        "reason": state.reason if isinstance(state, Unavailable) else None,
    }
