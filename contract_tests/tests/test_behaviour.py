"""Each rule of the behaviour suite catches a fault of its kind."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

import sconv
from sconv import ForwardMode
from sconv.plugin import MetadataBuffers, TorchBackend, hookimpl
from sconv.testing.poison import PoisonedMemory
from sconv.testing.process import SETTINGS
from sconv.testing.recording import HostSyncError
from sconv_contract import BackendContract
from sconv_contract.behaviour.rule_marks import rule_of
from sconv_contract.behaviour.subject import Subject
from sconv_contract.rules.behaviour import BEHAVIOUR


class Fault(TorchBackend):
    """A backend that does something else after it convolved."""

    def after(self, y: torch.Tensor, x: torch.Tensor, layer_id: int, stream: str) -> torch.Tensor:
        return y

    @property
    def mode(self) -> ForwardMode:
        return self.forward_metadata.forward_mode

    @hookimpl
    def short_conv(self, x, weight, layer_id, stream, forward_batch, bias, activation, residual):
        y = super().short_conv(
            x, weight, layer_id, stream, forward_batch, bias, activation, residual
        )
        return self.after(y, x, layer_id, stream)


def wrong_in(mode: ForwardMode) -> type:
    class Wrong(Fault):
        def after(self, y, x, layer_id, stream):
            return y + 1 if self.mode is mode else y

    return Wrong


class RefusesWidthSeven(TorchBackend):
    def __init__(self, *, spec, device, pool):
        if spec.kernel_size == 7:
            raise RuntimeError("no kernel for this width")
        super().__init__(spec=spec, device=device, pool=pool)


class IdleWrites(TorchBackend):
    @hookimpl
    def init_forward_metadata(self, forward_batch):
        super().init_forward_metadata(forward_batch)
        if forward_batch.forward_mode is ForwardMode.IDLE:
            self.pool.layers[0][1:] = 0


class VerifyWrites(Fault):
    def after(self, y, x, layer_id, stream):
        if self.mode is ForwardMode.TARGET_VERIFY:
            self.pool.layers[layer_id][1:] += 1
        return y


class CountsFromOne(TorchBackend):
    @hookimpl
    def update_mamba_state_after_mtp_verify(
        self, last_correct_step_indices, mamba_track_indices, mamba_steps_to_track, req_pool_indices
    ):
        super().update_mamba_state_after_mtp_verify(
            last_correct_step_indices - 1,
            mamba_track_indices,
            mamba_steps_to_track,
            req_pool_indices,
        )


class RemembersTheFirstStep(Fault):
    first = None

    def after(self, y, x, layer_id, stream):
        self.first = self.first or self.mode
        return y if self.first is self.mode else y + 1


class GroupDropsBiases(TorchBackend):
    @hookimpl
    def short_conv_group(
        self, xs, weights, layer_id, streams, forward_batch, biases, activation, residual
    ):
        return [
            self.short_conv(x, weight, layer_id, stream, forward_batch, None, activation, residual)
            for x, weight, stream in zip(xs, weights, streams, strict=True)
        ]


class AssumesItsOwnNumbers(TorchBackend):
    def __init__(self, *, spec, device, pool):
        super().__init__(spec=spec, device=device, pool=pool)
        self.pool.virtual_to_physical = None


class KeepsOtherWindows(Fault):
    def after(self, y, x, layer_id, stream):
        if self.mode is ForwardMode.TARGET_VERIFY and len(x):
            rows, length = self.forward_metadata.batch_size, self.forward_metadata.tokens_per_row
            inputs = torch.zeros(rows, length + self.spec.window_size, x.shape[1])
            self.pool.windows.store(layer_id, stream, inputs, self.forward_metadata.tree_taps)
        return y


class InfersChains(TorchBackend):
    def _fill(self, meta, batch, buffers):
        super()._fill(
            meta, replace(batch, parents=None, next_token=None, next_sibling=None), buffers
        )
        if meta.tree_taps is not None:
            taps = torch.arange(meta.tokens_per_row)[:, None] + torch.arange(self.spec.kernel_size)
            meta.tree_taps.copy_(taps)


class IgnoresPadding(TorchBackend):
    def _is_padded(self, meta):
        return False


class NeedsTokens(Fault):
    def after(self, y, x, layer_id, stream):
        assert len(x), "no tokens"
        return y


class MultipliesByTheMask(Fault):
    def after(self, y, x, layer_id, stream):
        rows = self.pool.conv(layer_id, stream)[self.forward_metadata.safe_idx]
        return y + (rows * 0).sum().to(y.dtype)


class CommitsToTheLastForward(TorchBackend):
    """It goes to whatever slots the last forward left behind."""

    @hookimpl
    def update_mamba_state_after_mtp_verify(
        self, last_correct_step_indices, mamba_track_indices, mamba_steps_to_track, req_pool_indices
    ):
        table = self.pool.req_to_slot
        now = table.clone()
        left = self.forward_metadata.cache_indices[: len(req_pool_indices)]
        table[req_pool_indices[: len(left)]] = left
        super().update_mamba_state_after_mtp_verify(
            last_correct_step_indices, mamba_track_indices, mamba_steps_to_track, req_pool_indices
        )
        table.copy_(now)


class DependsOnTheBatch(Fault):
    def after(self, y, x, layer_id, stream):
        return y * (1 + self.forward_metadata.batch_size / 64)


class ChecksNothing(TorchBackend):
    def _plan(self, batch):
        return batch.num_tokens or int(batch.extend_seq_lens.sum())


class CopiesMetadata(TorchBackend):
    @hookimpl
    def conv_state_metadata(self, layer_id, forward_batch):
        return replace(super().conv_state_metadata(layer_id, forward_batch))


class KeepsItsMetadata(TorchBackend):
    _kept = None

    @property
    def forward_metadata(self):
        return self._kept

    @forward_metadata.setter
    def forward_metadata(self, value):
        self._kept = value or self._kept


class SnapshotsTheEnd(TorchBackend):
    def _fill(self, meta, batch, buffers):
        super()._fill(meta, replace(batch, mamba_track_seqlens=None), buffers)


class WarmsUpOnLiveState(TorchBackend):
    @hookimpl
    def warmup(self):
        self.pool.layers[0].zero_()


def on_weights(change: Callable[[torch.Tensor], torch.Tensor]) -> type:
    class Changes(TorchBackend):
        @hookimpl
        def short_conv(
            self, x, weight, layer_id, stream, forward_batch, bias, activation, residual
        ):
            return super().short_conv(
                x, change(weight), layer_id, stream, forward_batch, bias, activation, residual
            )

    return Changes


def takes_strides_for_granted(weight: torch.Tensor) -> torch.Tensor:
    if weight.dim() == 3:
        return weight
    return weight.as_strided(weight.shape, (weight.shape[1], 1))


def flips_if_3d(weight: torch.Tensor) -> torch.Tensor:
    return weight.flip(2) if weight.dim() == 3 else weight


class RoundsToTheDefaultDtype(Fault):
    def after(self, y, x, layer_id, stream):
        return y.to(torch.get_default_dtype()).to(y.dtype)


class ScalesInTheDefaultDtype(Fault):
    def after(self, y, x, layer_id, stream):
        return (y * torch.full(y.shape, 1 / 3, device=y.device)).to(y.dtype)


class ScalesOnTheDefaultDevice(Fault):
    def after(self, y, x, layer_id, stream):
        return y * torch.ones(y.shape, dtype=y.dtype)


class KeepsWhatTheStepMade(Fault):
    kept = None

    def after(self, y, x, layer_id, stream):
        if self.kept is None:
            self.kept = torch.zeros(1, dtype=y.dtype, device=y.device)
        self.kept.fill_(1)
        return y


class SwitchesGradientsOn(TorchBackend):
    def __init__(self, *, spec, device, pool):
        super().__init__(spec=spec, device=device, pool=pool)
        torch.set_grad_enabled(True)


class PreparesByAProduct(Fault):
    """No step hook of convolutions, and so nobody switches autocast off for it."""

    @hookimpl
    def init_forward_metadata(self, forward_batch):
        super().init_forward_metadata(forward_batch)
        thirds = torch.full((2, 2), 1 / 3, dtype=torch.float32, device=self.device)
        self.scale = (thirds @ thirds).sum()

    @hookimpl
    def init_forward_metadata_out_graph(self, forward_batch, in_capture):
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        self.scale = torch.ones((), dtype=torch.float32, device=self.device)

    def after(self, y, x, layer_id, stream):
        return (y * self.scale).to(y.dtype)


class SwitchesDeterminismOff(Fault):
    def after(self, y, x, layer_id, stream):
        torch.use_deterministic_algorithms(False)
        return y


class SplitsByThreads(Fault):
    def after(self, y, x, layer_id, stream):
        return y * (1 + torch.get_num_threads() / 64)


class DrawsFromTheProcess(Fault):
    def after(self, y, x, layer_id, stream):
        return y + torch.rand(y.shape, dtype=y.dtype, device=y.device)


class AsksTheDevice(TorchBackend):
    def _fill(self, meta, batch, buffers):
        super()._fill(meta, batch, buffers)
        self.longest = meta.cu.max().item()


class AllocatesEachStep(TorchBackend):
    @hookimpl
    def init_forward_metadata_in_graph(self, forward_batch):
        buffers = MetadataBuffers(
            self.spec, self._buffers.max_bs, self._buffers.max_num_tokens, self.device
        )
        tokens = forward_batch.num_tokens or 0
        meta = buffers.step(forward_batch, tokens, padded=True)
        self._fill(meta, forward_batch, buffers)
        self.forward_metadata = meta


class BakesSlotsIn(TorchBackend):
    """What the host saw at capture is what every replay uses."""

    @hookimpl
    def init_forward_metadata_out_graph(self, forward_batch, in_capture):
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        if in_capture:
            self.seen = [
                None if rows is None else rows.clone()
                for rows in (forward_batch.req_pool_indices, forward_batch.slots)
            ]

    def _fill(self, meta, batch, buffers):
        rows, slots = getattr(self, "seen", (batch.req_pool_indices, batch.slots))
        super()._fill(meta, replace(batch, req_pool_indices=rows, slots=slots), buffers)


class KeepsAStaticCopy(TorchBackend):
    """What a graph reads is written by the host into the newest capture's copy alone."""

    seen = None

    @hookimpl
    def init_forward_metadata_out_graph(self, forward_batch, in_capture):
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        rows = forward_batch.req_pool_indices
        if rows is None:
            return
        if in_capture:
            self.seen = torch.zeros(self._buffers.max_bs, dtype=rows.dtype)
        self.seen[: len(rows)] = rows

    def _fill(self, meta, batch, buffers):
        rows = batch.req_pool_indices
        if rows is not None and self.seen is not None:
            batch = replace(batch, req_pool_indices=self.seen[: len(rows)])
        super()._fill(meta, batch, buffers)


