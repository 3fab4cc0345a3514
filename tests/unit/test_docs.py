"""The pages that show how to add things are followed here, block by block."""

import re
from pathlib import Path

import pytest

from surefoot.testing.tiny_models import write_tiny_llama

DOCS = Path(__file__).parents[2] / "docs"


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


@pytest.mark.parametrize("page", ["add-a-drafter.md", "add-a-model.md", "add-a-backend.md"])
def test_page_runs_as_written(page: str, tmp_path: Path) -> None:
    blocks = python_blocks(page)
    assert len(blocks) >= 2
    source = "\n".join(blocks)
    assert "assert " in source
    # The pages speak of a checkpoint on disk; here is one.
    names: dict[str, object] = {"MODEL": str(write_tiny_llama(tmp_path)), "__name__": page}
    exec(compile(source, page, "exec"), names)


def test_tour_names_every_package() -> None:
    tour = (DOCS / "tour.md").read_text()
    source = Path(__file__).parents[2] / "src" / "surefoot"
    for folder in source.iterdir():
        if folder.is_dir() and any(folder.glob("*.py")) and any(folder.glob("[a-z]*.py")):
            assert f"`{folder.name}/`" in tour, f"docs/tour.md says nothing of {folder.name}/"


def test_readme_has_the_support_matrix_of_the_code() -> None:
    root = Path(__file__).parents[2]
    names: dict[str, object] = {
        "__name__": "tools",
        "__file__": str(root / "tools/support_matrix.py"),
    }
    exec((root / "tools/support_matrix.py").read_text(), names)
    matrix = names["matrix"]
    assert callable(matrix)
    assert str(matrix()) in (root / "README.md").read_text()
