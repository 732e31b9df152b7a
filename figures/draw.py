"""Every picture, from the JSON beside it; and every table of RESULTS.md and the README.

    python figures/draw.py      makes all of them anew

A lesson calls `draw` on the JSON that it has just written."""
import json
import re
from importlib import import_module
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
    "lag clip + resync": {"color": PURPLE, "linestyle": "--"},
    "token-is": {"color": ORANGE, "linestyle": "-."},
    "geo": {"color": GREY, "linestyle": "--"},
    "minirl": {"color": PURPLE, "linestyle": "-."},
    "seq-tis": {"color": BLUE, "linestyle": "--"},
    "seq-is": {"color": GREEN, "linestyle": "-"},
    "discrepancy": {"color": GREEN, "linestyle": "-"},
    "lag": {"color": PURPLE, "linestyle": "--"},
}
PICTURES = {}       # the JSON's name -> function of what it holds that makes the figure
SOURCES = {}        # a picture's name -> the name of its JSON
TABLES = {}         # a table's name -> function that makes its Markdown, in the order of RESULTS.md


def picture(name: str, source: str | None = None):
    """Registers the function that draws figures/<name>.png from figures/<name>.json, or from that of
    another `source`."""
    def register(function):
        PICTURES[name] = function
        SOURCES[name] = source or name
        return function
    return register


def table(name: str):
    """Registers the function that makes a table from figures/*.json."""
    def register(function):
        TABLES[name] = function
        return function
    return register


def markdown(head: list, rows: list[list]) -> str:
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [head, ["---"] * len(head), *rows])


def power(x: float) -> str:
    """1.2e-3, and 0 for 0."""
    return "0" if x == 0 else re.sub(r"e([+-])0", r"e\1", f"{x:.1e}").replace("e+", "e")


def number(x) -> str:
    """Two decimals for a measured number; a dash where noise left none."""
    if x is None or x != x:
        return "-"
    return f"{x:.2f}" if isinstance(x, float) else str(x)


def load(name: str):
    """What figures/<name>.json holds."""
    return json.loads((FIGURES / f"{name}.json").read_text())


def draw(path, name: str | None = None) -> None:
    """Draws the picture of a JSON beside it: its own, or that of this name."""
    path = Path(path)
    name = name or path.stem
    figure = PICTURES[name](json.loads(path.read_text()))
    figure.tight_layout()
    figure.savefig(path.with_name(f"{name}.png"), dpi=110)
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
    off = [max(row["measured"] / row["eps (1 - p)"], row["eps (1 - p)"] / row["measured"]) for row in rows]
    middle.set(xlabel="log-odds of the sampled token, log p / (1 - p)", ylabel="mean |d| (nats)",
               yscale="log" if rows else "linear", title="bf16 engine, fp32 trainer: a likely token moves\n"
               f"least; eps (1 - p) is right to a factor of {max(off):.1f}" if rows else "too few tokens")
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


@table("mismatch")
def mismatch_table(kinds=("control", "natural", "batch shape", "precision", "bug", "cure")) -> str:
    """Lesson 1: d = log pi - log mu of the sampled tokens, in nats."""
    return markdown(
        ["", "arm", "mean abs d", "± seeds", "rms", "k3", "mean d", "± s.e.", "E[exp d]"],
        [[row["kind"], row["arm"], *(power(row[key]) for key in (
            "mean |d|", "± seeds", "rms", "k3", "mean d", "s.e. of mean d")), f"{row['E[exp d]']:.4f}"]
         for row in load("01_mismatch")["arms"] if row["kind"] in kinds])


@table("mismatch-short")
def mismatch_short() -> str:
    shown = ("fp32 engine, fp32 trainer", "temperature 0.7 in sampler only", "raw log-probs at temperature 0.7",
             "top-k 3 in sampler only", "bf16 log-softmax")
    rows = [row for row in load("01_mismatch")["arms"] if row["kind"] in ("natural", "cure") or row["arm"] in shown]
    return markdown(["arm", "mean abs d", "k3", "mean d ± s.e."], [
        [(f"{row['kind']}: " if row["kind"] in ("bug", "cure") else "") + row["arm"], power(row["mean |d|"]), power(row["k3"]),
         f"{power(row['mean d'])} ± {power(row['s.e. of mean d'])}"] for row in rows])


@table("errors")
def errors_table() -> str:
    """Lesson 1: the gap as two rounding errors, each against float64; predicted: independent."""
    rows = load("01_mismatch")["two errors"]
    return markdown(list(rows[0]), [
        [power(v) if "rms" in k or "error" in k else number(v) for k, v in row.items()] for row in rows])


@table("probability")
def probability_table() -> str:
    """Lesson 1: mean abs d against the probability of the token, predicted and measured."""
    return markdown(["p", "tokens", "eps (1 - p)", "measured", "±"], [
        [f"{row['p']:.4f}", row["tokens"], *(power(row[k]) for k in ("eps (1 - p)", "measured", "±"))]
        for row in load("01_mismatch")["by probability"]])


@table("say errors")
def say_errors() -> str:
    both, one, _ = load("01_mismatch")["two errors"]
    return (f"predicted {power(one['predicted rms'])}, measured {power(one['measured rms'])} for a bf16 engine against an "
            f"fp32 trainer. Two bf16 sides share errors (correlation {both['correlation']:+.2f}): "
            f"{power(both['predicted rms'])} predicted, {power(both['measured rms'])} measured")


# ---------------------------------------------------------------- lesson 2
def under_modulo(result: dict) -> list[dict]:
    """The rows of lesson 2's exact world whose reward is 1 if the tokens sum to 0 modulo V."""
    return [row for row in result["moments"] if row.get("reward", "modulo") == "modulo"]