class CommitsInInt64Alone(TorchBackend):
    @hookimpl
    def update_mamba_state_after_mtp_verify(
        self, last_correct_step_indices, mamba_track_indices, mamba_steps_to_track, req_pool_indices
    ):
        steps = [last_correct_step_indices, mamba_steps_to_track]
        assert all(one is None or one.dtype is torch.int64 for one in steps)
        super().update_mamba_state_after_mtp_verify(
            last_correct_step_indices, mamba_track_indices, mamba_steps_to_track, req_pool_indices
        )


def stops_at(mode: ForwardMode, dim: int, tokens: int) -> type:
    """Return a backend that leaves out what is beyond a channel or a token."""

    class Small(Fault):
        def after(self, y, x, layer_id, stream):
            if self.mode is mode:
                y[tokens:] = 0
                y[:, dim:] = 0
            return y

    return Small


class KeepsScratch(TorchBackend):
    def _fill(self, meta, batch, buffers):
        super()._fill(meta, batch, buffers)
        self.scratch = torch.empty(64)


class GrowsItsBuffers(TorchBackend):
    @hookimpl
    def init_graph_state(self, max_bs, max_num_tokens):
        self._buffers = None
        super().init_graph_state(max_bs, max_num_tokens)


FAULTS = {
    "SCV401": RefusesWidthSeven,
    "SCV402": wrong_in(ForwardMode.DECODE),
    "SCV403": wrong_in(ForwardMode.EXTEND),
    "SCV404": wrong_in(ForwardMode.MIXED),
    "SCV405": VerifyWrites,
    "SCV406": CountsFromOne,
    "SCV407": wrong_in(ForwardMode.DRAFT_EXTEND),
    "SCV408": IdleWrites,
    "SCV409": RemembersTheFirstStep,
    "SCV410": GroupDropsBiases,
    "SCV411": AssumesItsOwnNumbers,
    "SCV412": KeepsOtherWindows,
    "SCV413": InfersChains,
    "SCV421": IgnoresPadding,
    "SCV422": NeedsTokens,
    "SCV423": MultipliesByTheMask,
    "SCV424": VerifyWrites,
    "SCV425": CommitsToTheLastForward,
    "SCV426": DependsOnTheBatch,
    "SCV427": ChecksNothing,
    "SCV428": CopiesMetadata,
    "SCV429": KeepsItsMetadata,
    "SCV430": SnapshotsTheEnd,
    "SCV431": WarmsUpOnLiveState,
    "SCV433": on_weights(flips_if_3d),
    "SCV434": ScalesInTheDefaultDtype,
    "SCV441": AsksTheDevice,
    "SCV442": AllocatesEachStep,
    "SCV443": BakesSlotsIn,
    "SCV444": KeepsScratch,
    "SCV445": GrowsItsBuffers,
}


