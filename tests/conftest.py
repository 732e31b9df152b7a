"""What the tests share: the lessons, the tiny policy, one real vLLM engine for the whole session.

A test of a formula is a function check(f) that holds the lesson's f against an oracle. The same check
must fail for every plausible wrong version of f; `rejected` counts them."""
import sys
from importlib import import_module
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
lesson1 = import_module("01_mismatch")   # first: it decides what of torch's company is imported
import torch

REJECTED = []


def rejected(check, wrong) -> None:
    """check must fail on `wrong`, by an assertion and not by a crash."""
    with pytest.raises(AssertionError):
        check(wrong)
    REJECTED.append(wrong)


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"wrong versions rejected: {len(REJECTED)}")


@pytest.fixture(scope="session")
def tiny():
    """The tiny policy's checkpoint, built on the first run."""
    return lesson1.policy("sum")


@pytest.fixture(scope="session")
def mixture():
    return lesson1.policy("sum", import_module("05_router_replay").MIXTURE)


@pytest.fixture(scope="session")
def mixture_engine(mixture):
    """vLLM on the mixture of experts, in float32: it picks as the trainer does."""
    return lesson1.Sampler(mixture, dtype="float32")


@pytest.fixture(scope="session")
def engine(tiny, mixture_engine):
    """One real vLLM engine, in float32: exact to 1e-6 against a float32 trainer. Started after the mixture's: vLLM
    makes the experts' process group with a process' first engine or never."""
    return lesson1.Sampler(tiny, dtype="float32")


@pytest.fixture
def trainer(tiny):
    return lesson1.load_model(tiny)


@pytest.fixture(scope="session")
def tokenizer(tiny):
    return lesson1.transformers.AutoTokenizer.from_pretrained(tiny)


@pytest.fixture
def moved(trainer):
    """A trainer whose weights, the tied embedding and head included, have moved away from the checkpoint's."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return trainer
