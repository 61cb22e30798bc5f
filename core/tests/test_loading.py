"""From a name and a spec to a backend: what :func:`sconv.load_backend` refuses, and how."""

from __future__ import annotations

import types

import pytest
import torch

import sconv
import sconv.discovery.selection
import sconv.engine.loading
from sconv.engine.loading import build
from sconv.hookspecs import Available, BackendInfo, Capabilities
from sconv.torch_backend.backend import TorchBackend

ALL = Capabilities(graph_capture=False, trees=True, rollback=True)


def _spec(**changes) -> sconv.StateSpec:
    values = {
        "num_layers": 1,
        "streams": [sconv.Stream("conv", 4)],
        "kernel_size": 4,
        "num_slots": 2,
        "max_requests": 2,
        "dtype": torch.float32,
    }
    return sconv.StateSpec(**(values | changes))


@pytest.fixture
def installed(monkeypatch):
    """Install backends by description; returns a function that adds one."""
    infos: list[BackendInfo] = []

    def add(name="mine", device_type="cpu", capabilities=ALL, priority=1):
        state = Available(priority)
        infos.append(
            BackendInfo(
                name,
                device_type,
                (1, 0),
                "here:create",
                lambda: state,
                capabilities,
                availability=state,
            )
        )

    def list_backends(ask):
        return sorted(infos, key=lambda info: -info.availability.priority)

    monkeypatch.setattr(sconv.discovery.selection, "list_backends", list_backends)
    monkeypatch.delenv("SCONV_BACKEND", raising=False)
    return add


def _serve(monkeypatch, create):
    monkeypatch.setattr(sconv.engine.loading, "resolve_factory", lambda info: create)


def _dense(*, spec, device, pool):
    return TorchBackend(spec=spec, device=torch.device("cpu"), pool=pool)


def test_a_device_narrows_the_automatic_choice(installed, monkeypatch):
    installed("slow", "cpu", priority=0)
    installed("fast", "cuda", priority=100)
    _serve(monkeypatch, _dense)
    assert sconv.load_backend(spec=_spec(), device="cpu").info.name == "slow"
    assert sconv.load_backend(spec=_spec()).info.name == "fast"
    with pytest.raises(sconv.BackendNotFoundError, match="serves 'npu' devices"):
        sconv.discovery.selection.select(device_type="npu")


@pytest.mark.parametrize(
    ("capabilities", "changes", "message"),
    [
        (
            Capabilities(kernel_sizes=(2, 4)),
            {"kernel_size": 5},
            r"kernel_size=5 \(it takes 2 to 4\)",
        ),
        (
            Capabilities(kernel_sizes=(3, 8)),
            {"kernel_size": 2},
            r"kernel_size=2 \(it takes 3 to 8\)",
        ),
        (Capabilities(dtypes=("bfloat16",)), {}, r"dtype=float32 \(it takes bfloat16\)"),
        (Capabilities(window_axes=("time",)), {"window_axis": "channel"}, "window_axis='channel'"),
        (Capabilities(rollback=True), {"draft_topk": 2, "max_draft_tokens": 4}, "trees"),
    ],
)
def test_kern_9_a_spec_outside_of_the_declared_range_is_refused(
    installed, monkeypatch, capabilities, changes, message
):
    installed(capabilities=capabilities)
    _serve(monkeypatch, pytest.fail)
    with pytest.raises(sconv.SpecError, match=message):
        sconv.load_backend(spec=_spec(**changes))


def test_spec_8_speculation_needs_a_backend_that_declares_rollback(installed, monkeypatch):
    installed(capabilities=Capabilities())
    _serve(monkeypatch, pytest.fail)
    with pytest.raises(sconv.SpecError, match=r"'mine'.*rollback, which max_draft_tokens=3 needs"):
        sconv.load_backend(spec=_spec(max_draft_tokens=3))


def test_a_recurrent_state_needs_a_backend_that_declares_gated_delta():
    info = BackendInfo("mine", "cpu", (1, 1), "here:create", lambda: Available(1))
    with pytest.raises(sconv.SpecError, match=r"'mine'.*gated_delta, which recurrent="):
        build(info, spec=_spec(recurrent=sconv.GatedDelta(1, 1, 4, 4)))


