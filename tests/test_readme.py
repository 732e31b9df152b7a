"""What the README says is what the JSON in figures/ holds; its commands are those that CI runs."""
import json
import re

import numpy as np
import pytest
import torch
from conftest import ROOT

import draw
import study

README = (ROOT / "README.md").read_text()


def test_tables_are_those_of_the_json():
    assert draw.filled(README) == README, "python figures/draw.py makes them anew"
    assert (draw.FIGURES / "RESULTS.md").read_text() == draw.results()


def test_a_changed_table_is_noticed():
    one = README.replace("| bf16 engine, fp32 trainer | 2", "| bf16 engine, fp32 trainer | 3", 1)
    assert one != README and draw.filled(one) == README


def test_links_and_pictures_exist():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_ci_runs_the_readmes_own_install_line():
    lines = [line for line in README.splitlines() if line.startswith("pip install")]
    assert len(lines) == 1 and "-r requirements.txt" in lines[0] and "--retries 0" in lines[0]
    assert "README.md" in (ROOT / ".ci" / "run").read_text()


def short(x, digits=2) -> str:
    return f"{x:.{digits}f}".removeprefix("0").replace("-0.", "-.")


def span(values, digits=2) -> str:
    return f"{short(min(values), digits)} to {short(max(values), digits)}"


def sentences() -> dict[str, str]:
    """What the README must say in prose, from the JSON."""
    rows = {row["arm"]: row for row in study.arm_rows(study.main_runs(draw.records_04(), "sum"))}
    both = [*draw.load("both_study").values()]
    mixed = {row["arm"]: row["KL / floor"] for row in study.both_rows(both) if row["engine"] == "5% noise"}
    loop = study.feedback_rows([r for key, r in draw.load("03_study").items() if key.startswith("lr")])
    fast, slow = ([row for row in loop if row["lr"] == lr] for lr in (1.5e-3, 5e-4))
    free = [r for r in both if r["setting"] == "free, raw"]
    base = np.mean([study.mean_kl(r) for r in free if r["arm"] == "none" and not r["engine"]])
    alone = {arm: [study.mean_kl(r) / base for r in free if (r["arm"], r["engine"]) == (arm, "5% noise")]
             for arm in ("none", "tis", "centering")}
    kept, dlc = {row["arm"]: row for row in study.constancy(study.main_runs(draw.records_04(), "sum"))}, rows["dlc"]
    fixed = next(row for row in draw.load("03_decompose")["directions"] if row["drift made by"].startswith("discrepancy"))
    lags = [row["rms l"] / row["rms d"] for row in draw.load("03_decompose")["run"] if row["age"] == 1]
    reward = draw.load("train")["on-policy"]["reward"]
    after = [run["after"]["sampled"] for run in draw.load("train")["on-policy"]["summaries"]]
    change = lambda row: f"{row['d on log-odds: change, %']:+.0f} ± {row['d on log-odds: ±']:.0f} %"
    column = lambda runs, key: [row[key] for row in runs if row[key] is not None]
    leads = [row["w = r: harm"] - row["w = r: ESS < 1/2"] for row in fast]
    early = sum(row["w = r: harm"] is not None and row["w = r: harm"] < row["w = r: ESS < 1/2"] for row in slow)
    return {
        "cost": f"answers {span(rows['none']['accuracy'])} of new prompts, trained on-policy {span(rows['on-policy']['accuracy'])} "
                f"({len(rows['none']['accuracy'])} seeds)",
        "cure": f"Token-level importance weights reach {span(rows['tis']['accuracy'])}, the Discrepancy-Lag Correction (DLC) "
                f"{span(dlc['accuracy'])}",
        "near": f"within two floors of on-policy training in {dlc['at most 2']} seeds",
        "control": f"needs {min(rows['none + resync']['syncs'])} to {max(rows['none + resync']['syncs'])} syncs and stays at "
                   f"{span(rows['none + resync']['KL / floor'], 1)} floors, DLC with {min(dlc['syncs'])} to {max(dlc['syncs'])} at "
                   f"{span(dlc['KL / floor'], 1)} (rank test: p = {rows['none + resync']['p, DLC lower']:.1g})",
        "one for the other": f"TIS: {span(alone['tis'], 1)} floors under a discrepancy, {span(rows['tis']['KL / floor'], 1)} under a lag. "
                             f"Lag clip and resync: {span(rows['lag clip + resync']['KL / floor'], 1)} under a lag, "
                             f"{span(mixed['lag clip + resync'], 1)} under both",
        "constant": f"{change(kept['on-policy'])} of its mean over 80 on-policy steps, by {change(kept['dlc'])} under DLC",
        "clip": span(rows["lag clip + resync"]["KL / floor"], 1), "clip k": rows["lag clip + resync"]["at most 2"],
        "fed": f"{sum(x > 2 for x in mixed['lag clip + resync'])} of {len(mixed['lag clip + resync'])}",
        "fixed": f"cosine {fixed['16']:.2f} with itself after 16 steps, size {fixed['size, late / early']:.2f} times the earlier half's",
        "centering": f"{span(alone['centering'], 1)} floors against {span(alone['none'], 1)}",
        "feeds": f"without a weight up to {max(column(loop, 'w = 1: excess after')):.1f} nats above on-policy runs, more than .1 in "
                 f"{sum(x > 0.1 for x in column(fast, 'w = 1: excess after'))} of 8 at 1.5e-3 and "
                 f"{sum(x > 0.1 for x in column(slow, 'w = 1: excess after'))} of 8 at 5e-4",
        "loop": f"excess under w = r before its ESS < 1/2: {span(column(loop, 'w = r: excess before'))}; after, at lr 1.5e-3: "
                f"{span(column(fast, 'w = r: excess after'))}, at 5e-4: {span(column(slow, 'w = r: excess after'))}",
        "fails": f"at lr 1.5e-3 three floors are exceeded {min(leads)} to {max(leads)} steps later; at 5e-4 earlier in {early} of {len(slow)}, never in "
                 f"{sum(row['w = r: harm'] is None for row in slow)}",
        "collapses": f"none {span(rows['none']['accuracy'])}, with resyncs {span(rows['none + resync']['accuracy'])}; DLC without them "
                     f"{span(rows['dlc, no resync']['accuracy'])}, with them {span(dlc['accuracy'])}",
        "lag": f"the lag is {min(lags):.0f} to {max(lags):.0f} times the discrepancy |",
        "curve": f"climbs from {short(reward['0']['mean'])} to {short(list(reward.values())[-1]['mean'])}",
        "accuracy": f"held-out accuracy .38 to {short(sum(after) / len(after))}",
    }


