"""Rules of the code that neither ruff nor import-linter can state."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "surefoot"
FILES = sorted(SOURCE.rglob("*.py"))
MOST_LINES = 450


def words(*names: str) -> re.Pattern[str]:
    """Finds the names as words, also inside snake_case and CamelCase."""
    spellings = [form for name in names for form in (name, name.title(), name.upper())]
    return re.compile(rf"(?<![A-Za-z])({'|'.join(spellings)})(?![a-z])")


DEVICE = words("cuda", "npu", "ascend", "triton", "rocm", "hip", "xpu", "mps")
FAMILY = words("llama", "smollm", "SmolLM", "qwen", "mistral", "deepseek", "DeepSeek", "glm")
# Files outside model/ and weights/ that may name a family, each with its reason.
NAMES_FAMILIES = {
    "text/gguf_vocab.py",  # the file format names its ways to split text after families
}


def place(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """All names and strings of the code with their lines, docstrings left out."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=text) | ast.Attribute(attr=text) | ast.arg(arg=text):
                yield node.lineno, text
            case ast.FunctionDef(name=text) | ast.ClassDef(name=text):
                yield node.lineno, text
            case ast.alias(name=text):
                yield node.lineno, text
            case ast.ImportFrom(module=str(text)):
                yield node.lineno, text
            case ast.keyword(arg=str(text)):
                yield node.lineno, text
            case ast.Constant(value=str(text)) if id(node) not in prose:
                yield node.lineno, text


def naming(code: str, pattern: re.Pattern[str]) -> list[str]:
    found = [(line, text) for line, text in texts(ast.parse(code)) if pattern.search(text)]
    return [f"{line}: {text[:80]}" for line, text in found]


def probes(code: str) -> list[str]:
    """Calls that ask an object what it is able to do, instead of reading what it declares."""
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    return [
        f"{call.lineno}: {ast.unparse(call)[:80]}"
        for call in calls
        if isinstance(call.func, ast.Name)
        and (call.func.id == "hasattr" or (call.func.id == "getattr" and len(call.args) == 3))
    ]


def may_name_a_device(where: str) -> bool:
    """Inside backend/<device>/, and where the table of backends is made."""
    parts = where.split("/")
    return parts[0] == "backend" and (len(parts) > 2 or parts[1] == "__init__.py")


def may_name_a_family(where: str) -> bool:
    return where.split("/")[0] in {"model", "weights", "testing"} or where in NAMES_FAMILIES


def broken(check: dict[str, list[str]]) -> list[str]:
    return [f"{where}:{line}" for where, lines in check.items() for line in lines]


def test_there_is_something_to_check() -> None:
    assert len(FILES) >= 10


def test_only_backends_name_a_device() -> None:
    files = [path for path in FILES if not may_name_a_device(place(path))]
    assert broken({place(path): naming(path.read_text(), DEVICE) for path in files}) == []


def test_only_models_and_weights_name_a_family() -> None:
    files = [path for path in FILES if not may_name_a_family(place(path))]
    assert broken({place(path): naming(path.read_text(), FAMILY) for path in files}) == []


def test_nothing_probes_for_abilities() -> None:
    assert broken({place(path): probes(path.read_text()) for path in FILES}) == []


def test_files_stay_small() -> None:
    sizes = {place(path): len(path.read_text().splitlines()) for path in FILES}
    assert {where: lines for where, lines in sizes.items() if lines > MOST_LINES} == {}


def test_every_folder_is_a_package() -> None:
    """The import checks see regular packages only."""
    folders = {path.parent for path in FILES}
    assert [place(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


@pytest.mark.parametrize(
    "code",
    [
        "import torch_npu",
        "from torch import cuda",
        "x.is_cuda",
        "def npu_copy(): ...",
        "f(use_cuda=True)",
        "device = 'cuda:0'",
        "AscendRunner()",
    ],
)
def test_a_device_is_found(code: str) -> None:
    assert naming(code, DEVICE)


@pytest.mark.parametrize(
    "code", ['"""Replays a CUDA graph."""', "# npu", "sort(descending=True)", "ascending = 1"]
)
def test_prose_and_other_words_are_no_device(code: str) -> None:
    assert not naming(code, DEVICE)


@pytest.mark.parametrize("code", ["class LlamaModel: ...", "kind == 'qwen3_next'", "is_deepseek"])
def test_a_family_is_found(code: str) -> None:
    assert naming(code, FAMILY)


@pytest.mark.parametrize("code", ["hasattr(x, 'rewind')", "getattr(x, 'k', None)"])
def test_a_probe_is_found(code: str) -> None:
    assert probes(code)


def test_reading_a_declared_attribute_is_no_probe() -> None:
    assert not probes("getattr(params, name)")
