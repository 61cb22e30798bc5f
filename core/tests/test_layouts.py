"""The three layouts of verify windows restore the same bits; which one is kept, and what it costs.

Scratch is NaN before every step, so that a column which nobody wrote shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import sconv
from sconv import (
    Available,
    Backend,
    BackendInfo,
    BatchError,
    Capabilities,
    ContractError,
    ConvStatePool,
    ForwardBatch,
    ForwardMode,
    SpecError,
    StateSpec,
    Stream,
)
from sconv.discovery.load_check import bind
from sconv.discovery.observers import Observers
from sconv.state.windows import LAYOUTS, choose_layout, make_windows
from sconv.testing.digits import digit_inputs, digit_weight, fill_pool, read_window, run_digits
from sconv.testing.harness import Harness, assert_same_bits
from sconv.testing.poison import poison_
from sconv.testing.recording import record
from sconv.testing.steps import Step
from sconv.testing.strategies import live_slots, steps
from sconv.torch_backend.backend import TorchBackend

CPU = torch.device("cpu")
INFO = BackendInfo(
    "torch",
    "cpu",
    (1, 0),
    "nowhere:create",
    lambda: Available(1),
    Capabilities(window_layouts=TorchBackend.window_layouts, trees=True, rollback=True),
)
every_layout = pytest.mark.parametrize("layout", list(LAYOUTS))
every_axis = pytest.mark.parametrize("axis", ["time", "channel"])
#: Node 1 and node 2 are children of the root.
TREE = torch.tensor([[-1, 0, 0]], dtype=torch.int32)


def build(spec: StateSpec, pool: ConvStatePool | None = None) -> Backend:
    implementation = TorchBackend(spec=spec, device=CPU, pool=pool)
    hooks, manager = bind(implementation, INFO)
    return Backend(
        info=INFO,
        spec=spec,
        device=CPU,
        implementation=implementation,
        hooks=hooks,
        observers=Observers(manager),
    )


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def verify(backend: Backend, rows: list[int], tokens: list[int], **tree: Tensor) -> list[int]:
    per_row = len(tokens) // len(rows)
    batch = ForwardBatch.target_verify(ints(*rows), ints(*[3] * len(rows)), per_row, **tree)
    return run_digits(backend, batch, tokens)


def commit(backend: Backend, last: list[int], rows: list[int], **track: Tensor) -> None:
    backend.update_mamba_state_after_mtp_verify(ints(*last), req_pool_indices=ints(*rows), **track)


# What the windows hold.


@every_axis
def test_dedup_holds_each_column_once(spec_of: Callable[..., StateSpec], axis: str) -> None:
    backend = build(spec_of(window_axis=axis, window_layout="dedup", max_requests=1))
    fill_pool(backend.pool, {5: [1, 2, 3]}, {1: 5})
    poison_(backend.pool.windows.layers[0])
    batch = ForwardBatch.target_verify(ints(1), ints(3), 4)
    backend.init_forward_metadata(batch)
    x = torch.tensor([[10.0], [11.0], [12.0], [13.0]])
    backend.short_conv(x, digit_weight(), layer_id=0, stream="a", forward_batch=batch)
    windows = backend.pool.windows
    assert windows.layers[0].flatten().tolist() == [2, 3, 10, 11, 12, 13]
    assert windows.read(0)[0].flatten(1).tolist() == [
        [2, 3, 10],
        [3, 10, 11],
        [10, 11, 12],
        [11, 12, 13],
    ]


# What they cost.


@every_layout
def test_the_pool_says_which_layout_and_how_many_bytes(
    spec_of: Callable[..., StateSpec], layout: str
) -> None:
    backend = build(spec_of(window_layout=layout))
    assert backend.pool.window_layout == layout
    before = backend.pool.nbytes_by_part
    assert before["verify_windows"] == 6 * LAYOUTS[layout].row_nbytes(backend.spec)
    backend.init_graph_state(16, 64)
    after = backend.pool.nbytes_by_part
    assert after["verify_windows"] == 16 * LAYOUTS[layout].row_nbytes(backend.spec)
    assert after["state"] == before["state"]


@every_layout
def test_without_speculation_a_layout_costs_nothing(
    spec_of: Callable[..., StateSpec], layout: str
) -> None:
    backend = build(spec_of(window_layout=layout, max_draft_tokens=1))
    assert (backend.pool.window_layout, backend.pool.windows.nbytes) == (layout, 0)
    assert LAYOUTS[layout].row_nbytes(backend.spec) == 0


# Which one is kept.


def test_auto_is_the_first_that_can_hold_the_drafts(spec_of: Callable[..., StateSpec]) -> None:
    chains, trees = spec_of(), spec_of(draft_topk=2)
    assert choose_layout(chains, ("dedup", "dense")) == "dedup"
    assert choose_layout(trees, ("dedup", "dense")) == "dense"
    assert choose_layout(trees, ("inputs", "dense")) == "inputs"
    assert choose_layout(spec_of(window_layout="dense"), ("inputs", "dense")) == "dense"
    # A backend without speculation has none, and needs none.
    assert choose_layout(spec_of(max_draft_tokens=1), ()) == "dense"


def test_layout_2_dedup_is_refused_for_trees(spec_of: Callable[..., StateSpec]) -> None:
    message = r"npu does not support draft_topk=2 with .*'dedup'.*two children .* one\s+column"
    with pytest.raises(SpecError, match=message):
        choose_layout(spec_of(window_layout="dedup", draft_topk=2), ("dedup",), backend="npu")
    with pytest.raises(SpecError, match=r"window_layout='auto' \(it keeps dedup\)"):
        choose_layout(spec_of(draft_topk=2), ("dedup",))
    with pytest.raises(SpecError, match="does not support draft_topk=2"):
        build(spec_of(window_layout="dedup", draft_topk=2))


def test_layout_2_a_tree_step_is_refused_where_only_chains_are_kept(
    spec_of: Callable[..., StateSpec],
) -> None:
    backend = build(spec_of(window_layout="dedup"))
    fill_pool(backend.pool, {5: [1, 2, 3]}, {2: 5})
    before = [tensor.clone() for tensor in (*backend.pool.layers, *backend.pool.windows.layers)]
    links = {"next_token": ints(1, -1, -1)[None], "next_sibling": ints(-1, 2, -1)[None]}
    for tree in ({"parents": TREE}, links):
        with pytest.raises(BatchError, match="'dedup' hold chains alone"):
            verify(backend, [2], [4, 5, 6], **tree)
    for was, now in zip(before, (*backend.pool.layers, *backend.pool.windows.layers), strict=True):
        assert_same_bits(now, was, "after a refused step")


@pytest.mark.parametrize("accepted", [-1, 0, 1, 2])
def test_layout_2_dense_and_dedup_commit_a_chain_alike(
    spec_of: Callable[..., StateSpec], accepted: int
) -> None:
    windows = []
    for layout in LAYOUTS:
        backend = build(spec_of(window_layout=layout))
        fill_pool(backend.pool, {5: [1, 2, 3]}, {2: 5})
        assert verify(backend, [2], [4, 5, 6]) == [4321, 5432, 6543]
        commit(backend, [accepted], [2])
        windows.append(read_window(backend.pool, 5))
    assert windows == [list(range(1, 7))[accepted + 1 :][:3]] * 3


@pytest.mark.parametrize("layout", ["dense", "inputs"])
def test_spec_6_the_committed_window_of_a_tree_is_the_path(
    spec_of: Callable[..., StateSpec], layout: str
) -> None:
    for node, window in ((0, [2, 3, 4]), (1, [3, 4, 5]), (2, [3, 4, 6])):
        backend = build(spec_of(window_layout=layout, draft_topk=2))
        fill_pool(backend.pool, {5: [1, 2, 3]}, {2: 5})
        assert verify(backend, [2], [4, 5, 6], parents=TREE) == [4321, 5432, 6432]
        commit(backend, [node], [2])
        assert read_window(backend.pool, 5) == window


def test_a_layout_that_does_not_exist(spec_of: Callable[..., StateSpec]) -> None:
    expected = "window_layout='sparse': expected 'auto', 'dense', 'dedup', 'inputs'"
    with pytest.raises(SpecError, match=expected):
        spec_of(window_layout="sparse")
    with pytest.raises(SpecError, match="no window layout 'sparse': expected dense, dedup, inputs"):
        make_windows("sparse", spec_of(), CPU)


def test_a_layout_that_the_backend_does_not_keep(
    spec_of: Callable[..., StateSpec], serve: Callable[..., None]
) -> None:
    serve(TorchBackend, ("dense", "inputs"))
    assert sconv.load_backend(spec=spec_of()).pool.window_layout == "dense"
    asked = spec_of(window_layout="inputs")
    assert sconv.load_backend(spec=asked).pool.window_layout == "inputs"
    message = r"backend 'mine' .*window_layout='dedup' \(it keeps dense, inputs\)"
    with pytest.raises(SpecError, match=message):
        sconv.load_backend(spec=spec_of(window_layout="dedup"))


def test_a_backend_that_keeps_another_layout_than_it_declares(
    spec_of: Callable[..., StateSpec], serve: Callable[..., None]
) -> None:
    serve(TorchBackend, ("inputs", "dense"))
    with pytest.raises(ContractError, match=r"gets 'inputs', and built 'dense'.*window_layouts"):
        sconv.load_backend(spec=spec_of())
    # Without speculation nothing is kept in any layout.
    sconv.load_backend(spec=spec_of(max_draft_tokens=1))


class _Inputs(TorchBackend):
    window_layouts = ("inputs", "dense")


def test_an_adopted_pool_gets_the_backends_windows_or_keeps_the_engines(
    spec_of: Callable[..., StateSpec],
    serve: Callable[..., None],
) -> None:
    serve(_Inputs, _Inputs.window_layouts)
    spec, state = spec_of(), torch.zeros(1, 10, 3, 1)
    engines = [torch.zeros(6, 4, 3, 1)]
    pool = ConvStatePool.adopt(spec, state)
    assert not pool.has_windows
    assert sconv.load_backend(spec=spec, pool=pool).pool is pool
    assert (pool.window_layout, pool.has_windows) == ("inputs", True)
    pool = ConvStatePool.adopt(spec, state, windows=engines)
    assert sconv.load_backend(spec=spec, pool=pool).pool.window_layout == "dense"
    assert pool.windows.layers[0] is engines[0]
    with pytest.raises(SpecError, match="dense, and the spec asks for window_layout='inputs'"):
        ConvStatePool.adopt(spec_of(window_layout="inputs"), state, windows=engines)
    serve(_Inputs, ("inputs",))
    pool = ConvStatePool.adopt(spec, state, windows=engines)
    with pytest.raises(SpecError, match=r"does not keep the dense .* \(it keeps inputs\)"):
        sconv.load_backend(spec=spec, pool=pool)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Install one backend: a class, and the layouts that its plugin declares."""
    monkeypatch.delenv("SCONV_BACKEND", raising=False)

    def install(kind: type[TorchBackend], layouts: tuple[str, ...]) -> None:
        can = Capabilities(window_layouts=layouts, trees=True, rollback=True)
        state = Available(1)
        info = BackendInfo(
            "mine", "cpu", (1, 0), "here:create", lambda: state, can, availability=state
        )
        monkeypatch.setattr("sconv.discovery.selection.list_backends", lambda ask: [info])
        monkeypatch.setattr("sconv.engine.loading.resolve_factory", lambda info: kind)

    return install