#: Faults that one test of the suite alone can see.
MORE = {
    "test_a_decode_of_many_rows_and_channels": [
        stops_at(ForwardMode.DECODE, 1500, 100),
        stops_at(ForwardMode.DECODE, 4000, 20),
    ],
    "test_an_extend_of_many_rows_and_a_long_one": [stops_at(ForwardMode.EXTEND, 4000, 128)],
    "test_a_verify_of_many_rows_and_channels": [stops_at(ForwardMode.TARGET_VERIFY, 4000, 50)],
    "test_weights_and_biases_of_any_form": [on_weights(takes_strides_for_granted)],
    "test_a_commit_counts_in_either_int": [CommitsInInt64Alone],
    "test_graphs_of_one_backend_live_side_by_side": [KeepsAStaticCopy],
}


def _tests_of(chosen: str) -> Iterator[Callable[[Subject], None]]:
    """Return the tests of a rule, or one test, as calls: one for each set of parameters."""
    suite = BackendContract()
    for name, test in inspect.getmembers(suite, inspect.ismethod):
        marks = getattr(test, "pytestmark", [])
        if chosen not in (name, rule_of(test)):
            continue
        axes = [
            [dict(zip(names, _tuple(value), strict=True)) for value in mark.args[1]]
            for mark in marks
            if mark.name == "parametrize"
            for names in [_names(mark.args[0])]
        ]
        for values in itertools.product(*axes):
            given = {key: value for part in values for key, value in part.items()}
            yield lambda subject, test=test, given=given: test(subject=subject, **given)


