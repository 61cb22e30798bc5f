"""The module a model uses: which method runs, what it is bound to, what it loads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sconv import ForwardBatch, StateSpec, Stream
from sconv.discovery.load_check import bind
from sconv.discovery.observers import Observers
from sconv.engine.backend import Backend
from sconv.engine.nn import ShortConvolution
from sconv.engine.sharding import Part
from sconv.errors import MetadataError, SpecError
from sconv.hookspecs import Available, BackendInfo
from sconv.torch_backend.backend import TorchBackend

D, K = 3, 4
SPEC = StateSpec(
    num_layers=2,
    streams=[Stream("k", D), Stream("v", 2)],
    kernel_size=K,
    num_slots=4,
    max_requests=4,
    dtype=torch.float32,
    max_draft_tokens=3,
)
QKV = [Part(2), Part(2), Part(4)]


class Recorder:
    """A backend that keeps the arguments of its calls and answers with zeros."""

    def __init__(self, spec: StateSpec = SPEC) -> None:
        self.spec = spec
        self.calls: list[tuple[Tensor, Tensor, dict[str, Any]]] = []

    def short_conv(self, x: Tensor, weight: Tensor, **values: Any) -> Tensor:
        self.calls.append((x, weight, values))
        return torch.zeros_like(x)


def dense_backend() -> Backend:
    implementation = TorchBackend(spec=SPEC, device=torch.device("cpu"), pool=None)
    info = BackendInfo("dense", "cpu", (1, 0), "sconv.plugin:TorchBackend", lambda: Available(0))
    hooks, manager = bind(implementation, info)
    return Backend(
        info=info,
        spec=SPEC,
        device=torch.device("cpu"),
        implementation=implementation,
        hooks=hooks,
        observers=Observers(manager),
    )


def module(**values: Any) -> ShortConvolution:
    return ShortConvolution(
        values.pop("hidden_size", D), K, layer_id=1, stream=values.pop("stream", "k"), **values
    )


ROWS = torch.tensor([1])
ONE = torch.tensor([1])
BATCHES: dict[str, Callable[[], ForwardBatch]] = {
    "decode": lambda: ForwardBatch.decode(ROWS),
    "extend": lambda: ForwardBatch.extend(ROWS, ONE, ONE),
    "mixed": lambda: ForwardBatch.mixed(ROWS, ONE, ONE),
    "target_verify": lambda: ForwardBatch.target_verify(ROWS, draft_token_num=1),
    "draft_extend": lambda: ForwardBatch.draft_extend(ROWS, ONE, 1, ONE),
    "idle": lambda: ForwardBatch.idle(1),
}


def test_the_parameters_have_the_checkpoints_layout() -> None:
    conv = module(bias=True, dtype=torch.bfloat16)
    assert {name: tuple(value.shape) for name, value in conv.state_dict().items()} == {
        "weight": (D, 1, K),
        "bias": (D,),
    }
    assert all(value.dtype == torch.bfloat16 for value in conv.parameters())
    assert not any(value.requires_grad for value in conv.parameters())
    assert module().bias is None
    assert "stream='k'" in repr(conv)


def test_new_parameters_are_finite_and_small() -> None:
    conv = module(bias=True)
    for value in conv.parameters():
        assert value.abs().max() <= 0.5
        assert value.any()


@pytest.mark.parametrize("mode", list(BATCHES))
def test_decode_and_the_other_modes_have_a_method_each(mode: str) -> None:
    class Custom(ShortConvolution):
        def _apply_decode_sconv_kernel(self, hidden_states: Tensor, forward_batch: Any) -> Tensor:
            return hidden_states + 1

        def _apply_causal_sconv_kernel(self, hidden_states: Tensor, forward_batch: Any) -> Tensor:
            return hidden_states + 2

    conv = Custom(D, K, layer_id=1, stream="k")
    y = conv(torch.zeros(1, D), BATCHES[mode]())
    assert y.tolist() == [[1.0 if mode == "decode" else 2.0] * D]


@pytest.mark.parametrize("mode", list(BATCHES))
def test_by_default_the_backend_gets_everything(mode: str) -> None:
    backend = Recorder()
    conv = module(backend=backend, bias=True, activation="silu", use_residual=False)
    batch, x = BATCHES[mode](), torch.ones(1, D)
    conv(x, batch)
    ((got_x, got_weight, values),) = backend.calls
    assert got_x is x
    assert got_weight is conv.weight
    assert values == {
        "layer_id": 1,
        "stream": "k",
        "forward_batch": batch,
        "bias": conv.bias,
        "activation": "silu",
        "residual": False,
    }


def test_kern_15_a_call_leaves_the_module_as_it_was() -> None:
    """A call in one mode must not decide how the next one runs."""
    backend = Recorder()
    conv = module(backend=backend)
    before = dict(vars(conv))
    for mode in ("extend", "decode", "idle", "extend"):
        conv(torch.ones(1, D), BATCHES[mode]())
        assert vars(conv) == before
    assert conv.backend is backend
    assert len(backend.calls) == 4


def test_prefill_and_decode_on_a_real_backend() -> None:
    """LEN-11: prompt 1, 2, 3, 4, then 5 reads 5, 4, 3, 2; channel c gets the tokens plus c."""
    backend = dense_backend()
    backend.pool.assign([1], backend.pool.alloc(1))
    conv = module(use_residual=False)
    conv.bind(backend)
    conv.weight_loader(conv.weight, torch.tensor([[1.0, 10.0, 100.0, 1000.0]]).expand(D, K))

    def run(batch: ForwardBatch, *tokens: float) -> list[list[float]]:
        backend.init_forward_metadata(batch)
        x = torch.tensor(tokens, dtype=torch.float32)[:, None] + torch.arange(D)
        return conv(x, batch).T.tolist()

    prompt = ForwardBatch.extend(ROWS, torch.tensor([4]), torch.tensor([0]))
    assert run(prompt, 1, 2, 3, 4)[0] == [1000, 2100, 3210, 4321]
    assert run(ForwardBatch.decode(ROWS), 5) == [[5432], [6543], [7654]]
    assert backend.pool.conv(1, "k")[1, :, 0].tolist() == [3, 4, 5]


def test_a_module_without_a_backend_says_what_to_call() -> None:
    with pytest.raises(MetadataError, match=r"layer 1, stream 'k' .* bind\(backend\)"):
        module()(torch.ones(1, D), BATCHES["decode"]())


def test_bind_refuses_another_width_with_both_numbers() -> None:
    conv = module(stream="v")
    with pytest.raises(SpecError, match=r"has 3 channels, and stream 'v' of layer 1 has 2"):
        conv.bind(Recorder())
    assert conv.backend is None
    with pytest.raises(SpecError, match=r"has 3 channels"):
        module(stream="v", backend=Recorder())


def test_bind_refuses_another_kernel_and_unknown_layers_and_streams() -> None:
    with pytest.raises(SpecError, match=r"kernel_size=3, .* for 4"):
        ShortConvolution(D, 3, layer_id=1, stream="k").bind(Recorder())
    with pytest.raises(SpecError, match="layer_id=2"):
        ShortConvolution(D, K, layer_id=2, stream="k").bind(Recorder())
    with pytest.raises(SpecError, match="stream='q'"):
        module(stream="q").bind(Recorder())


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
def test_activations_of_the_contract_are_accepted(activation: str | None) -> None:
    assert module(activation=activation).activation == activation


@pytest.mark.parametrize("activation", ["relu", "SiLU", "", False])
def test_other_activations_are_refused_at_construction(activation: Any) -> None:
    with pytest.raises(ValueError, match=f"activation={activation!r}"):
        module(activation=activation)


@pytest.mark.parametrize(("tp_rank", "tp_size"), [(2, 2), (-1, 2), (0, 0)])
def test_ranks_that_do_not_exist_are_refused(tp_rank: int, tp_size: int) -> None:
    with pytest.raises(SpecError, match=f"tp_rank={tp_rank}"):
        module(tp_rank=tp_rank, tp_size=tp_size)


def numbered(channels: int) -> Tensor:
    """``[channels, 1, K]`` where channel c holds 10 c to 10 c + K - 1."""
    return torch.arange(channels)[:, None, None] * 10.0 + torch.arange(K)


@pytest.mark.parametrize("flat", [False, True])
def test_a_full_checkpoint_weight_is_narrowed_to_the_rank(flat: bool) -> None:
    full = numbered(12)
    for rank in range(4):
        conv = module(bias=True, tp_rank=rank, tp_size=4)
        conv.weight_loader(conv.weight, full.squeeze(1) if flat else full)
        assert torch.equal(conv.weight, full[3 * rank : 3 * rank + 3])
        conv.weight_loader(conv.bias, torch.arange(12.0))
        assert conv.bias.tolist() == [3 * rank, 3 * rank + 1, 3 * rank + 2]


def test_a_weight_of_this_rank_is_copied_as_it_is() -> None:
    conv = module(tp_rank=3, tp_size=4, dtype=torch.bfloat16)
    address = conv.weight.data_ptr()
    conv.weight_loader(conv.weight, numbered(D))
    assert torch.equal(conv.weight.float(), numbered(D))
    assert conv.weight.data_ptr() == address


def test_engines_find_the_loader_on_the_parameter() -> None:
    conv: Any = module(bias=True, tp_rank=1, tp_size=2)
    for name, parameter in conv.named_parameters():
        full = numbered(6) if name == "weight" else torch.arange(6.0)
        parameter.weight_loader(parameter, full)
        assert torch.equal(parameter, full[3:])


def test_layout_14_a_rank_among_several_must_be_named() -> None:
    """Taken for rank 0, every rank would load rank 0's channels."""
    with pytest.raises(SpecError, match=r"tp_rank is missing: with tp_size=2"):
        module(tp_size=2)
    assert module().tp_rank == 0
    for rank in (0, 1):
        conv = module(tp_rank=rank, tp_size=2)
        conv.weight_loader(conv.weight, numbered(2 * D))
        assert torch.equal(conv.weight, numbered(2 * D)[rank * D : (rank + 1) * D])


