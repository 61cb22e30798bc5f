"""Times the cases of the speed table on one GPU; with ``--tune``, in all tiles worth a try.

Writes JSON: the card, the versions, and for each case its microseconds, those of a copy of as many
bytes in the same run, and the aim.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch
from cases import (
    Step,
    Timed,
    commit_cases,
    decode_cases,
    extend_cases,
    layout_cases,
    metadata_cases,
    verify_cases,
)
from harness import compile_all, machine, record
from timing import copy_us, graph_us, host_us

from sconv_cuda.decode import DECODE
from sconv_cuda.launch import Tile

GROUPS: dict[str, Callable[[], list[Timed]]] = {
    "decode": decode_cases,
    "extend": extend_cases,
    "verify": verify_cases,
    "commit": commit_cases,
    "metadata": metadata_cases,
}
#: Times that a case is measured; its figure is the median. Bytes that are held in between.
ROUNDS, SPACER = 3, 6 << 20
EXTRA: dict[str, Callable[[], list[Timed]]] = {"layouts": layout_cases}


def measure(case: Timed, copies: dict[float, float], *, tune: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {"case": case.name, "bytes": case.bytes, "aim": case.aim}
    if case.bytes:
        if case.bytes not in copies:
            copies[case.bytes] = copy_us(case.bytes)
        entry["copy_us"] = copies[case.bytes]
    # The memory that outputs get decides about a few percent: each round gets other memory.
    rounds, spacers = [], []
    for number in range(ROUNDS):
        rounds.append(graph_us(case.calls(None)))
        spacers.append(torch.empty((2 * number + 1) * SPACER, dtype=torch.uint8, device="cuda"))
    entry["us"], entry["rounds"] = statistics.median(rounds), rounds
    if case.host:
        # As an engine calls it: without gradients.
        with torch.no_grad():
            entry["host_us"] = min(host_us(case.calls(None)[0]) for _ in range(2))
    if tune:
        tried = {}
        for tile in case.tiles:
            tried["/".join(map(str, astuple(tile)))] = graph_us(case.calls(tile), replays=5)
        entry["tiles"] = dict(sorted(tried.items(), key=lambda item: item[1]))
    return entry


def measure_warmup() -> float:
    """Seconds to compile what an Inkling decoder with drafts needs, from an empty cache."""
    from harness import build

    from sconv import StateSpec, Stream

    streams = [Stream("k", 1024), Stream("v", 1024), Stream("attn", 6144), Stream("mlp", 6144)]
    backend = build(StateSpec(66, streams, 4, 32, 32, max_draft_tokens=4))
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        backend.warmup()
    return time.perf_counter() - begin


def measure_step() -> dict[str, Any]:
    """The whole step: in one graph with its metadata, and with the metadata before the replay."""
    step = Step()
    for group in (True, False):
        step.metadata()
        step.convolve(group=group)
    found: dict[str, Any] = {}
    for name, recorded, eager in (
        ("convolutions alone", lambda: step.convolve(), None),
        ("metadata in graph", lambda: (step.metadata(), step.convolve()), None),
        ("metadata before replay", lambda: step.convolve(), step.metadata),
        ("k and v apart", lambda: (step.metadata(), step.convolve(group=False)), None),
    ):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = recorded()
        device, wall = [], []
        for i in range(25):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            at = time.perf_counter()
            begin.record()
            if eager is not None:
                eager()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if i >= 5:
                wall.append((time.perf_counter() - at) * 1e6)
                device.append(begin.elapsed_time(end) * 1e3)
        found[name] = {"us": statistics.median(device), "wall_us": statistics.median(wall)}
        del kept
    return found


def tune_step() -> None:
    """Print the step's time in each shape of its decode kernels."""
    step, tiles, jobs = Step(), [], {}
    for block in ((512, 8), (256, 4), (1024, 8), (512, 4), (128, 2)):
        tiles += [Tile(*block, 1, ahead) for ahead in (True, False)]
    before = DECODE.tiles
    for tile in tiles:
        object.__setattr__(DECODE, "tiles", ((float("inf"), tile),))
        record(step.backend, lambda: (step.metadata(), step.convolve()), jobs)
    compile_all(jobs)
    found = {}
    for tile in tiles:
        object.__setattr__(DECODE, "tiles", ((float("inf"), tile),))
        step.backend._impl._convolutions._step = None
        step.metadata()
        step.convolve()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step.metadata()
            kept = step.convolve()
        times = []
        for i in range(15):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if i >= 4:
                times.append(begin.elapsed_time(end) * 1e3)
        found[tile] = statistics.median(times)
        del kept
    object.__setattr__(DECODE, "tiles", before)
    for tile, us in sorted(found.items(), key=lambda item: item[1]):
        print("step in", astuple(tile), f"{us:.1f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument(
        "--only", nargs="*", choices=[*GROUPS, *EXTRA, "step", "warmup"], default=[*GROUPS, "step"]
    )
    parser.add_argument("--json")
    parser.add_argument("--match", default="", help="only cases whose name holds this")
    options = parser.parse_args()
    torch.manual_seed(0)
    report: dict[str, Any] = {"machine": machine(), "cases": []}
    print(report["machine"], flush=True)
    report["big_copy_GBps"] = 2 * (1 << 31) / copy_us(2.0 * (1 << 31), 2) / 1e3
    copies: dict[float, float] = {}
    for name in options.only:
        if name == "warmup":
            report["warmup_s"] = measure_warmup()
            print(f"warmup: {report['warmup_s']:.1f} s", flush=True)
            continue
        if name == "step":
            report["step"] = measure_step()
            if options.tune:
                tune_step()
            for key, value in report["step"].items():
                print(f"step, {key}: {value['us']:.1f} us, wall {value['wall_us']:.1f}", flush=True)
            continue
        cases, jobs = {**GROUPS, **EXTRA}[name](), {}
        cases = [case for case in cases if options.match in case.name]
        for case in cases:
            for tile in [None, *(case.tiles if options.tune else [])]:
                assert case.backend is not None
                record(case.backend, lambda case=case, tile=tile: case.calls(tile)[0](), jobs)
        seconds = compile_all(jobs)
        print(f"{name}: {len(jobs)} compilations in {seconds:.1f} s", flush=True)
        for case in cases:
            entry = measure(case, copies, tune=options.tune)
            report["cases"].append(entry)
            print(line(entry), flush=True)
        del cases, jobs
        torch.cuda.empty_cache()
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)


def line(entry: dict[str, Any]) -> str:
    text = f"{entry['case']}: {entry['us']:.2f} us"
    if "copy_us" in entry:
        text += f", copy {entry['copy_us']:.2f} us, fit {entry['copy_us'] / entry['us']:.3f}"
    text += f", aim {entry['aim']}"
    if "host_us" in entry:
        text += f", host {entry['host_us']:.1f} us"
    if "tiles" in entry:
        best = list(entry["tiles"].items())[:8]
        text += "; " + " ".join(f"{tile}={us:.2f}" for tile, us in best)
    return text


if __name__ == "__main__":
    main()
