"""Which models keep short-convolution state, and which backend class serves them.

An engine asks with the model's configuration; a model's plugin registers what it knows. Classes are
given by dotted names and imported when they are used, so that a registration costs no import.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from ..errors import PluginError, SpecError
from ..messages import did_you_mean, one_line_error

__all__ = [
    "LinearAttnModelSpec",
    "linear_attn_config",
    "linear_attn_spec",
    "linear_attn_spec_by_arch",
    "load_class",
    "register_linear_attn_model",
]

_DEFAULT_HYBRID: Final = "sconv.HybridBackend"


@dataclass(frozen=True, slots=True)
class LinearAttnModelSpec:
    """One family of models.

    Attributes:
        config_class: The configuration's class, or its dotted name. A name is compared with the
            classes of an object and never imported: a model in use has imported its own.
        backend_class_name: Dotted name of the class that serves the state.
        arch_names: Names in a configuration's ``architectures`` that belong to the family.
        unwrap_text_config: Look at ``config.get_text_config()`` instead, for models that wrap a
            language model.
        hybrid_backend_class_name: Dotted name of the class that joins full attention and the state;
            None = :class:`sconv.HybridBackend`.
        config_predicate: Further condition on the configuration; None = no condition.
    """

    config_class: type | str
    backend_class_name: str
    arch_names: tuple[str, ...] = ()
    unwrap_text_config: bool = False
    hybrid_backend_class_name: str | None = None
    config_predicate: Callable[[Any], bool] | None = None

    def __post_init__(self) -> None:
        # A string would be searched for substrings where a sequence is searched for names.
        if isinstance(self.arch_names, str):
            raise SpecError(f"arch_names={self.arch_names!r}: expected a sequence of names")
        object.__setattr__(self, "arch_names", tuple(self.arch_names))

    def config_of(self, hf_config: Any) -> Any | None:
        """Return the configuration if it belongs to the family, unwrapped if asked, else None.

        Raises:
            PluginError: ``config_class`` names a class that its module does not have.
        """
        config = hf_config
        if self.unwrap_text_config and hasattr(hf_config, "get_text_config"):
            config = hf_config.get_text_config()
        if not _is_instance(config, self.config_class):
            return None
        if self.config_predicate is not None and not self.config_predicate(config):
            return None
        return config

    def backend_class(self) -> type:
        """Import the class that serves the state. Raises as :func:`load_class`."""
        return load_class(self.backend_class_name)

    def hybrid_backend_class(self) -> type:
        """Import the class that joins the state to full attention. Raises as :func:`load_class`."""
        return load_class(self.hybrid_backend_class_name or _DEFAULT_HYBRID)


_SPECS: list[LinearAttnModelSpec] = []


def register_linear_attn_model(spec: LinearAttnModelSpec) -> None:
    """Add a family. Earlier ones are asked first; one that is registered already stays in place."""
    if spec not in _SPECS:
        _SPECS.append(spec)


def linear_attn_config(hf_config: Any) -> tuple[LinearAttnModelSpec, Any] | None:
    """Return the first family that a configuration belongs to, and the configuration it looked at.

    Raises:
        PluginError: A family that is asked has a ``config_class`` that does not exist.
    """
    for spec in _SPECS:
        config = spec.config_of(hf_config)
        if config is not None:
            return spec, config
    return None


def linear_attn_spec_by_arch(arch: str) -> LinearAttnModelSpec | None:
    """Return the first family that lists an architecture; its predicate is not asked."""
    for spec in _SPECS:
        if arch in spec.arch_names:
            return spec
    return None


def linear_attn_spec(hf_config: Any) -> LinearAttnModelSpec | None:
    """Return a configuration's family, by ``architectures[0]`` or :func:`linear_attn_config`."""
    architectures = getattr(hf_config, "architectures", None)
    if architectures:
        by_arch = linear_attn_spec_by_arch(architectures[0])
        if by_arch is not None:
            return by_arch
    found = linear_attn_config(hf_config)
    return None if found is None else found[0]


def load_class(dotted: str) -> type:
    """Import the class that a dotted name (``"package.module.Class"``) names.

    Raises:
        PluginError: It does not resolve; the message has the name and what went wrong.
    """
    module_name, _, name = dotted.rpartition(".")
    if not module_name:
        raise PluginError(f"{dotted!r} is no dotted name: expected 'package.module.Class'")
    try:
        module = import_module(module_name)
    except Exception as exc:
        raise PluginError(f"cannot load {dotted!r}: {one_line_error(exc)}") from exc
    return _class_in(module, name, dotted)


def _class_in(module: Any, name: str, dotted: str) -> type:
    value = getattr(module, name, None)
    if isinstance(value, type):
        return value
    if value is not None:
        raise PluginError(f"cannot load {dotted!r}: it is a {type(value).__name__}, not a class")
    hint = did_you_mean(name, dir(module))
    raise PluginError(f"cannot load {dotted!r}: {module.__name__!r} has no {name!r}{hint}")


def _is_instance(config: object, config_class: type | str) -> bool:
    if isinstance(config_class, type):
        return isinstance(config, config_class)
    qualified = [f"{base.__module__}.{base.__qualname__}" for base in type(config).__mro__]
    if config_class in qualified:
        return True
    # The name may be where a package re-exports the class. As long as that package has not been
    # imported, nobody can have made the object through it, and asking must not import it.
    module_name, _, name = config_class.rpartition(".")
    if not module_name:
        raise PluginError(f"{config_class!r} is no dotted name: expected 'package.module.Class'")
    module = sys.modules.get(module_name)
    return module is not None and isinstance(config, _class_in(module, name, config_class))
