"""Two sides behind one object: order, completeness, one commit, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from sconv import ForwardBatch, ForwardMode, StateSpec, Stream
from sconv.discovery.load_check import bind
from sconv.discovery.observers import Observers
from sconv.engine.backend import Backend
from sconv.engine.hybrid import FullAttentionBackend, HybridBackend, wrap_for_draft_extend
from sconv.errors import ContractError
from sconv.hookspecs import Available, BackendInfo
from sconv.torch_backend.backend import TorchBackend

K = 4


class FullAttention:
    """Keeps the order of calls that reach it in a list that both sides share."""

    def __init__(self, calls: list[tuple[Any, ...]], name: str = "full") -> None:
        self.calls = calls
        self.name = name
        self.forward_metadata: Any = None
        self.page_size = 64

    def init_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.calls.append((self.name, "init_graph_state", max_bs, max_num_tokens))

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.forward_metadata = ("planned", forward_batch)
        self.calls.append((self.name, "init_forward_metadata", forward_batch))

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        self.calls.append((self.name, "out_graph", forward_batch, in_capture))

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        self.calls.append((self.name, "in_graph", forward_batch))


class PrefillDecodePair(FullAttention):
    """Two full-attention backends, one for verify and decode, one for the rest."""

    def __init__(
        self, prefill: FullAttention, decode: FullAttention, decode_verifies: bool
    ) -> None:
        super().__init__(prefill.calls, "pair")
        self.prefill = prefill
        self.decode = decode
        self.decode_verifies = decode_verifies

    def init_forward_metadata(self, forward_batch: Any) -> None:
        verify = forward_batch.forward_mode is ForwardMode.TARGET_VERIFY
        side = self.decode if verify and self.decode_verifies else self.prefill
        side.init_forward_metadata(forward_batch)


class Sidecar:
    """A short-convolution side that only records."""

    def __init__(self, calls: list[tuple[Any, ...]], spec: StateSpec) -> None:
        self.calls = calls
        self.spec = spec
        self.info = "the info"
        self.pool = "the pool"
        self.device = "the device"
        self.forward_metadata = "the convolutions'"

    def init_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.calls.append(("conv", "init_graph_state", max_bs, max_num_tokens))

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.calls.append(("conv", "init_forward_metadata", forward_batch))

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        self.calls.append(("conv", "out_graph", forward_batch, in_capture))

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        self.calls.append(("conv", "in_graph", forward_batch))

    def conv_state_metadata(self, layer_id: int, forward_batch: Any) -> Any:
        return ("metadata", layer_id, forward_batch)

    def warmup(self) -> None:
        self.calls.append(("conv", "warmup"))

    def add_observer(self, observer: object) -> None:
        self.calls.append(("conv", "add_observer", observer))

    def remove_observer(self, observer: object) -> None:
        self.calls.append(("conv", "remove_observer", observer))

    def short_conv(self, x: Any, weight: Any, **values: Any) -> Any:
        return ("short_conv", x, weight, values)

    def short_conv_group(self, xs: Any, weights: Any, **values: Any) -> Any:
        return ("short_conv_group", xs, weights, values)

    def gated_delta(self, *inputs: Any, **values: Any) -> Any:
        return ("gated_delta", inputs, values)


class CommittingSidecar(Sidecar):
    def update_mamba_state_after_mtp_verify(
        self,
        last_correct_step_indices: Any,
        mamba_track_indices: Any = None,
        mamba_steps_to_track: Any = None,
        req_pool_indices: Any = None,
    ) -> None:
        values = {
            "last_correct_step_indices": last_correct_step_indices,
            "mamba_track_indices": mamba_track_indices,
            "mamba_steps_to_track": mamba_steps_to_track,
            "req_pool_indices": req_pool_indices,
        }
        self.calls.append(("conv", "commit", values))


def spec_of(max_draft_tokens: int = 1) -> StateSpec:
    return StateSpec(
        num_layers=1,
        streams=[Stream("a", 1)],
        kernel_size=K,
        num_slots=4,
        max_requests=4,
        dtype=torch.float32,
        max_draft_tokens=max_draft_tokens,
    )


def dense_backend(spec: StateSpec) -> Backend:
    implementation = TorchBackend(spec=spec, device=torch.device("cpu"), pool=None)
    info = BackendInfo("dense", "cpu", (1, 0), "sconv.plugin:TorchBackend", lambda: Available(0))
    hooks, manager = bind(implementation, info)
    return Backend(
        info=info,
        spec=spec,
        device=torch.device("cpu"),
        implementation=implementation,
        hooks=hooks,
        observers=Observers(manager),
    )


@pytest.fixture
def calls() -> list[tuple[Any, ...]]:
    return []


def hybrid_of(calls: list[tuple[Any, ...]], max_draft_tokens: int = 4) -> HybridBackend:
    sidecar = CommittingSidecar(calls, spec_of(max_draft_tokens))
    return HybridBackend(FullAttention(calls), sidecar)  # type: ignore[arg-type]


def test_full_attention_goes_first_in_every_hook(calls: list[tuple[Any, ...]]) -> None:
    hybrid = hybrid_of(calls)
    batch = ForwardBatch.idle()
    hybrid.init_graph_state(4, 16)
    hybrid.init_forward_metadata_out_graph(batch, in_capture=True)
    hybrid.init_forward_metadata_out_graph(batch)
    hybrid.init_forward_metadata_in_graph(batch)
    hybrid.init_forward_metadata(batch)
    expected = [
        ("init_graph_state", 4, 16),
        ("out_graph", batch, True),
        ("out_graph", batch, False),
        ("in_graph", batch),
        ("init_forward_metadata", batch),
    ]
    assert calls == [(side, *call) for call in expected for side in ("full", "conv")]


@pytest.mark.parametrize("mode", list(ForwardMode))
def test_no_mode_skips_the_convolutions(calls: list[tuple[Any, ...]], mode: ForwardMode) -> None:
    batch = ForwardBatch(mode, 0, 0, None)
    hybrid_of(calls).init_forward_metadata(batch)
    assert [call[0] for call in calls] == ["full", "conv"]


def test_the_step_functions_pass_everything_through(calls: list[tuple[Any, ...]]) -> None:
    hybrid: Any = hybrid_of(calls)
    assert hybrid.conv_state_metadata(3, "batch") == ("metadata", 3, "batch")
    one = {
        "layer_id": 1,
        "stream": "k",
        "forward_batch": "batch",
        "bias": "b",
        "activation": "silu",
        "residual": False,
    }
    assert hybrid.short_conv("x", "w", **one) == ("short_conv", "x", "w", one)
    group = {
        "layer_id": 1,
        "streams": ["k", "v"],
        "forward_batch": "batch",
        "biases": ["b", None],
        "activation": "silu",
        "residual": False,
    }
    assert hybrid.short_conv_group(["x"], ["w"], **group) == (
        "short_conv_group",
        ["x"],
        ["w"],
        group,
    )
    assert hybrid.pool == "the pool"
    assert hybrid.info == "the info"
    assert hybrid.spec == spec_of(4)


BOUND = (
    "add_observer",
    "conv_state_metadata",
    "device",
    "gated_delta",
    "info",
    "pool",
    "remove_observer",
    "short_conv",
    "short_conv_group",
    "spec",
    "update_mamba_state_after_mtp_verify",
    "warmup",
)


@pytest.mark.parametrize("name", BOUND)
def test_hyb_1_what_is_the_convolutions_alone_is_theirs(
    calls: list[tuple[Any, ...]], name: str
) -> None:
    full = FullAttention(calls)
    for theirs in BOUND:
        setattr(full, theirs, "the full-attention side's")
    hybrid = HybridBackend(full, CommittingSidecar(calls, spec_of(4)))  # type: ignore[arg-type]
    assert getattr(hybrid, name) == getattr(hybrid.backend, name)


def test_hyb_1_a_subclass_may_define_what_is_bound(calls: list[tuple[Any, ...]]) -> None:
    class Counting(HybridBackend):
        def short_conv(self, x: Any, weight: Any, **values: Any) -> Any:  # type: ignore[override]
            return ("counted", self.backend.short_conv(x, weight, **values))

    sidecar: Any = CommittingSidecar(calls, spec_of(4))
    hybrid = Counting(FullAttention(calls), sidecar)
    assert hybrid.short_conv(1, 2, layer_id=0) == ("counted", ("short_conv", 1, 2, {"layer_id": 0}))


def test_forward_metadata_is_the_full_attention_sides_for_both_read_and_write(
    calls: list[tuple[Any, ...]],
) -> None:
    hybrid = hybrid_of(calls)
    batch = ForwardBatch.idle()
    hybrid.init_forward_metadata(batch)
    assert hybrid.forward_metadata == ("planned", batch)
    hybrid.forward_metadata = None
    assert hybrid.full_attention.forward_metadata is None
    assert hybrid.backend.forward_metadata == "the convolutions'"
    assert "forward_metadata" not in vars(hybrid)


@pytest.mark.parametrize("decode_verifies", [True, False])
def test_hook_4_spec_3_a_verify_gets_exactly_one_commit_whoever_served_it(
    calls: list[tuple[Any, ...]], decode_verifies: bool
) -> None:
    pair = PrefillDecodePair(
        FullAttention(calls, "prefill"), FullAttention(calls, "decode"), decode_verifies
    )
    hybrid = HybridBackend(pair, CommittingSidecar(calls, spec_of(4)))  # type: ignore[arg-type]
    verify = ForwardBatch.target_verify(slots=torch.tensor([1]), draft_token_num=4)
    hybrid.init_forward_metadata(verify)
    values = {
        "last_correct_step_indices": torch.tensor([2]),
        "mamba_track_indices": torch.tensor([3]),
        "mamba_steps_to_track": torch.tensor([1]),
        "req_pool_indices": torch.tensor([1]),
    }
    hybrid.update_mamba_state_after_mtp_verify(**values)
    served_by = "decode" if decode_verifies else "prefill"
    assert calls == [
        (served_by, "init_forward_metadata", verify),
        ("conv", "init_forward_metadata", verify),
        ("conv", "commit", values),
    ]


def test_the_commit_takes_its_arguments_by_position_like_a_backend(
    calls: list[tuple[Any, ...]],
) -> None:
    hybrid = hybrid_of(calls)
    last, tracks, steps, rows = (torch.tensor([number]) for number in (2, 3, 1, 7))
    hybrid.update_mamba_state_after_mtp_verify(last, tracks, steps, rows)
    (call,) = calls
    assert call[:2] == ("conv", "commit")
    assert list(call[2].values()) == [last, tracks, steps, rows]


def test_hook_4_a_side_without_the_commit_is_refused(
    calls: list[tuple[Any, ...]],
) -> None:
    full: Any = FullAttention(calls)
    with pytest.raises(ContractError, match=r"Sidecar, lacks update_mamba_state_after_mtp_verify"):
        HybridBackend(full, Sidecar(calls, spec_of(4)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "missing",
    [
        "init_graph_state",
        "init_forward_metadata",
        "init_forward_metadata_out_graph",
        "init_forward_metadata_in_graph",
    ],
)
def test_hook_4_a_pair_that_lacks_a_hook_is_refused(
    calls: list[tuple[Any, ...]], missing: str
) -> None:
    a, b = FullAttention(calls), FullAttention(calls)
    pair: Any = PrefillDecodePair(a, b, True)
    setattr(pair, missing, None)
    with pytest.raises(ContractError, match=rf"PrefillDecodePair, lacks {missing}\."):
        HybridBackend(pair, CommittingSidecar(calls, spec_of(4)))  # type: ignore[arg-type]


class StepContainer(FullAttention):
    """As engines keep the backends of a multi-step draft."""

    def __init__(self, calls: list[tuple[Any, ...]], field: str) -> None:
        super().__init__(calls)
        setattr(self, field, [FullAttention(calls), FullAttention(calls)])


@pytest.mark.parametrize("wrap", [HybridBackend, wrap_for_draft_extend])
@pytest.mark.parametrize("kind", ["attn_backends", "attn_backend_list", "list", "tuple"])
def test_a_multi_step_draft_container_is_refused_with_what_to_use(
    calls: list[tuple[Any, ...]], wrap: Any, kind: str
) -> None:
    steps = [FullAttention(calls), FullAttention(calls)]
    made: Any = {"list": steps, "tuple": tuple(steps)}
    container = made.get(kind) or StepContainer(calls, kind)
    with pytest.raises(TypeError, match=r"several draft steps .* wrap_for_draft_extend"):
        wrap(container, CommittingSidecar(calls, spec_of()))


def test_a_container_without_any_hook_is_refused(calls: list[tuple[Any, ...]]) -> None:
    container: Any = object()
    with pytest.raises(ContractError, match=r"builtins\.object, lacks init_graph_state"):
        wrap_for_draft_extend(container, CommittingSidecar(calls, spec_of()))  # type: ignore[arg-type]


def test_a_hybrid_is_not_wrapped_again(calls: list[tuple[Any, ...]]) -> None:
    hybrid = hybrid_of(calls)
    with pytest.raises(ContractError, match=r"prepared twice .* \.full_attention"):
        HybridBackend(hybrid, hybrid.backend)


def test_wrap_for_draft_extend_prepares_both_sides(calls: list[tuple[Any, ...]]) -> None:
    class Stamped(HybridBackend):
        pass

    sidecar: Any = CommittingSidecar(calls, spec_of())
    hybrid = wrap_for_draft_extend(FullAttention(calls), sidecar, hybrid_class=Stamped)
    assert type(hybrid) is Stamped
    batch = ForwardBatch.draft_extend(
        slots=torch.tensor([1]),
        seq_lens=torch.tensor([4]),
        draft_token_num=2,
        num_accept_tokens=torch.tensor([1]),
    )
    hybrid.init_forward_metadata(batch)
    assert [call[0] for call in calls] == ["full", "conv"]


def test_other_attributes_are_the_full_attention_sides(calls: list[tuple[Any, ...]]) -> None:
    hybrid = hybrid_of(calls)
    assert hybrid.page_size == 64
    with pytest.raises(AttributeError) as caught:
        _ = hybrid.pages
    message = str(caught.value)
    assert "'pages'" in message
    assert ".FullAttention." in message
    assert ".CommittingSidecar," in message
    assert not hasattr(hybrid, "pages")


def test_a_hook_of_the_full_attention_side_alone_is_not_passed_on(
    calls: list[tuple[Any, ...]],
) -> None:
    hybrid: Any = hybrid_of(calls)
    hybrid.full_attention.init_cuda_graph_state = print
    with pytest.raises(AttributeError, match=r"'init_cuda_graph_state'.*call both sides"):
        hybrid.init_cuda_graph_state(1, 1)


def test_copies_and_half_built_objects_do_not_recurse(calls: list[tuple[Any, ...]]) -> None:
    hybrid = hybrid_of(calls)
    assert copy.copy(hybrid).full_attention is hybrid.full_attention
    with pytest.raises(AttributeError, match="no attribute 'backend'"):
        _ = HybridBackend.__new__(HybridBackend).backend


def test_one_verify_and_commit_on_a_real_backend(calls: list[tuple[Any, ...]]) -> None:
    """SPEC-1 through the hybrid: state 1, 2, 3, draft 4, 5, 6, two tokens kept, then 7."""
    full: FullAttentionBackend = FullAttention(calls)
    hybrid = HybridBackend(full, dense_backend(spec_of(3)))
    slot = hybrid.pool.alloc(1)
    hybrid.pool.assign([2], slot)
    rows = torch.tensor([2])
    hybrid.pool.conv(0, "a")[slot] = torch.tensor([1.0, 2.0, 3.0])[:, None]
    weight = torch.tensor([[1.0, 10.0, 100.0, 1000.0]])

    def run(batch: ForwardBatch, *tokens: float) -> list[float]:
        hybrid.init_forward_metadata(batch)
        x = torch.tensor(tokens, dtype=torch.float32)[:, None]
        y = hybrid.short_conv(
            x, weight, layer_id=0, stream="a", forward_batch=batch, residual=False
        )
        return y[:, 0].tolist()

    assert run(ForwardBatch.target_verify(rows, draft_token_num=3), 4, 5, 6) == [4321, 5432, 6543]
    hybrid.forward_metadata = None
    hybrid.update_mamba_state_after_mtp_verify(
        last_correct_step_indices=torch.tensor([1]), req_pool_indices=rows
    )
    assert run(ForwardBatch.decode(rows), 7) == [7543]
