"""python tests/figures.py: regenerates what the README shows, from the JSON that the lessons and train.py left in figures/.

    python tests/figures.py            rewrites the README's tables (between <!-- name --> and <!-- end -->) and figures/train.*
    python tests/figures.py --runs     first runs train.py for figures/train.json: four arms, three seeds, about 7 minutes;
                                       runs that runs/figures holds are not run again

The lessons' own figures come from the lessons: python 01_mismatch.py, 02, 03 and 04 and 05 with --study.
`tests/test_readme.py` fails when a table, or a sentence with a measured number, differs from its JSON."""
import csv
import json
import re
import statistics
import subprocess
import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SEEDS = (0, 1, 2)
ARMS = {"on-policy": ["--staleness", "0"], "stale, none": ["--staleness", "15"], "stale, tis": ["--staleness", "15", "--correction", "tis"],
        "stale, dlc": ["--staleness", "15", "--correction", "dlc"]}
SHOWN = (0, 5, 10, 20, 40, 60, 79)


# ---------------------------------------------------------------- the runs of train.py
def run(arm: str, seed: int) -> tuple[list[dict], dict]:
    """The rows of a run and its summary."""
    out = ROOT / "runs" / "figures" / f"{arm.replace(', ', '-')}-seed{seed}"
    if not (out / "summary.json").exists():
        print(f"{arm}, seed {seed}", flush=True)
        subprocess.run([sys.executable, str(ROOT / "train.py"), *ARMS[arm], "--seed", str(seed), "--out", str(out)], stdout=subprocess.DEVNULL, check=True)
    with (out / "metrics.csv").open() as file:
        return list(csv.DictReader(file)), json.loads((out / "summary.json").read_text())


def train_json() -> dict:
    """What figures/train.json holds."""
    result = {"seeds": SEEDS}
    for arm in ARMS:
        runs = [run(arm, seed) for seed in SEEDS]
        column = lambda name: [[float(row[name]) for row in rows] for rows, _ in runs]
        curves, gaps, losses = column("reward"), column("discrepancy_abs"), column("loss")
        result[arm] = {
            "curves": [[round(v, 3) for v in curve] for curve in curves],
            "reward": {str(step): {"mean": round(statistics.mean(c[step] for c in curves), 3), "low": round(min(c[step] for c in curves), 3),
                                   "high": round(max(c[step] for c in curves), 3)} for step in SHOWN},
            "discrepancy_abs": {str(step): round(statistics.mean(g[step] for g in gaps), 6) for step in SHOWN},
            "loss": {"low": min(map(min, losses)), "high": max(map(max, losses))},
            "lag_abs_max": max(map(max, column("lag_abs"))),
            "summaries": [summary for _, summary in runs]}
    return result


def draw_train(result: dict) -> None:
    """figures/train.png, from the JSON alone."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, len(ARMS), figsize=(15, 3.6), sharey=True)
    titles = {"on-policy": "Synced before every step", "stale, none": "Synced every 16 steps,\nuncorrected", "stale, tis": "Synced every 16 steps,\ntoken TIS",
              "stale, dlc": "Synced every 16 steps,\nand where DLC asks for it"}
    for panel, arm in zip(axes, ARMS):
        for seed, curve, style in zip(SEEDS, result[arm]["curves"], ("-", "--", ":")):
            panel.plot(curve, "k" + style, linewidth=1.2, label=f"seed {seed}")
        panel.set(xlabel="step", ylim=(0, 1), title=titles[arm])
    axes[0].set_ylabel("mean reward of a step")
    axes[0].legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(ROOT / "figures" / "train.png", dpi=110)
    plt.close(figure)


# ---------------------------------------------------------------- the README's tables
def load(name: str) -> dict:
    return json.loads((ROOT / "figures" / f"{name}.json").read_text())


def table(head: list[str], rows: list[list]) -> str:
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [head, ["---"] * len(head), *rows])


def power(x: float) -> str:
    """1.2e-3, and 0 for 0."""
    return "0" if x == 0 else re.sub(r"e([+-])0", r"e\1", f"{x:.1e}")


def each(values, digits: int = 2) -> str:
    """.96 .97 1.02"""
    return " ".join(f"{v:.{digits}f}".removeprefix("0") if isinstance(v, float) else str(v) for v in values)


def mismatch() -> str:
    """Lesson 1's arms."""
    return table(["arm", "mean abs d", "± seeds", "k3", "mean d"],
                 [[("bug: " if r["kind"] == "bug" else "") + r["arm"].replace(" | ", ", "), power(r["abs"]), power(r["spread"]), power(r["k3"]), power(r["mean"])]
                  for r in load("01_mismatch")["table"] if r["kind"] in ("control", "natural", "precision", "bug")])


