"""python tests/figures.py: regenerates what the README shows of train.py, from runs of three seeds.

Runs train.py on-policy and with a sampler up to 15 steps old, without and with token TIS (runs that
runs/figures holds are not run again; about 5 minutes in all), and writes figures/train.json and
figures/train.png. The lessons write their own figures."""
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
ARMS = {"on-policy": ["--staleness", "0"], "stale, none": ["--staleness", "15"], "stale, tis": ["--staleness", "15", "--correction", "tis"]}
SHOWN = (0, 5, 10, 20, 40, 60, 79)


def run(arm: str, seed: int) -> tuple[list[dict], dict]:
    """The rows of a run and its summary."""
    out = ROOT / "runs" / "figures" / f"{arm.replace(', ', '-')}-seed{seed}"
    if not (out / "summary.json").exists():
        print(f"{arm}, seed {seed}", flush=True)
        subprocess.run([sys.executable, str(ROOT / "train.py"), *ARMS[arm], "--seed", str(seed), "--out", str(out)],
                       stdout=subprocess.DEVNULL, check=True)
    with (out / "metrics.csv").open() as file:
        return list(csv.DictReader(file)), json.loads((out / "summary.json").read_text())


def main() -> None:
    result, curves = {"seeds": SEEDS}, {}
    for arm in ARMS:
        runs = [run(arm, seed) for seed in SEEDS]
        column = lambda name: [[float(row[name]) for row in rows] for rows, _ in runs]
        curves[arm], gaps, losses = column("reward"), column("discrepancy_abs"), column("loss")
        result[arm] = {
            "reward": {step: {"mean": round(statistics.mean(c[step] for c in curves[arm]), 3), "low": round(min(c[step] for c in curves[arm]), 3),
                              "high": round(max(c[step] for c in curves[arm]), 3)} for step in SHOWN},
            "discrepancy_abs": {step: round(statistics.mean(g[step] for g in gaps), 6) for step in SHOWN},
            "loss": {"low": min(map(min, losses)), "high": max(map(max, losses))},
            "lag_abs_max": max(map(max, column("lag_abs"))),
            "summaries": [summary for _, summary in runs]}
    (ROOT / "figures" / "train.json").write_text(json.dumps(result, indent=1) + "\n")
    figure, axes = plt.subplots(1, len(ARMS), figsize=(12, 3.6), sharey=True)
    titles = {"on-policy": "A normal run: synced before every step", "stale, none": "Synced every 16 steps, uncorrected", "stale, tis": "Synced every 16 steps, token TIS"}
    for panel, arm in zip(axes, ARMS):
        for seed, curve, style in zip(SEEDS, curves[arm], ("-", "--", ":")):
            panel.plot(curve, "k" + style, linewidth=1.2, label=f"seed {seed}")
        panel.set(xlabel="step", ylim=(0, 1), title=titles[arm])
    axes[0].set_ylabel("mean reward of a step")
    axes[0].legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(ROOT / "figures" / "train.png", dpi=110)
    for arm in ARMS:
        print(arm, json.dumps(result[arm], indent=1))


if __name__ == "__main__":
    main()
