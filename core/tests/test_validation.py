from __future__ import annotations

import functools
import inspect
from typing import Any

import pluggy
import pytest

from sconv.discovery.load_check import bind, check_implementation
from sconv.hookspecs import OPTIONAL_HOOKS, StepSpec, hookimpl

COMMIT = "update_mamba_state_after_mtp_verify"
HOOKS = {name for name in vars(StepSpec) if not name.startswith("_")}
foreign = pluggy.HookimplMarker("pytest")


class Good:
    """Keeps the contract; each method returns its name and what it was given."""

    def __init__(self):
        self.pool = object()
        self.forward_metadata = None

    @hookimpl
    def init_graph_state(self, max_bs, max_num_tokens):
        return "init_graph_state", max_bs, max_num_tokens

    @hookimpl
    def init_forward_metadata(self, forward_batch):
        return "init_forward_metadata", forward_batch

    @hookimpl
    def init_forward_metadata_out_graph(self, forward_batch, in_capture):
        return "init_forward_metadata_out_graph", forward_batch, in_capture

    @hookimpl
    def init_forward_metadata_in_graph(self, forward_batch):
        return "init_forward_metadata_in_graph", forward_batch

    @hookimpl
    def conv_state_metadata(self, layer_id, forward_batch):
        return "conv_state_metadata", layer_id, forward_batch

    @hookimpl
    def short_conv(self, x, weight, layer_id, stream, forward_batch, bias, activation, residual):
        return "short_conv", x, weight, layer_id, stream, forward_batch, bias, activation, residual

    @hookimpl
    def update_mamba_state_after_mtp_verify(
        self, last_correct_step_indices, mamba_track_indices, mamba_steps_to_track, req_pool_indices
    ):
        return COMMIT, last_correct_step_indices, mamba_track_indices, req_pool_indices


def good_with(**members: Any) -> Any:
    """An instance of a subclass of Good with other members."""
    return type("Npu", (Good,), members)()


def plain_decorator(function):
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def wrapping_decorator(function):
    return functools.wraps(function)(plain_decorator(function))


def test_a_good_implementation_passes_and_is_bound(npu_info):
    good = Good()
    calls, manager = bind(good, npu_info)
    assert set(calls) == HOOKS - OPTIONAL_HOOKS
    assert calls["init_graph_state"](max_bs=3, max_num_tokens=4) == ("init_graph_state", 3, 4)
    assert calls["short_conv"].__self__ is good
    assert manager.hook.init_graph_state(max_bs=3, max_num_tokens=4) == ("init_graph_state", 3, 4)


def test_optional_hooks_are_bound_when_they_are_there(npu_info):
    class Full(Good):
        @hookimpl
        def warmup(self):
            return "warm"

    calls, _ = bind(Full(), npu_info)
    assert calls["warmup"]() == "warm"
    assert "short_conv_group" not in calls


def test_parameters_may_come_in_any_order(npu_info):
    class Reordered(Good):
        @hookimpl
        def init_graph_state(self, max_num_tokens, max_bs):
            return max_bs, max_num_tokens

    calls, _ = bind(Reordered(), npu_info)
    assert calls["init_graph_state"](max_bs=3, max_num_tokens=4) == (3, 4)


def test_all_problems_are_told_at_once_with_definition_and_fix(complaint):
    class Npu(Good):
        pool = None

        @hookimpl
        def init_graph_state(self, max_bs, max_num_tokens=None): ...

        @hookimpl
        def conv_state_metadata(self, layer, forward_batch): ...

    line = inspect.getsourcelines(Npu.init_graph_state)[1]
    text = complaint(Npu())
    assert "3 problem(s)" in text
    assert "- hook 'init_graph_state': parameter 'max_num_tokens' has a default: remove it" in text
    assert (
        f"defined: init_graph_state(self, max_bs, max_num_tokens=None) at {__file__}:{line}" in text
    )
    assert "called with: max_bs, max_num_tokens" in text
    assert "parameter 'layer' is unknown: rename or remove it (did you mean 'layer_id'?)" in text
    assert "parameter 'layer_id' is missing: add it" in text


def narrow(self, last_correct_step_indices, mamba_track_indices, mamba_steps_to_track):
    return last_correct_step_indices


def extra(self, forward_batch, in_capture, stage): ...


def defaulted_extra(self, forward_batch, in_captur=False): ...


def positional_only(self, forward_batch, in_capture, /): ...


def keyword_only(self, forward_batch, *, in_capture): ...


def variadic(self, *args, **kwargs): ...


def no_self(forward_batch, in_capture): ...


async def coroutine(self, forward_batch, in_capture): ...


async def async_generator(self, forward_batch, in_capture):
    yield


def generator(self, forward_batch, in_capture):
    yield


OUT = "init_forward_metadata_out_graph"


