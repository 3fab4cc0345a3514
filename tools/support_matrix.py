"""Prints the README's support matrix from the code, or checks that the README has it.

python tools/support_matrix.py            prints it
python tools/support_matrix.py --write    puts it into README.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from surefoot.backend import BACKENDS, EMULATIONS, make_backend
from surefoot.config import DRAFTERS
from surefoot.model.registry import FAMILIES, Family

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- support matrix: begin -->", "<!-- support matrix: end -->"


def matrix() -> str:
    """Architectures by backends and draft heads, and the drafters."""
    backends = list(BACKENDS)
    columns = ["architecture", *backends, "draft head"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for name, family in sorted(FAMILIES.items()):
        heads = ", ".join(f"`{head}`" for head in family.draft_heads) or "-"
        tested = [_told(family, each) for each in backends]
        lines.append(f"| {name} | {' | '.join(tested)} | {heads} |")
    drafters = ", ".join(f"`{name}`" for name in DRAFTERS if name not in ("auto", "none", "mtp"))
    return "\n".join([*lines, "", f"Drafters for all of them: {drafters}, and plug-ins."])


def _told(family: Family, backend: str) -> str:
    """How far a backend runs a family."""
    if backend not in EMULATIONS:
        return "yes"
    able = make_backend(backend, None, emulate=True).capabilities.chosen_positions
    return "contract-tested" if able or not family.chosen_positions else "not yet"


def with_matrix(text: str) -> str:
    """The README with the matrix between its marks."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{matrix()}\n{END}{after}"


if __name__ == "__main__":
    if "--write" in sys.argv:
        README.write_text(with_matrix(README.read_text()))
    else:
        print(matrix())
