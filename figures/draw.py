"""Every picture, from the JSON beside it; and every table of RESULTS.md and the README.

    python figures/draw.py      makes all of them anew

A lesson calls `draw` on the JSON that it has just written."""
import json
from pathlib import Path

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

FIGURES = Path(__file__).resolve().parent

# The palette of Okabe and Ito, which color-blind readers can tell apart. One color per arm in all
# pictures, and a line style of its own, for a print in grey.
BLACK, ORANGE, SKY, GREEN, BLUE, RED, PURPLE, GREY = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#999999")
STYLE = {
    "on-policy": {"color": BLACK, "linestyle": "-"},
    "none": {"color": RED, "linestyle": ":"},
    "tis": {"color": ORANGE, "linestyle": "--"},
    "dlc": {"color": BLUE, "linestyle": "-"},
    "dlc, no resync": {"color": SKY, "linestyle": "-."},
    "centering": {"color": GREEN, "linestyle": (0, (5, 1))},
    "lag clip": {"color": PURPLE, "linestyle": (0, (3, 1, 1, 1))},
    "discrepancy": {"color": GREEN, "linestyle": "-"},
    "lag": {"color": PURPLE, "linestyle": "--"},
}
PICTURES = {}       # the JSON's name -> function of what it holds that makes the figure
TABLES = {}         # a table's name -> function that makes its Markdown, in the order of RESULTS.md


def picture(name: str):
    """Registers the function that draws figures/<name>.png from the numbers in figures/<name>.json."""
    def register(function):
        PICTURES[name] = function
        return function
    return register


def load(name: str):
    """What figures/<name>.json holds."""
    return json.loads((FIGURES / f"{name}.json").read_text())


def draw(path) -> None:
    """Draws the picture of a lesson's JSON beside it."""
    path = Path(path)
    figure = PICTURES[path.stem](json.loads(path.read_text()))
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=110)
    plt.close(figure)


# ---------------------------------------------------------------- lesson 1
@picture("01_mismatch")
def draw_01(result: dict):
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4.4))
    for (arm, (logp, mu)), marker, color in zip(result["points"].items(), ".x", (BLACK, RED)):
        left.plot(mu, logp, marker, color=color, markersize=4, label=arm, zorder=3 - "x.".index(marker))
    low = min(min(mu) for _, mu in result["points"].values())
    left.plot([low, 0], [low, 0], color=GREY, linewidth=0.8)
    left.set(xlabel="log mu, engine (nats)", ylabel="log pi, trainer (nats)",
             title="Same weights, two engines:\non the diagonal, but for a bug")
    left.legend()

    rows = result["by probability"]
    odds = [np.log(row["p"] / (1 - row["p"])) for row in rows]
    middle.errorbar(odds, [row["measured"] for row in rows], [row["±"] for row in rows],
                    fmt="o-", color=BLACK, label="measured, ± s.e.")
    middle.plot(odds, [row["eps (1 - p)"] for row in rows], "--", color=ORANGE,
                label="predicted: eps (1 - p), one eps")
    off = max(max(row["measured"] / row["eps (1 - p)"], row["eps (1 - p)"] / row["measured"])
              for row in rows)
    middle.set(xlabel="log-odds of the sampled token, log p / (1 - p)", ylabel="mean |d| (nats)",
               yscale="log", title="bf16 engine, fp32 trainer: a likely token moves\n"
               f"least; eps (1 - p) is right to a factor of {off:.1f}")
    middle.legend()

    rows, x = result["two errors"], np.arange(len(result["two errors"]))
    for shift, key, color, label in ((-0.15, "measured rms", BLACK, "measured"),
                                     (0.15, "predicted rms", ORANGE, "predicted: independent errors")):
        right.bar(x + shift, [row[key] for row in rows], 0.28, color=color, edgecolor="k", label=label)
    for i, row in enumerate(rows):
        right.text(i, 1.02 * max(row["measured rms"], row["predicted rms"]),
                   f"corr {row['correlation']:+.2f}", ha="center")
    control = next(row for row in result["arms"] if row["arm"] == "fp32 engine, fp32 trainer")
    right.set_xticks(x, [row["pair"].replace(", ", "\n") for row in rows])
    right.set(ylabel="rms of d (nats)", ylim=(0, 1.45 * max(row["measured rms"] for row in rows)),
              title=f"The gap is made by two rounding errors\n(fp32 on both sides: {control['rms']:.0e})")
    right.legend(fontsize=8)
    return figure


# ---------------------------------------------------------------- lesson 2
# ---------------------------------------------------------------- lesson 3
# ---------------------------------------------------------------- lesson 4
# ---------------------------------------------------------------- lesson 5
# ---------------------------------------------------------------- train.py
# ---------------------------------------------------------------- the tables
def main() -> None:
    for name in PICTURES:
        draw(FIGURES / f"{name}.json")


if __name__ == "__main__":
    main()