def weights() -> str:
    """Lesson 2's exact world."""
    formulas = {"none": "1", "token-is": "pi/mu at the token", "tis": "min(pi/mu, 2)", "icepop": "pi/mu inside [0.5, 5], else 0",
                "kpop": "1 where both binary KLs are at most phi (10 % masked), else 0", "seq-is": "prod_t pi/mu", "seq-tis": "min(prod_t pi/mu, 2)",
                "seq-mis": "prod_t pi/mu if at most 2, else 0", "geo": "(prod_t pi/mu)^(1/T)", "snis": "prod_t pi/mu over the batch's mean", "ppo": "pi/pi_old, 0 where PPO clips",
                "minirl": "min(pi/mu, 5), 0 where PPO would clip pi/pi_old", "dsv32": "pi/mu, 0 where PPO clips it; a response with A < 0 and mean log mu/pi > 0.5 is dropped"}
    small, large = load("02_importance_sampling")["exact"]["tables"]
    bias = lambda t, name: f"{t['rows'][name]['bias']:.2f} ± {t['spread'][name]:.2f}"
    return table(["`--correction`", "weight", f"bias, noise {small['size']}", "variance", f"bias, noise {large['size']}", "variance", "MSE at n = 4096"],
                 [[name, formula, bias(small, name), f"{small['rows'][name]['variance']:.0f}", bias(large, name), f"{large['rows'][name]['variance']:.0f}", f"{large['rows'][name]['mse']:.2f}"]
                  for name, formula in formulas.items()])


def dlc_records() -> list[dict]:
    return list(load("04_dlc")["study"].values())


def arms(name: str) -> str:
    """Lesson 4's arms on one task."""
    lesson4 = import_module("04_dlc")
    return table(["arm", "accuracy at the end", "KL / floor, fresh prefixes", "KL / floor, the sampler's prefixes", "syncs", "seconds"],
                 [[r["arm"], each(r["accuracy"]), each(r["fresh"], 1), each(r["sampler"], 1), each(r["syncs"]), f"{r['seconds']:.0f}"] for r in lesson4.arm_rows(lesson4.main_runs(dlc_records(), name))])


def positions() -> str:
    """Where the early-stop task's damage is, and who sees it."""
    lesson4 = import_module("04_dlc")
    steps = lambda values: " ".join("-" if v is None else str(v) for v in values)
    mean = lambda values: f"{statistics.mean(values):.3f}"
    return table(["arm", "fresh: early", "late", "above .2 at step", "above 3 floors", "sampler's: early", "late", "above .2", "above 3 floors"],
                 [[r["arm"], *(cell for kind in ("fresh", "sampler") for cell in (mean(r[f"{kind} early"]), mean(r[f"{kind} late"]), steps(r[f"{kind} above 0.2"]), steps(r[f"{kind} above 3 floors"])))]
                  for r in lesson4.prefixes(lesson4.main_runs(dlc_records(), "stop")) if r["arm"] in lesson4.MAIN + ["ppo", "seq-mis", "centering"]])


def free_tokens() -> str:
    """The discrepancy alone."""
    lesson4, rows = import_module("04_dlc"), []
    for noise in (0.0, 0.05, 0.1):
        for arm in ("none", "tis", "centering"):
            row = [f"{noise:.0%}", arm]
            for kind in ("raw", "mean"):
                mine = [r for r in dlc_records() if r["setting"] == f"free, {kind}"]
                base = statistics.mean(lesson4.mean_kl(r) for r in mine if r["arm"] == "none" and not r["noise"])
                cell = [r for r in mine if r["arm"] == arm and r["noise"] == noise]
                row += [each([lesson4.mean_kl(r) / base for r in cell], 1), each([r["entropy"] for r in cell])] + ([each([r["sampled"] for r in cell])] if kind == "raw" else [])
            rows.append(row)
    return table(["noise in the engine's weights", "arm", "raw rewards: KL / floor", "entropy at the end", "reward", "group means: KL / floor", "entropy"], rows)


