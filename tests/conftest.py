"""What the tests share: the lessons, the tiny policy, one real vLLM engine for the whole session; and the grader.

A test of a formula is a function check(f) that holds the lesson's f against an oracle. The same check
must fail for every plausible wrong version of f; `rejected` counts them. With --lesson a student's copy
stands in the lesson's place, and only the tests of its exercises run."""
import importlib.util
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "figures"), str(ROOT / "tests")]
lesson1 = import_module("01_mismatch")   # first: it decides what of torch's company is imported
import torch

exercises = import_module("exercises")

REJECTED, OUTCOMES = [], {}


def rejected(check, wrong) -> None:
    """check must fail on `wrong`, by an assertion and not by a crash."""
    with pytest.raises(AssertionError):
        check(wrong)
    REJECTED.append(wrong)


def pytest_addoption(parser):
    parser.addoption("--lesson", type=Path, help="a copy of a lesson, written by tests/exercises.py: grades its functions")


def pytest_configure(config):
    """Puts the student's copy in the lesson's place, before the tests import it."""
    path = config.getoption("--lesson")
    if path is None:
        return
    if not path.is_file():
        pytest.exit(f"--lesson {path}: there is no such file", returncode=2)
    if path.name not in {lesson.name for lesson in exercises.LESSONS.values()}:
        pytest.exit(f"--lesson {path}: the copy must be called like its lesson, for example {exercises.LESSONS['02'].name}", returncode=2)
    specification = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(specification)
    try:
        specification.loader.exec_module(module)
    except Exception as error:                     # a student's typo is not an internal error of pytest
        pytest.exit(f"--lesson {path} cannot be imported: {type(error).__name__}: {error}", returncode=2)
    if path.stem == lesson1.__name__:
        globals()["lesson1"] = module


def pytest_ignore_collect(collection_path, config):
    """With --lesson only that lesson's tests are imported."""
    path = config.getoption("--lesson")
    return True if path is not None and collection_path.suffix == ".py" and collection_path.name != f"test_{path.stem}.py" else None


def pytest_collection_modifyitems(config, items):
    """Of a student's copy only the exercises are graded."""
    path = config.getoption("--lesson")
    if path is not None:
        graded = {test for _, tests in exercises.WRITE[path.stem[:2]].values() for test in tests}
        items[:] = [item for item in items if item.path.name == f"test_{path.stem}.py" and (item.name in graded or item.originalname in graded)]


def pytest_runtest_logreport(report):
    if report.when == "call":
        missing = re.findall(r"NotImplementedError: exercise: write (\w+)", str(report.longrepr))
        OUTCOMES[report.nodeid.split("::")[1]] = ("right", "") if report.passed else ("needs", missing[-1]) if missing else ("wrong", "")


def pytest_terminal_summary(terminalreporter, config):
    path = config.getoption("--lesson")
    if path is None:
        terminalreporter.write_line(f"wrong versions rejected: {len(REJECTED)}")
        return
    for name, (_, tests) in exercises.WRITE[path.stem[:2]].items():
        seen = {key: outcome for test in tests for key, outcome in OUTCOMES.items() if test in (key, key.split("[")[0])}
        needs = [missing for kind, missing in seen.values() if kind == "needs"]
        failed = [key for key, (kind, _) in seen.items() if kind == "wrong"]
        verdict = ("not written yet" if name in needs else f"needs {needs[0]}" if needs else f"wrong: {', '.join(failed)}" if failed else
                   "right" if seen else "not graded")
        terminalreporter.write_line(f"{name:20}{verdict}")


@pytest.fixture(scope="session")
def tiny():
    """The tiny policy's checkpoint, built on the first run."""
    return lesson1.policy()


@pytest.fixture(scope="session")
def mixture():
    return lesson1.policy(architecture=import_module("05_router_replay").MIXTURE)


@pytest.fixture(scope="session")
def mixture_engine(mixture):
    """vLLM on the mixture of experts, in float32: it picks as the trainer does."""
    return import_module("05_router_replay").RoutedSampler(mixture, dtype="float32")


@pytest.fixture(scope="session")
def engine(tiny, mixture_engine):
    """One real vLLM engine, in float32: exact to 1e-6 against a float32 trainer. Started after the
    mixture's: vLLM makes the experts' process group with a process' first engine or never."""
    return lesson1.Sampler(tiny, dtype="float32")


@pytest.fixture(scope="session")
def engine16(engine, tiny):
    """The same in bfloat16, as the lessons use it."""
    return lesson1.Sampler(tiny)


@pytest.fixture
def trainer(tiny):
    return lesson1.load_model(tiny)


@pytest.fixture(scope="session")
def tokenizer(tiny):
    return lesson1.transformers.AutoTokenizer.from_pretrained(tiny)


@pytest.fixture
def moved(trainer):
    """A trainer whose weights, the tied embedding and lm_head included, have moved away from the
    checkpoint's."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return trainer