@pytest.mark.parametrize(
    ("hook", "function", "wanted"),
    [
        (COMMIT, narrow, "parameter 'req_pool_indices' is missing"),
        (OUT, extra, "parameter 'stage' is unknown"),
        (OUT, defaulted_extra, "'in_captur' is unknown, and would silently keep its default"),
        (OUT, positional_only, "parameter 'in_capture' is positional-only"),
        (OUT, keyword_only, "parameter 'in_capture' is keyword-only"),
        (OUT, variadic, "parameter '**kwargs' receives nothing"),
        (OUT, variadic, "parameter '*args' receives nothing"),
        (OUT, no_self, "the parameter self is missing"),
        (OUT, coroutine, "it is async"),
        (OUT, async_generator, "it is async"),
        (OUT, generator, "its body has a yield"),
        (OUT, lambda self, forward_batch: None, "parameter 'in_capture' is missing"),
    ],
)
def test_hook_3_signature_mutants(complaint, hook, function, wanted):
    text = complaint(good_with(**{hook: hookimpl(function)}))
    assert f"hook {hook!r}: " in text
    assert wanted in text
    assert f"at {__file__}:{function.__code__.co_firstlineno}" in text


def test_hook_1_an_override_older_than_in_capture(complaint):
    class Npu(Good):
        @hookimpl
        def init_forward_metadata_out_graph(self, forward_batch): ...

    assert "parameter 'in_capture' is missing: add it" in complaint(Npu())


def test_hook_6_pluggy_alone_would_accept_what_is_refused_here(complaint):
    class Npu(Good):
        @hookimpl
        def init_graph_state(self, max_bs): ...

    manager = pluggy.PluginManager("sconv")
    manager.add_hookspecs(StepSpec)
    manager.register(Npu())
    manager.check_pending()
    assert "parameter 'max_num_tokens' is missing" in complaint(Npu())


@pytest.mark.parametrize("wrap", [staticmethod, classmethod, property])
@pytest.mark.parametrize("mark_outside", [False, True])
def test_hook_3_only_plain_methods_are_hooks(complaint, wrap, mark_outside):
    def warmup(self): ...

    member = wrap(hookimpl(warmup))
    if mark_outside and wrap is not property:
        member = hookimpl(wrap(warmup))
    text = complaint(good_with(warmup=member))
    assert f"it is a {wrap.__name__}: make it a plain method" in text


def test_hook_3_a_callable_that_is_no_function(complaint):
    member = functools.partialmethod(hookimpl(lambda self: None))
    assert "is a partialmethod: make it a plain method" in complaint(good_with(warmup=member))


def test_hook_3_a_method_set_after_the_class(complaint):
    class Npu(Good): ...

    setattr(Npu, COMMIT, hookimpl(narrow))
    assert "parameter 'req_pool_indices' is missing" in complaint(Npu())


def test_hook_3_a_function_on_the_instance_has_no_self(complaint, npu_info):
    npu = Good()
    npu.warmup = hookimpl(lambda: "warm")
    assert bind(npu, npu_info)[0]["warmup"]() == "warm"
    npu.warmup = hookimpl(lambda self: "warm")
    assert "parameter 'self' is unknown" in complaint(npu)


def test_hook_3_a_method_bound_elsewhere(npu_info):
    other = Good()
    npu = Good()
    npu.init_graph_state = other.init_graph_state
    assert bind(npu, npu_info)[0]["init_graph_state"].__self__ is other


@pytest.mark.parametrize("live", ["narrow", "good"])
def test_hook_3_the_definition_that_counts_is_the_last(complaint, npu_info, live):
    class Npu(Good):
        if live == "good":

            @hookimpl
            def init_graph_state(self, max_bs): ...

            @hookimpl
            def init_graph_state(self, max_bs, max_num_tokens): ...  # noqa: F811
        else:

            @hookimpl
            def init_graph_state(self, max_bs, max_num_tokens): ...

            @hookimpl
            def init_graph_state(self, max_bs): ...  # noqa: F811

    if live == "good":
        check_implementation(Npu(), npu_info)
    else:
        assert "parameter 'max_num_tokens' is missing" in complaint(Npu())


def test_hook_3_absent_and_misspelt(complaint):
    class Npu:
        pool = forward_metadata = None

        @hookimpl
        def update_mamba_state_after_mtp_verfy(self, req_pool_indices): ...

        def short_convolution(self): ...

    text = complaint(Npu())
    misspelt = "update_mamba_state_after_mtp_verfy"
    assert f"hook {misspelt!r} of {misspelt}() does not exist: rename it" in text
    assert f"did you mean '{COMMIT}'?" in text
    assert (
        "hook 'short_conv' is not implemented (did you mean 'short_convolution'?);"
        " called with: x, weight" in text
    )
    for hook in HOOKS - OPTIONAL_HOOKS:
        assert f"hook {hook!r} is not implemented" in text
    for hook in OPTIONAL_HOOKS:
        assert f"hook {hook!r}" not in text


def test_hook_3_a_nested_or_module_level_function_is_no_method(complaint):
    class Npu:
        pool = forward_metadata = None

        def setup(self):
            @hookimpl
            def warmup(self): ...

            return warmup

    assert "hook 'init_graph_state' is not implemented" in complaint(Npu())
    assert "is a module: give an instance" in complaint(inspect)