@picture("02_importance_sampling")
def draw_02(result: dict):
    rows, rollouts, lowest = under_modulo(result), result["rollouts"], 1e-4     # a bias of 0 is drawn there
    longest = max(row["T"] for row in rows)
    markers = {"none": "o", "token-is": "s", "minirl": "D", "geo": "*", "seq-tis": "v", "seq-is": "^"}
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.8))

    def column(name: str, x: str) -> dict:
        """{noise or length: the weight's row}."""
        other, value = ("T", longest) if x == "noise" else ("noise", 0.4)
        mine = [row for row in rows if row["weight"] == name and row[other] == value]
        return {row[x]: row for row in sorted(mine, key=lambda row: row[x])}

    def noise(row: dict) -> float:
        """Standard deviation of the mean of n samples."""
        return (row["variance"] / n)**0.5

    unbiased = column("seq-is", "noise")[0.4]
    n = round(unbiased["variance"] / unbiased["MSE"])
    for axes, x in ((left, "noise"), (middle, "T")):
        for name, marker in markers.items():
            mine = column(name, x)
            axes.plot(list(mine), [max(row["bias"], lowest) for row in mine.values()], marker=marker,
                      markersize=6, label=f"{name}: bias", clip_on=False, zorder=3, **STYLE[name])
        for name in ("token-is", "seq-is"):
            mine = column(name, x)
            axes.plot(list(mine), [noise(row) for row in mine.values()], linewidth=5, alpha=0.4,
                      label=f"{name}: noise, n = {n}", **STYLE[name])
        axes.set(ylabel="size relative to the true gradient", yscale="log", ylim=(lowest, 300))
        axes.text(0.98, 0.02, "no bias: drawn at the bottom", transform=axes.transAxes, ha="right")
    without, token, capped = (column(name, "noise") for name in ("none", "token-is", "seq-tis"))
    left_over = min(token[size]["bias"] / without[size]["bias"] for size in without)
    bites = min((size for size in capped if capped[size]["bias"] > lowest), default="-")
    left.set(xlabel=f"noise on the logits of mu and of pi (T = {longest})", xscale="log")
    left.set_title(f"A token weight leaves {left_over:.0%} of the bias or more;\n"
                   f"seq-tis leaves none until its cap bites, at {bites}", fontsize=11)
    left.set_xticks(list(without), list(without))
    left.minorticks_off()
    left.legend(ncol=2, fontsize=8, loc="upper left")
    exact, token = (column(name, "T")[longest] for name in ("seq-is", "token-is"))
    middle.set(xlabel="length T of the responses, tokens (noise 0.4)")
    middle.set_title("A token weight is exact at T = 1 only; seq-is at any T,\n"
                     f"at {noise(exact) / noise(token):.1f} times token-is's sampling noise (T = {longest})", fontsize=11)
    middle.set_xticks(list(column("none", "T")))

    styles = (("o", 4, STYLE["discrepancy"]),
              ("s", 9, {"color": BLACK, "linestyle": "--", "markerfacecolor": "none"}),
              *((marker, 4, {**STYLE["lag"], "linestyle": line}) for marker, line in zip("^vD", ("-", "--", ":"))))
    for row, (marker, size, style) in zip(rollouts, styles):
        y = row["ESS by length"]
        right.plot(range(1, len(y) + 1), y, marker=marker, markersize=size, label=row["rollouts"], **style)
    right.axhline(0.5, color=GREY, linewidth=0.8)
    natural, bug = rollouts[:2]
    right.set(xlabel="length of the response, tokens", ylabel="ESS of the products of weights, a share",
              ylim=(0, 1.55), yticks=(0, 0.5, 1))
    blind = abs(bug["mean weight"] - 1) > 0.05 and bug["ESS of responses"] > 0.9
    right.set_title(f"The ESS {'is blind to' if blind else 'sees'} the top-k bug: it is {bug['ESS of responses']:.3f},\n"
                    f"and the mean token weight {bug['mean weight']:.2f} (natural: "
                    f"{natural['mean weight']:.2f})", fontsize=11)
    right.legend(fontsize=8, loc="upper right")
    return figure


FORMULAS = {
    "none": "1",
    "token-is": "pi/mu at the token",
    "prefix-is": "prod of pi/mu up to the token",
    "tis": "min(pi/mu, 2)",
    "icepop": "pi/mu inside [0.5, 5], else 0",
    "kpop": "1 where both binary KLs are at most phi (10 % masked), else 0",
    "seq-is": "prod_t pi/mu",
    "seq-tis": "min(prod_t pi/mu, 2)",
    "seq-mis": "prod_t pi/mu if at most 2, else 0",
    "geo": "(prod_t pi/mu)^(1/T)",
    "snis": "prod_t pi/mu over the batch's mean",
    "ppo": "pi/pi_old, 0 where PPO clips",
    "minirl": "min(pi/mu, 5), 0 where PPO would clip pi/pi_old",
    "dsv32": "pi/mu, 0 where PPO clips it; 0 on a response with A < 0 and mean log mu/pi > 0.5"}


def of_world(reward: str, noise: float) -> dict:
    """{weight: its row of lesson 2's exact world}, for the longest responses."""
    rows = [row for row in load("02_importance_sampling")["moments"] if row["reward"] == reward and row["noise"] == noise]
    return {row["weight"]: row for row in rows if row["T"] == max(r["T"] for r in rows)}


