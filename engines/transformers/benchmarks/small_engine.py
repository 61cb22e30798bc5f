"""A serving loop around the shipped model that calls sconv itself, step by step or in CUDA graphs.

transformers cannot capture a verify step: its caches grow. So this is the engine that a captured
one needs: keys and values in fixed places, lengths on the device, all rows of a batch in one
step. A step is metadata, forward, acceptance and commit; with ``graph`` all of it is one replay,
and the host only looks drafts up. Prompts are prefilled row by row, with different lengths.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import InklingForCausalLM

import sconv
from sconv import ForwardBatch, StateSpec, Stream

__all__ = ["Outcome", "SmallEngine"]

EOS = 1


@dataclass
class Outcome:
    """What a run wrote, and how.

    Attributes:
        tokens: New tokens of each prompt, up to its end of text.
        steps: Steps of the whole batch.
        accepted: How often a row kept so many of its drafts.
        windows: Layout of the verify windows.
        state_bytes: Bytes of the pool, windows included.
    """

    tokens: list[list[int]]
    steps: int
    windows: str
    state_bytes: int
    accepted: Counter[int] = field(default_factory=Counter)

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens that a live row gains in a step: its accept length."""
        kept = sum((drafts + 1) * count for drafts, count in self.accepted.items())
        return kept / max(sum(self.accepted.values()), 1)


