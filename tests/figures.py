"""python tests/figures.py: regenerates what the README shows of train.py, from runs of three seeds.

Runs `python train.py` with seeds 0, 1, 2 (those that runs/ does not hold yet) and writes the expected
curve with its spread to figures/train.json and figures/train.png. The lessons write their own."""
import csv
import json
import statistics
import subprocess
import sys
from pathlib import Path

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
SEEDS = (0, 1, 2)
SHOWN = (0, 5, 10, 20, 40, 60, 79)


def run(seed: int) -> tuple[list[dict], str]:
    """The rows of a run, and the line that its end prints about held-out accuracy."""
    out = ROOT / "runs" / f"none-s0-seed{seed}"
    log = out / "log.txt"
    if not log.exists():
        result = subprocess.run([sys.executable, str(ROOT / "train.py"), "--seed", str(seed)], capture_output=True, text=True, check=True)
        log.write_text(result.stdout)
    with (out / "metrics.csv").open() as file:
        return list(csv.DictReader(file)), next(line for line in log.read_text().splitlines() if line.startswith("held-out accuracy,"))


def main() -> None:
    runs = {seed: run(seed) for seed in SEEDS}
    curves = [[float(row["reward"]) for row in rows] for rows, _ in runs.values()]
    result = {"seeds": SEEDS, "held_out": {seed: line for seed, (_, line) in runs.items()},
              "seconds": [round(sum(float(row["seconds_step"]) for row in rows)) for rows, _ in runs.values()],
              "reward": {step: {"mean": round(statistics.mean(c[step] for c in curves), 3), "low": min(c[step] for c in curves),
                                "high": max(c[step] for c in curves)} for step in SHOWN},
              "discrepancy_abs": {step: round(statistics.mean(float(rows[step]["discrepancy_abs"]) for rows, _ in runs.values()), 6) for step in SHOWN},
              "lag_abs_max": max(float(row["lag_abs"]) for rows, _ in runs.values() for row in rows)}
    (ROOT / "figures" / "train.json").write_text(json.dumps(result, indent=1) + "\n")
    figure, axes = plt.subplots(figsize=(7, 3.6))
    for seed, curve, style in zip(SEEDS, curves, ("-", "--", ":")):
        axes.plot(curve, "k" + style, linewidth=1.2, label=f"seed {seed}")
    axes.set(xlabel="step", ylabel="mean reward of the step's 256 responses", ylim=(0, 1),
             title="A normal run: python train.py on a CPU, three seeds")
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(ROOT / "figures" / "train.png", dpi=110)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