@table("weights")
def weights_table() -> str:
    """Lesson 2's exact world. All relative to grad J; modulo: the reward is 1 if the tokens sum to 0 modulo 4; additive:
    each token adds its share"""
    small, large, additive = of_world("modulo", 0.1), of_world("modulo", 0.4), of_world("additive", 0.4)
    spread = lambda row: f"{row['bias']:.2f} ± {row['± worlds'] or 0:.2f}"
    return markdown(
        ["`--correction`", "weight", "modulo, noise 0.1: bias", "noise 0.4: bias", "cosine", "variance", "MSE, n = 1024",
         "MSE, n = 4096", "MSE, n = 16384", "additive, noise 0.4: bias", "cosine", "variance"],
        [[name, formula, spread(small[name]), spread(large[name]), number(large[name]["cosine"]), f"{large[name]['variance']:.0f}",
          *(number(large[name][key]) for key in ("MSE, n = 1024", "MSE", "MSE, n = 16384")),
          spread(additive[name]), number(additive[name]["cosine"]), f"{additive[name]['variance']:.0f}"]
         for name, formula in FORMULAS.items()])


@table("weights-short")
def weights_short() -> str:
    modulo, additive = of_world("modulo", 0.4), of_world("additive", 0.4)
    return markdown(["`--correction`, noise 0.4", "modulo: bias", "cosine", "variance", "MSE, n = 4,096", "additive: bias", "cosine"], [
        [name, number(modulo[name]["bias"]), number(modulo[name]["cosine"]), f"{modulo[name]['variance']:.0f}",
         number(modulo[name]["MSE"]), number(additive[name]["bias"]), number(additive[name]["cosine"])]
        for name in ("none", "token-is", "tis", "prefix-is", "seq-is", "seq-tis")])


@table("say ess")
def say_ess() -> str:
    ess = {row["rollouts"]: row["ESS of responses"] for row in load("02_importance_sampling")["rollouts"]}
    natural, _, one, _, eight = ess.values()
    return (f"the ESS of whole responses is {natural:.4f} at the natural gap, {one:.2f} with the trainer one step ahead, and "
            f"{eight:.2f} after eight steps on the same batch")


# ---------------------------------------------------------------- lesson 3
@picture("03_decompose")
def draw_03(result: dict):
    rows, tiny = result["run"], "directions" in result
    figure, panels = plt.subplots(1, 2 + tiny, figsize=(5 * (2 + tiny), 4.4))
    left, middle = panels[:2]
    steps = [row["step"] for row in rows]
    stale, synced = ([row for row in rows if bool(row["rms l"]) == lag] for lag in (True, False))

    bottom = min(row["rms d"] for row in rows) / 10
    left.plot(steps, [row["rms l"] or np.nan for row in rows], marker=".", label="lag", **STYLE["lag"])
    left.plot([row["step"] for row in synced], [bottom] * len(synced), "v", color=STYLE["lag"]["color"],
              clip_on=False, label="lag exactly 0")
    left.plot(steps, [row["rms d"] for row in rows], label="discrepancy", **STYLE["discrepancy"])
    ratios = [row["rms l"] / row["rms d"] for row in rows if row["age"] == 1]
    left.set(xlabel="step", ylabel="rms over the step's tokens (nats)", yscale="log",
             ylim=(bottom, 30 * max(row["rms l"] + row["rms d"] for row in rows)),
             title="One step after a sync the lag is\n" +
             (f"{min(ratios):.2g} to {max(ratios):.2g} times the discrepancy" if any(ratios)
              else "still 0: no update has moved the trainer"))
    left.legend(loc="upper left")

    low = {}
    for key, marker, style in (("ESS of tokens", "s", {"color": ORANGE, "linestyle": "--"}),
                               ("ESS of responses", "o", {"color": BLACK, "linestyle": "-"})):
        middle.plot(steps, [row[key] for row in rows], marker=marker, markersize=4, label=key, **style)
        low[key] = sum(row[key] < 0.5 for row in stale)
    middle.axhline(0.5, color=GREY, linewidth=0.8)
    for row in rows:
        if row["age"] == 0:
            middle.axvline(row["step"], color=GREY, linestyle=":", linewidth=0.8)
    middle.set(xlabel="step (dotted: sync)", ylabel="ESS of the lag ratio, a share", ylim=(0, 1.3),
               title=f"Of {len(stale)} steps with a lag the ESS is below one half\n"
               f"in {low['ESS of responses']} for responses, in {low['ESS of tokens']} for tokens")
    middle.legend(loc="upper left")

    if tiny:
        right, cosines = panels[2], {}
        styles = {**STYLE, "control": {"color": GREY, "linestyle": ":"}}
        for row, marker in zip(result["directions"], "oxs"):
            kind = row["drift made by"].split(":")[0]
            cosines[kind] = {int(k): np.nan if v is None else v for k, v in row.items() if k.isdigit()}
            right.plot(cosines[kind].keys(), cosines[kind].values(), marker=marker,
                       label=row["drift made by"], **styles[kind])
        noise = np.nanmax(np.abs(list(cosines["control"].values())))
        right.axhspan(-noise, noise, color="0.92", zorder=0, label="within what the control reaches")
        engine, lag = (list(cosines[kind].values()) for kind in ("discrepancy", "lag"))
        keeps = "keeps" if min(engine) > 0.9 else "does not keep"
        loses = "loses it" if abs(lag[-1]) <= noise else "does not lose it"
        right.set(xlabel="steps apart", ylabel="cosine of the drift with itself", ylim=(-1.1, 1.15),
                  xscale="log", title=f"The engine's drift {keeps} its direction,\n"
                  f"the lag's {loses} within {max(cosines['lag'])} steps")
        right.set_xticks(list(cosines["discrepancy"]), list(cosines["discrepancy"]))
        right.minorticks_off()
        right.legend(fontsize=8, loc="lower left")
    return figure


@table("drift")
def drift_table() -> str:
    """Lesson 3's bias in the gradient: what was loaded into the engine, under both advantages."""
    rows, ratios = load("03_decompose")["drift"], ("|D| / |S|", "cos(D, S)", "cos(G, S)")
    head = ["loaded into the engine", "mean abs d", "k3"]
    head += [f"{kind}: {key.replace('|', chr(92) + '|')}" for kind in ("raw", "mean") for key in ratios]
    return markdown(head, [
        [raw["loaded into the engine"], power(raw["mean |d|"]), power(raw["k3"]),
         *(number(row[key]) for row in (raw, mean) for key in ratios)]
        for raw, mean in zip(rows[::2], rows[1::2])])