@pytest.mark.parametrize("name", ["cost", "cure", "near", "control", "one for the other", "constant", "fixed", "centering", "feeds",
                                  "loop", "fails", "collapses", "clip", "clip k", "fed", "lag", "curve", "accuracy"])
def test_a_sentences_numbers_are_those_of_the_json(name):
    assert sentences()[name] in " ".join(README.split()), sentences()[name]


# ---------------------------------------------------------------- the function to paste
def log_probs(fault: str):
    """(sampler, old, now, mask) of 64 responses of 30 tokens, over 12 tokens, with one fault."""
    rng = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(64, 30, 12, generator=rng)
    engine = logits + (0.5 if fault == "other weights" else 0.002) * torch.randn(logits.shape, generator=rng)
    if fault == "top-k":
        engine = engine.masked_fill(engine < engine.topk(3, -1).values[..., -1:], -torch.inf)
    drawn = engine / (0.7 if "temperature" in fault else 1.0)
    ids = torch.distributions.Categorical(logits=drawn).sample()[..., None]
    recorded = drawn if fault == "temperature" else engine
    sampler, old = (x.log_softmax(-1).gather(-1, ids)[..., 0] for x in (recorded, logits))
    if fault == "raw temperature":       # the trainer divides, the recorded log mu does not
        old = (logits / 0.7).log_softmax(-1).gather(-1, ids)[..., 0]
    if fault == "misaligned":
        old = old.roll(1, 1)
    lag = (0.2 if fault == "lag" else 0.01) * torch.randn(old.shape, generator=rng)
    return sampler, old, old + lag, torch.ones_like(old, dtype=torch.bool)


@pytest.mark.parametrize("fault, words", [
    ("none", ": rounding."), ("temperature", "a temperature in the sampler only"), ("raw temperature", "before the temperature"),
    ("top-k", "top-k or top-p"), ("misaligned", "misaligned by one"), ("other weights", "other weights"), ("lag", "ESS of responses 0.")])
def test_the_function_to_paste_names_the_fault(fault, words):
    code, = re.findall("```python\n(.*?)```", README, re.DOTALL)
    pasted = {}
    exec(code, pasted)
    torch.manual_seed(0)
    said = pasted["read_aloud"](*log_probs(fault))
    assert words in said and ("ESS of responses 0.9" in said or "ESS of responses 1.0" in said) == (fault != "lag"), said


def test_every_json_is_json():
    for path in draw.FIGURES.glob("*.json"):
        json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{path.name}: {name}"))