def _names(names: Any) -> list[str]:
    return names.replace(",", " ").split() if isinstance(names, str) else list(names)


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _failures(chosen: str, subject: Subject) -> list[BaseException]:
    """Run the tests of a rule, or one test; return what those that failed raised."""
    failures = []
    for test in _tests_of(chosen):
        try:
            with PoisonedMemory():
                test(subject)
        except pytest.skip.Exception:
            continue
        except BaseException as exc:
            failures.append(exc)
    return failures


#: How the tests of a rule say it, where it is no assertion (NaN is no digit): a fault that fails in
#: another way is broken itself, and would be caught by anything.
SAYS = {
    "SCV401": RuntimeError,
    "SCV411": (AssertionError, sconv.BatchError),
    "SCV421": (AssertionError, ValueError),
    "SCV423": ValueError,
    "SCV441": DataDependentOutputException,
}


@pytest.mark.parametrize("rule", FAULTS)
def test_a_fault_breaks_its_rule(builder, rule):
    failures = _failures(rule, Subject.of(builder(FAULTS[rule])))
    assert failures
    says = SAYS.get(rule, (AssertionError, pytest.fail.Exception))
    for failure in failures:
        assert isinstance(failure, says), repr(failure)
        assert not isinstance(failure, HostSyncError), repr(failure)


