"""Draw a loss curve of `train.py` as a PNG."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def draw(record: dict, file: Path) -> None:
    """Training loss per token and held-out loss per byte over the tokens seen; both are in bits."""
    millions = record["tokens_per_step"] / 1e6
    curve = record["curve"]
    measured = [point for point in curve if "held_out_bits_per_byte" in point]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(
        [point["step"] * millions for point in curve],
        [point["train_bits_per_token"] for point in curve],
        label="training, mean since the last point",
    )
    axes.plot(
        [point["step"] * millions for point in measured],
        [point["held_out_bits_per_byte"] for point in measured],
        "o-",
        label="held out, its first 256 windows",
    )
    axes.set(xlabel="million byte tokens seen", ylabel="bits per byte", yscale="log")
    axes.set_yticks([0.6, 0.8, 1, 1.5, 2, 3, 4], ["0.6", "0.8", "1", "1.5", "2", "3", "4"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title(
        f"{record['parameters'] / 1e6:.2f} M parameters, {record['corpus']['source']}\n"
        f"{record['card']}, {record['seconds']:.0f} s; {versions}",
        fontsize=10,
    )
    figure.savefig(file, dpi=120)


def main() -> None:
    """Write the picture beside the curve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("curve", type=Path, help="loss.json")
    file = parser.parse_args().curve
    draw(json.loads(file.read_text()), file.with_suffix(".png"))


if __name__ == "__main__":
    main()