# The commit.


@st.composite
def verified(draw: st.DrawFn, layout: str) -> tuple[Harness, Step]:
    """A backend of a layout with dirty scratch, and a verify step for it."""
    spec = StateSpec(
        num_layers=2,
        streams=[Stream("a", draw(st.sampled_from((1, 3, 64)))), Stream("b", 2)],
        kernel_size=draw(st.integers(2, 8)),
        num_slots=12,
        max_requests=9,
        dtype=draw(st.sampled_from((torch.bfloat16, torch.float32))),
        window_axis=draw(st.sampled_from(("time", "channel"))),
        max_draft_tokens=draw(st.integers(2, 8)),
        draft_topk=1 if layout == "dedup" else 2,
        window_layout=layout,
    )
    harness = Harness(build(spec), seed=draw(st.integers(0, 2**16)), live=draw(live_slots()))
    step = draw(steps(spec, harness.live, ForwardMode.TARGET_VERIFY))
    if layout == "dedup":
        step = Step(**{**vars_of(step), "parents": None})
    return harness, step


def vars_of(step: Step) -> dict[str, Any]:
    return {name: getattr(step, name) for name in Step.__dataclass_fields__}


@every_layout
@settings(max_examples=40, derandomize=True, deadline=None, phases=[Phase.generate])
@given(data=st.data())
def test_a_commit_equals_the_oracle_in_every_layout(layout: str, data: st.DataObject) -> None:
    harness, step = data.draw(verified(layout))
    request_rows = harness.request_rows(step)
    at_verify, inputs = harness.state(), harness.inputs(step.num_tokens)
    batch = step.batch(request_rows, harness.slot_id)
    harness.backend.init_forward_metadata(batch)
    outputs = harness.convolve(batch, inputs)
    harness.check(step, inputs, at_verify, outputs)
    if data.draw(st.booleans()):
        harness.backend.init_forward_metadata(ForwardBatch.idle(1))
    # Nodes of the memory's, of the step's, and of nobody's.
    node = st.integers(-2, harness.backend.spec.max_draft_tokens + 1)
    each = st.lists(node, min_size=step.rows, max_size=step.rows)
    free = [slot for slot in range(1, 13) if slot not in harness.live]
    targets = None
    if data.draw(st.booleans()):
        targets = [*data.draw(st.permutations(free)), *[-1] * step.rows][: step.rows]
    harness.commit(
        step,
        inputs,
        at_verify,
        data.draw(each),
        track_slots=targets,
        track_steps=None if targets is None else data.draw(each),
        request_rows=request_rows,
    )


