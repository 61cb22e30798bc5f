"""What a plan counts is what the pool takes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import sconv
from sconv import SpecError, StateSpec, Stream
from sconv.cli import main as cli
from sconv.engine.planning import parse_bytes
from sconv.state.windows import LAYOUTS
from sconv.torch_backend.backend import TorchBackend

CPU = torch.device("cpu")
CLI = Path(__file__).resolve().parents[2] / "docs/reference/cli.md"


def spec_of(**changes: Any) -> StateSpec:
    options: dict[str, Any] = {
        "num_layers": 2,
        "streams": [[Stream("k", 3), Stream("v", 5)], [Stream("k", 7)]],
        "kernel_size": 4,
        "num_slots": 1,
        "max_requests": 1,
        "max_draft_tokens": 4,
    }
    return StateSpec(**{**options, **changes})


@pytest.mark.parametrize("axis", ["time", "channel"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("drafts", [1, 2, 4, 7])
@pytest.mark.parametrize("snapshots", [0, 5])
def test_the_pool_takes_what_was_planned_and_one_request_more_does_not_fit(
    axis: str, dtype: torch.dtype, drafts: int, snapshots: int
) -> None:
    memory = 50_000
    spec = spec_of(window_axis=axis, dtype=dtype, max_draft_tokens=drafts, num_slots=1 + snapshots)
    plan = sconv.plan(spec, memory=memory)
    assert [each.layout for each in plan.layouts] == list(LAYOUTS)
    for each in plan.layouts:
        pool = TorchBackend(spec=each.spec, device=CPU, pool=None).pool
        assert pool.window_layout == each.layout
        assert pool.nbytes == each.nbytes <= memory
        assert pool.nbytes_by_part == {
            "state": each.state_bytes,
            "verify_windows": each.window_bytes,
        }
        assert (each.requests, each.slots) == (pool.spec.max_requests, pool.num_free)
        assert each.slots == each.requests + snapshots
        larger = StateSpec(
            **{
                **options_of(each.spec),
                "num_slots": each.slots + 1,
                "max_requests": each.requests + 1,
            }
        )
        assert TorchBackend(spec=larger, device=CPU, pool=None).pool.nbytes > memory


@pytest.mark.parametrize("snapshots", [0, 5])
@pytest.mark.parametrize("slots_per_request", [1, 2, 4])
def test_mem_2_a_request_may_take_several_slots(slots_per_request: int, snapshots: int) -> None:
    memory = 50_000
    spec = spec_of(num_slots=1 + snapshots)
    for each in sconv.plan(spec, memory=memory, slots_per_request=slots_per_request).layouts:
        pool = TorchBackend(spec=each.spec, device=CPU, pool=None).pool
        assert each.slots == each.requests * slots_per_request + snapshots == pool.num_free
        assert pool.nbytes == each.nbytes <= memory
        more = each.nbytes + slots_per_request * each.slot_bytes + each.row_bytes
        assert more > memory


@pytest.mark.parametrize("count", [0, -1, 1.0, True, "2", 2**31])
def test_mem_2_a_number_of_slots_that_is_none(count: Any) -> None:
    with pytest.raises(SpecError, match=r"slots_per_request=.*: expected an int, 1 to"):
        sconv.plan(spec_of(), memory=50_000, slots_per_request=count)


def options_of(spec: StateSpec) -> dict[str, Any]:
    fields = StateSpec.__dataclass_fields__
    return {name: getattr(spec, name) for name in fields if fields[name].init}


class Allocations(TorchDispatchMode):
    """Bytes of the storages that ``torch.empty`` makes."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format:
            self.nbytes += made.untyped_storage().nbytes()
        return made


