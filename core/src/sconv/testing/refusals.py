"""Calls with one bad argument each, and everything that a refused call must leave as it was.

    @pytest.mark.parametrize("call", CALLS)
    def test_a_refused_call_has_changed_nothing(call):
        check_refusals(call, load)     # load(spec=, pool=) -> Backend

A stage is a backend in the middle of its work: requests are live, a verify step waits for its
commit, a decode step is prepared, static buffers are in use. The kinds of wrong are the same for
every argument of a sort, so that none is left out where a call gets an argument more.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

import torch
from torch import Tensor

from ..engine.backend import Backend
from ..errors import SconvError
from ..state.exported import ExportedState
from ..state.pool import ConvStatePool
from ..state.spec import StateSpec
from ..step.batch import ForwardBatch
from .digits import digit_inputs, digit_spec, digit_weight

__all__ = ["CALLS", "Stage", "assert_unchanged", "check_refusals"]

#: Characters that an error has at least which says more than that something is wrong.
_SHORTEST: Final = 20

_DIM = 5


class Load(Protocol):
    """What builds the backend that is tested."""

    def __call__(self, *, spec: StateSpec, pool: ConvStatePool | None) -> Backend:
        """Return a backend for a spec, on an engine's pool if there is one."""


class _RefusingFunctions(Tensor):
    """A subclass whose every function raises, attributes included."""

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise LookupError("this tensor takes part in nothing")


class _RefusingOperators(Tensor):
    """A subclass that looks like a tensor until an operator runs."""

    @classmethod
    def like(cls, good: Tensor) -> Any:
        """Return one of another tensor's shape, dtype and device."""
        return cls._make_wrapper_subclass(cls, good.shape, dtype=good.dtype, device=good.device)

    @classmethod
    def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:
        raise LookupError("this tensor takes part in nothing")


def _fake(good: Tensor) -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        return mode.from_tensor(good)


