"""The exercises: a copy of a lesson with functions to write, or with a bug to find.

python tests/exercises.py 02            writes exercises/02_importance_sampling.py, the functions below emptied; then
pytest tests --lesson exercises/02_importance_sampling.py      grades them one by one

python tests/exercises.py --bug 01 --seed 3        writes exercises/bug_01_mismatch.py with one of its bugs, chosen by the seed; run
                                                   it, compare its table with the lesson's, name the bug from its fingerprint:
python tests/exercises.py --answer 01 --seed 3 NAME      checks the name (without a name: lists them)
"""
import argparse
import ast
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LESSONS = {path.name[:2]: path for path in sorted(ROOT.glob("0*.py"))}

# lesson -> function to write -> (about how many lines, the tests that grade it: none of them starts vLLM)
WRITE = {
    "01": {"token_logp": (3, ["test_token_logp"]), "gap": (9, ["test_gap"]),
           "response_logits": (6, ["test_padded_row_equals_its_row_alone", "test_first_response_token_is_scored_by_the_last_prompt_logit"]),
           "two_errors": (6, ["test_two_errors_predict_the_rms_of_d"]), "lm_head_in_float32": (8, ["test_lm_head_in_float32"]),
           "pack": (20, ["test_pack"])},
    "02": {"tis": (1, ["test_weight[tis]"]), "seq_tis": (1, ["test_weight[seq-tis]"]),
           "ppo_keeps": (2, ["test_weight[ppo]", "test_weight[minirl]"]), "policy_loss": (3, ["test_policy_loss"]),
           "ess": (4, ["test_ess", "test_ess_refuses"]),
           "advantages": (12, ["test_advantages", "test_rewards_that_are_no_numbers_are_refused"])},
    "03": {"split": (1, ["test_split"]), "cross": (1, ["test_cross"]), "norm2": (1, ["test_norm2"]), "cosine": (3, ["test_cosine"]),
           "slope": (2, ["test_slope"]), "drift": (3, ["test_drift"])},
    "04": {"lag_ess": (1, ["test_lag_ess", "test_lag_ess_refuses_what_has_no_ess"]), "ppo_clipped": (2, ["test_ppo_clipped"]),
           "kl": (6, ["test_kl", "test_kl_in_micro_batches"]),
           "center": (11, ["test_center", "test_unclipped_weight_needs_no_center", "test_without_a_head_there_is_no_center"]),
           "dlc_loss": (9, ["test_loss", "test_trigger", "test_padding_is_ignored_even_if_it_is_nan"])},
    "05": {"gates": (4, ["test_gates", "test_gates_of_picks_far_below_the_best_are_finite"]), "replay": (11, ["test_replay", "test_router_gradient", "test_a_second_forward_pass_replays_the_same", "test_micro_batches_replay_their_own_rows"]), "flips": (3, ["test_flips"]),
           "beyond": (1, ["test_beyond"]), "check_routes": (16, ["test_refusals"])},
}

# lesson -> bug -> (the right text, which occurs once in the lesson; the wrong text)
BUGS = {
    "01": {
        "scored-one-token-late": ("logits_to_keep=T + 1).logits[:, :-1]", "logits_to_keep=T + 1).logits[:, 1:]"),
        "log-softmax-in-bfloat16": ("torch.log_softmax(logits / temperature, -1).gather(-1, ids)", "torch.log_softmax((logits / temperature).bfloat16(), -1).float().gather(-1, ids)"),
        "temperature-forgotten-by-the-trainer": ("torch.log_softmax(logits / temperature, -1).gather", "torch.log_softmax(logits, -1).gather"),
        "raw-logprobs-from-the-engine": ('logprobs_mode: str = "processed_logprobs"', 'logprobs_mode: str = "raw_logprobs"'),
        "sampled-with-top-k": ("head: int = 0, temperature: float = 1.0, top_k: int = -1,", "head: int = 0, temperature: float = 1.0, top_k: int = 3,"),
        "sign-of-the-gap": ("d = (logp - logp_sampler).double()", "d = (logp_sampler - logp).double()"),
    },
    "02": {
        "weight-upside-down": ("self.token = ratio(log_rho)", "self.token = ratio(-log_rho)"),
        "clip-whatever-the-sign": ("~(((A > 0) & (r > 1 + high)) | ((A < 0) & (r < 1 - low)))", "~((r > 1 + high) | (r < 1 - low))"),
        "effective-samples-not-divided-by-n": ("(len(w) * w.square().sum())", "w.square().sum()"),
        "sequence-weight-without-the-last-token": ("return inside(mask, x).sum(1, keepdim=True)", "return inside(mask, x)[:, :-1].sum(1, keepdim=True)"),
        "reward-without-a-baseline": ("self.A = self.R - self.mu @ self.R", "self.A = self.R"),
    },
    "03": {
        "old-is-the-live-model": ("old, synced = copy.deepcopy(trainer), 0", "old, synced = trainer, 0"),
        "old-is-never-refreshed": ("                old.load_state_dict(trainer.state_dict())\n", ""),
        "noise-drawn-anew-at-each-sync": ("itertools.count(seed, 1000 if fresh else 0)", "itertools.count(seed, 1000)"),
        "norm-of-one-estimate": ("return (a[0] @ a[1]).item()", "return ((a[0] + a[1]) / 2).square().sum().item()"),
    },
    "04": {
        "center-under-the-trainer": ("torch.where(q > 0, q * f(", "torch.where(q > 0, pi * f("),
        "clip-forgotten": ("return lesson2.ratio(lag).clamp(max=C)", "return lesson2.ratio(lag)"),
        "ess-after-clipping": ("sequence_sum(lag, mask)[mask.any(1), 0])", "sequence_sum(lag, mask)[mask.any(1), 0].clamp(max=0.69))"),
        "resyncs-above-one-half": ("if lag_ess(lag, mask) < resync_ess:", "if batch.age and lag_ess(lag, mask) > resync_ess:"),
        "log-ratio-for-the-ratio": ("return lesson2.ratio(lag[mask].double()).mean()", "return lag[mask].double().mean()"),
    },
    "05": {
        "routes-one-token-late": ("picks, normalized = routes.flatten(0, 1), normalizes(model)", "picks, normalized = routes.roll(1, 1).flatten(0, 1), normalizes(model)"),
        "gates-not-normalized": ("g = gates(logits, picks[:, layer], normalized)", "g = gates(logits, picks[:, layer], False)"),
        "bf16-trainer-in-float32": ("lesson1.load_model(path, torch.bfloat16), is_mixture", "lesson1.load_model(path), is_mixture"),
        "noise-stays-in-the-engine": ("    engine.sync(trainer)\n", ""),
        "order-of-the-experts-counts": ("a.shape[-1] - (a[..., :, None] == b[..., None, :]).any(-1).sum(-1)", "a.shape[-1] - (a == b).sum(-1)"),
    },
}