@every_layout
def test_what_names_no_node_touches_no_memory(
    spec_of: Callable[..., StateSpec], layout: str
) -> None:
    backend = build(spec_of(window_layout=layout))
    fill_pool(backend.pool, {slot: [1, 2, 3] for slot in (1, 2, 3, 4)}, {1: 3, 2: 1, 3: 4, 4: 2})
    verify(backend, [1, 2, 6, 4], [4, 5, 6, 7] * 3 + [5, 6, 7, 8])
    before = backend.pool.layers[0].clone()
    # Rows by slot: 3 keeps node 2, 1 none, the third has no slot, 2 a node out of range.
    commit(backend, [2, -1, 1, 9], [1, 2, 6, 4])
    assert read_window(backend.pool, 3) == [4, 5, 6]
    others = [slot for slot in range(10) if slot != 3]
    assert_same_bits(backend.pool.layers[0][others], before[others], "other slots")


@every_layout
def test_a_node_past_a_shorter_step_is_not_kept(
    spec_of: Callable[..., StateSpec], layout: str
) -> None:
    backend = build(spec_of(window_layout=layout))
    fill_pool(backend.pool, {1: [1, 2, 3], 2: [1, 2, 3]}, {1: 1, 2: 2})
    verify(backend, [1, 2], [4, 5, 6, 7, 4, 5, 6, 7])
    verify(backend, [1, 2], [8, 9, 8, 9])
    # Node 2 is there from the step before, in the memory of some layouts.
    commit(backend, [2, 1], [1, 2])
    assert [read_window(backend.pool, slot) for slot in (1, 2)] == [[1, 2, 3], [3, 8, 9]]