def alarm_levels() -> str:
    """Which ESS warns."""
    lesson4 = import_module("04_dlc")
    return table(["alarm", "harmed runs: before the harm", "late or never", "false alarms in quiet runs", "median lead, steps"],
                 [[r["level"], r["before"], r["late"], f"{r['false']} of {r['quiet']}", f"{statistics.median(r['leads']):.0f}" if r["leads"] else "-"] for r in lesson4.alarms(dlc_records())])


def tail() -> str:
    """The modelled tail's error."""
    return table(["", "K", "mass of the head", "gradient's error, tail modelled", "tail dropped"],
                 [[name, r["K"], f"{r['mass']:.4f}", power(r["modelled"]), power(r["dropped"])] for name, rows in load("04_dlc")["tail"].items() for r in rows])


def replay() -> str:
    """Lesson 5's gap."""
    percent = lambda x: f"{100 * x:.2f}"
    return table(["policy", "situation", "replay", "mean abs d", "k3", "F(1.1), %", "F(2), %", "picks that flip, %", "tokens with a flip, % (layers independent)", "rms of d: no flip, flip"],
                 [[r["policy"], r["situation"], r["replay"], power(r["abs"]), power(r["k3"]), percent(r["F(1.1)"]), percent(r["F(2)"]),
                   *([percent(r["flips"]["picks"]), f"{percent(r['flips']['tokens'])} ({percent(r['flips']['tokens_predicted'])})", f"{power(r['rms where no pick flips'])}, {power(r['rms where one does'])}"]
                     if "flips" in r else ["", "", ""])] for r in load("05_router_replay")["gap"]])


def replay_study() -> str:
    """No replay, R2, R3 in training."""
    lesson4, records = import_module("04_dlc"), list(load("05_router_replay")["study"].values())
    base, rows = lesson4.floor(records), []
    for arm, kind, period in dict.fromkeys((r["arm"], r["replay"], r["period"]) for r in records):
        mine = [r for r in records if (r["arm"], r["replay"], r["period"]) == (arm, kind, period)]
        rows.append([f"every {period} step{'s' * (period > 1)}", kind, each([lesson4.mean_kl(r) / base for r in mine], 1), each([r["sampled"] for r in mine])])
    return table(["synced", "replay", "KL / floor", "accuracy at the end"], rows)


def curve() -> str:
    """Is my run normal?"""
    reward, gap = load("train")["on-policy"]["reward"], load("train")["on-policy"]["discrepancy_abs"]
    short = lambda x: f"{x:.2f}".removeprefix("0")
    return table(["step", *SHOWN], [["reward, mean of 3 seeds", *(short(reward[str(k)]["mean"]) for k in SHOWN)],
                                    ["lowest and highest", *(f"{short(reward[str(k)]['low'])}-{short(reward[str(k)]['high'])}" for k in SHOWN)],
                                    ["mean abs d", *(power(gap[str(k)]) for k in SHOWN)]])


TABLES = {"mismatch": mismatch, "weights": weights, "arms-sum": lambda: arms("sum"), "arms-stop": lambda: arms("stop"), "positions": positions, "free": free_tokens, "alarms": alarm_levels,
          "tail": tail, "replay": replay, "replay-study": replay_study, "curve": curve}


def with_tables(readme: str) -> str:
    """The README with every table made anew."""
    for name, make in TABLES.items():
        readme, found = re.subn(rf"(<!-- {name} -->\n).*?(\n<!-- end -->)", lambda match: match[1] + make() + match[2], readme, flags=re.DOTALL)
        assert found == 1, f"the README has {found} places for {name}"
    return readme


def main() -> None:
    if sys.argv[1:] == ["--runs"]:
        import_module("01_mismatch").save_json(train_json(), ROOT / "figures" / "train.json")
    elif sys.argv[1:]:
        sys.exit(__doc__)
    draw_train(load("train"))
    (ROOT / "README.md").write_text(with_tables((ROOT / "README.md").read_text()))
    print("figures/train.png and the README's tables are made anew")


if __name__ == "__main__":
    main()
