"""Prints the README's support matrix from the code, or checks that the README has it.

python tools/support_matrix.py            prints it
python tools/support_matrix.py --write    puts it into README.md
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from surefoot.backend import BACKENDS, EMULATIONS, make_backend
from surefoot.config import DRAFTERS, QUANTIZATIONS
from surefoot.errors import SettingError
from surefoot.model.registry import FAMILIES

README = Path(__file__).parents[1] / "README.md"
RUN_HERE = ("cpu", "reference")
"""What the project's own tests run."""
BEGIN, END = "<!-- support matrix: begin -->", "<!-- support matrix: end -->"


def matrix() -> str:
    """Architectures by backends, quantisation and draft heads; drafters, and where int8 runs."""
    backends = list(BACKENDS)
    columns = ["architecture", *backends, "quantization", "draft head"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for name, family in sorted(FAMILIES.items()):
        heads = _listed(family.draft_heads)
        forms = _listed(() if family.int8_linears is None else QUANTIZATIONS)
        tested = [f" {_how_tested(each)} |" for each in backends]
        lines.append(f"| {name} |{''.join(tested)} {forms} | {heads} |")
    drafters = _listed([name for name in DRAFTERS if name not in ("auto", "none", "mtp")])
    lines += ["", f"Drafters for all of them: {drafters}, and plug-ins."]
    where = ", ".join(filter(_has_int8, backends))
    return "\n".join([*lines, f"Quantised weights, made or stored: on {where}."])


def _how_tested(device: str) -> str:
    if device in EMULATIONS:
        return "contract-tested"
    return "yes" if device in RUN_HERE else "not tested"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "-"


def _has_int8(device: str) -> bool:
    """What no test here can run is not claimed."""
    try:
        return make_backend(device, None, emulate=device in EMULATIONS).capabilities.int8
    except SettingError:
        return False


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