@every_layout
def test_pad_7_a_padded_row_has_scratch_of_its_own(
    spec_of: Callable[..., StateSpec], layout: str
) -> None:
    backend = build(spec_of(window_layout=layout, max_requests=3))
    backend.init_graph_state(8, 32)
    fill_pool(
        backend.pool, {0: [0, 0, 0], 1: [1, 2, 3], 2: [2, 3, 4], 3: [3, 4, 5]}, {1: 1, 2: 2, 3: 3}
    )
    batch = ForwardBatch.target_verify(ints(1, 2, 3, 0), ints(3, 3, 3, 0), 2)
    backend.init_forward_metadata_out_graph(batch)
    backend.init_forward_metadata_in_graph(batch)
    run_digits(backend, batch, [4, 5, 5, 6, 6, 7, 9, 9], prepare=False)
    commit(backend, [0, 1, 0, -1], [1, 2, 3, 0])
    windows = [read_window(backend.pool, slot) for slot in (1, 2, 3)]
    assert windows == [[2, 3, 4], [4, 5, 6], [4, 5, 6]]


@every_layout
def test_spec_12_other_forwards_may_run_before_the_commit(
    spec_of: Callable[..., StateSpec], layout: str
) -> None:
    backend = build(spec_of(window_layout=layout))
    fill_pool(backend.pool, {slot: [1, 2, 3] for slot in (1, 2, 3, 4)}, {1: 1, 2: 2, 3: 3, 4: 4})
    verify(backend, [1, 2], [4, 5, 6, 4, 5, 6])
    run_digits(backend, ForwardBatch.decode(ints(3, 4)), [7, 8])
    run_digits(backend, ForwardBatch.extend(ints(4), ints(2), ints(4)), [9, 9])
    commit(backend, [1, 2], [1, 2])
    windows = [read_window(backend.pool, slot) for slot in (1, 2, 3, 4)]
    assert windows == [[3, 4, 5], [4, 5, 6], [2, 3, 7], [8, 9, 9]]


