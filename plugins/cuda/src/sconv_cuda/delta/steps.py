"""The gated delta rule of one backend: from a step's metadata to launches."""

from __future__ import annotations

import torch
from torch import Tensor

from sconv import (
    BatchError,
    ConvStatePool,
    ForwardBatch,
    ForwardMode,
    ShortConvMetadata,
    SpecError,
    StateSpec,
)
from sconv.plugin import DeltaRecords, RecurrentState

from ..launch import Launcher
from ..slots import SlotSource
from .commit import StateTable, commit
from .inputs import Heads, Inputs, Records
from .paths import node_bits, paths_of
from .recurrence import Rows, recur
from .verify import MOST_DRAFTS, VerifyTile, verify

__all__ = ["DeltaSteps"]


class DeltaSteps:
    """Runs the launches of a spec's recurrent state.

    Attributes:
        heads: Of every layer.
    """

    def __init__(self, spec: StateSpec, pool: ConvStatePool, launcher: Launcher) -> None:
        """Check that the kernels serve the spec.

        Raises:
            SpecError: They do not.
        """
        delta = spec.recurrent
        assert delta is not None
        if delta.log:
            raise SpecError(f"recurrent.log={delta.log}: the CUDA backend keeps no log; use log=0")
        if delta.records != "corrections" and spec.max_draft_tokens > 1:
            raise SpecError(
                f"recurrent.records={delta.records!r}: the CUDA backend keeps 'corrections'"
            )
        if spec.max_draft_tokens > MOST_DRAFTS:
            raise SpecError(
                f"max_draft_tokens={spec.max_draft_tokens}: with a recurrent state the CUDA "
                f"backend takes {MOST_DRAFTS} at most"
            )
        self.spec = spec
        self.pool = pool
        self.launcher = launcher
        self.heads = Heads(
            delta.key_heads,
            delta.value_heads,
            delta.key_dim,
            delta.value_dim,
            delta.gate == "channel",
        )
        self._source = SlotSource(pool)
        self._table: tuple[tuple[Tensor, ...], StateTable] | None = None
        # The paths of the last verify step, where recorded layers and commits find them.
        self._paths = torch.empty(0, dtype=torch.int32, device=pool.device)
        self._bits = node_bits(spec.max_draft_tokens, pool.device)
        self.reserve(spec.max_requests)

    def check(self, batch: ForwardBatch) -> None:
        """Refuse a verify step that the kernels are not known to be right for.

        Raises:
            BatchError: Its rows have 3 draft tokens, say: on an H200 the outputs of 3 were wrong,
                and only powers of two were compared with float64 there.
        """
        drafts = batch.tokens_per_row or 1
        if batch.forward_mode is ForwardMode.TARGET_VERIFY and drafts & (drafts - 1):
            raise BatchError(
                f"draft_token_num={drafts}: with a recurrent state the CUDA backend verifies 1, 2, "
                f"4, 8, 16 or {MOST_DRAFTS} draft tokens a row; give that many, and commit the "
                "last one that counts"
            )

    @property
    def _recurrent(self) -> RecurrentState:
        assert self.pool.recurrent is not None
        return self.pool.recurrent

    @property
    def _records(self) -> DeltaRecords:
        assert self._recurrent.records is not None
        return self._recurrent.records

    def reserve(self, rows: int) -> None:
        """Make room for the trees of ``rows`` rows. Out of graph, before any capture."""
        size = rows * self.spec.max_draft_tokens
        if self._paths.numel() < size:
            # A tensor made under inference mode could not be written outside of it later.
            with torch.inference_mode(False):
                self._paths = torch.zeros(size, dtype=torch.int32, device=self.pool.device)

    def prepare(self) -> None:
        """Build the table of layers, unless the one that exists is still right. Out of graph."""
        self._states()

    def note(self, meta: ShortConvMetadata) -> None:
        """Keep what the layers and the commit of a verify step must know. In graph."""
        records = self._records
        records.store_step(meta.has_initial_state, meta.tree_taps)
        if meta.tree_taps is not None:
            rows, drafts = meta.tree_taps.shape[:2]
            self._tree(rows, drafts).copy_(
                paths_of(records.ancestors[:rows, :drafts, :drafts], self._bits[:drafts])
            )

    def run(
        self,
        meta: ShortConvMetadata,
        layer_id: int,
        inputs: Inputs,
        tile: VerifyTile | None = None,
    ) -> Tensor:
        """Return the outputs of a layer's tokens, ``[T, HV, dv]``. In graph.

        Args:
            meta: The step.
            layer_id: The layer.
            inputs: Its tensors.
            tile: Of a verify step, instead of the table's.
        """
        state = self._recurrent.layers[layer_id]
        mode, rows = meta.forward_mode, meta.batch_size
        if mode is ForwardMode.TARGET_VERIFY and rows:
            records = self._records
            drafts = meta.tokens_per_row
            tree = None if meta.tree_taps is None else self._tree(rows, drafts)
            return verify(
                self.launcher, self.heads, inputs, state, meta.cache_indices,
                meta.has_initial_state,
                Records(records.u[layer_id], records.k[layer_id], records.g[layer_id]),
                drafts=drafts, tree=tree, tile=tile,
            )  # fmt: skip
        one = mode is ForwardMode.DECODE
        return recur(
            self.launcher,
            self.heads,
            inputs,
            state,
            Rows(
                meta.cache_indices,
                None if one else meta.query_start_loc,
                meta.has_initial_state,
                meta.num_accept_tokens if mode is ForwardMode.DRAFT_EXTEND else None,
                meta.track_cache_indices if meta.tracks else None,
                meta.track_conv_indices[:, -1] if meta.tracks and not one else None,
            ),
        )

    def commit(
        self,
        ids: Tensor,
        steps: Tensor,
        targets: Tensor | None,
        track_steps: Tensor | None,
        *,
        drafts: int,
        slots: bool,
        tree: bool,
    ) -> None:
        """Move all layers to the accepted nodes, as :meth:`sconv_cuda.commits.Commits.run`."""
        records = self._records
        ids, targets, looks_up = self._source.committed(ids, targets, are_slots=slots)
        commit(
            self.launcher,
            self.heads,
            self._states(),
            Records(records.u, records.k, records.g),
            ids,
            steps,
            records.resumes,
            source={
                **self._source.translation(),
                **self._source.constants,
                "LOOKUP": looks_up,
            },
            drafts=drafts,
            tree=self._tree(ids.shape[0], drafts) if tree else None,
            targets=targets,
            track_steps=track_steps,
        )

    def _tree(self, rows: int, drafts: int) -> Tensor:
        return self._paths[: rows * drafts].view(rows, drafts)

    def _states(self) -> StateTable:
        layers = self._recurrent.layers
        if self._table is None or self._table[0] is not layers:
            self._table = (layers, StateTable.build(layers))
        return self._table[1]