def test_a_backend_that_declares_gated_delta_has_the_hook(monkeypatch):
    class Without(TorchBackend):
        gated_delta = None

    can = Capabilities(gated_delta=True)
    info = BackendInfo("mine", "cpu", (1, 1), "here:create", lambda: Available(1), can)
    monkeypatch.setattr("sconv.engine.loading.resolve_factory", lambda info: Without)
    with pytest.raises(sconv.ContractError, match="hook 'gated_delta'"):
        build(info, spec=_spec(recurrent=sconv.GatedDelta(1, 1, 4, 4)))


def test_a_factory_that_fails_is_named_with_its_cause(installed, monkeypatch):
    installed()

    def create(*, spec, device, pool):
        raise OSError("libfoo.so: cannot open")

    _serve(monkeypatch, create)
    with pytest.raises(sconv.PluginError, match=r"'mine'.*factory failed: .*libfoo\.so") as caught:
        sconv.load_backend(spec=_spec())
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize(
    ("made", "kind"),
    [(None, r"None: .*hooks; is its return missing\?"), ({}, "a dict: "), (4, "an int: ")],
)
def test_a_factory_that_makes_no_backend_is_told_in_one_line(installed, monkeypatch, made, kind):
    installed()
    _serve(monkeypatch, lambda *, spec, device, pool: made)
    with pytest.raises(sconv.ContractError, match=rf"'here:create' returned {kind}") as caught:
        sconv.load_backend(spec=_spec())
    assert "\n" not in str(caught.value)


def test_a_factorys_own_refusal_of_a_spec_passes_through(installed, monkeypatch):
    installed()

    def create(*, spec, device, pool):
        raise sconv.SpecError("only even channels")

    _serve(monkeypatch, create)
    with pytest.raises(sconv.SpecError, match=r"^only even channels$"):
        sconv.load_backend(spec=_spec())


def test_an_adopted_pool_of_another_spec_is_refused(installed, monkeypatch):
    installed()
    _serve(monkeypatch, _dense)
    pool = sconv.ConvStatePool.adopt(_spec(), torch.zeros(1, 3, 3, 4))
    assert sconv.load_backend(spec=_spec(), pool=pool).pool is pool
    with pytest.raises(sconv.SpecError, match="another StateSpec"):
        sconv.load_backend(spec=_spec(max_requests=5), pool=pool)


def test_importing_the_factory_may_be_what_makes_torch_know_the_device(installed, monkeypatch):
    installed("acme", "acme")
    known = []

    def device(name):
        if name == "acme" and not known:
            raise RuntimeError("Expected one of cpu, cuda\nmore")
        return types.SimpleNamespace(type="acme", index=0)

    def resolve(info):
        known.append(info.name)
        return _dense

    monkeypatch.setattr(sconv.engine.loading, "torch", types.SimpleNamespace(device=device))
    monkeypatch.setattr(sconv.engine.loading, "resolve_factory", resolve)
    assert sconv.load_backend(spec=_spec()).info.name == "acme"


def test_a_device_that_torch_does_not_know_is_named(installed, monkeypatch):
    installed("acme", "acme")
    _serve(monkeypatch, pytest.fail)
    with pytest.raises(sconv.SpecError, match=r"'acme'.*torch has no such device"):
        sconv.load_backend(spec=_spec())
    with pytest.raises(sconv.BackendNotFoundError, match="serves 'zzz' devices"):
        sconv.load_backend(spec=_spec(), device="zzz")


@pytest.mark.parametrize("device", [None, "cpu", "cpu:0", torch.device("cpu", 0)])
def test_the_host_has_no_index(installed, monkeypatch, device):
    """As its tensors name it, so that a batch made on backend.device is one of the backend's."""
    installed()
    seen = []

    def create(*, spec, device, pool):
        seen.append(device)
        return TorchBackend(spec=spec, device=device, pool=pool)

    _serve(monkeypatch, create)
    backend = sconv.load_backend(spec=_spec(), device=device)
    again = sconv.load_backend(spec=_spec(), device=device, pool=backend.pool)
    assert [*seen, backend.device, again.device] == [torch.device("cpu")] * 4


def test_a_device_that_torch_has_no_tensor_of_is_the_factorys_to_refuse(installed, monkeypatch):
    """An accelerator that torch names and this torch or machine lacks: nobody guesses an index."""
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    installed(device_type="xpu")
    seen = []

    def create(*, spec, device, pool):
        seen.append(device)
        raise sconv.SpecError("no driver")

    _serve(monkeypatch, create)
    with pytest.raises(sconv.SpecError, match=r"^no driver$"):
        sconv.load_backend(spec=_spec())
    assert seen == [torch.device("xpu")]