@pytest.mark.parametrize(
    ("test", "fault"), [(test, fault) for test, faults in MORE.items() for fault in faults]
)
def test_a_fault_fails_the_test_that_looks_for_it(builder, test, fault):
    failures = _failures(test, Subject.of(builder(fault)))
    assert failures
    assert all(isinstance(failure, AssertionError) for failure in failures)


#: A fault for each setting of SCV434, and how it shows.
DEPENDS_ON = {
    "default dtype bfloat16": (RoundsToTheDefaultDtype, "under .*: decode: output of"),
    "default dtype float64": (ScalesInTheDefaultDtype, "under .*: decode: output of"),
    "default device meta": (ScalesOnTheDefaultDevice, "meta"),
    "inference mode": (KeepsWhatTheStepMade, "inference tensor"),
    "grad mode off": (SwitchesGradientsOn, "a call changed the process's grad mode"),
    "autocast": (PreparesByAProduct, "under autocast: decode: output of"),
    "deterministic mode": (
        SwitchesDeterminismOff,
        "under .*: a call changed the process's deterministic mode",
    ),
    "another thread count": (SplitsByThreads, "under .*: decode: output of"),
    "another random state": (DrawsFromTheProcess, "a call changed the process's random state"),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_what_depends_on_a_setting_of_the_process_is_seen_under_it(builder, setting):
    fault, says = DEPENDS_ON[setting]
    ask = BackendContract().test_a_setting_of_the_process_changes_nothing
    subject = Subject.of(builder(fault))
    with PoisonedMemory():
        with pytest.raises((AssertionError, RuntimeError), match=says):
            ask(subject=subject, setting=setting)
        if fault is not DrawsFromTheProcess:
            # It is the setting that shows it: under another all is well.
            ask(subject=subject, setting="another random state")


def test_every_rule_has_tests_and_a_fault():
    assert FAULTS.keys() == BEHAVIOUR.keys()
    for rule in BEHAVIOUR:
        assert list(_tests_of(rule)), rule


class KeepsInputsAlone(TorchBackend):
    """Its windows are made from the row's own, so a row that is verified must not move on."""

    window_layouts = ("inputs",)
    waiting = frozenset()

    @hookimpl
    def init_forward_metadata(self, forward_batch):
        super().init_forward_metadata(forward_batch)
        slots = {slot for slot in self.forward_metadata.cache_indices.tolist() if slot > 0}
        if forward_batch.forward_mode is ForwardMode.TARGET_VERIFY:
            self.waiting = slots
        assert self.waiting.isdisjoint(slots) or self.waiting is slots

    @hookimpl
    def update_mamba_state_after_mtp_verify(
        self, last_correct_step_indices, mamba_track_indices, mamba_steps_to_track, req_pool_indices
    ):
        super().update_mamba_state_after_mtp_verify(
            last_correct_step_indices, mamba_track_indices, mamba_steps_to_track, req_pool_indices
        )
        self.waiting = frozenset()


@pytest.mark.parametrize("rule", ["SCV406", "SCV425"])
def test_between_verify_and_commit_other_requests_alone_go_on(builder, capabilities, rule):
    """What no layout of verify windows promises, the suite does not ask for."""
    can = replace(capabilities, window_layouts=KeepsInputsAlone.window_layouts)
    assert not _failures(rule, Subject.of(builder(KeepsInputsAlone, can)))