def emptied(source: str, names) -> str:
    """The source with the bodies of these functions replaced, docstrings kept."""
    lines, functions = source.splitlines(), {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    for name in sorted(names, key=lambda name: -functions[name].lineno):
        body = functions[name].body
        first = body[1 if ast.get_docstring(functions[name]) else 0]
        header = []
        if first.lineno == functions[name].lineno:                     # a function of one line
            header = [lines[first.lineno - 1][:first.col_offset].rstrip()]
        lines[first.lineno - 1:body[-1].end_lineno] = [*header, f'    raise NotImplementedError("exercise: write {name}, about {names[name][0]} line{"s" * (names[name][0] > 1)}")']
        # a comment that gives the formula away stands above the first line
        start = first.lineno - 2
        while lines[start].lstrip().startswith("#"):
            del lines[start]
            start -= 1
    return "\n".join(lines) + "\n"


def bug_of(lesson: str, seed: int) -> str:
    """The bug of this seed."""
    names = sorted(BUGS[lesson])
    return random.Random(0).sample(names, len(names))[seed % len(names)]      # neighbouring seeds, different bugs


def with_bug(lesson: str, name: str) -> str:
    """The lesson's source with that bug in it."""
    right, wrong = BUGS[lesson][name]
    source = LESSONS[lesson].read_text()
    assert source.count(right) == 1, f"{name}: its text occurs {source.count(right)} times in {LESSONS[lesson].name}"
    return source.replace(right, wrong)


def at_home(source: str) -> str:
    """A copy in exercises/ finds the other lessons, and the policies that are built already, one folder up."""
    source = source.replace("ROOT = Path(__file__).resolve().parent\n", "ROOT = Path(__file__).resolve().parent.parent\n")
    lines, first = source.splitlines(keepends=True), ast.parse(source).body[:2]
    future = isinstance(first[1], ast.ImportFrom) and first[1].module == "__future__"
    end = first[future].end_lineno                     # behind the docstring and `from __future__`
    return "".join([*lines[:end], "import sys; from pathlib import Path; sys.path.insert(0, str(Path(__file__).resolve().parent.parent))\n", *lines[end:]])


def main(argv=None) -> None:
    """argv as on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", help="a lesson whose functions are to be written; with --answer the bug's name")
    parser.add_argument("--bug", choices=BUGS, metavar="LESSON", help="puts a bug into a copy of the lesson")
    parser.add_argument("--answer", choices=BUGS, metavar="LESSON", help="checks a bug's name, or lists them")
    parser.add_argument("--seed", type=int, default=0, help="which bug")
    args = parser.parse_args(argv)
    if bool(args.bug) + bool(args.answer) + bool(args.what) != 1 and not (args.answer and args.what and not args.bug):
        parser.error("say one thing: a lesson, --bug LESSON, or --answer LESSON with or without a name")
    if args.what and not args.answer:
        args.what = args.what.zfill(2)
    if args.answer:
        if args.what is None:
            print("\n".join(sorted(BUGS[args.answer])))
        elif args.what not in BUGS[args.answer]:
            sys.exit(f"no bug of lesson {args.answer} is called {args.what!r}: --answer {args.answer} alone lists them")
        else:
            right = args.what == bug_of(args.answer, args.seed)
            print("right" if right else f"not the bug of seed {args.seed}")
            sys.exit(not right)
    elif args.bug:
        path = ROOT / "exercises" / f"bug_{LESSONS[args.bug].name}"
        path.parent.mkdir(exist_ok=True)
        path.write_text(at_home(with_bug(args.bug, bug_of(args.bug, args.seed))))
        print(f"{path.relative_to(ROOT)} holds one bug. Run it: python {path.relative_to(ROOT)} --quick --out exercises/out\n"
              f"and the lesson beside it; then: python tests/exercises.py --answer {args.bug} --seed {args.seed} NAME")
    elif args.what in WRITE:
        path = ROOT / "exercises" / LESSONS[args.what].name
        if path.exists():
            sys.exit(f"{path.relative_to(ROOT)} exists, and your work may be in it: delete it or move it away first")
        path.parent.mkdir(exist_ok=True)
        path.write_text(at_home(emptied(LESSONS[args.what].read_text(), WRITE[args.what])))
        print(f"{path.relative_to(ROOT)} written. Write {', '.join(WRITE[args.what])}; grade them with:\npytest tests --lesson {path.relative_to(ROOT)}")
    else:
        parser.error(f"which lesson? One of {', '.join(WRITE)}")


if __name__ == "__main__":
    main()
