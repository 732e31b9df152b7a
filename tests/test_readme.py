"""What the README says is what the JSON in figures/ holds; its commands are those that CI runs."""
import json
import re

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


def span(values) -> str:
    low, high = (f"{x:.2f}".removeprefix("0") for x in (min(values), max(values)))
    return f"{low} to {high}"


def sentences() -> dict[str, str]:
    """What the README must say in prose, from the JSON."""
    records = study.main_runs(draw.records_04(), "sum")
    accuracy = {arm: [r["accuracy"] for r in records if r["arm"] == arm]
                for arm in ("on-policy", "none", "tis", "dlc", "dlc, no resync")}
    laws = {row["law"]: row for row in draw.load("03_decompose")["laws"]}
    slope = next(row for law, row in laws.items() if law.startswith("rms d"))
    reward = draw.load("train")["on-policy"]["reward"]
    after = [run["after"]["sampled"] for run in draw.load("train")["on-policy"]["summaries"]]
    short = lambda x: f"{x:.2f}".removeprefix("0")
    return {
        "cost": f"answers {span(accuracy['none'])} of new prompts, trained on-policy {span(accuracy['on-policy'])} (five seeds)",
        "cure": f"token-level importance weights reach {span(accuracy['tis'])}, the Discrepancy-Lag Correction (DLC) {span(accuracy['dlc'])}",
        "collapses": f"accuracy {span(accuracy['dlc'])} with it, {span(accuracy['dlc, no resync'])} without",
        "constant": f"{slope['measured']:+.0f} ± {slope['±']:.0f} %",
        "curve": f"climbs from {short(reward['0']['mean'])} to {short(list(reward.values())[-1]['mean'])}",
        "accuracy": f"held-out accuracy .38 to {short(sum(after) / len(after))}",
    }


@pytest.mark.parametrize("name", ["cost", "cure", "collapses", "constant", "curve", "accuracy"])
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