@table("say lag")
def say_lag() -> str:
    rows = load("03_decompose")["run"]
    ratios = [row["rms l"] / row["rms d"] for row in rows if row["age"] == 1]
    return (f"The lag is exactly 0 at each sync, and {min(ratios):.0f} to {max(ratios):.0f} times the discrepancy one step later "
            f"(rms, {len(ratios)} syncs)")


@table("directions")
def directions_table() -> str:
    """Lesson 3: cosine of the drift with itself, by steps apart, and its size in the second half of the run over that in
    the first; mean ± standard deviation over four seeds"""
    runs = [rows for key, rows in load("03_study").items() if key.startswith("directions")]
    table = []
    for rows in zip(*runs):
        columns = {key: [np.nan if row.get(key) is None else row[key] for row in rows] for key in list(rows[0])[1:]}
        table.append([rows[0]["drift made by"], *(f"{np.mean(x):.2f} ± {np.std(x):.2f}" for x in columns.values())])
    head = max((list(rows[0]) for rows in runs), key=len, default=[])
    return markdown([head[0], *(f"{key} apart" if key.isdigit() else key for key in head[1:])], table) if runs else ""


@table("cast")
def cast_table() -> str:
    """Lesson 3: a sync before every step, AdamW at 3e-5 from bf16 weights. Does the engine see the updates?"""
    rows = load("03_decompose").get("lost updates", [])
    return markdown(["trainer, engine", "step", "mean abs arithmetic", "mean abs cast", "the policy has moved",
                     "weights that the engine sees changed: predicted", "measured"], [
        [row["trainer | engine"].replace(" |", ","), row["step"],
         *(power(row[f"mean |{part}|"]) for part in ("arithmetic", "cast", "movement")),
         f"{row['weights seen to change, predicted']:.0%}", f"{row['measured']:.0%}"] for row in rows])


@table("feedback")
def feedback_table() -> str:
    """Lesson 3's feedback loop: rms lag (nats, on the start's responses) over that of two on-policy runs, before and
    after the ESS of the run with w = r first falls below 1/2; and the step of first harm (KL above three floors)"""
    rows = import_module("study").feedback_rows([r for key, r in load("03_study").items() if key.startswith("lr")])
    return markdown(list(rows[0]), [[f"{row['lr']:g}", *map(number, list(row.values())[1:])] for row in rows])


# ---------------------------------------------------------------- lesson 4
FRESH, STALE = "KL, fresh prefixes", "KL, sampler's prefixes"
NAME = {"none": "no correction", "tis": "TIS", "dlc": "DLC"}     # of an arm, where it is not its own


@picture("04_dlc")
def draw_04(result: dict):
    """One seed: each arm's distance from on-policy training, alone with a lag and with both; the ESS."""
    both = result.get("both")
    figure, panels = plt.subplots(1, 2 + bool(both), figsize=(5 * (2 + bool(both)), 4.6))

    def distances(panel, part: dict, title: str) -> None:
        rows = {row["arm"]: row for row in part["arms"]}
        for run in part["runs"]:
            arm = run["arm"]
            syncs, ratio = rows[arm]["syncs"], rows[arm][f"{FRESH} / floor"]
            # the first checkpoint is before any update: its KL is exactly 0
            at = [step for step in run["steps"] if step.get(FRESH)]
            panel.semilogy([step["step"] for step in at], [step[FRESH] for step in at], **STYLE[arm],
                           label=f"{NAME.get(arm, arm)}: {'-' if ratio is None else format(ratio, '.1f')} floors, "
                           f"{syncs} {'sync' if syncs == 1 else 'syncs'}")
        panel.set(xlabel="step", ylabel="KL(on-policy || run) (nats per token)", title=title,
                  ylim=(None, 30 * panel.get_ylim()[1]))                # room for the legend
        panel.legend(loc="upper left", fontsize=8)

    distances(panels[0], result, f"A lag: synced every {result['period']} steps.\n"
              "The floor is the on-policy run shown, another seed")
    for run in result["runs"]:
        style = STYLE[run["arm"]]
        panels[1].plot([step["ESS of responses"] for step in run["steps"]], label=NAME.get(run["arm"], run["arm"]), **style)
        if run["arm"] == "dlc":
            resynced = [step["step"] for step in run["steps"] if step["age"] == 0]
            panels[1].plot(resynced, [1.06] * len(resynced), "v", color=style["color"], label="a sync of DLC")
    panels[1].axhline(0.5, color=GREY, linewidth=0.8)
    panels[1].set(xlabel="step", ylabel="ESS of the responses, a share", ylim=(0, 1.4), yticks=(0, 0.25, 0.5, 0.75, 1),
                  title="A lag: DLC refuses a batch below one half (not shown)\nand syncs. The others train on what is left")
    panels[1].legend(loc="upper center", ncol=3, fontsize=8)
    if both:
        ratios = {row["arm"]: row[f"{FRESH} / floor"] for row in both["arms"]}
        more = (ratios["lag clip + resync"] or 0) > 2 * (ratios["dlc"] or 0)
        distances(panels[2], both, "A lag and an engine that is 5 % off: " + (
            "syncs alone\nlet the discrepancy drift; the center holds it" if more else
            "with and\nwithout a center"))
    return figure


def records_04() -> list[dict]:
    """The runs of lesson 4's study."""
    return [record for record in load("04_study").values() if isinstance(record, dict)]


def span(values) -> str:
    """5 to 11, or 2."""
    low, high = min(values), max(values)
    return f"{low}" if low == high else f"{low} to {high}"


