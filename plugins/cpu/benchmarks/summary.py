"""Boil pytest-benchmark's report down to what is committed.

pytest plugins/cpu/benchmarks --benchmark-json=report.json
python plugins/cpu/benchmarks/summary.py report.json > plugins/cpu/benchmarks/results/cpu.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """Medians and minima in microseconds by group, and where they come from."""
    groups: dict[str, dict[str, dict[str, float]]] = {}
    for case in report["benchmarks"]:
        what = (case["params"] or {}).get("what", "sconv")
        stats = case["stats"]
        groups.setdefault(case["group"] or case["name"], {})[what] = {
            "median_us": round(stats["median"] * 1e6, 3),
            "min_us": round(stats["min"] * 1e6, 3),
        }
    return {
        "processor": report["machine_info"]["cpu"]["brand_raw"],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": report["datetime"],
        "note": "two virtual cores of a shared host; ratios within a group are the result",
        "groups": groups,
    }


if __name__ == "__main__":
    print(
        json.dumps([summary(json.loads(Path(one).read_text())) for one in sys.argv[1:]], indent=1)
    )
