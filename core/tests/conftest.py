"""Distributions made up for a test, with metadata and modules on a real ``sys.path``; and specs."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import importlib_metadata
import pytest
import torch
from hypothesis import HealthCheck, settings

import sconv
import sconv.discovery.selection
from sconv import StateSpec, Stream
from sconv.discovery.load_check import check_implementation
from sconv.errors import ContractError
from sconv.hookspecs import Available, BackendInfo, Broken, Origin

settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("search", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

_PLUGIN = """
from sconv import Available, BackendInfo, Capabilities, Unavailable, hookimpl
{head}

class Plugin:
    @hookimpl
    def sconv_backend(self):
        return BackendInfo(
            name={name!r}, device_type={device!r}, contract={contract!r}, factory={factory!r},
            probe=lambda: {answer},
        )

plugin = Plugin()
"""


class Site:
    """A folder of installed distributions."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.root.mkdir(exist_ok=True)

    def distribution(
        self,
        name: str,
        version: str = "1.0",
        *,
        backends: Mapping[str, str] | None = None,
        commands: Mapping[str, str] | None = None,
        root: Path | None = None,
    ) -> Path:
        """Write a metadata folder and return it."""
        folder = (root or self.root) / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(parents=True)
        folder.joinpath("METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        lines = []
        for group, entries in (("sconv.backends", backends), ("sconv.commands", commands)):
            lines += [f"[{group}]", *(f"{key} = {value}" for key, value in (entries or {}).items())]
        folder.joinpath("entry_points.txt").write_text("\n".join(lines) + "\n")
        return folder

    def module(self, dotted: str, source: str) -> Path:
        """Write a module, in packages as its name says, and return its file."""
        *packages, last = dotted.split(".")
        folder = self.root.joinpath(*packages)
        folder.mkdir(parents=True, exist_ok=True)
        for depth in range(len(packages)):
            self.root.joinpath(*packages[: depth + 1], "__init__.py").touch()
        file = folder / f"{last}.py"
        file.write_text(source)
        return file

    def plugin(
        self,
        name: str,
        distribution: str | None = None,
        *,
        answer: str = "Available(1)",
        contract: object = (1, 0),
        factory: str = "nowhere:create",
        device: str = "cpu",
        calls_itself: str | None = None,
        head: str = "",
    ) -> str:
        """Install a distribution with one backend; return the module of its plugin object."""
        distribution = distribution or f"sconv-{name}"
        module = distribution.replace("-", "_") + "_plugin"
        self.distribution(distribution, backends={name: f"{module}:plugin"})
        source = _PLUGIN.format(
            name=name if calls_itself is None else calls_itself,
            contract=contract,
            factory=factory,
            answer=answer,
            device=device,
            head=head,
        )
        self.module(module, source)
        return module

    def reason(self, name: str) -> str:
        """Return why the one backend of this name is broken."""
        (info,) = (info for info in sconv.backends() if info.name == name)
        assert isinstance(info.availability, Broken)
        return info.availability.reason


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """In this process: a site where nothing but what the test installs is on ``sys.path``."""
    made = Site(tmp_path / "site")
    paths = sysconfig.get_paths()
    standard = [paths["stdlib"], str(Path(paths["stdlib"]) / "lib-dynload")]
    monkeypatch.setattr(sys, "path", [str(made.root), *standard])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sconv.discovery.selection, "_described", {})
    monkeypatch.delenv("SCONV_BACKEND", raising=False)
    importlib.invalidate_caches()
    before = set(sys.modules)
    yield made
    for name in set(sys.modules) - before:
        if str(tmp_path) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


def _files_of(*names: str) -> Iterator[Path]:
    """Yield the top-level packages and modules of some distributions and of what they require."""
    waiting, seen = list(names), set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = importlib_metadata.distribution(name)
        except importlib_metadata.PackageNotFoundError:
            continue  # Required on another Python only.
        tops = {file.parts[0] for file in found.files or ()}
        yield from (Path(str(found.locate_file(top))) for top in tops if _is_code(top))
        waiting += [
            re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
            for requirement in found.requires or ()
            if "extra ==" not in requirement
        ]


def _is_code(top: str) -> bool:
    return not top.endswith(".dist-info") and top not in ("..", "__pycache__")


class Alone(Site):
    """A site for child processes that have core, what core depends on, and no torch."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        for source in _files_of("pluggy", "importlib-metadata"):
            self.root.joinpath(source.name).symlink_to(source)
        self.root.joinpath("sconv").symlink_to(Path(sconv.__file__).parent)
        self.distribution("sconv-core", "0.0.1")

    def python(
        self, *arguments: str, environment: Mapping[str, str] | None = None, code: int = 0
    ) -> subprocess.CompletedProcess[str]:
        """Run the interpreter, without its own site-packages, and check its exit code."""
        done = subprocess.run(
            [sys.executable, "-S", "-B", *arguments],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(self.root), **(environment or {})},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done


@pytest.fixture
def alone(tmp_path: Path) -> Alone:
    """For child processes: core, what it depends on, and nothing else."""
    return Alone(tmp_path / "alone")


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Uninitialised memory is NaN, or a number that no index would be."""
    from sconv.testing.poison import PoisonedMemory

    with PoisonedMemory():
        yield


@pytest.fixture(scope="session")
def spec_of() -> Callable[..., StateSpec]:
    """Return what makes a spec with verify windows, of one channel unless it is told otherwise."""

    def make(**changes: Any) -> StateSpec:
        options: dict[str, Any] = {
            "num_layers": 1,
            "streams": [Stream("a", 1)],
            "kernel_size": 4,
            "num_slots": 9,
            "max_requests": 6,
            "dtype": torch.float32,
            "max_draft_tokens": 4,
        }
        return StateSpec(**{**options, **changes})

    return make


@pytest.fixture(scope="session")
def npu_info() -> BackendInfo:
    """Return the description of a backend that a test makes up."""
    return BackendInfo(
        "npu", "npu", (1, 0), "m:f", lambda: Available(1), origin=Origin("sconv-npu", "0.2", "m:p")
    )


@pytest.fixture(scope="session")
def complaint(npu_info: BackendInfo) -> Callable[[Any], str]:
    """Return what gives the text by which an implementation is refused."""

    def complaint_of(implementation: Any) -> str:
        with pytest.raises(ContractError) as caught:
            check_implementation(implementation, npu_info)
        text = str(caught.value)
        assert text.startswith("backend 'npu' of sconv-npu 0.2 does not keep contract 1.1, ")
        return text

    return complaint_of
