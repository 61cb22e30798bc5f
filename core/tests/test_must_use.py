"""A hook must read the parameters that say which rows are meant; reading is seen in its code."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sconv.discovery import signatures
from sconv.discovery.load_check import check_implementation
from sconv.discovery.signatures import is_read
from sconv.hookspecs import hookimpl
from sconv.testing.digits import digit_spec
from sconv.torch_backend.backend import TorchBackend

COMMIT = "update_mamba_state_after_mtp_verify"


def commit(body: str) -> Any:
    """A commit whose body reads last_correct_step_indices, and then runs some statements."""
    parameters = "last_correct_step_indices, mamba_track_indices, mamba_steps_to_track"
    lines = "\n    ".join(["print(last_correct_step_indices)", *body.splitlines()])
    scope: dict[str, Any] = {}
    exec(f"def {COMMIT}(self, {parameters}, req_pool_indices):\n    {lines}\n", scope)
    made = type("Npu", (TorchBackend,), {COMMIT: hookimpl(scope[COMMIT])})
    return made(spec=digit_spec(max_draft_tokens=2), device=torch.device("cpu"), pool=None)


@pytest.mark.parametrize(
    "body",
    [
        "pass",
        "del req_pool_indices",
        "_ = req_pool_indices",
        "a = req_pool_indices\nb = a",
        "a = req_pool_indices\nreq_pool_indices = a",
        "req_pool_indices",
        "req_pool_indices = self.forward_metadata",
        "req_pool_indices = self.forward_metadata\nif req_pool_indices:\n    return 1",
        "def later():\n    nonlocal req_pool_indices\n    req_pool_indices = 1",
        "[0 for _ in (1, 2)]",
    ],
)
def test_hook_2_a_must_use_parameter_that_is_dropped(complaint, body):
    text = complaint(commit(body))
    assert f"hook '{COMMIT}': parameter 'req_pool_indices' is accepted and never read" in text
    assert "1 problem(s)" in text


@pytest.mark.parametrize(
    "body",
    [
        "print(req_pool_indices)",
        "return self.pool, req_pool_indices",
        "slots = req_pool_indices\nreturn slots",
        "return lambda: req_pool_indices",
        "return [req_pool_indices[i] for i in (1, 2)]",
        "class Later:\n    rows = req_pool_indices",
        "if req_pool_indices is None:\n    return",
        "req_pool_indices += 1",
        "if self.pool:\n    req_pool_indices = 1\nreturn req_pool_indices",
        "for req_pool_indices in ():\n    pass\nreturn req_pool_indices",
        "try:\n    req_pool_indices = 1\nfinally:\n    print(req_pool_indices)",
        "x = y = req_pool_indices\nreturn y",
        "def later():\n    def still_later():\n        return req_pool_indices",
        "del last_correct_step_indices\nreturn req_pool_indices",
        "raise NotImplementedError('no verify windows')",
    ],
)
def test_a_must_use_parameter_that_is_read(npu_info, body):
    check_implementation(commit(body), npu_info)


def test_what_is_not_python_counts_as_reading():
    assert is_read(len, "obj")


@pytest.mark.parametrize(
    ("instructions", "read"),
    [
        ([("LOAD_FAST_LOAD_FAST", ("other", "rows")), ("CALL", 0)], True),
        ([("LOAD_FAST_BORROW_LOAD_FAST_BORROW", ("rows", "other")), ("CALL", 0)], True),
        ([("LOAD_FAST_BORROW", "rows"), ("RETURN_VALUE", None)], True),
        ([("LOAD_FAST_CHECK", "rows"), ("RETURN_VALUE", None)], True),
        ([("STORE_FAST_LOAD_FAST", ("other", "rows")), ("CALL", 0)], True),
        ([("STORE_FAST_LOAD_FAST", ("rows", "other")), ("CALL", 0)], False),
        ([("STORE_FAST_STORE_FAST", ("rows", "other"))], False),
        ([("LOAD_FAST_AND_CLEAR", "rows"), ("SWAP", 2)], False),
        ([("LOAD_FAST", "rows"), ("NOP", None), ("POP_TOP", None)], False),
        ([("LOAD_FAST", "rows"), ("STORE_FAST_LOAD_FAST", ("unused", "other"))], False),
        ([("DELETE_FAST", "rows")], False),
        ([("LOAD_GLOBAL", "Error"), ("RAISE_VARARGS", 1)], True),
        ([("RAISE_VARARGS", 1), ("RETURN_CONST", None)], False),
    ],
)
def test_the_instructions_of_other_python_releases(monkeypatch, instructions, read):
    given = [SimpleNamespace(opname=name, argval=argument) for name, argument in instructions]
    monkeypatch.setattr(signatures.dis, "get_instructions", lambda code: given)
    assert is_read(lambda rows, other: None, "rows") is read