@pytest.mark.parametrize(
    "dtype",
    [torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn],
    ids=str,
)
def test_layout_16_a_code_without_its_scale_is_not_a_weight(dtype: torch.dtype) -> None:
    conv = module(bias=True)
    before = conv.weight.clone()
    with pytest.raises(SpecError, match=rf"it holds {dtype}, .* dequantise it"):
        conv.weight_loader(conv.weight, torch.ones(D, 1, K).to(dtype))
    assert torch.equal(conv.weight, before)
    for loadable in (torch.float64, torch.float16, torch.bfloat16):
        conv.weight_loader(conv.weight, numbered(D).to(loadable))
        assert torch.equal(conv.weight, numbered(D))


def test_layout_16_a_weight_lies_in_plain_memory() -> None:
    conv = module()
    for weight, fault in (
        (numbered(D).to_sparse(), "it has the layout sparse_coo"),
        (torch.empty(D, 1, K, device="meta"), "it is on meta, without values"),
        ([1.0], "the loaded weight is a list"),
    ):
        with pytest.raises(SpecError, match=fault):
            conv.weight_loader(conv.weight, weight)  # type: ignore[arg-type]


def test_layout_5_side_by_side_projections_are_narrowed_one_by_one() -> None:
    conv = module(hidden_size=4, tp_rank=1, tp_size=2, parts=QKV, bias=True)
    conv.weight_loader(conv.weight, numbered(8))
    assert conv.weight[:, 0, 0].tolist() == [10, 30, 60, 70]
    conv.weight_loader(conv.bias, torch.arange(8.0))
    assert conv.bias.tolist() == [1, 3, 6, 7]