def _quantised(good: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(good, 0.1, 0, torch.qint8)


Kinds: TypeAlias = Mapping[str, Callable[[Any], Any]]

_OBJECTS: Kinds = {
    "a list": lambda good: [[1]],
    "text": lambda good: "1",
    "bytes": lambda good: b"\x01",
    "a dict": lambda good: {1: 1},
    "a set": lambda good: {1},
    "an int": lambda good: 1,
    "a float": lambda good: 1.5,
}
_MEMORY: Kinds = {
    "meta": lambda good: good.to("meta"),
    "fake": _fake,
    "sparse": lambda good: good.to_sparse(),
    "a raising function": lambda good: good.as_subclass(_RefusingFunctions),
    "a raising operator": _RefusingOperators.like,
    "complex": lambda good: good.to(torch.complex64),
    "one dimension more": lambda good: good[..., None, None],
    "no dimension": lambda good: good.flatten()[0],
    "a row more": lambda good: torch.cat([good, good[:1]]),
}
_FLOATS: Kinds = {
    **_OBJECTS,
    **_MEMORY,
    "mkldnn": lambda good: good.to_mkldnn(),
    "quantised": _quantised,
    "ints": lambda good: good.to(torch.int64),
    "bools": lambda good: good.to(torch.bool),
    "float64": lambda good: good.to(torch.float64),
}
_INDEXES: Kinds = {
    **_OBJECTS,
    **_MEMORY,
    "floats": lambda good: good.to(torch.float32),
    "bools": lambda good: good.to(torch.bool),
    "int16": lambda good: good.to(torch.int16),
}
_LARGE: Kinds = {
    "huge": lambda good: torch.full_like(good, 2**40),
    "negative": lambda good: torch.full_like(good, -(2**40)),
}
_COUNTS: Kinds = {
    "nothing": lambda good: None,
    "text": lambda good: "1",
    "bytes": lambda good: b"\x01",
    "a float": lambda good: 1.0,
    "a bool": lambda good: True,
    "a list": lambda good: [1],
    "a tensor": lambda good: torch.tensor(1, dtype=torch.int64, device="cpu"),
    "huge": lambda good: 2**40,
    "negative": lambda good: -1,
}
_SLOTS: Kinds = {
    "nothing": lambda good: None,
    "text": lambda good: "two",
    "bytes": lambda good: b"\x02",
    "a dict": lambda good: {2: 2},
    "a set": lambda good: {2, 3},
    "a float": lambda good: 2.0,
    "a bool": lambda good: True,
    "a list of bools": lambda good: [True],
    "a list of floats": lambda good: [2.0],
    "a list of lists": lambda good: [[2]],
    "huge": lambda good: 2**40,
    "a huge list": lambda good: [2**40],
    "none": lambda good: -1,
    "the dummy": lambda good: [0],
    "free": lambda good: [6],
    "floats": lambda good: torch.tensor([2.0], dtype=torch.float32, device="cpu"),
    "bools": lambda good: torch.tensor([True], dtype=torch.bool, device="cpu"),
    "two dimensions": lambda good: torch.tensor([[2]], dtype=torch.int64, device="cpu"),
    "meta": lambda good: torch.tensor([2], dtype=torch.int64, device="meta"),
    "fake": lambda good: _fake(torch.tensor([2], dtype=torch.int64, device="cpu")),
    "sparse": lambda good: torch.tensor([2], dtype=torch.int64, device="cpu").to_sparse(),
    "a raising function": lambda good: torch.tensor(
        [2], dtype=torch.int64, device="cpu"
    ).as_subclass(_RefusingFunctions),
    "a raising operator": lambda good: _RefusingOperators.like(
        torch.tensor([2], dtype=torch.int64, device="cpu")
    ),
}


@dataclass(frozen=True)
class Stage:
    """A backend in the middle of its work.

    Attributes:
        backend: Slots 1 to 3 are in use, request rows 4 and 1 have 2 and 3, row 2 has none.
        decode: The prepared step, of rows 4 and 1.
    """

    backend: Backend
    decode: ForwardBatch

    @classmethod
    def build(cls, load: Load) -> Stage:
        """Bring a backend to where all calls have something to lose."""
        spec = digit_spec(
            num_layers=2,
            streams=("a", "b"),
            dim=_DIM,
            num_slots=6,
            max_requests=4,
            max_draft_tokens=3,
            draft_topk=2,
            track_interval=4,
        )
        backend = load(spec=spec, pool=None)
        pool = backend.pool
        pool.alloc(4)
        pool.free(4)
        pool.assign([4, 1], [2, 3])
        for number, layer in enumerate(pool.layers):
            layer.copy_(
                torch.arange(layer.numel(), dtype=torch.int64, device="cpu").view(layer.shape)
                + number
            )
        backend.init_graph_state(4, 16)
        device = backend.device
        rows = torch.tensor([4, 1], dtype=torch.int64, device=device)
        verify = ForwardBatch.target_verify(
            rows, torch.tensor([3, 3], dtype=torch.int64, device=device), 2
        )
        backend.init_forward_metadata_out_graph(verify)
        backend.init_forward_metadata_in_graph(verify)
        for layer_id in (0, 1):
            for stream in ("a", "b"):
                backend.short_conv(
                    digit_inputs([4, 5, 7, 8], _DIM, device=device),
                    digit_weight(_DIM, device=device),
                    layer_id=layer_id,
                    stream=stream,
                    forward_batch=verify,
                )
        decode = ForwardBatch.decode(rows)
        backend.init_forward_metadata(decode)
        return cls(backend, decode)

    def everything(self) -> dict[str, Any]:
        """Return copies of all that a call could change."""
        pool, implementation = self.backend.pool, self.backend._impl
        found: dict[str, Any] = {"metadata": id(self.backend.forward_metadata)}
        slots = pool._slots
        if slots is not None:
            found |= {"free": (slots._unused, list(slots._freed)), "live": slots.live()}
        state = {"layers": pool.layers, "req_to_slot": pool.req_to_slot, "windows": pool.windows}
        state |= {"forward_metadata": self.backend.forward_metadata}
        state |= {"buffers": getattr(implementation, "_buffers", None)}
        for name, value in state.items():
            found |= {f"{name}{path}": tensor for path, tensor in _copies(value)}
        for name, value in vars(implementation).items():
            if isinstance(value, bool | int) or value is None:
                found[name] = value
        return found


def _copies(value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield "", value.detach().clone()
    elif isinstance(value, tuple | list):
        for number, each in enumerate(value):
            yield from ((f"[{number}]{path}", tensor) for path, tensor in _copies(each))
    elif isinstance(value, ForwardBatch):
        return
    elif is_dataclass(value):
        for each in fields(value):
            inner = _copies(getattr(value, each.name))
            yield from ((f".{each.name}{path}", tensor) for path, tensor in inner)
    elif hasattr(value, "__dict__") and not isinstance(value, StateSpec | type):
        for name, each in vars(value).items():
            if isinstance(each, Tensor | tuple | list):
                yield from ((f".{name}{path}", tensor) for path, tensor in _copies(each))


def assert_unchanged(before: Mapping[str, Any], after: Mapping[str, Any], where: str) -> None:
    """Compare what :meth:`Stage.everything` returned, tensors bit for bit."""
    assert before.keys() == after.keys(), where
    for name, old in before.items():
        new = after[name]
        if isinstance(old, Tensor):
            same = (old.shape, old.dtype) == (new.shape, new.dtype)
            same = same and torch.equal(old.view(torch.uint8), new.view(torch.uint8))
        else:
            same = old == new
        assert same, f"{where} changed {name}"


@dataclass(frozen=True)
class _Call:
    """A public call: its right arguments, how it is made, and what can be wrong."""

    arguments: Callable[[Stage], dict[str, Any]]
    run: Callable[[Stage, dict[str, Any]], object]
    bad: Mapping[str, Kinds]


def check_refusals(name: str, load: Load) -> None:
    """Make one public call with every kind of bad argument, on one stage.

    Args:
        name: One of :data:`CALLS`.
        load: Builds the backend.

    Raises:
        AssertionError: A call was not refused, or not by sconv's own error, or changed something;
            the message names the call, the argument and the kind.
    """
    call, stage = _CALLS[name], Stage.build(load)
    before = stage.everything()
    for argument, kinds in call.bad.items():
        for kind, spoil in kinds.items():
            where = f"{name}({argument}: {kind})"
            arguments = call.arguments(stage)
            arguments[argument] = spoil(arguments[argument])
            try:
                call.run(stage, arguments)
            except Exception as exc:
                if not _is_refusal(exc):
                    raise AssertionError(f"{where} raised {exc!r}") from exc
            else:
                raise AssertionError(f"{where} was not refused")
            assert_unchanged(before, stage.everything(), where)


def _is_refusal(error: Exception) -> bool:
    """Whether an error is sconv's own, or the one built-in that is documented."""
    if isinstance(error, SconvError):
        return len(str(error)) > _SHORTEST
    return isinstance(error, TypeError) and "req_pool_indices is missing" in str(error)


def _without(kinds: Kinds, *names: str) -> Kinds:
    return {name: kind for name, kind in kinds.items() if name not in names}


def _pool_call(method: str, **bad: Kinds) -> Callable[[Callable[[Stage], dict[str, Any]]], _Call]:
    def made(arguments: Callable[[Stage], dict[str, Any]]) -> _Call:
        return _Call(
            arguments,
            lambda stage, given: getattr(stage.backend.pool, method)(*given.values()),
            bad,
        )

    return made


def _ints(stage: Stage, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=stage.backend.device)


def _second(kind: Callable[[Any], Any], _: object) -> Callable[[Any], Any]:
    """Hand a kind on: the export that it spoils is made by the call."""
    return kind


def _exported(stage: Stage, spoil: Callable[[Any], Any] | None = None) -> ExportedState:
    good = stage.backend.pool.export([3])
    last = good[1] if spoil is None else spoil(good[1])
    return ExportedState(good.fingerprint, (good[0] + 1, last))


def _adopt(stage: Stage, given: dict[str, Any]) -> None:
    layers = given["layers"]
    if isinstance(layers, list):
        layers = [layers[0], given["layer"]]
    first = torch.zeros(4, 3, 3, 2 * _DIM, dtype=torch.float32, device=stage.backend.device)
    ConvStatePool.adopt(
        replace(stage.backend.spec, draft_topk=1),
        layers,
        windows=[first, given["windows"]],
        null_slots=given["null_slots"],
        virtual_to_physical=given["virtual_to_physical"],
    )


def _step(**good: Any) -> Callable[[Stage], dict[str, Any]]:
    def arguments(stage: Stage) -> dict[str, Any]:
        return {
            name: _ints(stage, *value) if isinstance(value, tuple) else value
            for name, value in good.items()
        }

    return arguments


def _prepare(
    hook: str, make: Callable[..., ForwardBatch]
) -> Callable[[Stage, dict[str, Any]], object]:
    return lambda stage, given: getattr(stage.backend, hook)(make(**given))


def _host_facts(kinds: Kinds) -> Kinds:
    """Leave out what only values give away."""
    if kinds.get("huge") is _LARGE["huge"]:
        return _without(kinds, *_LARGE)
    return kinds


_ROWS = {**_INDEXES, **_LARGE}
_HOOKS = {
    "eager": "init_forward_metadata",
    "out of graph": "init_forward_metadata_out_graph",
    # Recorded, so that no value can be read.
    "in graph": "init_forward_metadata_in_graph",
}

_STEPS: dict[str, tuple[Callable[..., ForwardBatch], dict[str, Any], dict[str, Kinds]]] = {
    "decode": (
        ForwardBatch.decode,
        {"req_pool_indices": (4, 1), "seq_lens": (3, 3), "mamba_track_indices": (1, -1)},
        {"req_pool_indices": _ROWS, "seq_lens": _ROWS, "mamba_track_indices": _ROWS},
    ),
    "decode by slots": (
        ForwardBatch.decode,
        {"slots": (2, 3)},
        {"slots": _without(_ROWS, "a row more")},
    ),
    "extend": (
        ForwardBatch.extend,
        {
            "req_pool_indices": (4, 1),
            "extend_seq_lens": (2, 1),
            "extend_prefix_lens": (3, 3),
            "num_tokens": 3,
            "mamba_track_indices": (1, -1),
            "mamba_track_seqlens": (4, -1),
        },
        {
            "req_pool_indices": _ROWS,
            "extend_seq_lens": _ROWS,
            "extend_prefix_lens": _ROWS,
            "num_tokens": _without(_COUNTS, "nothing"),
            "mamba_track_indices": _ROWS,
            "mamba_track_seqlens": _INDEXES,
        },
    ),
    "target_verify": (
        ForwardBatch.target_verify,
        {"req_pool_indices": (4, 1), "seq_lens": (3, 3), "draft_token_num": 2},
        {"req_pool_indices": _ROWS, "seq_lens": _ROWS, "draft_token_num": _COUNTS},
    ),
    "draft_extend": (
        ForwardBatch.draft_extend,
        {
            "req_pool_indices": (4, 1),
            "seq_lens": (3, 3),
            "draft_token_num": 2,
            "num_accept_tokens": (1, 2),
        },
        {
            "req_pool_indices": _ROWS,
            "seq_lens": _ROWS,
            "draft_token_num": _COUNTS,
            "num_accept_tokens": _INDEXES,
        },
    ),
    "idle": (ForwardBatch.idle, {"batch_size": 1}, {"batch_size": _COUNTS}),
}


def _conv_arguments(stage: Stage) -> dict[str, Any]:
    device = stage.backend.device
    return {
        "x": digit_inputs([1, 2], _DIM, device=device),
        "weight": digit_weight(_DIM, device=device),
        "bias": torch.zeros(_DIM, dtype=torch.float32, device=device),
        "layer_id": 0,
        "stream": "b",
        "forward_batch": stage.decode,
        "activation": None,
        "residual": True,
    }


def _run_conv(stage: Stage, given: dict[str, Any]) -> None:
    stage.backend.short_conv(given.pop("x"), given.pop("weight"), **given)


def _run_group(stage: Stage, given: dict[str, Any]) -> None:
    """The bad argument is the second stream's: the first must not have run."""
    good = _conv_arguments(stage)
    stage.backend.short_conv_group(
        [good["x"], given["x"]],
        [good["weight"], given["weight"]],
        layer_id=given["layer_id"],
        streams=["a", given["stream"]],
        forward_batch=given["forward_batch"],
        biases=[good["bias"], given["bias"]],
        activation=given["activation"],
        residual=given["residual"],
    )


_NAMES: Kinds = {
    "nothing": lambda good: None,
    "a list": lambda good: ["a"],
    "an int": lambda good: 1,
    "another": lambda good: "c",
}
_WEIGHT = _without(_FLOATS, "one dimension more")
_CONV: dict[str, Kinds] = {
    "x": _FLOATS,
    "weight": {**_WEIGHT, "two dimensions more": lambda good: good[:, None, None]},
    "bias": _FLOATS,
    "layer_id": _COUNTS,
    "stream": _NAMES,
    "forward_batch": {"nothing": lambda good: None, "a dict": lambda good: {}},
    "activation": {"another": lambda good: "relu", "a list": lambda good: ["silu"]},
    "residual": {"nothing": lambda good: None, "an int": lambda good: 1},
}


def _commit_arguments(stage: Stage) -> dict[str, Any]:
    return {
        "last_correct_step_indices": _ints(stage, 1, 0),
        "mamba_track_indices": _ints(stage, 1, -1),
        "mamba_steps_to_track": _ints(stage, 0, -1),
        "req_pool_indices": _ints(stage, 4, 1),
    }


_CALLS: dict[str, _Call] = {
    "alloc": _pool_call("alloc", n=_COUNTS)(lambda stage: {"n": 1}),
    "free": _pool_call("free", slots=_SLOTS)(lambda stage: {"slots": [2]}),
    "assign": _pool_call(
        "assign", req_rows=_without(_SLOTS, "free"), slots=_without(_SLOTS, "none")
    )(lambda stage: {"req_rows": [2], "slots": [1]}),
    "clear": _pool_call("clear", slots=_SLOTS)(lambda stage: {"slots": [2]}),
    "copy": _pool_call("copy", src=_SLOTS, dst=_SLOTS)(lambda stage: {"src": [3], "dst": [1]}),
    "fork": _pool_call("fork", src=_SLOTS)(lambda stage: {"src": [3]}),
    "export": _pool_call("export", slots=_SLOTS)(lambda stage: {"slots": [3]}),
    "restore": _Call(
        lambda stage: {"slots": [2], "layer": None, "data": None},
        lambda stage, given: stage.backend.pool.restore(
            given["slots"],
            _exported(stage, given["layer"]) if given["data"] is None else given["data"],
        ),
        {
            "slots": _SLOTS,
            "layer": {name: partial(_second, kind) for name, kind in _FLOATS.items()},
            "data": _OBJECTS,
        },
    ),
    "translate_": _pool_call("translate_", ids={**_OBJECTS, "floats": _FLOATS["float64"]})(
        lambda stage: {"ids": _ints(stage, 1, 2)}
    ),
    "bind": _pool_call("bind", layers={**_OBJECTS, "tensors": lambda good: good})(
        lambda stage: {"layers": [layer.clone() for layer in stage.backend.pool.layers]}
    ),
    "adopt": _Call(
        lambda stage: {
            "layers": [torch.zeros_like(layer) for layer in stage.backend.pool.layers],
            "layer": torch.zeros_like(stage.backend.pool.layers[1]),
            "windows": torch.zeros(
                4, 3, 3, 2 * _DIM, dtype=torch.float32, device=stage.backend.device
            ),
            "virtual_to_physical": _ints(stage, 0, 2, 1),
            "null_slots": (-1,),
        },
        _adopt,
        {
            "layers": _without(_OBJECTS, "a list"),
            "layer": {
                "nothing": lambda good: None,
                "requires grad": lambda good: good.requires_grad_(),
                "rows that overlap": lambda good: good[:1].expand_as(good),
                **_FLOATS,
            },
            "windows": {
                "requires grad": lambda good: good.requires_grad_(),
                "rows that overlap": lambda good: good[:1].expand_as(good),
                **_without(_FLOATS, "a row more"),
            },
            "virtual_to_physical": _without(_INDEXES, "a row more"),
            "null_slots": {"nothing": lambda good: None, "a bool": lambda good: [False]},
        },
    ),
    "init_graph_state": _Call(
        lambda stage: {"max_bs": 4, "max_num_tokens": 16},
        lambda stage, given: stage.backend.init_graph_state(**given),
        {"max_bs": _without(_COUNTS, "negative"), "max_num_tokens": _without(_COUNTS, "negative")},
    ),
    **{
        f"{name} {how}": _Call(
            _step(**good),
            _prepare(hook, make),
            {key: _host_facts(kinds) for key, kinds in bad.items()} if how == "in graph" else bad,
        )
        for name, (make, good, bad) in _STEPS.items()
        for how, hook in _HOOKS.items()
    },
    "short_conv": _Call(_conv_arguments, _run_conv, _CONV),
    "short_conv_group": _Call(_conv_arguments, _run_group, _CONV),
    "commit": _Call(
        _commit_arguments,
        lambda stage, given: stage.backend.update_mamba_state_after_mtp_verify(**given),
        {
            "last_correct_step_indices": {**_INDEXES, "nothing": lambda good: None},
            "mamba_track_indices": {**_INDEXES, "nothing": lambda good: None},
            "mamba_steps_to_track": {**_INDEXES, "nothing": lambda good: None},
            "req_pool_indices": {**_ROWS, "nothing": lambda good: None},
        },
    ),
}

#: The public calls, by name.
CALLS = tuple(_CALLS)
