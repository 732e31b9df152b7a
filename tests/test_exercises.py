"""The grader, graded: right answers pass, plausible wrong ones do not, every bug is one that a test sees."""
import subprocess
import sys
import types
from importlib import import_module

import pytest
from conftest import exercises, lesson1, rejected

tests = {lesson: import_module(f"test_{path.stem}") for lesson, path in exercises.LESSONS.items()}

# the wrong versions of each function that a student writes: what its check must reject
WRONG = {
    "token_logp": tests["01"].WRONG_LOGP, "gap": tests["01"].WRONG_GAP, "response_logits": tests["01"].WRONG_LOGPROBS,
    "two_errors": tests["01"].WRONG_ERRORS, "lm_head_in_float32": tests["01"].WRONG_LM_HEAD, "pack": tests["01"].WRONG_PACK,
    "advantages": tests["02"].WRONG_ADVANTAGES, "policy_loss": tests["02"].WRONG_LOSS, "ess": tests["02"].WRONG_ESS,
    "tis": [w for name, *w in tests["02"].WRONG_WEIGHTS if name == "tis"], "seq_tis": [w for name, *w in tests["02"].WRONG_WEIGHTS if name == "seq-tis"],
    "ppo_keeps": [w for name, *w in tests["02"].WRONG_WEIGHTS if name in ("ppo", "minirl")],
    "split": tests["03"].WRONG_SPLIT, "cross": tests["03"].WRONG_CROSS, "norm2": tests["03"].WRONG_NORM2, "cosine": tests["03"].WRONG_COSINE,
    "slope": tests["03"].WRONG_SLOPE, "drift": tests["03"].WRONG_DRIFT,
    "center": tests["04"].WRONG_CENTER, "lag_ess": tests["04"].WRONG_ESS, "dlc_loss": {**tests["04"].WRONG_LOSS, **tests["04"].WRONG_TRIGGER},
    "ppo_clipped": tests["04"].WRONG_RULE, "kl": tests["04"].WRONG_KL,
    "gates": tests["05"].WRONG_GATES, "replay": tests["05"].WRONG_REPLAY, "flips": tests["05"].WRONG_FLIPS, "beyond": tests["05"].WRONG_BEYOND, "check_routes": tests["05"].WRONG_REFUSALS,
}


def test_every_exercise_has_wrong_versions_that_its_tests_reject():
    """Three or more a function; that each is rejected is shown where it stands."""
    functions = [name for written in exercises.WRITE.values() for name in written]
    assert set(functions) == set(WRONG) and all(len(written) >= 4 for written in exercises.WRITE.values())
    assert all(len(WRONG[name]) >= 3 for name in functions), {name: len(WRONG[name]) for name in functions}
    assert sum(len(WRONG[name]) for name in functions) >= 40
    for lesson, written in exercises.WRITE.items():
        for _, graded in written.values():
            assert graded and all(hasattr(tests[lesson], name.split("[")[0]) for name in graded)


@pytest.mark.parametrize("lesson", exercises.WRITE)
def test_emptied_functions_raise_and_the_rest_is_the_lesson(lesson):
    source = exercises.LESSONS[lesson].read_text()
    empty = exercises.emptied(source, exercises.WRITE[lesson])
    compile(exercises.at_home(empty), lesson, "exec")
    assert empty.count("raise NotImplementedError") == len(exercises.WRITE[lesson])
    heads = [[line.split("  ")[0] for line in text.splitlines() if line.startswith(("def ", "class "))] for text in (source, empty)]
    assert heads[0] == heads[1]


def grade(tmp_path, lesson, source):
    path = tmp_path / exercises.LESSONS[lesson].name
    path.write_text(source)
    result = subprocess.run([sys.executable, "-m", "pytest", "tests", "-q", "--lesson", str(path)], capture_output=True, text=True, cwd=lesson1.ROOT)
    return {line.split()[0]: " ".join(line.split()[1:]) for line in result.stdout.splitlines() if line.split() and line.split()[0] in exercises.WRITE[lesson]}


def test_the_grader_tells_right_wrong_and_unwritten_apart(tmp_path):
    """Lesson 2's own source; with one function emptied, one wrong."""
    source = exercises.LESSONS["02"].read_text()
    assert set(grade(tmp_path, "02", source).values()) == {"right"}
    changed = exercises.emptied(source, {"ess": (2, []), "seq_tis": (1, [])}).replace("return x.token.clamp(max=C)  ", "return x.lag.clamp(max=C)  ")
    verdicts = grade(tmp_path, "02", changed)
    assert verdicts.pop("ess") == verdicts.pop("seq_tis") == "not written yet" and verdicts.pop("tis") == "wrong: test_weight[tis]" and set(verdicts.values()) == {"right"}


