"""Trying a backend in a process of its own, whatever it does there."""

from __future__ import annotations

import json

import pytest

from sconv.cli.main import main
from sconv.cli.try_backend import Trial, try_backend
from sconv.discovery.selection import backends

HOST = "from sconv.torch_backend.backend import TorchBackend\n"


@pytest.fixture
def trial(site):
    """Try a backend with this factory module."""

    def of(source: str, *, answer: str = "Available(1)", limit: float = 120.0) -> Trial:
        site.module("kernels", source)
        site.plugin("host", answer=answer, factory="kernels:create")
        (info,) = backends()
        return try_backend(info, limit=limit)

    return of


@pytest.mark.parametrize("answer", ["Available(1)", "Unavailable('no device file')"])
def test_one_that_works_also_where_its_probe_sees_nothing(trial, answer):
    source = f"{HOST}print('driver 1.0')\ncreate = TorchBackend\n"
    assert trial(source, answer=answer) == Trial("cpu")


def test_one_that_ends_the_process(trial):
    tried = trial("import os, sys\nprint('no driver', file=sys.stderr, flush=True)\nos.abort()\n")
    assert tried == Trial(None, "it ended its process by SIGABRT: no driver")


def test_one_that_computes_something_else(trial):
    source = (
        f"{HOST}class create(TorchBackend):\n"
        "    def _decode(self, x, taps, state, meta):\n"
        "        return x + x\n"
    )
    assert trial(source) == Trial(None, "one token after an empty window gave 2.0 instead of 1")


def test_one_that_does_not_answer(trial):
    source = "import threading\nthreading.Event().wait()\n"
    assert trial(source, limit=0.2) == Trial(None, "it gave no answer within 0.2 s")


def test_a_broken_one_is_not_started(site):
    site.plugin("host", head="raise OSError('no driver')")
    (info,) = backends()
    tried = try_backend(info, limit=0.0)
    assert tried.error is not None
    assert "OSError: no driver" in tried.error


def test_the_command_says_what_came_of_it(site, capsys):
    site.module("kernels", "raise OSError('no driver')\n")
    site.plugin("host", factory="kernels:create")
    assert main(["backends", "--probe"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("tried"))
    assert line.startswith("tried host: backend 'host' of sconv-host 1.0: its factory fails: ")
    assert line.endswith("OSError: no driver")
    assert main(["backends", "--json"]) == 0
    assert "tried" not in json.loads(capsys.readouterr().out)["backends"][0]