@pytest.mark.parametrize("kernel_size", [2, 8])
@pytest.mark.parametrize(("drafts", "topk"), [(1, 1), (64, 1), (64, 2)])
def test_captured_steps_take_the_step_bytes(kernel_size: int, drafts: int, topk: int) -> None:
    spec = spec_of(kernel_size=kernel_size, max_draft_tokens=drafts, draft_topk=topk)
    for each in sconv.plan(spec, memory="1MB").layouts:
        backend = TorchBackend(spec=each.spec, device=CPU, pool=None)
        with Allocations() as taken:
            backend.init_graph_state(each.requests, each.requests * drafts)
        rows, tokens = each.requests, each.requests * drafts
        # The int32 and the bool fields are each rounded up to whole words of the one allocation.
        rounding = -4 * (2 * rows + 1 + tokens) % 8 + -3 * rows % 8
        assert taken.nbytes == each.requests * each.step_bytes + 16 + rounding
    # Only trees have taps, and those are most of it.
    taps = 8 * drafts * kernel_size * (topk > 1)
    assert each.step_bytes - taps == 55 + 8 * drafts + 32 * (kernel_size - 1)


def test_no_plan_has_more_slots_than_can_be_named() -> None:
    spec = spec_of(num_slots=11, max_requests=1, max_draft_tokens=1)
    [each] = sconv.plan(spec, memory="9999TiB", layout="dense").layouts
    assert (each.slots, each.requests) == (2**31 - 1, 2**31 - 11)


def test_saved_bytes_become_slots() -> None:
    # One layer of 64 channels, K = 4, dtn = 4: a slot has 3 columns, a row 12, 6 or 4 of them.
    spec = spec_of(num_layers=1, streams=[Stream("a", 64)], dtype=torch.float32)
    column = 64 * 4
    plan = sconv.plan(spec, memory=(3 + 100 * (3 + 12)) * column)
    assert (plan["dense"].requests, plan["dedup"].requests) == (100, 100 * 15 // 9)
    paths = 4 * 3 * 4
    assert plan["inputs"].requests == 100 * 15 * column // (7 * column + paths)
    assert plan.best is plan["inputs"]


def test_without_speculation_all_layouts_fit_the_same() -> None:
    plan = sconv.plan(spec_of(max_draft_tokens=1), memory="1MiB")
    assert len({each.requests for each in plan.layouts}) == 1
    assert {each.row_bytes for each in plan.layouts} == {0}
    assert plan.best.layout == "dense"


def test_one_layout_alone() -> None:
    spec = spec_of()
    everything = sconv.plan(spec, memory=50_000)
    for layout in LAYOUTS:
        alone = sconv.plan(spec, memory=50_000, layout=layout)
        assert alone.layouts == (everything[layout],)
        assert sconv.plan(spec_of(window_layout=layout), memory=50_000) == alone
    with pytest.raises(KeyError, match="dense"):
        alone["dense"]


def test_trees_leave_dedup_out() -> None:
    plan = sconv.plan(spec_of(draft_topk=2), memory=50_000)
    assert [each.layout for each in plan.layouts] == ["dense", "inputs"]
    with pytest.raises(SpecError, match=r"draft_topk=2 with window_layout='dedup'"):
        sconv.plan(spec_of(draft_topk=2), memory=50_000, layout="dedup")


def test_a_memory_that_holds_nothing() -> None:
    slot = 3 * 15 * 2
    one = 2 * slot + 4 * slot
    assert sconv.plan(spec_of(), memory=one, layout="dense")["dense"].requests == 1
    message = rf"{one - 1} bytes hold no request .*'dense'.*takes {5 * slot}, .* 0 .* {slot}"
    with pytest.raises(SpecError, match=message):
        sconv.plan(spec_of(), memory=one - 1, layout="dense")
    for wrong in (0, -5, True, 1.5, None):
        with pytest.raises(SpecError, match="expected a number of bytes"):
            sconv.plan(spec_of(), memory=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("17", 17),
        ("1 B", 1),
        ("2kB", 2000),
        ("1.5 GiB", 3 << 29),
        ("4gib", 4 << 30),
        ("1MB", 10**6),
        (" 2TiB ", 2 << 40),
    ],
)
def test_sizes_as_text(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1", "4 PB", "1e9", "4GiB/s", "4,5GiB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(SpecError, match="is no size"):
        parse_bytes(text)


COMMAND = ["plan", "--memory", "4GiB", "--layers", "36", "--stream", "qkv=8192"]


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*COMMAND, "--draft-tokens", "4"]) == 0
    # fmt: off
    assert capsys.readouterr().out.splitlines() == [
        "LAYOUT  REQUESTS  SLOTS  PER SLOT   PER ROW       STATE   WINDOWS     TOTAL",
        "dense        485    485  1.69 MiB  6.75 MiB  820.12 MiB  3.20 GiB  4.00 GiB",
        "dedup        808    808  1.69 MiB  3.38 MiB    1.33 GiB  2.66 GiB  4.00 GiB",
        "inputs      1039   1039  1.69 MiB  2.25 MiB    1.71 GiB  2.28 GiB  4.00 GiB",
        "dedup: +323 requests against dense",
        "inputs: +554 requests against dense",
    ]
    # fmt: on


