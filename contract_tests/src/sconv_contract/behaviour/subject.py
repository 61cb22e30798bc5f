"""The backend under test, and specs and steps that it declares support for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import strategies as st

import sconv
from sconv import Capabilities, ForwardMode, StateSpec, Stream
from sconv.testing.digits import digit_spec
from sconv.testing.harness import Harness
from sconv.testing.steps import Step
from sconv.testing.strategies import dtypes, live_slots, specs, steps

__all__ = ["Build", "Subject"]

#: Builds a backend from a spec and, perhaps, a pool.
Build: TypeAlias = Callable[..., sconv.Backend]


@dataclass(frozen=True)
class Subject:
    """The backend under test.

    Attributes:
        build: Makes one.
        can: What it declares.
    """

    build: Build
    can: Capabilities

    @classmethod
    def of(cls, backend: str | Build) -> Subject:
        """Return the subject for an entry point's name, or for a function that builds a backend."""
        if isinstance(backend, str):
            name = backend
            info = sconv.discovery.selection.select(name)

            def build(spec: StateSpec, pool: sconv.ConvStatePool | None = None) -> sconv.Backend:
                return sconv.load_backend(name, spec=spec, pool=pool)

            return cls(build, info.capabilities)
        spec = StateSpec(
            num_layers=1, streams=[Stream("a", 3)], kernel_size=4, num_slots=2, max_requests=2
        )
        return cls(backend, backend(spec).info.capabilities)

    def fit(self, spec: StateSpec, **changes: Any) -> StateSpec:
        """Return a spec with what the backend does not declare replaced by what it does."""
        can = self.can
        low, high = can.kernel_sizes
        changes.setdefault("kernel_size", min(max(spec.kernel_size, low), high))
        if str(spec.dtype).removeprefix("torch.") not in can.dtypes:
            changes.setdefault("dtype", getattr(torch, can.dtypes[0]))
        if spec.window_axis not in can.window_axes:
            changes.setdefault("window_axis", can.window_axes[0])
        if not can.rollback:
            changes |= {"max_draft_tokens": 1, "draft_topk": 1}
        if not can.trees or set(can.window_layouts) == {"dedup"}:
            changes["draft_topk"] = 1
        if spec.window_layout not in ("auto", *can.window_layouts):
            changes.setdefault("window_layout", "auto")
        return replace(spec, **changes)

    def specs(self, *, draft: bool = False) -> st.SearchStrategy[StateSpec]:
        """Random specs that the backend declares support for."""
        return specs(draft=draft).map(self.fit)

    def steps(
        self, spec: StateSpec, live: list[int], mode: ForwardMode, **options: Any
    ) -> st.SearchStrategy[Step]:
        """Random steps of a mode; chains alone for a backend without trees."""
        drawn = steps(spec, live, mode, **options)
        return drawn if self.can.trees else drawn.map(lambda step: replace(step, parents=None))

    def harness(self, data: st.DataObject, spec: StateSpec, **options: Any) -> Harness:
        """A fresh backend with random weights, dtypes and live slots."""
        backend = self.build(spec, options.pop("pool", None))
        return Harness(
            backend,
            seed=data.draw(st.integers(0, 2**16)),
            live=data.draw(live_slots()),
            x_dtype=data.draw(dtypes),
            weight_dtype=data.draw(dtypes),
            bias=data.draw(st.booleans()),
            activation=data.draw(st.sampled_from((None, "silu", "swish"))),
            residual=data.draw(st.booleans()),
            strided=data.draw(st.booleans()),
            group=options.pop("group", data.draw(st.booleans())),
            **options,
        )

    def digits(self, **options: Any) -> sconv.Backend:
        """A backend whose outputs read as digits: kernel width 4, float32 state."""
        low, high = self.can.kernel_sizes
        if not low <= 4 <= high or "float32" not in self.can.dtypes:
            pytest.skip("capability: readable digits need kernel width 4 and a float32 state")
        spec = digit_spec(channel_axis="time" not in self.can.window_axes, **options)
        if spec.max_draft_tokens > 1:
            self.needs("rollback")
        if spec.draft_topk > 1:
            self.needs("trees")
        return self.build(spec)

    def needs(self, capability: str) -> None:
        """Skip the test unless the backend declares a capability."""
        if not getattr(self.can, capability):
            pytest.skip(f"capability: it declares {capability}=False")
