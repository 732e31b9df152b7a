"""The long experiments behind the README: lessons 3, 4 and 5 with every arm and several seeds.

    python figures/study.py 03      the feedback loop
    python figures/study.py 04      every correction on two tasks
    python figures/study.py 05      training with router replay

A study writes figures/NN_study.json after each run. Stopped and started again it goes on where it
was: a record that is there is not made again. Delete the file after a change of the code."""
import argparse
import json
import os
import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
lesson1 = import_module("01_mismatch")

STUDIES = {}        # "03" -> function(path of the JSON) that runs the study


def study(lesson: str):
    """Registers the study of a lesson."""
    def register(function):
        STUDIES[lesson] = function
        return function
    return register


def resumable(path: Path, plan: dict, run) -> dict:
    """{key: run(*arguments)} for each {key: arguments} of the plan. `path` holds all records so far
    after each run, and what it holds is not run again."""
    try:
        records = json.loads(path.read_text())
    except (OSError, ValueError):
        records = {}
    for number, (key, arguments) in enumerate(plan.items(), 1):
        if key not in records:
            print(f"run {number} of {len(plan)}: {key}", flush=True)
            records[key] = run(*arguments)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".tmp").write_text(json.dumps(records, indent=1) + "\n")
            os.replace(path.with_suffix(".tmp"), path)
    return {key: records[key] for key in plan}


# ---------------------------------------------------------------- lesson 3
# ---------------------------------------------------------------- lesson 4
# ---------------------------------------------------------------- lesson 5
def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("lesson", choices=sorted(STUDIES))
    parser.add_argument("--out", type=Path, default=ROOT / "figures", help="folder of the JSON")
    args = parser.parse_args(argv)
    STUDIES[args.lesson](args.out / f"{args.lesson}_study.json")


if __name__ == "__main__":
    main()
