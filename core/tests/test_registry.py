"""Which family a configuration belongs to, and what its dotted names resolve to."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from sconv.engine import registry
from sconv.engine.backend import Backend
from sconv.engine.hybrid import HybridBackend
from sconv.engine.registry import (
    LinearAttnModelSpec,
    linear_attn_config,
    linear_attn_spec,
    linear_attn_spec_by_arch,
    linear_attn_specs,
    load_class,
    register_linear_attn_model,
)
from sconv.errors import PluginError, SpecError


class TextConfig:
    def __init__(self, layers: int = 4) -> None:
        self.layers = layers


class LargeTextConfig(TextConfig):
    pass


class VisionConfig:
    """Wraps a language model."""

    def __init__(self, text: TextConfig, architectures: list[str] | None = None) -> None:
        self.text = text
        self.architectures = architectures

    def get_text_config(self) -> TextConfig:
        return self.text


BACKEND = "collections.OrderedDict"


@pytest.fixture(autouse=True)
def _empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_SPECS", [])
    monkeypatch.setattr(registry, "_BUILT_IN", [])


def register(config_class: type | str = TextConfig, **values: Any) -> LinearAttnModelSpec:
    spec = LinearAttnModelSpec(config_class, values.pop("backend_class_name", BACKEND), **values)
    register_linear_attn_model(spec)
    return spec


def test_a_config_and_its_subclasses_belong_to_the_family() -> None:
    spec = register()
    for config in (TextConfig(), LargeTextConfig()):
        assert linear_attn_config(config) == (spec, config)
        assert linear_attn_spec(config) is spec
    assert linear_attn_config(VisionConfig(TextConfig())) is None
    assert linear_attn_spec(object()) is None


def test_the_first_match_in_registration_order_wins() -> None:
    small = register(config_predicate=lambda config: config.layers < 10)
    large = register(LargeTextConfig)
    rest = register()
    assert linear_attn_spec(LargeTextConfig(4)) is small
    assert linear_attn_spec(LargeTextConfig(20)) is large
    assert linear_attn_spec(TextConfig(20)) is rest


def test_a_family_registered_twice_keeps_its_place() -> None:
    first = register(backend_class_name="a.First")
    register(backend_class_name="a.Second")
    register(backend_class_name="a.First")
    assert linear_attn_spec(TextConfig()) == first
    assert len(registry._SPECS) == 2


def test_a_wrapped_text_config_is_unwrapped_where_asked() -> None:
    text = TextConfig()
    spec = register(unwrap_text_config=True, config_predicate=lambda config: config.layers == 4)
    assert linear_attn_config(VisionConfig(text)) == (spec, text)
    assert linear_attn_config(text) == (spec, text)
    assert linear_attn_config(VisionConfig(TextConfig(5))) is None


def test_a_wrapped_text_config_is_left_alone_where_not_asked() -> None:
    register()
    assert linear_attn_config(VisionConfig(TextConfig())) is None


def test_the_architecture_comes_before_the_config_and_without_the_predicate() -> None:
    by_config = register(VisionConfig)
    by_arch = register(
        TextConfig,
        arch_names=("FooForCausalLM", "BarForCausalLM"),
        config_predicate=lambda _: False,
    )
    assert linear_attn_spec_by_arch("BarForCausalLM") is by_arch
    assert linear_attn_spec_by_arch("Bar") is None
    assert linear_attn_spec(VisionConfig(TextConfig(), ["FooForCausalLM"])) is by_arch
    for architectures in (["OtherModel", "FooForCausalLM"], [], None):
        assert linear_attn_spec(VisionConfig(TextConfig(), architectures)) is by_config


def test_the_first_family_that_lists_an_architecture_wins() -> None:
    first = register(arch_names=["FooForCausalLM"])
    register(VisionConfig, arch_names=("FooForCausalLM",))
    assert linear_attn_spec_by_arch("FooForCausalLM") is first


def test_arch_names_as_one_string_are_refused() -> None:
    """Else "Foo" would be found in it."""
    with pytest.raises(SpecError, match="arch_names='FooForCausalLM'"):
        LinearAttnModelSpec(TextConfig, BACKEND, arch_names="FooForCausalLM")  # type: ignore[arg-type]


def test_a_dotted_config_class_is_compared_by_name_and_never_imported() -> None:
    spec = register("made_up_models.configuration.FooConfig")
    config_class = type("FooConfig", (TextConfig,), {"__module__": "made_up_models.configuration"})
    derived = type("Derived", (config_class,), {})
    assert linear_attn_config(TextConfig()) is None
    assert linear_attn_spec(config_class()) is spec
    assert linear_attn_spec(derived()) is spec
    assert "made_up_models" not in sys.modules


def test_a_dotted_config_class_may_be_a_re_export(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = register("made_up_models.FooConfig")
    assert linear_attn_config(TextConfig()) is None
    package = ModuleType("made_up_models")
    package.FooConfig = TextConfig  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_up_models", package)
    assert linear_attn_spec(LargeTextConfig()) is spec
    assert linear_attn_spec(object()) is None


def test_a_config_class_that_its_module_lacks_fails_with_the_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = ModuleType("made_up_models")
    package.FooConfig = TextConfig  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_up_models", package)
    register("made_up_models.FoConfig")
    with pytest.raises(PluginError, match=r"'made_up_models\.FoConfig'.*did you mean 'FooConfig'"):
        linear_attn_config(object())


def test_backend_classes_are_resolved_when_used() -> None:
    spec = register(hybrid_backend_class_name="collections.UserDict")
    assert spec.backend_class().__name__ == "OrderedDict"
    assert spec.hybrid_backend_class().__name__ == "UserDict"


def test_the_default_classes_are_those_of_this_package() -> None:
    spec = LinearAttnModelSpec(TextConfig)
    assert spec.backend_class() is Backend
    assert spec.hybrid_backend_class() is HybridBackend


def test_what_is_built_in_is_asked_last_by_name_and_by_configuration() -> None:
    """A user's registration may come after an adapter's, which comes with an import."""
    built_in = LinearAttnModelSpec(TextConfig, arch_names=("FooForCausalLM",))
    register_linear_attn_model(built_in, built_in=True)
    config = TextConfig()
    config.architectures = ["FooForCausalLM"]  # type: ignore[attr-defined]
    assert linear_attn_spec(config) is built_in
    own = register()
    assert linear_attn_spec(config) is own
    assert linear_attn_config(config) == (own, config)
    assert linear_attn_specs() == (own, built_in)


class Conv:
    pass


class WiderConv(Conv):
    pass


@pytest.mark.parametrize("named", [Conv, f"{__name__}.Conv"])
def test_a_conv_module_is_of_exactly_the_class(named: type | str) -> None:
    spec = register(conv_modules=["elsewhere.Other", named])
    assert spec.has_conv_module(Conv)
    assert not spec.has_conv_module(WiderConv)
    with pytest.raises(SpecError, match="conv_modules='Conv'"):
        register(conv_modules="Conv")


@pytest.mark.parametrize(
    ("dotted", "why"),
    [
        ("no_such_package.Backend", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("collections.no_such.Backend", "ModuleNotFoundError"),
        ("collections.OrderedDct", "has no 'OrderedDct' (did you mean 'OrderedDict'?)"),
        ("collections.namedtuple", "it is a function, not a class"),
        ("Backend", "not a dotted name"),
        ("", "not a dotted name"),
        (".Backend", "not a dotted name"),
        ("collections.", "has no ''"),
    ],
)
def test_a_bad_dotted_name_fails_with_the_name_and_the_reason(dotted: str, why: str) -> None:
    spec = register(backend_class_name=dotted)
    assert linear_attn_spec(TextConfig()) is spec  # registering and matching do not resolve it
    with pytest.raises(PluginError) as caught:
        spec.backend_class()
    assert repr(dotted) in str(caught.value)
    assert why in str(caught.value)


def test_a_module_that_breaks_on_import_keeps_its_reason(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.joinpath("broken_backend_module.py").write_text(
        "raise OSError('libfoo.so: missing')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        PluginError, match=r"'broken_backend_module\.B'.*OSError: libfoo\.so"
    ) as caught:
        load_class("broken_backend_module.B")
    assert isinstance(caught.value.__cause__, OSError)


def test_a_bad_dotted_config_class_fails_with_the_name() -> None:
    register("FooConfig")
    with pytest.raises(PluginError, match="'FooConfig' is not a dotted name"):
        linear_attn_config(TextConfig())
