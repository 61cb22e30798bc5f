from __future__ import annotations

from dataclasses import dataclass
from types import FunctionType
from typing import Any

import pytest

import sconv
from sconv.discovery.load_check import bind
from sconv.discovery.observers import Observers
from sconv.engine.loading import load_backend
from sconv.errors import ContractError, PluginError
from sconv.hookspecs import Available, BackendInfo, hookimpl

INFO = BackendInfo("npu", "npu", (1, 0), "m:f", lambda: Available(1))


class Implementation:
    pool = forward_metadata = None

    @hookimpl
    def init_graph_state(self, max_bs, max_num_tokens): ...

    @hookimpl
    def init_forward_metadata(self, forward_batch): ...

    @hookimpl
    def init_forward_metadata_out_graph(self, forward_batch, in_capture): ...

    @hookimpl
    def init_forward_metadata_in_graph(self, forward_batch): ...

    @hookimpl
    def conv_state_metadata(self, layer_id, forward_batch):
        if layer_id > 9:
            raise IndexError(layer_id)
        return f"metadata of {forward_batch}"

    @hookimpl
    def short_conv(self, x, weight, layer_id, stream, forward_batch, bias, activation, residual):
        return x * weight

    @hookimpl
    def update_mamba_state_after_mtp_verify(
        self, last_correct_step_indices, mamba_track_indices, mamba_steps_to_track, req_pool_indices
    ):
        return last_correct_step_indices, req_pool_indices


@pytest.fixture
def observers() -> Observers:
    return Observers(bind(Implementation(), INFO)[1])


def call(observers: Observers, **changed: Any) -> Any:
    arguments = {"layer_id": 3, "stream": "k", "forward_batch": "batch"}
    arguments |= {"bias": None, "activation": None, "residual": True}
    return observers.calls()["short_conv"](x=6, weight=7, **{**arguments, **changed})


class Counts:
    def __init__(self):
        self.seen: list[int] = []

    @hookimpl(wrapper=True)
    def short_conv(self, layer_id):
        self.seen.append(layer_id)
        return (yield)


def test_an_observer_sees_the_calls_between_add_and_remove(observers):
    counts = Counts()
    assert not observers.active
    observers.add(counts)
    assert observers.active
    assert call(observers) == 42
    observers.remove(counts)
    assert not observers.active
    assert call(observers, layer_id=4) == 42
    assert counts.seen == [3]


def test_a_hook_that_the_backend_leaves_out_has_no_relay(observers):
    class Both:
        @hookimpl(wrapper=True)
        def warmup(self):
            return (yield)

    observers.add(Both())
    assert "warmup" not in observers.calls()
    assert "short_conv_group" not in observers.calls()
    assert len(observers.calls()) == 7


def test_hook_7_each_observer_gets_only_what_it_names(observers):
    seen = []

    class One:
        @hookimpl(wrapper=True)
        def short_conv(self, bias, stream):
            seen.append((bias, stream))
            return (yield)

    class Two:
        @hookimpl(wrapper=True)
        def short_conv(self):
            seen.append(())
            return (yield)

    observers.add(One())
    observers.add(Two())
    call(observers, bias="b")
    assert seen == [(), ("b", "k")]  # the last one added is the outermost


def test_a_fault_can_be_put_in_and_a_result_changed(observers):
    class Fault:
        @hookimpl(wrapper=True)
        def short_conv(self, layer_id):
            if layer_id == 5:
                raise OSError("injected")
            return 1 + (yield)

    observers.add(Fault())
    assert call(observers) == 43
    with pytest.raises(OSError, match="injected"):
        call(observers, layer_id=5)


def test_an_observer_sees_the_backends_error_and_lets_it_pass(observers):
    seen = []

    class Traces:
        @hookimpl(wrapper=True)
        def conv_state_metadata(self, layer_id):
            try:
                return (yield)
            except IndexError as exc:
                seen.append((layer_id, exc))
                raise

    observers.add(Traces())
    with pytest.raises(IndexError):
        observers.calls()["conv_state_metadata"](layer_id=12, forward_batch="batch")
    assert [layer for layer, _ in seen] == [12]


