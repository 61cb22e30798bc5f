"""A convolution or a group with a bad argument is refused, and nothing of it has run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sconv import Backend, BatchError, ForwardBatch, MetadataError, SpecError, load_backend
from sconv.testing.digits import digit_inputs, digit_spec, digit_weight

#: The channels of a stream of the fixture ``backend``.
DIM = 5


def calls() -> dict[str, tuple[dict[str, Any], type[Exception], str]]:
    """Calls of a decode step of two rows, each with one bad argument."""
    wide = torch.zeros(2, 2 * DIM)
    return {
        "too few tokens": (
            {"x": torch.zeros(1, DIM)},
            BatchError,
            r"x has shape \[1, 5\]: expected packed \[T, D\] = \[2, 5\] for stream 'a' of layer 0",
        ),
        "other channels": ({"x": torch.zeros(2, DIM + 1)}, BatchError, r"x has shape \[2, 6\]"),
        "three dimensions": (
            {"x": torch.zeros(2, 1, DIM)},
            BatchError,
            r"x has shape \[2, 1, 5\]: expected packed",
        ),
        "int activations": (
            {"x": torch.zeros(2, DIM, dtype=torch.int64)},
            BatchError,
            r"x is torch.int64: expected bfloat16, float16 or float32",
        ),
        "double activations": (
            {"x": torch.zeros(2, DIM, dtype=torch.float64)},
            BatchError,
            r"x is torch.float64",
        ),
        "x on another device": (
            {"x": torch.zeros(2, DIM, device="meta")},
            BatchError,
            r"x is on meta, the state is on cpu",
        ),
        "channels that are strided": (
            {"x": wide[:, ::2]},
            BatchError,
            r"x has strides \[10, 2\]: its channels must be contiguous",
        ),
        "a narrow weight": (
            {"weight": torch.zeros(DIM, 3)},
            BatchError,
            r"weight has shape \[5, 3\]: expected \[D, K\].*D=5, K=4",
        ),
        "a transposed weight": (
            {"weight": torch.zeros(4, DIM)},
            BatchError,
            r"weight has shape \[4, 5\]",
        ),
        "a dense weight": (
            {"weight": torch.zeros(DIM, DIM, 4)},
            BatchError,
            r"weight has shape \[5, 5, 4\]",
        ),
        "a double weight": (
            {"weight": torch.zeros(DIM, 4, dtype=torch.float64)},
            BatchError,
            r"weight is torch.float64",
        ),
        "a weight on another device": (
            {"weight": torch.zeros(DIM, 4, device="meta")},
            BatchError,
            r"weight is on meta",
        ),
        "a wide bias": (
            {"bias": torch.zeros(DIM + 1)},
            BatchError,
            r"bias has shape \[6\]: expected \[5\]",
        ),
        "a bias on another device": (
            {"bias": torch.zeros(DIM, device="meta")},
            BatchError,
            r"bias is on meta",
        ),
        "another activation": (
            {"activation": "relu"},
            BatchError,
            r"activation='relu': expected None, 'silu' or 'swish'",
        ),
        "no x": ({"x": None}, BatchError, r"x is None: expected a tensor \[T, D\]"),
        "x in a list": ({"x": [[0.0]]}, BatchError, r"x is a list: expected a tensor"),
        "x of numpy": (
            {"x": torch.zeros(2, DIM).numpy()},
            BatchError,
            r"x is a ndarray: expected a tensor",
        ),
        "no weight": ({"weight": None}, BatchError, r"weight is None: expected a tensor \[D, K\]"),
        "a weight in a list": ({"weight": [1.0]}, BatchError, r"weight is a list: expected"),
        "a weight of numpy": (
            {"weight": torch.zeros(DIM, 4).numpy()},
            BatchError,
            r"weight is a ndarray: expected a tensor",
        ),
        "a bias in a list": (
            {"bias": [0.0] * DIM},
            BatchError,
            r"bias is a list: expected a tensor \[D\], or None",
        ),
        "no batch": (
            {"forward_batch": None},
            BatchError,
            r"forward_batch is None: expected a sconv.ForwardBatch",
        ),
        "an engine's batch": (
            {"forward_batch": {"mode": "decode"}},
            BatchError,
            r"forward_batch is a dict: expected a sconv.ForwardBatch",
        ),
        "a residual that is no bool": (
            {"residual": 1},
            BatchError,
            r"residual=1: expected True or False",
        ),
        "a layer in a string": ({"layer_id": "0"}, SpecError, r"layer_id='0': expected an int"),
        "a layer that is a bool": ({"layer_id": True}, SpecError, r"layer_id=True: expected an"),
        "a layer in a tensor": (
            {"layer_id": torch.tensor([0])},
            SpecError,
            r"layer_id=tensor\(\[0\]\): exp",
        ),
        "no layer": ({"layer_id": None}, SpecError, r"layer_id=None: expected an int, 0 to 1"),
        "a stream by number": ({"stream": 1}, SpecError, r"stream=1: layer 0 has 'a', 'b'"),
        "a layer that does not exist": (
            {"layer_id": 2},
            SpecError,
            r"layer_id=2: this backend has layers 0 to 1",
        ),
        "a negative layer": ({"layer_id": -1}, SpecError, r"layer_id=-1"),
        "a stream that does not exist": (
            {"stream": "c"},
            SpecError,
            r"stream='c': layer 0 has 'a', 'b'",
        ),
        "another batch": (
            {"forward_batch": ForwardBatch.decode(torch.tensor([1]))},
            MetadataError,
            r"the prepared step is decode with 2 rows, this batch is decode with 1",
        ),
        "other rows": (
            {"forward_batch": ForwardBatch.decode(torch.tensor([4, 1]))},
            MetadataError,
            r"are decode with 2 rows each, and differ in their rows or lengths: prepare this",
        ),
        "other names of rows": (
            {"forward_batch": ForwardBatch.decode(slots=torch.tensor([1, 4]))},
            MetadataError,
            r"differ in their rows or lengths",
        ),
        "another mode": (
            {
                "forward_batch": ForwardBatch.extend(
                    torch.tensor([1, 4]), torch.tensor([1, 1]), torch.tensor([3, 3])
                )
            },
            MetadataError,
            r"the prepared step is decode with 2 rows, this batch is extend with 2",
        ),
    }


@pytest.mark.parametrize("case", calls())
@pytest.mark.parametrize("group", [False, True], ids=["one", "group"])
def test_a_convolution_that_is_refused(backend: Backend, case: str, group: bool) -> None:
    """In a group the bad one is the last: those before it must not have run."""
    changed, error, message = calls()[case]
    batch = ForwardBatch.decode(torch.tensor([1, 4]))
    backend.init_forward_metadata(batch)
    good: dict[str, Any] = {
        "x": torch.ones(2, DIM),
        "weight": digit_weight(DIM),
        "layer_id": 0,
        "stream": "a",
        "forward_batch": batch,
        "bias": None,
        "activation": None,
        "residual": True,
    }
    bad = {**good, **changed}

    def run_one() -> None:
        backend.short_conv(bad.pop("x"), bad.pop("weight"), **bad)

    def run_group() -> None:
        backend.short_conv_group(
            [good["x"], bad["x"]],
            [good["weight"], bad["weight"]],
            layer_id=bad["layer_id"],
            streams=["b" if bad["stream"] == "a" else "a", bad["stream"]],
            forward_batch=bad["forward_batch"],
            biases=[None, bad["bias"]],
            activation=bad["activation"],
            residual=bad["residual"],
        )

    with pytest.raises(error, match=message):
        (run_group if group else run_one)()


def test_doc_1_rows_and_lengths_are_compared_with_the_prepared_step(backend: Backend) -> None:
    rows, x, weight = torch.tensor([1, 4]), torch.ones(2, DIM), digit_weight(DIM)
    backend.init_forward_metadata(ForwardBatch.decode(rows))
    for other in (
        ForwardBatch.decode(rows.flip(0)),
        ForwardBatch.decode(slots=rows),
        ForwardBatch.decode(rows[:1]),
    ):
        with pytest.raises(MetadataError, match="the prepared step"):
            backend.short_conv(x, weight, layer_id=0, stream="a", forward_batch=other)


def test_a_group_that_does_not_match(backend: Backend) -> None:
    batch = ForwardBatch.decode(torch.tensor([1, 4]))
    backend.init_forward_metadata(batch)
    x, weight = torch.ones(2, DIM), digit_weight(DIM)
    with pytest.raises(BatchError, match="2 inputs, 1 weights, 2 streams, 2 biases"):
        backend.short_conv_group(
            [x, x], [weight], layer_id=0, streams=["a", "b"], forward_batch=batch
        )
    with pytest.raises(BatchError, match=r"\['a', 'a'\] names a stream twice"):
        backend.short_conv_group(
            [x, x], [weight, weight], layer_id=0, streams=["a", "a"], forward_batch=batch
        )


@pytest.mark.parametrize("missing", ["xs", "weights", "streams", "biases"])
def test_a_group_that_is_no_sequence(backend: Backend, missing: str) -> None:
    batch = ForwardBatch.decode(torch.tensor([1, 4]))
    backend.init_forward_metadata(batch)
    arguments: dict[str, Any] = {"xs": [], "weights": [], "streams": [], "biases": [], missing: 3}
    with pytest.raises(BatchError, match=rf"{missing}.* an int.*: expected sequences"):
        backend.short_conv_group(**arguments, layer_id=0, forward_batch=batch)


def test_a_convolution_before_any_step() -> None:
    fresh = load_backend("cpu", spec=digit_spec())
    batch = ForwardBatch.decode(slots=torch.tensor([1]))
    with pytest.raises(MetadataError, match="no step is prepared: call init_forward_metadata"):
        fresh.short_conv(
            digit_inputs([1]), digit_weight(), layer_id=0, stream="a", forward_batch=batch
        )
    with pytest.raises(MetadataError, match="no step is prepared"):
        fresh.conv_state_metadata(0, batch)