@picture("04_study")
def draw_04_study(result: dict):
    """Every arm on two tasks, a mark per seed."""
    study = import_module("study")
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(17, 5.2))
    records = [record for record in result.values() if isinstance(record, dict)]
    for panel, setting, task in ((left, "sum", "Running sum"), (middle, "stop", "Early stop")):
        rows = study.arm_rows(study.main_runs(records, setting))[::-1]
        near = [row["arm"] for row in rows if max(row["KL / floor"]) <= 2 and row["arm"] != "on-policy"]
        for y, row in enumerate(rows):
            color = STYLE.get(row["arm"], {"color": GREY})["color"]
            panel.plot(row["KL / floor"], [y] * len(row["KL / floor"]), "o", color=color, markeredgecolor="k",
                       markeredgewidth=0.5, clip_on=False)
        panel.axvspan(0.5, 2, color="0.9", zorder=0)
        panel.axvline(1, color=GREY, linewidth=0.8)
        panel.set_yticks(range(len(rows)), [f"{row['arm']} ({span(row['syncs'])})" for row in rows])
        panel.set(xscale="log", xlim=(0.5, 100),
                  xlabel="KL / floor, a mark per seed (grey: at most 2)\nin brackets: syncs",
                  title=f"{task}: at most two floors in all seeds,\n" + (" | ".join(near[::-1]) or "no arm"))
    stop = [r for r in study.main_runs(records, "stop") if r["arm"] in study.MAIN_04]
    arms = list(dict.fromkeys(r["arm"] for r in stop))
    for key, marker, color, shift, label in (
            (FRESH, "o", BLACK, -0.2, "fresh prefixes, all tokens"),
            (STALE, "s", ORANGE, 0, "the sampler's prefixes, all tokens"),
            (STALE + ", late", "^", BLUE, 0.2, "the sampler's, from the fifth token on")):
        for x, arm in enumerate(arms):
            y = [study.mean_kl(r, key) / study.floor(stop, key) for r in stop if r["arm"] == arm]
            right.semilogy([x + shift] * len(y), y, marker, color=color, markersize=5,
                           label=label if x == 0 else None)
    right.axhspan(0.3, 2, color="0.9", zorder=0)
    right.set_xticks(range(len(arms)), [arm.replace(", ", ",\n").replace(" + ", "\n+ ") for arm in arms])
    right.set(ylabel="KL / floor of the same prefixes", ylim=(0.3, 25),
              title="Early stop: on the sampler's prefixes\nthe mean hides what late tokens show")
    right.legend(fontsize=8, loc="upper right")
    return figure


@picture("first", source="04_study")
def draw_first(result: dict):
    """The README's first picture: a stale sampler, four ways to train with it, all seeds."""
    figure, panel = plt.subplots(figsize=(8.5, 4.6))
    records = import_module("study").main_runs([r for r in result.values() if isinstance(r, dict)], "sum")
    names = {"none": "no correction", "tis": "TIS: clipped importance weights",
             "dlc": "DLC: center, clip, resync", "on-policy": "on-policy, another seed"}
    for arm, name in names.items():
        mine = [r for r in records if r["arm"] == arm]
        curves = np.array([r[FRESH] for r in mine])
        steps, middle = mine[0]["checkpoints"][1:], np.median(curves, 0)[1:]
        for curve in curves:
            panel.semilogy(steps, curve[1:], linewidth=0.5, alpha=0.6, **STYLE[arm])
        panel.semilogy(steps, middle, linewidth=2.2, **STYLE[arm])
        accuracy = [r["accuracy"] for r in mine]
        shift = {"none": 10, "tis": -14, "dlc": 12, "on-policy": -14}[arm]
        panel.annotate(f"{name}\n(accuracy {min(accuracy):.2f} to {max(accuracy):.2f})", (steps[-1], middle[-1]),
                       xytext=(8, shift), textcoords="offset points", color=STYLE[arm]["color"], va="center",
                       fontsize=9)
    syncs = span([r["syncs"] for r in records if r["arm"] == "dlc"])
    base = np.mean([np.mean(r[FRESH]) for r in records if r["arm"] == "on-policy"])
    near = sum(np.mean(r[FRESH]) <= 2 * base for r in records if r["arm"] == "dlc")
    panel.set(xlabel=f"training step (thin: a seed, thick: the median of {len(curves)})",
              ylabel="distance from on-policy training\nKL(on-policy || run), nats per token",
              title="A sampler synced twice in 80 steps leads training astray, importance weights or not.\n"
              f"DLC, with {syncs} syncs, is within two floors in {near} of {len(curves)} seeds")
    panel.set_xlim(0, 80)
    panel.spines[["top", "right"]].set_visible(False)
    return figure


def each(values, digits: int = 2) -> str:
    """.96 .97 1.02, a number per seed."""
    return " ".join("-" if v is None else f"{v:.{digits}f}".removeprefix("0") if isinstance(v, float) else str(v)
                    for v in values)


def arms_table(setting: str) -> str:
    study = import_module("study")
    head = ["arm", "accuracy at the end", "KL / floor, fresh prefixes", "at most 2", "p, DLC lower",
            "second half of the run", "KL / floor, the sampler's prefixes", "syncs", "dropped tokens", "seconds"]
    return markdown(head, [
        [row["arm"], each(row["accuracy"]), each(row["KL / floor"], 1), row["at most 2"],
         "-" if row["p, DLC lower"] is None else f"{row['p, DLC lower']:.2g}", each(row["second half"], 1),
         each(row["on the sampler's prefixes"], 1), each(row["syncs"]), f"{row['dropped tokens']:.0f}",
         f"{row['seconds']:.0f}"] for row in study.arm_rows(study.main_runs(records_04(), setting))])