def test_layout_6_one_group_is_loaded_by_every_rank() -> None:
    parts = [Part(4), Part(2, 1)]
    for rank, expected in ((0, [0, 10, 40, 50]), (1, [20, 30, 40, 50])):
        conv = module(hidden_size=4, tp_rank=rank, tp_size=2, parts=parts)
        conv.weight_loader(conv.weight, numbered(6))
        assert conv.weight[:, 0, 0].tolist() == expected


def test_parts_that_give_a_rank_another_width_are_refused() -> None:
    with pytest.raises(SpecError, match=r"hidden_size=3, but the parts .* 2 ranks 4 channels"):
        module(tp_rank=0, tp_size=2, parts=QKV)
    with pytest.raises(SpecError, match=r"2 groups .* tp_size=4"):
        module(tp_rank=0, tp_size=4, parts=[Part(12, 2)])


@pytest.mark.parametrize(
    ("loaded", "parts"),
    [
        (torch.zeros(7, 1, K), None),
        (torch.zeros(2 * D, 1, K + 1), None),
        (torch.zeros(D, K, 1), None),
        (torch.zeros(D, 2, K), None),
        (torch.zeros(D), None),
        (torch.zeros(()), None),
        (torch.zeros(5, 1, K), [Part(4), Part(2)]),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_both_shapes_and_the_rank(
    loaded: Tensor, parts: list[Part] | None
) -> None:
    conv = module(tp_rank=1, tp_size=2, parts=parts)
    before = conv.weight.clone()
    with pytest.raises(SpecError) as caught:
        conv.weight_loader(conv.weight, loaded)
    message = str(caught.value)
    assert str(list(loaded.shape)) in message
    assert str([D, 1, K]) in message
    assert "rank 1 of 2" in message
    assert torch.equal(conv.weight, before)