def test_a_class_in_place_of_an_instance(complaint):
    assert "is a class: give an instance" in complaint(Good)


def test_a_marker_that_is_missing(complaint):
    text = complaint(good_with(warmup=lambda self: None))
    assert (
        "hook 'warmup' is not marked, so nothing would call it: mark it with @sconv.hookimpl"
        in text
    )


def test_a_marker_that_an_override_lost(complaint):
    def init_graph_state(self, max_bs, max_num_tokens): ...

    text = complaint(good_with(init_graph_state=init_graph_state))
    assert "hook 'init_graph_state' overrides Good.init_graph_state and lost its marker" in text
    assert "is not implemented" not in text


def test_a_marker_of_another_project(complaint):
    text = complaint(good_with(warmup=foreign(lambda self: None)))
    assert "hook 'warmup' is marked for the pluggy project 'pytest'" in text


def test_an_inherited_marked_method_counts(npu_info):
    check_implementation(type("Npu", (Good,), {})(), npu_info)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"wrapper": True}, "marked as a wrapper"),
        ({"hookwrapper": True}, "marked as a wrapper"),
        ({"optionalhook": True}, "marked with optionalhook"),
    ],
)
def test_marker_options_that_hide_mistakes(complaint, options, wanted):
    def warmup(self):
        yield

    assert wanted in complaint(good_with(warmup=hookimpl(warmup, **options)))


def test_specname_is_respected_and_its_typos_found(complaint, npu_info):
    class Named(Good):
        @hookimpl(specname="warmup")
        def compile_kernels(self):
            return "compiled"

    assert bind(Named(), npu_info)[0]["warmup"]() == "compiled"
    text = complaint(good_with(compile_kernels=hookimpl(lambda self: None, specname="warm_up")))
    assert (
        "hook 'warm_up' of compile_kernels() does not exist: rename it (did you mean 'warmup'?)"
        in text
    )


def test_two_methods_for_one_hook(complaint):
    second = hookimpl(lambda self, max_bs, max_num_tokens: None, specname="init_graph_state")
    text = complaint(good_with(second=second))
    assert "hook 'init_graph_state' is implemented by init_graph_state and second: keep one" in text


def test_a_decorator_with_wraps_is_looked_through(npu_info):
    def init_graph_state(self, max_bs, max_num_tokens):
        return max_bs, max_num_tokens

    for member in (
        hookimpl(wrapping_decorator(init_graph_state)),
        wrapping_decorator(hookimpl(init_graph_state)),
    ):
        calls, manager = bind(good_with(init_graph_state=member), npu_info)
        assert calls["init_graph_state"](max_bs=1, max_num_tokens=2) == (1, 2)
        assert manager.hook.init_graph_state(max_bs=1, max_num_tokens=2) == (1, 2)


def test_torch_decorators_are_looked_through(npu_info):
    import torch

    def init_graph_state(self, max_bs, max_num_tokens):
        return torch.is_grad_enabled(), max_bs, max_num_tokens

    for decorator in (torch.no_grad(), torch.inference_mode()):
        member = decorator(hookimpl(init_graph_state))
        calls, _ = bind(good_with(init_graph_state=member), npu_info)
        assert calls["init_graph_state"](max_bs=1, max_num_tokens=2) == (False, 1, 2)


def test_hook_3_a_narrow_function_behind_a_decorator(complaint):
    text = complaint(good_with(**{COMMIT: hookimpl(wrapping_decorator(narrow))}))
    assert "parameter 'req_pool_indices' is missing" in text


def test_a_decorator_that_narrows_the_call(complaint):
    def init_graph_state(self, max_bs, max_num_tokens): ...

    @functools.wraps(init_graph_state)
    def wrapper(self, max_bs):
        return init_graph_state(self, max_bs, 0)

    text = complaint(good_with(init_graph_state=hookimpl(wrapper)))
    assert "its decorator hides the parameters behind init_graph_state(self, max_bs)" in text


def test_a_decorator_without_wraps(complaint):
    def warmup(self): ...

    for member in (hookimpl(plain_decorator(warmup)), plain_decorator(hookimpl(warmup))):
        text = complaint(good_with(warmup=member))
        assert "hook 'warmup'" in text
        assert "if 'wrapper' is a decorator's wrapper, give it functools.wraps" in text


def test_attributes_besides_the_hooks(complaint):
    class Npu(Good):
        def __init__(self): ...

        @property
        def forward_metadata(self):
            raise AssertionError("the check runs no code of the implementation")

    text = complaint(Npu())
    assert "attribute 'pool' is missing" in text
    assert "attribute 'forward_metadata' cannot be set" in text


def test_hook_2_both_must_use_parameters_are_looked_at(complaint):
    def dropped(
        self, last_correct_step_indices, mamba_track_indices, mamba_steps_to_track, req_pool_indices
    ): ...

    text = complaint(good_with(**{COMMIT: hookimpl(wrapping_decorator(dropped))}))
    assert "'last_correct_step_indices' is accepted and never read" in text
    assert "'req_pool_indices' is accepted and never read" in text
