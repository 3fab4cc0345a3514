"""What the backend calls: published operators by their published names, and in one place."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import surefoot
from surefoot.backend import make_backend
from surefoot.backend.ascend.emulate import STRICT, EmulatedVendor
from surefoot.backend.ascend.vendor import Vendor, installed_vendor
from surefoot.errors import SettingError
from surefoot.model.registry import FAMILIES

SOURCE = Path(surefoot.__file__).parent
OPERATORS = {name: value for name, value in vars(Vendor).items() if name.startswith("npu_")}


@pytest.mark.parametrize("name", OPERATORS)
def test_the_backend_calls_operators_as_the_emulation_has_them(name: str) -> None:
    """And a test beside this one holds those to the published schemas."""
    ours = inspect.signature(OPERATORS[name]).parameters
    theirs = inspect.signature(getattr(EmulatedVendor, name)).parameters
    for parameter, mine in ours.items():
        published = theirs[parameter]
        assert mine.kind == published.kind, parameter
        assert mine.default == published.default or parameter == "active_expert_range", parameter
    positional = [each for each in theirs.values() if each.kind == each.POSITIONAL_OR_KEYWORD]
    assert list(ours)[: len(positional)] == [each.name for each in positional][: len(ours)]


def test_no_file_outside_the_backend_names_the_vendor() -> None:
    own = SOURCE / "backend" / "ascend"
    found = [
        path
        for path in SOURCE.rglob("*.py")
        if own not in path.parents and re.search(r"torch_npu|npu_", path.read_text("utf-8"))
    ]
    assert found == []


def test_one_file_touches_the_vendors_module() -> None:
    own = SOURCE / "backend" / "ascend"
    found = [
        path.name
        for path in own.rglob("*.py")
        if re.search(r"import torch_npu|import_module\(", path.read_text("utf-8"))
    ]
    assert found == ["vendor.py"]


def test_no_backend_names_a_model() -> None:
    names = "|".join({"deepseek", "qwen", "llama", "glm", *(f.lower() for f in FAMILIES)})
    found = {
        (path.name, match)
        for path in (SOURCE / "backend").rglob("*.py")
        for match in re.findall(names, path.read_text("utf-8").lower())
    }
    assert found == set()


def test_without_the_vendors_module_the_device_is_refused_with_a_way_out() -> None:
    with pytest.raises(SettingError, match=r"torch_npu cannot be used here.*--emulate"):
        installed_vendor()
    with pytest.raises(SettingError, match="goes with device npu, not 'cpu'"):
        make_backend("cpu", None, emulate=True)


def test_the_emulation_promises_bits_and_says_what_it_lacks() -> None:
    capabilities = make_backend("npu", True, emulate=True).capabilities
    assert capabilities.bitwise
    assert capabilities.host_lengths
    assert not capabilities.ordered_entries
    assert capabilities.recordings == STRICT.most_graphs
    assert {"rotary", "compress", "attend_latents"} <= set(capabilities.composed)
