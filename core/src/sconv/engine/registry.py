"""Which models keep short-convolution state, where, and which classes serve them.

An engine asks with the model's configuration. Whoever knows a model registers it: an engine's
adapter the families that it comes with, a user his own. Classes may be given by dotted names, so
that a registration costs no import.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
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
    "linear_attn_specs",
    "load_class",
    "names_class",
    "register_linear_attn_model",
]

_DEFAULT_BACKEND: Final = "sconv.Backend"
_DEFAULT_HYBRID: Final = "sconv.HybridBackend"


@dataclass(frozen=True, slots=True)
class LinearAttnModelSpec:
    """One family of models.

    Attributes:
        config_class: The configuration's class, or its dotted name. A name is compared with the
            classes of an object and never imported: a model in use has imported its own.
        backend_class_name: Dotted name of the class that serves the state; None =
            :class:`sconv.Backend`.
        arch_names: Names in a configuration's ``architectures`` that belong to the family.
        unwrap_text_config: Look at ``config.get_text_config()`` instead, for models that wrap a
            language model.
        hybrid_backend_class_name: Dotted name of the class that joins full attention and the state;
            None = :class:`sconv.HybridBackend`.
        config_predicate: Further condition on the configuration; None = no condition.
        conv_modules: The classes of the modules that are its short convolutions, or their dotted
            names, for engines that serve a model as it is: ``sconv_transformers.attach``. A
            subclass is another class, since its forward may be.
    """

    config_class: type | str
    backend_class_name: str | None = None
    arch_names: tuple[str, ...] = ()
    unwrap_text_config: bool = False
    hybrid_backend_class_name: str | None = None
    config_predicate: Callable[[Any], bool] | None = None
    conv_modules: tuple[type | str, ...] = ()

    def __post_init__(self) -> None:
        for field in ("arch_names", "conv_modules"):
            value = getattr(self, field)
            # A string would be searched for substrings where a sequence is searched for names.
            if isinstance(value, str):
                raise SpecError(f"{field}={value!r}: expected a sequence of names")
            object.__setattr__(self, field, tuple(value))

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

    def has_conv_module(self, module_class: type) -> bool:
        """Whether modules of exactly this class are short convolutions of the family.

        Raises:
            PluginError: ``conv_modules`` names a class that its module does not have.
        """
        return any(names_class(module_class, named) for named in self.conv_modules)

    def backend_class(self) -> type:
        """Import the class that serves the state. Raises as :func:`load_class`."""
        name = self.backend_class_name
        return load_class(_DEFAULT_BACKEND if name is None else name)

    def hybrid_backend_class(self) -> type:
        """Import the class that joins the state to full attention. Raises as :func:`load_class`."""
        return load_class(self.hybrid_backend_class_name or _DEFAULT_HYBRID)


_SPECS: list[LinearAttnModelSpec] = []
_BUILT_IN: list[LinearAttnModelSpec] = []


def register_linear_attn_model(spec: LinearAttnModelSpec, *, built_in: bool = False) -> None:
    """Add a family. Earlier ones are asked first; one that is registered already stays in place.

    Args:
        spec: The family.
        built_in: It comes with an engine's adapter, and is asked after all that do not, so that a
            user's registration wins whenever it is made.
    """
    specs = _BUILT_IN if built_in else _SPECS
    if spec not in specs:
        specs.append(spec)


def linear_attn_specs() -> tuple[LinearAttnModelSpec, ...]:
    """Return all families, in the order in which they are asked."""
    return (*_SPECS, *_BUILT_IN)


def linear_attn_config(hf_config: Any) -> tuple[LinearAttnModelSpec, Any] | None:
    """Return the first family that a configuration belongs to, and the configuration it looked at.

    Raises:
        PluginError: A family that is asked has a ``config_class`` that does not exist.
    """
    return _by_config(linear_attn_specs(), hf_config)


def linear_attn_spec_by_arch(arch: str) -> LinearAttnModelSpec | None:
    """Return the first family that lists an architecture; its predicate is not asked."""
    return _by_arch(linear_attn_specs(), arch)


def linear_attn_spec(hf_config: Any) -> LinearAttnModelSpec | None:
    """Return a configuration's family, by ``architectures[0]`` or :func:`linear_attn_config`.

    What is built in is asked after both.
    """
    architectures = getattr(hf_config, "architectures", None)
    for specs in (_SPECS, _BUILT_IN):
        by_arch = _by_arch(specs, architectures[0]) if architectures else None
        if by_arch is not None:
            return by_arch
        found = _by_config(specs, hf_config)
        if found is not None:
            return found[0]
    return None


def names_class(cls: type, named: type | str) -> bool:
    """Whether a class, or a dotted name of its own or of a re-export, is exactly ``cls``.

    Raises:
        PluginError: The name is not a dotted name, or its module has no such class.
    """
    if isinstance(named, type):
        return cls is named
    if named == f"{cls.__module__}.{cls.__qualname__}":
        return True
    # The name may be where a package re-exports the class. As long as that package has not been
    # imported, nobody can have got the class through it, and asking must not import it.
    module_name, _, name = named.rpartition(".")
    if not module_name:
        raise PluginError(f"{named!r} is not a dotted name: expected 'package.module.Class'")
    module = sys.modules.get(module_name)
    return module is not None and cls is _class_in(module, name, named)


def load_class(dotted: str) -> type:
    """Import the class that a dotted name (``"package.module.Class"``) names.

    Raises:
        PluginError: It does not resolve; the message has the name and what went wrong.
    """
    module_name, _, name = dotted.rpartition(".")
    if not module_name:
        raise PluginError(f"{dotted!r} is not a dotted name: expected 'package.module.Class'")
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


def _by_arch(specs: Sequence[LinearAttnModelSpec], arch: str) -> LinearAttnModelSpec | None:
    return next((spec for spec in specs if arch in spec.arch_names), None)


def _by_config(
    specs: Sequence[LinearAttnModelSpec], hf_config: Any
) -> tuple[LinearAttnModelSpec, Any] | None:
    for spec in specs:
        config = spec.config_of(hf_config)
        if config is not None:
            return spec, config
    return None


def _is_instance(config: object, config_class: type | str) -> bool:
    if isinstance(config_class, type):
        return isinstance(config, config_class)
    return any(names_class(base, config_class) for base in type(config).__mro__)
