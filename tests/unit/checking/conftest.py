from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.checking.cases import Amount, Scope
from surefoot.checking.engines import Models
from surefoot.checking.prompts import Prompt, random_prompts
from surefoot.checking.report import Report
from surefoot.checking.run import Checker
from surefoot.config import make_config
from surefoot.engine.models import LoadedModel, load, load_draft
from surefoot.testing.tiny_models import write_tiny_llama

VOCAB = 64

Check = Callable[..., Report]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a target and a draft model that guesses right now and then."""
    root = tmp_path_factory.mktemp("checking")
    write_tiny_llama(root / "target", vocab=VOCAB)
    write_tiny_llama(root / "draft", vocab=VOCAB, drift=0.2)
    return root


def load_both(folder: Path, bitwise: bool) -> Models:
    config = make_config(bitwise=bitwise, draft_model=str(folder / "draft"))
    target = load(str(folder / "target"), config)
    return Models(target, load_draft(target, config))


@pytest.fixture(scope="session")
def models(folder: Path) -> Models:
    return load_both(folder, bitwise=True)


@pytest.fixture(scope="session")
def loose_models(folder: Path) -> Models:
    """The same without the bitwise mode."""
    return load_both(folder, bitwise=False)


@pytest.fixture(scope="session")
def target(models: Models) -> LoadedModel:
    return models.target


@pytest.fixture(scope="session")
def prompts() -> list[Prompt]:
    """A single token, two with a common beginning, a repetition, each at most 25 tokens long."""
    few = random_prompts(VOCAB, 3)
    kept = [few[0], few[1], few[4], few[5], few[9]]
    return [Prompt(prompt.label, prompt.tokens[:25]) for prompt in kept]


@pytest.fixture
def check(folder: Path, prompts: list[Prompt]) -> Check:
    """Checks some models over a scope, on pages of 4 tokens and with 8 new tokens each."""
    config = make_config(page_tokens=4, draft_model=str(folder / "draft"))

    def run(models: Models, scope: Scope, **amount: int) -> Report:
        chosen = Amount(**{"new_tokens": 8, **amount})
        return Checker(models, config, prompts, chosen).run(scope)

    return run
