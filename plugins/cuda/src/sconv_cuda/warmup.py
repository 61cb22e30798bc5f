"""Compile, before serving, every kernel that a spec can ask for.

What has to be compiled is found by walking through the real calls with a launcher that only takes
notes, on steps of one row; so there is no second list of kernels that could grow stale. The
compilations then run side by side, since most of their time is spent outside of Python.

Activations and weights are taken to have the state's dtype, and a recurrent state to have the
softplus gate with a float32 bias. A model with the safe gate, or one that mixes dtypes, runs one
eager step of each mode instead: a capture that meets a kernel without a compilation says so.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from sconv import ConvStatePool, ForwardBatch, ShortConvMetadata, StateSpec
from sconv.plugin import MetadataBuffers

from .commits import Commits
from .convolution import MODES, Convolutions
from .delta.inputs import Inputs
from .delta.steps import DeltaSteps
from .delta.verify import VERIFY_TILES
from .launch import Launcher
from .metadata import Metadata
from .tiles import RAGGED_TILES, fit

__all__ = ["warm_up"]

_log: Final = logging.getLogger("sconv")


def warm_up(
    spec: StateSpec,
    convolutions: Convolutions,
    metadata: Metadata,
    commits: Commits,
    delta: DeltaSteps | None,
) -> None:
    """Compile what the spec needs and load it on the device; progress goes to the terminal."""
    launcher = convolutions.launcher
    walk = _Walk(spec, convolutions, metadata, commits, delta)
    with launcher.taking_notes() as jobs:
        walk.all()
    _compile(launcher, jobs)
    # Again, now that all are ready, so that every call's own look-up is filled too.
    with launcher.launching_nothing():
        walk.all()


class _Walk:
    """Calls everything once that decides about a compilation."""

    def __init__(
        self,
        spec: StateSpec,
        convolutions: Convolutions,
        metadata: Metadata,
        commits: Commits,
        delta: DeltaSteps | None,
    ) -> None:
        self.spec = spec
        self.pool: ConvStatePool = convolutions.pool
        self.convolutions = convolutions
        self.metadata = metadata
        self.commits = commits
        self.delta = delta

    def all(self) -> None:
        drafts = max(self.spec.max_draft_tokens, 1)
        self.convolutions.forget()
        self.metadata.forget()
        self.commits.forget()
        for batch in self._batches(drafts):
            tokens = batch.num_tokens or 0
            buffers = MetadataBuffers(self.spec, 1, max(tokens, 1), self.pool.device)
            meta = buffers.step(batch, tokens, padded=True)
            if batch.forward_mode.is_ragged:
                # An engine's slice of lengths may lie anywhere.
                lengths = torch.ones(2, dtype=torch.int64, device=self.pool.device)[1:]
                anywhere = replace(batch, extend_seq_lens=lengths)
                for _, ragged in RAGGED_TILES:
                    self.metadata.fill_ragged(meta, batch, buffers, ragged)
                    self.metadata.fill_ragged(meta, anywhere, buffers, ragged)
            else:
                self.metadata.fill(meta, batch, buffers)
            if tokens and batch.slots is None:
                self._convolve(batch, meta)
                self._recur(meta)
                if self.spec.track_interval is not None:
                    self._convolve(batch, replace(meta, tracks=True))
                    self._recur(replace(meta, tracks=True))
        if drafts > 1:
            self._commit(drafts)
        self.convolutions.forget()

    def _batches(self, drafts: int) -> Iterator[ForwardBatch]:
        one = torch.ones(1, dtype=torch.int64, device=self.pool.device)
        for names in ({"req_pool_indices": one}, {"slots": one}):
            yield ForwardBatch.decode(**names)
            yield ForwardBatch.decode(**names, seq_lens=one)
            yield ForwardBatch.extend(
                **names, extend_seq_lens=one, extend_prefix_lens=one, num_tokens=1
            )
            yield ForwardBatch.draft_extend(
                **names, seq_lens=one, draft_token_num=drafts, num_accept_tokens=one
            )
            if drafts > 1:
                yield ForwardBatch.target_verify(**names, draft_token_num=drafts)
            if drafts > 1 and self.spec.draft_topk > 1:
                nodes = torch.zeros(1, drafts, dtype=torch.int64, device=self.pool.device)
                yield ForwardBatch.target_verify(**names, draft_token_num=drafts, parents=nodes)
                yield ForwardBatch.target_verify(
                    **names, draft_token_num=drafts, next_token=nodes, next_sibling=nodes
                )
        yield ForwardBatch.idle(1)

    def _convolve(self, batch: ForwardBatch, meta: ShortConvMetadata) -> None:
        """Run each kind of layer: alone and, where it has several streams, two at a time."""
        seen = set()
        for layer_id in range(self.spec.num_layers):
            streams = self.spec.layer_streams(layer_id)
            groups = [(stream,) for stream in streams]
            if len(streams) > 1:
                groups.append(streams[:2])
            for group in groups:
                names = tuple(stream.name for stream in group)
                layer = self.convolutions.layer(layer_id, names)
                kind = (len(group), layer.widest, layer.aligned)
                if kind not in seen:
                    seen.add(kind)
                    self._each_way(batch, meta, layer_id, names)

    def _each_way(
        self, batch: ForwardBatch, meta: ShortConvMetadata, layer_id: int, names: tuple[str, ...]
    ) -> None:
        convolutions = self.convolutions
        widest = convolutions.layer(layer_id, names).widest
        tokens = batch.num_tokens or 0
        parts = [self.spec.stream_slice(layer_id, name) for name in names]

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=self.spec.dtype, device=self.pool.device)

        xs = tuple(empty(tokens, part.dim) for part in parts)
        weights = tuple(empty(part.dim, self.spec.kernel_size) for part in parts)
        tiles = {fit(tile, widest) for _, tile in MODES[batch.forward_mode].tiles}
        for tile in tiles:
            for silu in (False, True):
                for residual in (False, True):
                    for settled in (False, True):
                        convolutions.settled = settled
                        convolutions.run(
                            meta, layer_id, names, xs, weights, (None,) * len(xs),
                            silu, residual, tile,
                        )  # fmt: skip

    def _recur(self, meta: ShortConvMetadata) -> None:
        """Run the gated delta rule with the gate and the scale that models have."""
        delta = self.spec.recurrent
        if self.delta is None or delta is None:
            return
        tokens = meta.num_tokens

        def empty(*shape: int, dtype: torch.dtype = self.spec.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=self.pool.device)

        inputs = Inputs(
            empty(tokens, delta.key_heads, delta.key_dim),
            empty(tokens, delta.key_heads, delta.key_dim),
            empty(tokens, delta.value_heads, delta.value_dim),
            empty(tokens, *delta.gate_shape),
            empty(tokens, delta.value_heads),
            empty(delta.value_heads, dtype=torch.float32),
            empty(*delta.gate_shape, dtype=torch.float32),
            scale=delta.key_dim**-0.5,
            lower_bound=None,
            normalize=True,
        )
        for tile in {tile for _, tile in VERIFY_TILES}:
            self.delta.run(meta, 0, inputs, tile)

    def _commit(self, drafts: int) -> None:
        self.commits.prepare()
        one = torch.ones(1, dtype=torch.int64, device=self.pool.device)
        for slots in (False, True):
            for tree in (False, True) if self.spec.draft_topk > 1 else (False,):
                self.commits.run(one, one, None, None, drafts=drafts, slots=slots, tree=tree)
                if self.delta is not None:
                    self.delta.commit(one, one, None, None, drafts=drafts, slots=slots, tree=tree)


def _compile(launcher: Launcher, jobs: dict[object, dict[str, object]]) -> None:
    if not jobs:
        return
    _log.info("compiling %d kernels for %s", len(jobs), launcher.device)
    terminal = sys.stderr.isatty()
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as workers:
        running = [workers.submit(launcher.compile, **job) for job in jobs.values()]
        for done, finished in enumerate(as_completed(running), start=1):
            finished.result()
            if terminal:
                end = "\n" if done == len(running) else ""
                sys.stderr.write(f"\rsconv: compiled {done} of {len(running)} kernels{end}")
                sys.stderr.flush()
    _log.info("compiled %d kernels", len(jobs))