@table("arms-sum")
def arms_sum() -> str:
    """Lesson 4: every arm on the running sum, sampler synced every 64 of 80 steps; a number per seed. p: chance
    that a random split of both arms' KLs favors DLC as much (rank test, one-sided)"""
    return arms_table("sum")


@table("arms-stop")
def arms_stop() -> str:
    """Lesson 4: every arm on the early-stop task, sampler never synced; a number per seed. These records are of an earlier
    revision of the code, on several threads, and the floor of the sampler's prefixes is taken on the on-policy runs' own"""
    return arms_table("stop")


@table("floors")
def floors_table() -> str:
    """Lesson 4: the floors, KL between on-policy runs in nats per token: mean ± standard deviation over the seeds, on fresh
    responses and on the start policy's"""
    study, rows = import_module("study"), []
    for records, setting in ((records_04(), "sum"), (records_04(), "stop"), ([*load("both_study").values()], "both")):
        mine = [r for r in records if r["setting"] == setting and r["arm"] == "on-policy"]
        for prefixes in (FRESH, STALE):
            values = [study.mean_kl(r, prefixes) for r in mine]
            rows.append([setting, "fresh" if prefixes == FRESH else "the start policy's",
                         f"{np.mean(values):.4f} ± {np.std(values):.4f}", len(values)])
    return markdown(["setting", "responses", "floor", "seeds"], rows)


@table("arms-short")
def arms_short() -> str:
    study = import_module("study")
    rows = study.arm_rows(study.main_runs(records_04(), "sum"))
    return markdown(["arm", "KL / floor, a seed each", "at most 2", "accuracy", "syncs", "dropped tokens"], [
        [row["arm"], each(row["KL / floor"], 1), row["at most 2"], span([float(f"{x:.2f}") for x in row["accuracy"]]),
         span(row["syncs"]), f"{row['dropped tokens']:.0f}"] for row in rows if row["arm"] in study.MAIN_04])


def both_table(short: bool) -> str:
    rows = import_module("study").both_rows([*load("both_study").values()])
    if short:
        shown = ("none", "tis + resync", "lag clip + resync", "dlc")
        return markdown(["arm", "KL / floor, a seed each", "entropy at the end", "syncs"], [
            [row["arm"], each(row["KL / floor"], 1), each(row["entropy"]), span(row["syncs"])]
            for row in rows if row["engine"] == "5% noise" and row["arm"] in shown])
    return markdown(["engine", *list(rows[0])[1:]], [
        [row["engine"], row["arm"], each(row["KL / floor"], 1), each(row["entropy"]), each(row["reward"]),
         each(row["syncs"]), f"{row['dropped tokens']:.0f}"] for row in rows])


@table("both")
def both_long() -> str:
    """Lesson 4: lag and discrepancy together, on the free tokens, synced every 50 of 100 steps; a number per seed.
    The on-policy runs have the natural engine"""
    return both_table(short=False)


@table("both-short")
def both_short() -> str:
    return both_table(short=True)


@table("constancy")
def constancy_table() -> str:
    """Lesson 3 and 4: does the discrepancy stay about constant? Its change over a run on the running sum, in % of its mean"""
    study = import_module("study")
    rows = study.constancy(study.main_runs(records_04(), "sum"))
    return markdown(list(rows[0]), [[row["arm"], number(row["accuracy"]), *(f"{x:.0f}" for x in list(row.values())[2:])]
                                    for row in rows])


@table("positions")
def positions_table() -> str:
    """Lesson 4, early stop: KL in nats at the first four positions and at later ones (mean over the seeds), on fresh
    responses and on the sampler's (of on-policy runs: on the start policy's). Seed by seed, the step at which the token mean first exceeds .2 nats, and three of the prefixes' own floors"""
    study = import_module("study")
    shown = [*study.MAIN_04, "ppo", "seq-mis", "centering"]
    rows = [row for row in study.positions(study.main_runs(records_04(), "stop")) if row["arm"] in shown]
    short = {FRESH: "fresh", STALE: "sampler's"}
    head = [key.replace(kind, name) for key in list(rows[0])[1:]
            for kind, name in short.items() if key.startswith(kind)]
    return markdown(["arm", *head], [[row["arm"], *(
        f"{np.mean(values):.3f}" if key.endswith(("early", "late")) else each(values)
        for key, values in list(row.items())[1:])] for row in rows])


@table("free")
def free_table() -> str:
    """Lesson 4: the discrepancy alone, on the free tokens, sampler synced before every step; a number per seed"""
    study, rows = import_module("study"), []
    records = [r for r in load("both_study").values() if r["setting"].startswith("free")]
    for setting, engine, arm in dict.fromkeys((r["setting"], r["engine"], r["arm"]) for r in records):
        mine = [r for r in records if r["setting"] == setting]
        base = np.mean([study.mean_kl(r) for r in mine if r["arm"] == "none" and not r["engine"]])
        cell = [r for r in mine if (r["engine"], r["arm"]) == (engine, arm)]
        rows.append([setting.removeprefix("free, "), engine or "natural", arm, each([study.mean_kl(r) / base for r in cell], 1),
                     each([r["entropy"] for r in cell]), each([r["accuracy"] for r in cell])])
    return markdown(["advantage", "engine", "arm", "KL / floor", "entropy at the end", "reward"], rows)


@table("alarms")
def alarms_table() -> str:
    """Lesson 4: which alarm rings before the harm? Arms that weight by the lag and are never resynced (token-is, tis,
    lag clip); harm is a KL above so many floors"""
    rows = import_module("study").alarms(records_04())
    return markdown(
        ["task", "alarm", "harm, floors", "before the harm", "at the same step", "later or never", "false alarms in quiet runs",
         "median lead, steps"],
        [[row["task"], row["alarm"], row["harm, floors"], row["before"], row["same step"], row["later"],
          f"{row['false']} of {row['quiet']}", f"{np.median(row['leads']):.0f}" if row["leads"] else "-"] for row in rows])


