"""Draws ``results/speed.svg`` from the JSON that ``bench.py`` wrote: each case against a copy.

    python plot.py results/h200-bench.json results/speed.svg

The best peer's figure was measured by the same method on a card of the same kind, with a copy of
its own beside it.
"""

from __future__ import annotations

import json
import sys
from typing import Final

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

#: Fraction of a copy that the fastest implementation elsewhere reached; None = not measured.
PEERS: Final = {
    "decode (1, 6144)": 0.80,
    "decode (32, 1024)": 0.65,
    "decode (32, 6144)": 0.92,
    "decode (256, 1024)": 0.92,
    "decode (256, 6144)": 0.83,
    "decode (1024, 6144)": 0.90,
    "extend T=2048 D=1024": 0.57,
    "extend T=2048 D=6144": 0.57,
    "extend T=16384 D=1024": 0.58,
    "extend T=16384 D=6144": 0.62,
    "extend T=65536 D=1024": 0.57,
    "extend T=65536 D=6144": 0.69,
}


def main() -> None:
    source, target = sys.argv[1:3]
    with open(source) as file:
        report = json.load(file)
    found = {
        case["case"]: case["copy_us"] / case["us"] for case in report["cases"] if "copy_us" in case
    }
    names = [name for name in PEERS if f"{name} residual" in found]
    figure, axes = plt.subplots(figsize=(9, 5.2))
    height = 0.26
    for offset, (label, values, colour) in enumerate(
        (
            ("with residual", [found[f"{name} residual"] for name in names], "#1f6f8b"),
            ("with silu", [found[f"{name} silu"] for name in names], "#99c1b9"),
            ("best elsewhere", [PEERS[name] for name in names], "#c9c9c9"),
        )
    ):
        places = [index + (offset - 1) * height for index in range(len(names))]
        axes.barh(places, values, height, label=label, color=colour)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("speed over that of a copy of the same bytes (more is better)")
    axes.set_title(f"{report['machine']['card']}, K = 4, bfloat16, under graph replay")
    axes.legend(loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main()
