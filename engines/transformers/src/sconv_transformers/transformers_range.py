"""Which releases of transformers this package works with, as its own requirements say."""

from __future__ import annotations

from importlib.metadata import requires, version

from packaging.requirements import Requirement

__all__ = ["check_transformers"]


def check_transformers() -> None:
    """Refuse a transformers whose cache and convolution modules were not checked.

    Both are private to transformers, so they may change with any minor release. The range is that
    of the package's requirements; its ends are tested.

    Raises:
        RuntimeError: The installed release is outside of the range.
    """
    declared = map(Requirement, requires("sconv-transformers") or ())
    needed = next(requirement for requirement in declared if requirement.name == "transformers")
    installed = version("transformers")
    if not needed.specifier.contains(installed, prereleases=True):
        raise RuntimeError(
            f"sconv_transformers works with transformers {needed.specifier}, found {installed}: "
            f"pip install '{needed}'"
        )