@table("tail")
def tail_table() -> str:
    """Lesson 4: error of the center's gradient, from the sampler's K most likely tokens"""
    rows = load("04_study")["tail"]
    return markdown(list(rows[0]), [
        [row["distributions"], row["K"], f"{row['mass of the head']:.4f}", power(row["error, tail modeled"]),
         power(row["error, tail dropped"])] for row in rows])


# ---------------------------------------------------------------- lesson 5
REPLAY = {      # (policy, replay) -> what the picture calls it and draws it with
    ("dense", "none"): {"label": "dense", "color": GREY, "hatch": ""},
    ("MoE", "none"): {"label": "MoE, live", "color": RED, "hatch": "//"},
    ("MoE", "r2"): {"label": "MoE, R2", "color": ORANGE, "hatch": ".."},
    ("MoE", "r3"): {"label": "MoE, R3", "color": BLUE, "hatch": ""}}


@picture("05_router_replay")
def draw_05(result: dict):
    rows = {(row["situation"], row["policy"], row["replay"]): row for row in result["gap"]}
    situations = list(dict.fromkeys(row["situation"] for row in result["gap"]))
    live = [rows[situation, "MoE", "none"] for situation in situations]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(16, 4.6))

    layers = len(live[0]["by layer"])
    for layer in range(layers):
        left.bar(np.arange(len(live)) + (layer - (layers - 1) / 2) * 0.8 / layers,
                 [100 * row["by layer"][layer] for row in live], 0.7 / layers, edgecolor="k",
                 color=plt.cm.viridis(0.95 * layer / max(1, layers - 1)),
                 label=f"layer {layer}" if layers < 9 else None)
    if any(row["picks that flip"] for row in live):
        left.set_yscale("log")
    left.set(ylabel="picks that differ, %", title="Engine and trainer pick other experts:\n"
             f"{live[0]['picks that flip']:.1%} of the picks at the natural gap")
    left.legend(fontsize=8, loc="upper left")

    for i, (arm, style) in enumerate(REPLAY.items()):
        bars = [(k, rows[situation, *arm]) for k, situation in enumerate(situations) if (situation, *arm) in rows]
        # from the smallest seed's side only as far as a logarithm goes
        spread = [[min(row["k3 ±"], 0.9 * row["k3"]) for _, row in bars], [row["k3 ±"] for _, row in bars]]
        middle.bar([k + (i - 1.5) * 0.2 for k, _ in bars], [row["k3"] for _, row in bars], 0.18,
                   yerr=spread, capsize=2, edgecolor="k", **style)
    before, after = (rows[situations[0], "MoE", kind]["k3"] for kind in ("none", "r3"))
    if any(row["k3"] for row in result["gap"]):
        middle.set_yscale("log")
    middle.set(ylabel="k3, nats per token (mean, ± over seeds)",
               title=(f"Replay (R3) divides the natural k3 by {before / after:.1f}" if before > after > 0 else
                      "Replay (R3) does not lower the natural k3") + "\n(R2 is drawn where there is a lag)")
    middle.legend(fontsize=8, loc="upper left")
    for axes in (left, middle):
        axes.set_xticks(range(len(situations)), [x.replace(", ", ",\n").replace(" noise", "\nnoise") for x in situations],
                        fontsize=8)

    jump = result["jump"]
    for number, k in enumerate(jump["flips at"]):
        right.axvspan(jump["u"][k], jump["u"][k + 1], color="0.85",
                      label="a pick of this token flips" if number == 0 else None)
    right.plot(jump["u"], jump["log pi"], ".-", color=RED, label="live")
    right.plot(jump["u"], jump["log pi, replayed"], "--", color=BLUE, label="the picks of u = 0 replayed")
    right.set(xlabel="u, weights (1 - u) start + u end", ylabel="log pi of one token (nats)",
              title="A pick changes all or nothing:\n" + (
                  f"a jump of {jump['jump']:.2g} nats" if jump["flips at"] else "no pick flips on this way"))
    right.legend(fontsize=8)
    return figure


@table("replay")
def replay_table(situations=None) -> str:
    """Lesson 5: the gap of a dense policy and of a mixture, live and replayed."""
    percent = lambda x: "" if x is None else f"{100 * x:.2f}"
    return markdown(
        ["policy", "situation", "replay", "mean abs d", "k3 ± seeds", "F(1.1), %", "F(2), %", "picks that flip, %",
         "tokens with a flip, %", "if layers are independent, %", "rms d: no flip", "rms d: flip"],
        [[row["policy"], row["situation"], row["replay"], power(row["mean |d|"]),
          f"{power(row['k3'])} ± {power(row['k3 ±'])}", percent(row["F(1.1)"]), percent(row["F(2)"]),
          *(percent(row.get(key)) for key in ("picks that flip", "tokens with a flip", "if layers are independent")),
          *("" if row.get(key) is None else power(row[key]) for key in ("rms d: no flip", "rms d: flip"))]
         for row in load("05_router_replay")["gap"] if situations is None or row["situation"] in situations])


@table("replay-gradients")
def replay_gradients_table() -> str:
    """Lesson 5: the replayed policy's gradient against the live one's, some steps after a sync."""
    rows = load("05_study")["gradients"]
    return markdown(list(rows[0]), [[row[key] if key.startswith("steps") else
                                     f"{row[key]:.2%}" if key.startswith("picks") else f"{row[key]:.4f}"
                                     for key in row] for row in rows])


@table("replay-study")
def replay_study_table() -> str:
    """Lesson 5: training with MiniRL's weight under no replay, R2 and R3, three seeds."""
    study = import_module("study")
    return markdown(["synced every", "replay", "KL / floor", "accuracy at the end"], [
        [f"{row['synced every']} steps", row["replay"], " ".join(f"{x:.1f}" for x in row["KL / floor"]),
         " ".join(f"{x:.2f}" for x in row["accuracy"])]
        for row in study.replay_rows(load("05_study"))])


