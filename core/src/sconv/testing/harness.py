"""Runs steps on a backend and on the oracle, and compares everything both may touch.

State is compared bit for bit, NaN and the slots that no row names included. Outputs may differ from
the float64 oracle by float32 arithmetic and one rounding, no more.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .. import reference
from ..engine.backend import Backend
from ..step.batch import ForwardBatch
from .comparison import assert_same_bits, output_bound, same_bits
from .expected import Layer, expected_step
from .poison import poison_
from .steps import Step

__all__ = ["Harness", "Layer", "assert_same_bits", "output_bound", "same_bits"]


class Harness:
    """One backend, the weights of a model, and a pool in which every unused slot is NaN.

    Attributes:
        backend: The backend under test.
        row_of: Request row of every live slot.
        live: Slots in use; all others are NaN, row 0 too.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        seed: int,
        live: Sequence[int],
        x_dtype: torch.dtype = torch.float32,
        weight_dtype: torch.dtype = torch.float32,
        bias: bool = True,
        activation: str | None = None,
        residual: bool = True,
        strided: bool = False,
        group: bool = False,
        slot_ids: dict[int, int] | None = None,
        null_id: int = -1,
    ) -> None:
        """Poison the pool, fill the live slots, and give them request rows in random order.

        Args:
            backend: A fresh backend.
            seed: Of all values.
            live: Rows of the pool in use.
            x_dtype: Dtype of the activations.
            weight_dtype: Dtype of weights and biases.
            bias: Whether convolutions have one.
            activation: Of all convolutions.
            residual: Of all convolutions.
            strided: Activations are a slice of a wider projection.
            group: Convolve a layer's streams in one call.
            slot_ids: The engine's id of each row of the pool, where they differ.
            null_id: The engine's id for "no slot".
        """
        self.backend, self.live = backend, list(live)
        self.strided, self.group, self.x_dtype = strided, group, x_dtype
        self.slot_ids, self.null_id = slot_ids, null_id
        self.generator = torch.Generator("cpu").manual_seed(seed)
        spec, pool = backend.spec, backend.pool
        for layer in pool.layers:
            poison_(layer)
            layer[self.live] = self._random(len(self.live), *layer.shape[1:]).to(layer)
        for windows in pool.windows.layers:
            poison_(windows)
        self.layers: dict[tuple[int, str], Layer] = {}
        for layer_id, stream in self.streams():
            dim = spec.stream_slice(layer_id, stream).dim
            self.layers[layer_id, stream] = Layer(
                self._random(dim, spec.kernel_size).to(weight_dtype).to(backend.device),
                self._random(dim).to(weight_dtype).to(backend.device) if bias else None,
                activation,
                residual,
            )
        self._rows = random.Random(seed)
        numbers = list(range(1, spec.max_requests + 1))
        self._rows.shuffle(numbers)
        self.row_of = dict(zip(self.live, numbers, strict=False))
        self.unassigned = numbers[len(self.live) :]
        pool.req_to_slot.fill_(-1)
        pool.req_to_slot[0] = 0
        for slot, row in self.row_of.items():
            pool.req_to_slot[row] = self.slot_id(slot)

    def slot_id(self, slot: int) -> int:
        """Return the engine's id of a row of the pool."""
        if slot < 0:
            return self.null_id
        return slot if self.slot_ids is None else self.slot_ids[slot]

    def streams(self) -> Iterator[tuple[int, str]]:
        """Return every convolution of the model as layer and stream."""
        spec = self.backend.spec
        for layer_id in range(spec.num_layers):
            for stream in spec.layer_streams(layer_id):
                yield layer_id, stream.name

    def request_rows(self, step: Step) -> list[int]:
        """Return the request row of each row; one that owns no slot where the step has none."""
        rows = []
        for slot in step.slots:
            if slot == 0:
                rows.append(0)
            else:
                rows.append(self.row_of[slot] if slot > 0 else self._rows.choice(self.unassigned))
        return rows

    def batch(self, step: Step) -> ForwardBatch:
        """Return the step as a batch of the backend."""
        return step.batch(self.request_rows(step), self.slot_id, self.backend.device)

    def inputs(self, tokens: int) -> dict[tuple[int, str], Tensor]:
        """Return random activations of every convolution, ``[T, D]`` with unit channel stride."""
        found = {}
        for layer_id, stream in self.streams():
            dim = self.backend.spec.stream_slice(layer_id, stream).dim
            if self.strided:
                wide = self._random(tokens, 2 * dim + 3).to(self.x_dtype)
                found[layer_id, stream] = wide.to(self.backend.device)[:, dim : 2 * dim]
            else:
                value = self._random(tokens, dim).to(self.x_dtype)
                found[layer_id, stream] = value.to(self.backend.device)
        return found

    def state(self) -> dict[tuple[int, str], Tensor]:
        """Return a host copy of every stream's state, ``[rows, K-1, D]``."""
        axis = self.backend.spec.window_axis
        return {
            key: reference.time_axis(self.backend.pool.conv(*key), axis).cpu().clone()
            for key in self.streams()
        }

    def convolve(
        self, batch: ForwardBatch, inputs: dict[tuple[int, str], Tensor]
    ) -> dict[tuple[int, str], Tensor]:
        """Run every convolution of the model for a prepared step."""
        outputs: dict[tuple[int, str], Tensor] = {}
        spec = self.backend.spec
        for layer_id in range(spec.num_layers):
            names = [stream.name for stream in spec.layer_streams(layer_id)]
            layers = [self.layers[layer_id, name] for name in names]
            xs = [inputs[layer_id, name] for name in names]
            if self.group:
                ys = self.backend.short_conv_group(
                    xs,
                    [layer.weight for layer in layers],
                    layer_id=layer_id,
                    streams=names,
                    forward_batch=batch,
                    biases=[layer.bias for layer in layers],
                    activation=layers[0].activation,
                    residual=layers[0].residual,
                )
            else:
                ys = [
                    self.backend.short_conv(
                        x,
                        layer.weight,
                        layer_id=layer_id,
                        stream=name,
                        forward_batch=batch,
                        bias=layer.bias,
                        activation=layer.activation,
                        residual=layer.residual,
                    )
                    for name, layer, x in zip(names, layers, xs, strict=True)
                ]
            outputs.update({(layer_id, name): y for name, y in zip(names, ys, strict=True)})
        return outputs

    def run(self, step: Step) -> dict[tuple[int, str], Tensor]:
        """Run one step eagerly and compare it with the oracle.

        Returns:
            The outputs.

        Raises:
            AssertionError: They differ.
        """
        inputs = self.inputs(step.num_tokens)
        before = self.state()
        batch = self.batch(step)
        self.backend.init_forward_metadata(batch)
        outputs = self.convolve(batch, inputs)
        self.check(step, inputs, before, outputs)
        return outputs

    def check(
        self,
        step: Step,
        inputs: dict[tuple[int, str], Tensor],
        before: dict[tuple[int, str], Tensor],
        outputs: dict[tuple[int, str], Tensor],
    ) -> None:
        """Compare a step that ran with the oracle."""
        after = self.state()
        for key, y in outputs.items():
            x, layer = inputs[key], self.layers[key]
            expected, pool = expected_step(step, self._grid(), x, before[key], layer)
            size, _ = expected_step(
                step,
                self._grid(),
                x.abs(),
                before[key].abs(),
                Layer(
                    layer.weight.abs(),
                    None if layer.bias is None else layer.bias.abs(),
                    None,
                    layer.residual,
                ),
            )
            # A padded row on the dummy slot reads and writes what means nothing.
            means = torch.ones(step.num_tokens, dtype=torch.bool, device="cpu")
            start = 0
            for slot, length in zip(step.slots, step.lengths, strict=True):
                means[start : start + length] = slot != 0
                start += length
            assert y.shape == x.shape, f"{key}: output {list(y.shape)} for inputs {list(x.shape)}"
            assert y.dtype == x.dtype, f"{key}: output in {y.dtype} for inputs in {x.dtype}"
            bound = output_bound(expected, size, x.dtype, self.backend.spec.kernel_size)
            error = (y.cpu().double() - expected).abs()[means]
            worst = (error - bound[means]).amax().item() if error.numel() else -1.0
            assert worst <= 0, f"{key}: output is off by {worst} more than a rounding in {step}"
            assert_same_bits(after[key][1:], pool[1:], f"state of {key} after {step}")

    def commit(
        self,
        step: Step,
        inputs: dict[tuple[int, str], Tensor],
        at_verify: dict[tuple[int, str], Tensor],
        last_steps: Sequence[int],
        *,
        slots: Sequence[int] | None = None,
        track_slots: Sequence[int] | None = None,
        track_steps: Sequence[int] | None = None,
        request_rows: Sequence[int] | None = None,
    ) -> None:
        """Commit a verify step and compare with the oracle.

        Args:
            step: The verify step.
            inputs: Its activations.
            at_verify: The state when it ran.
            last_steps: Kept node per row.
            slots: Slots of the rows now, if they changed since.
            track_slots: Rows of the pool that receive snapshots.
            track_steps: Node of each snapshot.
            request_rows: Request rows of the step, if it was built by the caller.
        """
        device = self.backend.device
        names = self.request_rows(step) if request_rows is None else request_rows
        if step.by_slots:
            names = [self.slot_id(slot) for slot in (slots or step.slots)]
        before = self.state()
        self.backend.update_mamba_state_after_mtp_verify(
            torch.tensor(list(last_steps), device=device, dtype=torch.int64),
            None
            if track_slots is None
            else torch.tensor(
                [self.slot_id(slot) for slot in track_slots], device=device, dtype=torch.int64
            ),
            None
            if track_steps is None
            else torch.tensor(list(track_steps), device=device, dtype=torch.int64),
            req_pool_indices=torch.tensor(list(names), device=device, dtype=torch.int64),
        )
        after = self.state()
        for key in self.streams():
            layer = self.layers[key]
            _, windows = reference.verify(
                x=inputs[key],
                pool=at_verify[key],
                weight=layer.weight,
                slots=step.slots,
                draft_token_num=step.draft_tokens,
                has_initial=step.resumes,
                parents=step.parents,
            )
            pool = reference.commit(
                pool=before[key],
                windows=windows,
                slots=[slot or -1 for slot in (step.slots if slots is None else slots)],
                last_steps=last_steps,
                track_slots=track_slots,
                track_steps=track_steps,
            )
            assert_same_bits(after[key][1:], pool[1:], f"state of {key} after the commit of {step}")

    def _grid(self) -> int | None:
        return self.backend.spec.track_grid

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float32, device="cpu")
