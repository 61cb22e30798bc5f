"""``sconv verify --on-hardware``: how a backend is proven on its device, printed and done."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from sconv import backends
from sconv.plugin import one_line_error

from ..target import TargetError
from .command import refuse_without_needs, selected
from .simulated import in_this_process

__all__ = ["Recipe", "device_of", "hardware_subject", "recipe_for", "verify_in_child"]


@dataclass(frozen=True)
class Recipe:
    """How a device's own means show what the suite alone cannot.

    Attributes:
        device: torch's name of its type.
        variables: Set before Python starts, and what each is for.
        packages: Distributions whose versions belong into a report.
    """

    device: str
    variables: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    packages: tuple[str, ...] = ()

    def lines(self, name: str) -> Iterator[str]:
        """Yield the recipe for a backend, in words and as a command."""
        steps = [f"{key}={value}: {why}" for key, (value, why) in self.variables.items()]
        steps += [
            f'torch.{self.device}.set_sync_debug_mode("error"), where torch has it, while the in-'
            "graph hooks run: a wait for the device that torch knows of is an error",
            f"every mode is captured by torch.{self.device}.{self.device.upper()}Graph and"
            " replayed with other rows, lengths and values: whatever cannot be recorded ends the"
            " capture, and what the host computed is found out",
            "the behaviour suite: every mode and ruling against the float64 oracle, on the device",
        ]
        yield f"{name} on {self.device} hardware:"
        yield from (f"  {number}. {step}" for number, step in enumerate(steps, 1))
        settings_ = [f"{key}={shlex.quote(value)}" for key, (value, _) in self.variables.items()]
        yield "  by hand: " + " ".join([*settings_, f"sconv verify --behaviour {name}"])
        yield "  report: the summary at the end, the product's name, and the driver's version"

    @property
    def environment(self) -> dict[str, str]:
        """The variables and their values."""
        return {key: value for key, (value, _) in self.variables.items()}


_RECIPES: Final = {
    recipe.device: recipe
    for recipe in (
        Recipe(
            "npu",
            {
                "TORCH_NPU_FALLBACK_CPU_DISABLE": (
                    "1",
                    "an operator without an NPU kernel is an error, and not run on the CPU",
                )
            },
            packages=("torch", "torch_npu"),
        ),
        Recipe(
            "cuda",
            {"TRITON_INTERPRET": ("0", "kernels of Triton are compiled, not interpreted")},
            packages=("torch", "triton"),
        ),
    )
}


def recipe_for(device: str) -> Recipe:
    """Return the recipe of a type of device; what every device has, where it has no other."""
    return _RECIPES.get(device) or Recipe(device, packages=("torch",))


def device_of(name: str) -> str:
    """Return the type of device that an installed backend is for, whether or not it is here.

    Raises:
        TargetError: There is no such backend, or it does not say, or it is for the host.
    """
    found = {info.name: info for info in backends()}
    if name not in found or found[name].device_type == "unknown":
        # It says what is installed, and what is wrong with it.
        return selected(name).device_type
    if found[name].device_type == "cpu":
        raise TargetError(
            f"{found[name]} is for the host, which sconv verify --behaviour {name} checks as it is"
        )
    return found[name].device_type


def verify_in_child(recipe: Recipe, argv: Sequence[str]) -> int | None:
    """Run a command again under the recipe's variables; None if they are set.

    Args:
        recipe: Of the device.
        argv: The arguments of ``sconv verify``.

    Raises:
        TargetError: What the suite needs is not installed.
    """
    refuse_without_needs()
    if all(os.environ.get(key) == value for key, value in recipe.environment.items()):
        return None
    command = [sys.executable, "-m", "sconv", "verify", *argv]
    done = subprocess.run(command, env={**os.environ, **recipe.environment}, check=False)
    return done.returncode if done.returncode >= 0 else 128 - done.returncode


def hardware_subject(recipe: Recipe, name: str) -> str:
    """Return the line of the summary that says on what hardware this was.

    Raises:
        TargetError: The backend cannot run here, or there is no such device.
    """
    if in_this_process():
        raise TargetError("this process has a simulated npu: --on-hardware needs another one")
    try:
        # First, because a library that torch loads with itself may know of devices whose files are
        # hidden, and a probe asks it if it is there.
        import torch
    except (ImportError, RuntimeError) as exc:
        selected(name)  # its reason says more
        raise TargetError(f"torch cannot be imported: {one_line_error(exc)}") from exc
    selected(name)
    try:
        module: Any = torch.get_device_module(recipe.device)
        count = module.device_count() if module.is_available() else 0
        product = module.get_device_name(0) if count else ""
    except (AttributeError, RuntimeError) as exc:
        raise TargetError(f"torch has no {recipe.device} device: {one_line_error(exc)}") from exc
    if not count:
        raise TargetError(f"torch finds no {recipe.device} device on this machine")
    versions = ", ".join(f"{package} {_version(package)}" for package in recipe.packages)
    return f"on hardware: {count} x {product}; {versions}"


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"
