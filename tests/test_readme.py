"""The README's numbers are those of the JSON in figures/: its tables whole, its sentences one by one."""
import importlib
import json
import statistics

import figures
import pytest
from conftest import lesson1

README = (lesson1.ROOT / "README.md").read_text()
lesson4 = importlib.import_module("04_dlc")
power, each = figures.power, figures.each


def test_tables_are_those_of_the_json():
    assert figures.with_tables(README) == README, "python tests/figures.py makes them anew"


def test_a_changed_table_is_noticed():
    one = README.replace("| bf16 engine, fp32 trainer | 2", "| bf16 engine, fp32 trainer | 3", 1)
    assert one != README and figures.with_tables(one) == README


def sentences() -> dict[str, str]:
    """What the README must say, from the JSON."""
    rows = {r["arm"]: r for r in figures.load("01_mismatch")["table"]}
    why = {r["pair"]: r for r in figures.load("01_mismatch")["why"]}
    ess = next(r for r in lesson4.alarms(figures.dlc_records()) if r["level"] == "ESS of responses < 1/2")
    natural, both = rows["bf16 engine | fp32 trainer"], rows["bf16 engine | bf16 trainer"]
    real = figures.load("02_importance_sampling")["real"]
    three = figures.load("03_decompose")
    lesson3 = importlib.import_module("03_decompose")
    lag = lesson3.lag_over_discrepancy(three["follow"]["rows"])
    records = figures.dlc_records()
    arms = {name: {r["arm"]: r for r in lesson4.arm_rows(lesson4.main_runs(records, name))} for name in ("sum", "stop")}
    default = {r["arm"]: r for r in lesson4.arm_rows(list(figures.load("04_dlc")["default"].values()))}
    free = [r for r in records if r["setting"] == "free, raw"]
    base = statistics.mean(lesson4.mean_kl(r) for r in free if r["arm"] == "none" and not r["noise"])
    noisy = {arm: [r for r in free if r["arm"] == arm and r["noise"] == 0.05] for arm in ("none", "centering")}
    five = figures.load("05_router_replay")
    moe = {(r["situation"], r["replay"]): r for r in five["gap"] if r["policy"] == "MoE"}
    live, replayed = moe["natural, fp32 trainer", "none"], moe["natural, fp32 trainer", "r3"]
    jump, cosines = five["jump"], [five["gradients"][k] for k in range(4)]
    train = figures.load("train")
    after = lambda arm, kind: [s["after"][kind] for s in train[arm]["summaries"]]
    short = lambda x, digits: f"{x:.{digits}f}".removeprefix("0")
    spread = lambda values: f"{min(values):.0f} to {max(values):.0f}"
    return {
        "01 natural": f"mean abs d {power(natural['abs'])} ± {natural['spread']:.0e}".replace("e-0", "e-"),
        "01 independent errors": f"predicted {power(why['bf16 engine | fp32 trainer']['independent'])} and measured {power(why['bf16 engine | fp32 trainer']['measured'])} for bf16 vLLM",
        "01 shared errors": f"(correlation {why['bf16 engine | bf16 trainer']['corr']:+.2f}), and the same prediction, {power(why['bf16 engine | bf16 trainer']['independent'])}, overstates the measured {power(why['bf16 engine | bf16 trainer']['measured'])}",
        "02 real rollouts": f"ESS of whole responses {short(real['natural: bf16 vLLM, fp32 trainer']['sequence_ess'], 4)}, one step stale {short(real['stale: trainer 1 step ahead']['sequence_ess'], 2)}",
        "02 stale": f"With the trainer one step ahead it is {short(real['stale: trainer 1 step ahead']['sequence_ess'], 2)}, two steps {short(real['stale: trainer 2 steps ahead']['sequence_ess'], 2)}, eight steps {short(real['stale: trainer 8 steps ahead']['sequence_ess'], 2)}",
        "03 lag": f"lag {lag:.0f} times the discrepancy one step after a sync",
        "03 slope": f"+{100 * three['follow']['d_rms_slope'][0] * 40 / statistics.mean(r['d_rms'] for r in three['follow']['rows']):.0f} ± {100 * three['follow']['d_rms_slope'][1] * 40 / statistics.mean(r['d_rms'] for r in three['follow']['rows']):.0f} % of its mean over 40 stale steps",
        "03 directions": " ".join(short(v, 2).replace("-0.", "-.") for v in three["directions"]["control: new weight noise of 10% every step"].values()),
        "03 lag's directions": "; " + " ".join(short(v, 2) for v in next(v for k, v in three["directions"].items() if k.startswith("lag")).values()) + " for a lag",
        "04 default": f"KL over its floor: none {default['none']['fresh'][0]:.0f}, TIS {default['tis']['fresh'][0]:.0f}, DLC {default['dlc']['fresh'][0]:.1f} (one seed)",
        "04 abstract": f"averaged over training, {spread(arms['sum']['none']['fresh'] + arms['sum']['tis']['fresh'])} times as far from on-policy training as another on-policy run is (on a second task "
                       f"{spread(arms['stop']['none']['fresh'] + arms['stop']['tis']['fresh'])} times)",
        "04 dlc": f"at {min(arms['sum']['dlc']['fresh']):.1f} to {max(arms['sum']['dlc']['fresh']):.1f} times ({min(arms['stop']['dlc']['fresh']):.1f} to {max(arms['stop']['dlc']['fresh']):.1f}) with {min(arms['sum']['dlc']['syncs'])} to {max(arms['sum']['dlc']['syncs'])} syncs in 80 steps",
        "04 within twice": f"early stop {' '.join(f'{v:.1f}' for v in arms['stop']['dlc']['fresh'])}; running sum {' '.join(f'{v:.1f}' for v in arms['sum']['dlc']['fresh'])}",
        "04 collapses": f"TIS {each(arms['sum']['tis']['accuracy'])}, DLC without resync {each(arms['sum']['dlc, no resync']['accuracy'])}, DLC {each(arms['sum']['dlc']['accuracy'])}",
        "04 prefixes": f"TIS: {min(arms['stop']['tis']['fresh']):.1f} to {max(arms['stop']['tis']['fresh']):.1f} floors on fresh prefixes, {min(arms['stop']['tis']['sampler']):.1f} to {max(arms['stop']['tis']['sampler']):.1f} on the sampler's",
        "04 centering alone": f"{min(arms['sum']['centering']['fresh']):.1f} to {max(arms['sum']['centering']['fresh']):.0f} floors away under the second",
        "04 centre without resync": f"lag clip alone {' '.join(f'{v:.1f}' for v in arms['sum']['lag clip']['fresh'])}, with the centre {' '.join(f'{v:.1f}' for v in arms['sum']['dlc, no resync']['fresh'][:3])}, same seeds",
        "04 clips": f"{' '.join(f'{v:.1f}' for v in arms['sum']['dlc, ppo rule']['fresh'])} against {' '.join(f'{v:.1f}' for v in arms['sum']['dlc']['fresh'][:3])} on the running sum, {' '.join(f'{v:.1f}' for v in arms['stop']['dlc, ppo rule']['fresh'])} against {' '.join(f'{v:.1f}' for v in arms['stop']['dlc']['fresh'][:3])}",
        "04 free": f"none {' '.join(f'{lesson4.mean_kl(r) / base:.0f}' for r in noisy['none'])} floors and entropy {short(min(r['entropy'] for r in noisy['none']), 2)} to {short(max(r['entropy'] for r in noisy['none']), 2)}, centering {' '.join(f'{lesson4.mean_kl(r) / base:.1f}' for r in noisy['centering'])}",
        "04 alarms": f"of {ess['before'] + ess['late'] + ess['quiet']} stale runs that were never resynchronised {ess['before'] + ess['late']} went beyond three floors; in {ess['before']} of them the ESS of responses had fallen below 1/2 before, "
                     f"in the median {statistics.median(ess['leads']):.0f} steps before; so it had in {ess['false']} of the {ess['quiet']} quiet runs",
        "01 float16": "float16 on both sides divides mean abs d by about eight" if 7.5 < both["abs"] / rows["fp16 engine | fp16 trainer"]["abs"] < 8.5 and 65 < both["k3"] / rows["fp16 engine | fp16 trainer"]["k3"] < 80 else "another factor",
        "04 mean ratio": f"smallest mean ratio {short(min(min(r['mean_ratio']) for r in records if r['task'] != 'free' and r['arm'] not in lesson4.RESYNCED), 2)}",
        "05 picks": f"{short(100 * live['flips']['picks'], 2)} % of the picks flip and make {100 * (1 - replayed['k3'] / live['k3']):.0f} % of k3",
        "05 jump": f"the largest step is a jump of {short(jump['jump'], 2)} nats within {jump['jump_width']:.0e} of the way".replace("e-0", "e-"),
        "05 gradients": f"R3 {short(cosines[0]['r3'], 4)}; 1, 4, 16 steps later R2 {' '.join(short(c['r2'], 3) for c in cosines[1:])}, R3 {' '.join(short(c['r3'], 3) for c in cosines[1:])}",
        "train accuracy": f"held-out accuracy {short(train['on-policy']['summaries'][0]['before']['sampled'], 2)} to {short(statistics.mean(after('on-policy', 'sampled')), 2)}",
        "train stale, none": f"held-out accuracy sampled {', '.join(short(v, 2) for v in after('stale, none', 'sampled'))} and greedy {', '.join(short(v, 2) for v in after('stale, none', 'greedy'))} without a correction",
        "train stale, tis": f"sampled {', '.join(short(v, 2) for v in after('stale, tis', 'sampled'))} and greedy {', '.join(f'{v:.2f}'.removeprefix('0') for v in after('stale, tis', 'greedy'))}",
        "train stale, dlc": f"with `--correction dlc` sampled {', '.join(short(v, 2) for v in after('stale, dlc', 'sampled'))}",
    }


@pytest.mark.parametrize("name", sentences())
def test_a_sentences_numbers_are_those_of_the_json(name):
    text = " ".join(README.split())
    assert " ".join(sentences()[name].split()) in text, sentences()[name]
