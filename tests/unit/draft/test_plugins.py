"""Drafters from other packages: found by name, refused with a reason."""

from pathlib import Path

import pytest

from surefoot.config import make_config
from surefoot.draft.plugins import DrafterSetting, make_plugin
from surefoot.engine.engine import Engine
from surefoot.engine.models import load
from surefoot.errors import SettingError
from surefoot.llm import LLM
from surefoot.params import SamplingParams
from surefoot.testing.tiny_models import write_tiny_llama

MODULE = """
from surefoot.draft.drafter import NoDrafter

class Twice(NoDrafter):
    name = "twice"
    def __init__(self, setting):
        self.setting = setting
    def propose(self, rows):
        return [[row.request.tokens[-1]] * row.limit for row in rows]

def broken(setting):
    raise RuntimeError("no luck today")
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with two entry points."""
    info = tmp_path / "twice-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: twice\nVersion: 1.0\n")
    lines = ["[surefoot.drafters]", "twice = twice_module:Twice", "broken = twice_module:broken"]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / "twice_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("package")
def test_plugin_drafts_and_changes_nothing(tmp_path: Path) -> None:
    model = str(write_tiny_llama(tmp_path / "model"))
    target = load(model, make_config(drafter="none"))
    params = SamplingParams(max_tokens=16, temperature=0, seed=2)
    results = [
        LLM.on(Engine(target, make_config(drafter=name, draft_tokens=3))).generate(
            [1, 2, 3], params
        )[0]
        for name in ("none", "twice")
    ]
    assert results[0].outputs[0].token_ids == results[1].outputs[0].token_ids
    assert results[1].speculation.drafter == "twice"
    assert results[1].speculation.drafted_tokens > 0


@pytest.mark.usefixtures("package")
def test_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(SettingError, match=r"drafter: 'thrice' is unknown; .*ngram.*twice"):
        make_config(drafter="thrice")


@pytest.mark.usefixtures("package")
def test_plugin_that_does_not_start_says_why() -> None:
    with pytest.raises(SettingError, match="'broken' does not start: RuntimeError: no luck today"):
        make_plugin("broken", DrafterSetting(10, 16, 64))