@every_layout
def test_a_request_that_leaves_in_between_is_skipped(
    spec_of: Callable[..., StateSpec], layout: str
) -> None:
    backend = build(spec_of(window_layout=layout))
    pool = backend.pool
    slots = pool.alloc(2).tolist()
    fill_pool(pool, {slot: [1, 2, 3] for slot in slots}, {1: slots[0], 2: slots[1]})
    verify(backend, [1, 2], [4, 5, 6, 4, 5, 6])
    pool.free(slots[0])
    before = pool.layers[0][slots[0]].clone()
    commit(backend, [2, 2], [1, 2])
    assert_same_bits(pool.layers[0][slots[0]], before, "the freed slot")
    assert read_window(pool, slots[1]) == [4, 5, 6]


@every_layout
def test_a_row_that_moved_on_harms_nobody_else(
    spec_of: Callable[..., StateSpec], layout: str
) -> None:
    backend = build(spec_of(window_layout=layout))
    fill_pool(backend.pool, {slot: [1, 2, 3] for slot in (1, 2, 3)}, {1: 1, 2: 2, 3: 3})
    verify(backend, [1, 2], [4, 5, 6, 4, 5, 6])
    run_digits(backend, ForwardBatch.decode(ints(1)), [9])
    commit(backend, [0, 0], [1, 2])
    # With inputs, which read the window that moved, row 1's is undefined by then.
    if layout != "inputs":
        assert read_window(backend.pool, 1) == [2, 3, 4]
    assert [read_window(backend.pool, slot) for slot in (2, 3)] == [[2, 3, 4], [1, 2, 3]]


@every_layout
def test_a_snapshot_is_of_the_verified_row_and_not_of_the_committed_one(
    spec_of: Callable[..., StateSpec], layout: str
) -> None:
    backend = build(spec_of(window_layout=layout))
    fill_pool(backend.pool, {1: [1, 2, 3], 2: [1, 2, 3]}, {1: 1, 2: 2})
    verify(backend, [1, 2], [4, 5, 6, 7, 4, 5, 6, 7])
    commit(
        backend,
        [3, 2],
        [1, 2],
        mamba_track_indices=ints(8, 9),
        mamba_steps_to_track=ints(0, -1),
    )
    assert [read_window(backend.pool, slot) for slot in (1, 2, 8)] == [
        [5, 6, 7],
        [4, 5, 6],
        [2, 3, 4],
    ]
    assert bool(backend.pool.layers[0][9].isnan().all())


@every_layout
@every_axis
def test_verify_and_commit_can_be_recorded(
    spec_of: Callable[..., StateSpec], layout: str, axis: str
) -> None:
    backend = build(spec_of(window_layout=layout, window_axis=axis, draft_topk=1))
    backend.init_graph_state(2, 8)
    names, lengths, last = ints(1, 2), ints(3, 3), ints(0, 0)
    x = torch.zeros(8, 1)
    batch = ForwardBatch.target_verify(names, lengths, 4)
    fill_pool(backend.pool, {1: [1, 2, 3], 2: [2, 3, 4], 6: [5, 6, 7]}, {1: 1, 2: 2, 3: 6})

    def step() -> Tensor:
        backend.init_forward_metadata_in_graph(batch)
        return backend.short_conv(
            x, digit_weight(), layer_id=0, stream="a", forward_batch=batch, residual=False
        )

    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    verified = record(step)
    kept = record(lambda: backend.update_mamba_state_after_mtp_verify(last, req_pool_indices=names))
    fill_pool(backend.pool, {1: [1, 2, 3], 2: [2, 3, 4], 6: [5, 6, 7]}, {1: 1, 2: 2, 3: 6})
    poison_(backend.pool.windows.layers[0])
    # Another request, other tokens, other nodes, at the recorded addresses.
    names.copy_(ints(3, 1))
    x.copy_(digit_inputs([8, 9, 1, 2, 4, 5, 6, 7]))
    last.copy_(ints(2, 1))
    verified.replay()
    kept.replay()
    assert verified.result[:, 0].tolist() == [8765, 9876, 1987, 2198, 4321, 5432, 6543, 7654]
    windows = [read_window(backend.pool, slot) for slot in (6, 1, 2)]
    assert windows == [[8, 9, 1], [3, 4, 5], [2, 3, 4]]