def test_a_copy_that_cannot_be_graded_says_why(tmp_path):
    for name, source, message in (("02_mine.py", "", "must be called like its lesson"), ("nothing.py", None, "no such file"), ("02_importance_sampling.py", "def f(:", "SyntaxError")):
        if source is not None:
            (tmp_path / name).write_text(source)
        result = subprocess.run([sys.executable, "-m", "pytest", "tests", "-q", "--lesson", str(tmp_path / name)], capture_output=True, text=True, cwd=lesson1.ROOT)
        assert result.returncode == 2 and message in result.stdout + result.stderr and "INTERNALERROR" not in result.stdout + result.stderr


def loaded(lesson, name):
    """The lesson with that bug, as a module."""
    module = types.ModuleType(f"bug_{lesson}")
    module.__dict__.update(__file__=str(exercises.LESSONS[lesson]))
    sys.modules[module.__name__] = module                      # dataclasses look there
    exec(compile(exercises.with_bug(lesson, name), name, "exec"), module.__dict__)
    return module


def check_baseline(world):
    assert abs(world.mu @ world.A) < 1e-12, "the mean advantage under mu is 0"


# what shows each bug; the others need an engine, and are shown by the numbers of the lesson's own run
SHOWN = {
    "scored-one-token-late": lambda m: tests["01"].check_logprobs(m.logprobs), "log-softmax-in-bfloat16": lambda m: tests["01"].check_token_logp(m.token_logp),
    "temperature-forgotten-by-the-trainer": lambda m: tests["01"].check_token_logp(m.token_logp), "sign-of-the-gap": lambda m: tests["01"].check_gap(m.gap),
    "weight-upside-down": lambda m: tests["02"].check_weight("token-is", m.CORRECTIONS["token-is"]),
    "clip-whatever-the-sign": lambda m: tests["02"].check_weight("ppo", m.CORRECTIONS["ppo"]),
    "effective-samples-not-divided-by-n": lambda m: tests["02"].check_ess(m.ess),
    "sequence-weight-without-the-last-token": lambda m: tests["02"].check_weight("seq-is", m.CORRECTIONS["seq-is"]),
    "reward-without-a-baseline": lambda m: check_baseline(m.World(0.4, 0.4, seed=1, V=3, T=4)),
    "norm-of-one-estimate": lambda m: tests["03"].check_norm2(m.norm2), "noise-drawn-anew-at-each-sync": lambda m: tests["03"].check_noise(m.parameter_noise),
    "center-under-the-trainer": lambda m: tests["04"].check_center(m.center), "clip-forgotten": lambda m: tests["04"].check_clip(m.clipped),
    "ess-after-clipping": lambda m: tests["04"].check_ess(m.lag_ess), "resyncs-above-one-half": lambda m: tests["04"].check_trigger(m.dlc_loss),
    "log-ratio-for-the-ratio": lambda m: tests["04"].check_mean_ratio(m.mean_ratio),
    "routes-one-token-late": lambda m: tests["05"].check_replay(m.replay), "gates-not-normalized": lambda m: tests["05"].check_replay(m.replay),
    "order-of-the-experts-counts": lambda m: tests["05"].check_flips(m.flips),
}
BUGS = [(lesson, name) for lesson, bugs in exercises.BUGS.items() for name in bugs]


@pytest.mark.parametrize("lesson, name", BUGS)
def test_every_bug_is_in_its_lesson_once(lesson, name):
    compile(exercises.at_home(exercises.with_bug(lesson, name)), name, "exec")


@pytest.mark.parametrize("lesson, name", [bug for bug in BUGS if bug[1] in SHOWN])
def test_a_test_sees_every_bug(lesson, name):
    rejected(SHOWN[name], loaded(lesson, name))


def test_bug_hunt(tmp_path, monkeypatch, capsys):
    """Twelve bugs or more; the seed chooses; the name is checked."""
    assert len(BUGS) >= 12 and len({exercises.bug_of("01", seed) for seed in range(30)}) == len(exercises.BUGS["01"])
    monkeypatch.setattr(exercises, "ROOT", tmp_path)
    exercises.main(["--bug", "02", "--seed", "3"])
    bug = exercises.bug_of("02", 3)
    assert exercises.BUGS["02"][bug][1] in (tmp_path / "exercises" / "bug_02_importance_sampling.py").read_text() and bug not in capsys.readouterr().out
    for answer, code in ((bug, 0), (next(name for name in exercises.BUGS["02"] if name != bug), 1), ("nonsense", "no bug of lesson 02")):
        with pytest.raises(SystemExit) as exit:
            exercises.main(["--answer", "02", "--seed", "3", answer])
        assert exit.value.code == code or str(exit.value.code).startswith(str(code))
    exercises.main(["--answer", "02"])
    assert set(capsys.readouterr().out.split()) >= set(exercises.BUGS["02"])


def test_work_is_never_overwritten(tmp_path, monkeypatch):
    monkeypatch.setattr(exercises, "ROOT", tmp_path)
    exercises.main(["02"])
    path = tmp_path / "exercises" / "02_importance_sampling.py"
    path.write_text("my work")
    with pytest.raises(SystemExit, match="exists"):
        exercises.main(["02"])
    assert path.read_text() == "my work"
    with pytest.raises(SystemExit):
        exercises.main(["07"])