@table("say replay")
def say_replay() -> str:
    natural = {row["replay"]: row for row in load("05_router_replay")["gap"]
               if row["policy"] == "MoE" and row["situation"] == "natural, fp32 trainer"}
    live, replayed = natural["none"], natural["r3"]
    return (f"{live['picks that flip']:.2%} of the picks flip. Replay lowers k3 from {power(live['k3'])} ± "
            f"{power(live['k3 ±'])} to {power(replayed['k3'])} ± {power(replayed['k3 ±'])} (± over four seeds)")


# ---------------------------------------------------------------- train.py
@picture("train")
def draw_train(result: dict):
    """The same training with a stale and with a fresh sampler, three seeds each."""
    arms = {"stale, none": ("none", "no correction"), "stale, tis": ("tis", "token TIS"),
            "stale, dlc": ("dlc", "DLC, which adds syncs")}
    figure, panels = plt.subplots(1, len(arms), figsize=(14, 4), sharey=True)
    for panel, (arm, (style, name)) in zip(panels, arms.items()):
        for seed, line in zip(result["seeds"], ("-", "--", ":")):
            panel.plot(result["on-policy"]["curves"][seed], color=GREY, linestyle=line)
            panel.plot(result[arm]["curves"][seed], color=STYLE[style]["color"], linestyle=line,
                       label=f"seed {seed}")
        ends = ", ".join(f"{curve[-1]:.2f}" for curve in result[arm]["curves"])
        panel.set(xlabel="step", ylim=(0, 1), title=f"Synced every 16 steps, {name}:\n"
                  f"reward {ends} in the last step")
        panel.legend(loc="lower right", title="grey: synced before every step")
    panels[0].set_ylabel("mean reward of a step")
    return figure


@table("curve")
def curve_table() -> str:
    """train.py, synced before every step: three seeds."""
    run = load("train")["on-policy"]
    return markdown(["step", *run["reward"]], [
        ["reward, mean of three seeds", *(number(r["mean"]) for r in run["reward"].values())],
        ["lowest and highest", *(f"{r['low']:.2f}-{r['high']:.2f}" for r in run["reward"].values())],
        ["mean abs d", *map(power, run["discrepancy"].values())]])


@table("train")
def train_table() -> str:
    """train.py, synced every 16 steps: held-out accuracy at the end, three seeds."""
    runs = {arm: run["summaries"] for arm, run in load("train").items() if arm != "seeds"}
    return markdown(["arm", "sampled", "greedy", "syncs"], [
        [arm, *(" ".join(number(s["after"][kind]) for s in mine) for kind in ("sampled", "greedy")),
         " ".join(str(s["syncs"]) for s in mine)] for arm, mine in runs.items()])


def draw_run(column, path) -> None:
    """One run of train.py: column[name] is what metrics.csv holds under that name."""
    step, lowest = column["step"], 1e-5                # where an exact 0 is drawn
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4.4))
    left.plot(step, column["reward"], color=BLACK)
    left.set(xlabel="step", ylabel="mean reward", ylim=(0, 1), title="Reward: "
             f"{column['reward'][0]:.2f} in the first step, {column['reward'][-1]:.2f} in the last")

    for name, label in (("discrepancy", "discrepancy, mean |d|"), ("lag", "lag, mean |l|")):
        middle.semilogy(step, column[name].clip(lowest), label=label, marker=".", **STYLE[name])
    zeros = int((column["lag"] == 0).sum())
    middle.set(xlabel="step", ylabel="nats per token",
               title="The engine's part and the stale weights' part\n"
               f"(a lag of 0 in {zeros} of {len(step)} steps, drawn at {lowest:g})")
    middle.legend()

    right.plot(step, column["ess"], color=BLACK, label="ESS of responses")
    right.plot(step, column["ess_tokens"], color=GREY, linestyle="--", label="ESS of tokens")
    right.plot(step, column["mean_ratio"], color=ORANGE, linestyle=":",
               label="mean lag ratio (predicted: 1)")
    resynced = step[column["dropped_tokens"] > 0]
    right.plot(resynced, np.full(len(resynced), 0.02), "^", color=RED,
               label="batch dropped, sampler synced")
    right.axhline(0.5, color=GREY, linewidth=0.6)
    right.set(xlabel="step", ylabel="share of the batch; ratio", ylim=(0, 1.9),
              title=f"What is left of the stale samples\n({len(resynced)} batches dropped)")
    right.legend(loc="upper left", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


# ---------------------------------------------------------------- the tables
def filled(text: str) -> str:
    """The text with what stands between each <!-- name --> and <!-- end --> made anew."""
    def make(match) -> str:
        between = match[3] if match[1].startswith("say ") else "\n"
        return f"<!-- {match[1]} -->{between}{TABLES[match[1]]()}{between}<!-- end -->"
    return re.sub(r"<!-- ((?!end )[\w -]+) -->(.*?)()<!-- end -->", make, text, flags=re.DOTALL)


def results() -> str:
    """RESULTS.md: all tables but those that the README shows shortened."""
    made = {make.__doc__.strip(): make() for make in TABLES.values() if make.__doc__}
    parts = [f"## {title}\n\n{text}" for title, text in made.items() if text]      # no records yet: no table
    return "\n\n".join(["# Results\n\nEvery table, made by `python figures/draw.py` from the JSON beside it.",
                        *parts]) + "\n"


def main() -> None:
    for name in PICTURES:
        draw(FIGURES / f"{SOURCES[name]}.json", name)
    (FIGURES / "RESULTS.md").write_text(results())
    readme = FIGURES.parent / "README.md"
    readme.write_text(filled(readme.read_text()))


if __name__ == "__main__":
    main()
