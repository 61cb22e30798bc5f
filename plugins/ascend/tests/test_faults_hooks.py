"""Known faults of NPU overrides: signatures that drift, arguments that are taken and dropped.

Names carry the id of the entry in docs/reference/known-faults.md. No check needs torch_npu: one
binds the class to the hooks as ``load_backend`` does, the other reads a copy of the source.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sconv import ContractError, ForwardBatch, StateSpec, Stream, hookimpl
from sconv.discovery.load_check import bind
from sconv_ascend.backend import AscendBackend
from sconv_ascend.plugin import plugin

PLUGIN = Path(__file__).parents[1]


def bound(backend: type[AscendBackend]) -> dict[str, Any]:
    spec = StateSpec(
        num_layers=1, streams=[Stream("a", 3)], kernel_size=4, num_slots=2, max_requests=2
    )
    # Any device will do: nothing runs.
    implementation = backend(spec=spec, device=torch.device("cpu"), pool=None)
    return bind(implementation, plugin.sconv_backend())[0]


def test_the_backend_itself_is_bound() -> None:
    assert "update_mamba_state_after_mtp_verify" in bound(AscendBackend)


def test_hook_1_an_override_without_in_capture_is_refused_at_load() -> None:
    class Older(AscendBackend):
        @hookimpl
        def init_forward_metadata_out_graph(  # type: ignore[override]
            self, forward_batch: ForwardBatch
        ) -> None: ...

    with pytest.raises(ContractError, match="parameter 'in_capture' is missing: add it"):
        bound(Older)


def test_hook_3_a_commit_that_drops_the_request_rows_is_refused_at_load() -> None:
    class Dropping(AscendBackend):
        @hookimpl
        def update_mamba_state_after_mtp_verify(
            self,
            last_correct_step_indices: Tensor,
            mamba_track_indices: Tensor | None,
            mamba_steps_to_track: Tensor | None,
            req_pool_indices: Tensor,
        ) -> None:
            del req_pool_indices
            self.stale = last_correct_step_indices

    with pytest.raises(ContractError, match="req_pool_indices"):
        bound(Dropping)


#: What each fault appends to the class, and the rule and the words that report it.
DRIFTS = {
    "hook_1_without_in_capture": (
        "    @hookimpl\n    def init_forward_metadata_out_graph(self, forward_batch): ...\n",
        "SCV101",
        "in_capture",
    ),
    "hook_3_request_rows_dropped": (
        "    @hookimpl\n"
        "    def update_mamba_state_after_mtp_verify(\n"
        "        self, last_correct_step_indices, mamba_track_indices, mamba_steps_to_track,\n"
        "        req_pool_indices,\n"
        "    ):\n"
        "        del req_pool_indices\n"
        "        self._commit(last_correct_step_indices, self.slots, None, None)\n",
        "SCV106",
        "req_pool_indices",
    ),
    "hook_3_marker_lost": (
        "    def init_graph_state(self, max_bs, max_num_tokens):\n"
        "        super().init_graph_state(max_bs, max_num_tokens)\n",
        "SCV202",
        "init_graph_state",
    ),
}


@pytest.mark.parametrize("drift", DRIFTS)
def test_hook_1_and_3_source_is_refused_without_an_import(drift: str, tmp_path: Path) -> None:
    contract = pytest.importorskip("sconv_contract.check", reason="it comes with sconv-contract")
    from sconv_contract.target import locate

    copy = tmp_path / "ascend"
    shutil.copytree(PLUGIN, copy, ignore=shutil.ignore_patterns("tests", "__pycache__"))
    report = contract.check(locate(str(copy)), strict=True)
    assert report.clean, report.findings

    code, rule, words = DRIFTS[drift]
    module = copy / "src" / "sconv_ascend" / "backend.py"
    source = module.read_text().replace(
        "\n\nclass AscendBackend",
        "\nimport torch_npu  # not installed\nfrom sconv import hookimpl\n\n\nclass AscendBackend",
    )
    module.write_text(f"{source}\n{code}")
    found = contract.check(locate(str(copy)), strict=True).findings
    assert [finding.rule for finding in found] == [rule]
    assert words in found[0].message
    assert Path(found[0].path).name == "backend.py"