def test_the_command_plans_what_the_function_does(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--stream",
        "mlp=64",
        "--kernel-size",
        "3",
        "--dtype",
        "float32",
        "--window-axis",
        "channel",
    ]
    arguments += ["--draft-tokens", "3", "--draft-topk", "2", "--snapshots", "7", "--json"]
    arguments += ["--slots-per-request", "3"]
    assert cli.main([*COMMAND, *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    spec = StateSpec(
        num_layers=36,
        streams=[Stream("qkv", 8192), Stream("mlp", 64)],
        kernel_size=3,
        num_slots=8,
        max_requests=1,
        dtype=torch.float32,
        window_axis="channel",
        max_draft_tokens=3,
        draft_topk=2,
    )
    plan = sconv.plan(spec, memory=4 << 30, slots_per_request=3)
    assert (found["memory"], found["best"]) == (plan.memory, plan.best.layout)
    assert [each["layout"] for each in found["layouts"]] == ["dense", "inputs"]
    for each in found["layouts"]:
        planned = plan[each.pop("layout")]
        assert each == {name: getattr(planned, name) for name in each}
        assert len(each) == 8
    assert cli.main([*COMMAND, "--layout", "inputs", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["layouts"]) == 1


def test_the_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*COMMAND, "--memory", "1kB"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("sconv: 1000 bytes hold no request")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "banana"], "argument --memory: 'banana' is no size: expected"),
        (["--memory", "0"], "argument --memory: '0' is no memory"),
        (["--layers", "0"], "argument --layers: '0': expected a number, 1 or more"),
        (["--layers", "-1"], "argument --layers: '-1': expected a number, 1 or more"),
        (["--layers", "x"], "argument --layers: 'x': expected a number, 1 or more"),
        (["--draft-tokens", "0"], "argument --draft-tokens: '0': expected a number, 1"),
        (["--draft-topk", "0"], "argument --draft-topk: '0': expected a number, 1"),
        (["--snapshots", "-1"], "argument --snapshots: '-1': expected a number, 0 or more"),
        (["--stream", "k"], "'k': expected NAME=DIM"),
        (["--stream", "k=x"], "'k=x': expected NAME=DIM"),
        (["--stream", "k=0"], "'k=0': expected NAME=DIM"),
        (["--stream", "qkv=1"], "error: streams names a stream twice"),
        (["--kernel-size", "9"], "error: kernel_size=9: the contract covers 2 to 8"),
        (["--draft-topk", "2", "--layout", "dedup"], "error: the plan does not support draft_topk"),
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
    ],
)
def test_the_command_does_not_understand(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main([*COMMAND, *arguments])
    captured = capsys.readouterr()
    assert left.value.code == 2
    assert captured.out == ""
    assert message in captured.err.rpartition("sconv plan: ")[2]


def test_the_command_needs_torch_and_says_so(alone) -> None:
    done = alone.python("-m", "sconv", *COMMAND, code=2)
    assert done.stdout == ""
    assert done.stderr == (
        "sconv: 'plan' needs torch, which arrives with a plugin: pip install sconv-plugin-cpu\n"
    )


def test_no_distribution_can_take_the_command(site, capsys: pytest.CaptureFixture[str]) -> None:
    site.module("gen", "raise AssertionError('imported')")
    site.distribution("sconv-extra", commands={"plan": "gen:main"})
    assert cli.main(COMMAND) == 0
    assert "dense" in capsys.readouterr().out


def test_every_option_of_the_command_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", "--help"])
    options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
    part = re.split(r"^## ", CLI.read_text(), flags=re.MULTILINE)
    table = next(text for text in part if text.startswith("sconv plan\n"))
    described = {cell.split(" ")[0] for cell in re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)}
    assert described == options