class SmallEngine:
    """The model on one device with a backend of its own, for a fixed set of prompts."""

    def __init__(
        self,
        model: InklingForCausalLM,
        prompts: list[list[int]],
        *,
        backend: str,
        new_tokens: int,
        drafts: int,
        layout: str,
    ) -> None:
        self.model, self.prompts = model, prompts
        self.new_tokens, self.drafts = new_tokens, drafts
        self.device = next(model.parameters()).device
        layers, rows = model.model.layers, len(prompts)
        self.spec = StateSpec(
            num_layers=len(layers),
            streams=[
                [
                    Stream("k", layer.self_attn.k_proj.out_features),
                    Stream("v", layer.self_attn.v_proj.out_features),
                    Stream("attn", layer.self_attn.o_proj.out_features),
                    Stream("mlp", layer.self_attn.o_proj.out_features),
                ]
                for layer in layers
            ],
            kernel_size=model.config.conv_kernel_size,
            num_slots=rows,
            max_requests=rows,
            dtype=torch.float32,
            max_draft_tokens=drafts + 1,
            window_layout=layout if drafts else "auto",
        )
        self.backend = sconv.load_backend(backend, spec=self.spec, device=self.device)
        self.backend.init_graph_state(rows, rows * (drafts + 1))
        # The last step of a row may accept all its drafts, and the row then stays in the batch.
        room = max(map(len, prompts)) + new_tokens + 2 * drafts + 1
        self.keys, self.values = [], []
        for layer in layers:
            shape = (rows, room, layer.self_attn.num_key_value_heads, layer.self_attn.head_dim)
            self.keys.append(torch.zeros(shape, device=self.device))
            self.values.append(torch.zeros(shape, device=self.device))
        self.places = torch.arange(room, device=self.device)
        # What a graph reads and writes. A row that has ended is request row 0, as padding is.
        self.ids = torch.zeros(rows, drafts + 1, dtype=torch.int64, device=self.device)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self.requests = torch.arange(1, rows + 1, device=self.device)
        self.greedy = torch.zeros_like(self.ids)
        self.kept = torch.zeros(rows, dtype=torch.int64, device=self.device)

    @torch.no_grad()
    def run(self, *, graph: bool) -> Outcome:
        """Write greedily, by prompt lookup if there are drafts."""
        pool, rows = self.backend.pool, len(self.prompts)
        pool.clear(slots := pool.alloc(rows))
        pool.assign(torch.arange(1, rows + 1), slots)
        tokens = [self._prefill(row, prompt) for row, prompt in enumerate(self.prompts)]
        batch = self._batch()
        replay = self._capture(batch) if graph else None
        found = Outcome([[] for _ in tokens], 0, pool.window_layout or "none", pool.nbytes)
        live = set(range(rows))
        for row, token in enumerate(tokens):
            self._write(found, live, row, [token])
        while live:
            drafted = [
                [found.tokens[row][-1], *self._draft(self.prompts[row] + found.tokens[row])]
                for row in range(rows)
            ]
            self.ids.copy_(torch.tensor(drafted))
            requests = [row + 1 if row in live else 0 for row in range(rows)]
            self.requests.copy_(torch.tensor(requests))
            if replay is None:
                self.backend.init_forward_metadata(batch)
                self._step(batch)
            else:
                self.backend.init_forward_metadata_out_graph(batch)
                replay.replay()
            greedy, kept = self.greedy.tolist(), self.kept.tolist()
            found.steps += 1
            for row in sorted(live):
                found.accepted[kept[row]] += 1
                self._write(found, live, row, greedy[row][: kept[row] + 1])
        pool.free(slots)
        return found

    def _write(self, found: Outcome, live: set[int], row: int, tokens: list[int]) -> None:
        written = found.tokens[row]
        for token in tokens:
            written.append(token)
            if token == EOS or len(written) == self.new_tokens:
                live.discard(row)
                return

    def _draft(self, text: list[int]) -> list[int]:
        """Guess what follows: what followed the last tokens where they stood before."""
        for size in (3, 2, 1):
            tail = text[-size:]
            for at in range(len(text) - size - 1, -1, -1):
                if text[at : at + size] == tail:
                    guess = text[at + size : at + size + self.drafts]
                    return guess + [0] * (self.drafts - len(guess))
        return [0] * self.drafts

    def _batch(self) -> ForwardBatch:
        if self.drafts == 0:
            return ForwardBatch.decode(self.requests, self.lengths)
        return ForwardBatch.target_verify(self.requests, self.lengths, self.drafts + 1)

    def _prefill(self, row: int, prompt: list[int]) -> int:
        length = torch.tensor([len(prompt)], device=self.device)
        batch = ForwardBatch.extend(
            torch.tensor([row + 1], device=self.device),
            length,
            torch.zeros_like(length),
            num_tokens=len(prompt),
        )
        self.backend.init_forward_metadata(batch)
        ids = torch.tensor([prompt], device=self.device)
        self.lengths[row] = 0
        logits = self._forward(ids, batch, slice(row, row + 1))
        self.lengths[row] = len(prompt)
        return int(logits[0, -1].argmax())

    def _step(self, batch: ForwardBatch) -> None:
        """Forward all rows, accept what greedy search would have written, and keep that."""
        logits = self._forward(self.ids, batch, slice(None))
        self.greedy.copy_(logits.argmax(-1))
        right = self.ids[:, 1:] == self.greedy[:, :-1]
        self.kept.copy_(right.long().cumprod(1).sum(1))
        if self.drafts:
            self.backend.update_mamba_state_after_mtp_verify(
                self.kept, req_pool_indices=self.requests
            )
        self.lengths += torch.where(self.requests > 0, self.kept + 1, 0)

    def _capture(self, batch: ForwardBatch) -> torch.cuda.CUDAGraph:
        """Capture a step on dead rows, so that nothing moves; eager ones before it compile."""
        self.requests.zero_()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.backend.init_forward_metadata(batch)
                self._step(batch)
        torch.cuda.current_stream().wait_stream(side)
        self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.backend.init_forward_metadata_in_graph(batch)
            self._step(batch)
        return graph

    def _forward(self, ids: Tensor, batch: ForwardBatch, rows: slice) -> Tensor:
        """Return logits ``[B, T, V]``; keys and values of the tokens go to their places."""
        model = self.model.model
        places = self.lengths[rows, None] + torch.arange(ids.shape[1], device=self.device)
        hidden = model.embed_tokens(ids)
        for number, layer in enumerate(model.layers):
            normed = layer.input_layernorm(hidden)
            mixed = self._attend(number, layer.self_attn, normed, batch, rows, places)
            hidden = hidden + self._convolve(number, "attn", layer.attn_sconv, mixed, batch)
            mixed = layer.mlp(layer.post_attention_layernorm(hidden))
            hidden = hidden + self._convolve(number, "mlp", layer.mlp_sconv, mixed, batch)
        hidden = model.norm(hidden) / self.model.config.logits_mup_width_multiplier
        logits: Tensor = self.model.lm_head(hidden)
        return logits

    def _convolve(
        self, number: int, stream: str, module: nn.Module, x: Tensor, batch: ForwardBatch
    ) -> Tensor:
        y = self.backend.short_conv(
            x.flatten(0, 1),
            module.conv1d.weight,
            layer_id=number,
            stream=stream,
            forward_batch=batch,
        )
        return y.view(x.shape)

    def _attend(
        self,
        number: int,
        attention: nn.Module,
        hidden: Tensor,
        batch: ForwardBatch,
        rows: slice,
        places: Tensor,
    ) -> Tensor:
        shape = (*hidden.shape[:2], -1, attention.head_dim)
        key = self._convolve(number, "k", attention.k_sconv, attention.k_proj(hidden), batch)
        value = self._convolve(number, "v", attention.v_sconv, attention.v_proj(hidden), batch)
        keys, values = self.keys[number][rows], self.values[number][rows]
        index = places[:, :, None, None].expand(-1, -1, *keys.shape[2:])
        keys.scatter_(1, index, attention.k_norm(key.view(shape)))
        values.scatter_(1, index, value.view(shape))
        query = attention.q_norm(attention.q_proj(hidden).view(shape)).transpose(1, 2)
        groups = attention.num_key_value_groups
        spread = [t.transpose(1, 2).repeat_interleave(groups, 1) for t in (keys, values)]

        distance = (places[:, :, None] - self.places)[:, None]  # [B, 1, T, room]
        extent = attention.rel_extent
        bias = attention.r_proj(hidden).view(*hidden.shape[:2], attention.num_heads, -1)
        bias = (bias @ attention.rel_logits_proj.proj).transpose(1, 2)
        near = distance.clamp(0, extent - 1).expand(-1, bias.shape[1], -1, -1)
        bias = bias.gather(-1, near).masked_fill(distance >= extent, 0.0)
        hidden_from = distance < 0
        if attention.sliding_window is not None:
            hidden_from = hidden_from | (distance >= attention.sliding_window)
        scores = query @ spread[0].transpose(2, 3) * attention.scaling + bias
        scores = scores.masked_fill(hidden_from, float("-inf"))
        mixed = (scores.softmax(-1) @ spread[1]).transpose(1, 2).reshape(*hidden.shape[:2], -1)
        output: Tensor = attention.o_proj(mixed)
        return output