def marked(function, **options):
    """A marked copy: a marker is written into the function that it marks."""
    code, name, defaults = function.__code__, function.__name__, function.__defaults__
    copy = FunctionType(code, function.__globals__, name, defaults)
    copy.__kwdefaults__ = function.__kwdefaults__
    return hookimpl(copy, **options)


def wrapper(function):
    return marked(function, wrapper=True)


def misnamed(self):
    return (yield)


def unknown_parameter(self, layerid):
    return (yield)


def defaulted(self, layer_id=0):
    return (yield)


def variadic(self, **arguments):
    return (yield)


def keyword_only(self, *, layer_id):
    return (yield)


def without_yield(self, layer_id):
    return layer_id


async def asynchronous(self, layer_id):
    yield


@pytest.mark.parametrize(
    ("name", "method", "wanted"),
    [
        ("short_con", wrapper(misnamed), "hook 'short_con'.*did you mean 'short_conv'"),
        ("short_conv", wrapper(unknown_parameter), "'layerid' is unknown.*'layer_id'"),
        ("short_conv", wrapper(defaulted), "'layer_id' has a default"),
        ("short_conv", wrapper(variadic), r"'\*\*arguments' receives nothing"),
        ("short_conv", wrapper(keyword_only), "'layer_id' is keyword-only"),
        ("short_conv", wrapper(without_yield), "it has no yield"),
        ("short_conv", wrapper(asynchronous), "it is async"),
        ("short_conv", marked(misnamed), r"in the backend's place.*wrapper=True"),
        ("short_conv", marked(misnamed, hookwrapper=True), "in the backend's place"),
        ("short_conv", staticmethod(wrapper(misnamed)), "it is a staticmethod"),
        ("short_conv", misnamed, "is not marked.*wrapper=True"),
        ("other", misnamed, "observes nothing"),
    ],
)
def test_an_observer_that_would_see_nothing_or_too_much_is_refused(observers, name, method, wanted):
    observer = type("Observer", (), {name: method})()
    with pytest.raises(ContractError, match=rf"(?s)Observer object.*cannot observe.*{wanted}"):
        observers.add(observer)
    assert not observers.active
    assert call(observers) == 42


def test_an_observer_is_added_once_and_removed_once(observers):
    counts = Counts()
    with pytest.raises(PluginError, match="does not observe"):
        observers.remove(counts)
    observers.add(counts)
    with pytest.raises(PluginError, match="already"):
        observers.add(counts)
    call(observers)
    assert counts.seen == [3]
    observers.remove(counts)
    with pytest.raises(PluginError, match="does not observe"):
        observers.remove(counts)
    observers.add(counts)
    call(observers)
    assert counts.seen == [3, 3]


def test_an_observer_equal_to_one_that_is_there_is_refused(observers):
    @dataclass
    class Named:
        name: str

        @hookimpl(wrapper=True)
        def short_conv(self):
            return (yield)

    observers.add(Named("a"))
    observers.add(Named("b"))
    with pytest.raises(PluginError, match=r"Named.*name='a'.*, or an equal object"):
        observers.add(Named("a"))


def test_the_backend_calls_observers_only_while_they_are_there(site):
    site.plugin("host", factory="sconv.plugin:TorchBackend")
    spec = sconv.StateSpec(
        num_layers=2, streams=[sconv.Stream("k", 4)], kernel_size=4, num_slots=2, max_requests=2
    )
    backend = load_backend("host", spec=spec)
    prepared = []

    class Prepares:
        @hookimpl(wrapper=True)
        def init_forward_metadata(self, forward_batch):
            prepared.append(forward_batch)
            return (yield)

    observer = Prepares()
    batch = sconv.ForwardBatch.idle()
    backend.init_forward_metadata(batch)
    backend.add_observer(observer)
    backend.init_forward_metadata(batch)
    backend.remove_observer(observer)
    backend.init_forward_metadata(batch)
    assert prepared == [batch]
