"""Reads the corpus and unpacks its cases (corpus/README.md); builds backends of made-up classes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import sconv
from sconv.discovery.load_check import bind
from sconv.discovery.observers import Observers
from sconv.plugin import TorchBackend

CORPUS = Path(__file__).parent / "corpus"
BYTES = re.compile(rb"\{\{([0-9a-f ]+)\}\}")


@dataclass
class Case:
    """One plugin of the corpus."""

    name: str
    shows: str
    rule: str = ""
    runtime: str = ""
    files: dict[str, str] = field(default_factory=dict)

    def unpack(self, folder: Path) -> Path:
        """Write the plugin and return its folder."""
        skeleton = CORPUS / "skeleton"
        files = {
            path.relative_to(skeleton).as_posix().removesuffix(".txt"): path.read_text()
            for path in skeleton.rglob("*")
            if path.is_file()
        }
        parts = {"before": "", "class": "    pass\n"}
        for name, text in self.files.items():
            (parts if name in parts else files)[name] = text
        backend = files["sconv_npu/backend.py"]
        for part, text in parts.items():
            backend = backend.replace("{" + part + "}\n", text)
        files["sconv_npu/backend.py"] = backend
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            raw = BYTES.sub(lambda match: bytes.fromhex(match[1].decode()), text.encode())
            path.write_bytes(raw)
        return folder


def read_cases(folder: str) -> list[Case]:
    """Return the cases of one half of the corpus."""
    return [case for path in sorted((CORPUS / folder).glob("*.txt")) for case in _cases(path)]


def _cases(path: Path) -> Iterator[Case]:
    for text in path.read_text().split("\n=== ")[0:]:
        heading, _, rest = text.removeprefix("=== ").partition("\n")
        name, _, shows = heading.partition(": ")
        case = Case(name, shows)
        current = None
        for line in rest.splitlines(keepends=True):
            if line.startswith("--- "):
                current = line.removeprefix("--- ").strip()
                case.files[current] = ""
            elif current is not None:
                case.files[current] += line
            elif ": " in line:
                key, _, value = line.strip().partition(": ")
                setattr(case, key, value)
        yield case


BROKEN = read_cases("broken")
GOOD = read_cases("good")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``loadable_…`` are the cases of which the check at load has something to say."""
    kinds = {"broken_case": BROKEN, "good_case": GOOD}
    for argument, cases in list(kinds.items()):
        kinds[f"loadable_{argument}"] = [case for case in cases if case.runtime != "-"]
    for argument, cases in kinds.items():
        if argument in metafunc.fixturenames:
            metafunc.parametrize(argument, cases, ids=[case.name for case in cases])


@pytest.fixture(scope="session")
def corpus() -> tuple[list[Case], list[Case]]:
    """The broken and the good cases."""
    return BROKEN, GOOD


@pytest.fixture(scope="session")
def capabilities() -> sconv.Capabilities:
    """What core's own hooks can do, declared recordable."""
    return sconv.Capabilities(
        window_layouts=TorchBackend.window_layouts, graph_capture=True, trees=True, rollback=True
    )


@pytest.fixture(scope="session")
def builder(capabilities: sconv.Capabilities) -> Callable[..., Callable[..., sconv.Backend]]:
    """Return what builds a backend of a class that no entry point names."""

    def builder_of(
        made: type, can: sconv.Capabilities = capabilities
    ) -> Callable[..., sconv.Backend]:
        info = sconv.BackendInfo("made", "cpu", (1, 0), "made:up", lambda: sconv.Available(1), can)

        def build(spec: sconv.StateSpec, pool: Any = None) -> sconv.Backend:
            implementation = made(spec=spec, device=torch.device("cpu"), pool=pool)
            hooks, manager = bind(implementation, info)
            return sconv.Backend(
                info=info,
                spec=spec,
                device=implementation.pool.device,
                implementation=implementation,
                hooks=hooks,
                observers=Observers(manager),
            )

        return build

    return builder_of
