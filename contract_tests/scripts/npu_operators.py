"""Writes the table of operators of a torch_npu release, from the YAML that its wheel carries.

    pip download --no-deps torch_npu==2.13.0
    python scripts/npu_operators.py torch_npu-2.13.0-*.whl

Needs PyYAML, and the torch release that the wheel is made for; neither CANN nor an NPU. torch_npu
generates its registrations from the lists ``supported``, ``autograd`` and ``symint`` of these
files. Whatever torch decomposes, it decomposes for every backend alike, so torch says the rest:
an operator that is in no list and has no kernel that torch made for all backends ends in
torch_npu's fallback, which runs it on the CPU.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any, Final

FILES: Final = (
    "torch_npu/csrc/aten/npu_native_functions.yaml",
    "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml",
)
LISTS: Final = ("supported", "autograd", "symint")
#: Listed, but its kernel is registered for sparse tensors alone (seen in the built library).
NOT_REGISTERED: Final = frozenset({"_coalesce"})
FOLDER: Final = Path(__file__).parents[1] / "src" / "sconv_contract" / "simulated_npu" / "data"


def table(version: str, sources: list[str]) -> dict[str, Any]:
    """Return the table of a release, given the text of its YAML files."""
    import torch

    listed = {name for text in sources for name in _listed(text)} - NOT_REGISTERED
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    aten = {name.removeprefix("aten::"): name for name in names}
    has_kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    direct = sorted(listed & aten.keys())
    fallback = sorted(
        short
        for short, name in aten.items()
        if short not in listed and not has_kernel(name, "PrivateUse1")
    )
    return {
        "torch_npu": version,
        "torch": torch.__version__.partition("+")[0],
        "source": [f"{FILES[0]} and {Path(FILES[1]).name} of the wheel torch_npu {version}"],
        "direct": direct,
        "cpu_fallback": fallback,
    }


def from_wheel(path: Path) -> dict[str, Any]:
    """Return the table of a wheel."""
    version = path.name.split("-")[1]
    with zipfile.ZipFile(path) as wheel:
        return table(version, [wheel.read(name).decode() for name in FILES])


def from_installation() -> dict[str, Any] | None:
    """Return the table of the installed torch_npu, or None if there is none."""
    try:
        installed = files("torch_npu") or []
    except PackageNotFoundError:
        return None
    from importlib.metadata import version

    found = {str(path): path for path in installed}
    return table(version("torch_npu"), [found[name].read_text() for name in FILES])


def text_of(made: dict[str, Any]) -> str:
    """Return a table as it is kept: one name per line, so that a release's changes can be read."""
    return json.dumps(made, indent=1) + "\n"


def _listed(text: str) -> Iterator[str]:
    import yaml

    document = yaml.safe_load(text)
    for part in LISTS:
        for entry in document.get(part) or []:
            # "name.overload", or a schema that starts so, alone or under "func".
            schema = entry if isinstance(entry, str) else entry["func"]
            yield re.split(r"[(\s]", schema, maxsplit=1)[0]


def main(argv: list[str]) -> int:
    """Write the table of a wheel."""
    parser = argparse.ArgumentParser(description="Write a release's table of operators.")
    parser.add_argument("wheel", type=Path)
    made = from_wheel(parser.parse_args(argv).wheel)
    target = FOLDER / f"torch_npu-{made['torch_npu']}.json"
    target.write_text(text_of(made), encoding="utf-8")
    sys.stdout.write(
        f"{target}: {len(made['direct'])} direct, {len(made['cpu_fallback'])} on the CPU\n"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
