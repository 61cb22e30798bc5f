"""Two caches of one model walk at random through forwards, crops, reorders and copies."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

ROWS = 2
#: Of the pairs in conftest: what a verify step holds.
CHAIN = 25

which = st.integers(0, 1)
operations = st.one_of(
    st.tuples(st.just("forward"), which, st.sampled_from([1, 1, 1, 2, 5, 30])),
    st.tuples(st.just("crop"), which, st.integers(0, CHAIN)),
    st.tuples(st.just("reorder"), which, st.tuples(*[st.integers(0, ROWS - 1)] * ROWS)),
    st.tuples(st.just("copy"), which, st.none()),
)


class Walk:
    """One model's two caches; what is done to them gives logits."""

    def __init__(self, model, recording):
        self.model = model
        self.caches = [DynamicCache(config=model.config) for _ in range(2)]
        for cache, records in zip(self.caches, recording, strict=True):
            if records:
                cache.activate_past_recording()

    def forward(self, index, tokens):
        return self.model(tokens, cache=self.caches[index]).logits

    def crop(self, index, removed):
        self.caches[index].crop(-removed)

    def reorder(self, index, rows):
        self.caches[index].reorder_cache(torch.tensor(rows))

    def copy(self, index):
        """Replace the other cache by a copy of this one."""
        self.caches[1 - index] = copy.deepcopy(self.caches[index])


@pytest.mark.parametrize("name", ["inkling", "lfm2-bias-k5"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    recording=st.tuples(st.booleans(), st.booleans()),
    steps=st.lists(operations, min_size=3, max_size=12),
    seed=st.integers(0, 1000),
)
def test_any_walk_gives_the_stock_logits(all_pairs, name, recording, steps, seed):
    pair = all_pairs[name]
    _walk(pair, recording, steps, seed)
    gc.collect()
    assert pair.attachment.rows_held == 0


def _walk(pair, recording, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    stock, pooled = Walk(pair.stock, recording), Walk(pair.attached, recording)
    records = list(recording)
    recorded = [0, 0]
    for kind, index, argument in steps:
        if kind == "forward":
            tokens = torch.randint(2, 96, (ROWS, argument), generator=generator)
            expected, got = (walk.forward(index, tokens) for walk in (stock, pooled))
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
            recorded[index] += argument
        elif kind == "copy":
            for walk in (stock, pooled):
                walk.copy(index)
            records[1 - index], recorded[1 - index] = records[index], recorded[index]
        elif recorded[index] and kind == "reorder":
            for walk in (stock, pooled):
                walk.reorder(index, argument)
        elif recorded[index] and records[index] and kind == "crop":
            # One token stays: an empty stock cache and a cropped one are not the same thing.
            removed = min(argument, recorded[index] - 1, CHAIN)
            for walk in (stock, pooled):
                walk.crop(index, removed)
            recorded[index] = 0
