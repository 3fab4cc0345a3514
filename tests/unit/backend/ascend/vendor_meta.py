"""Compares the emulation with the vendor's functions for shapes; run by `test_vendor_wheel`.

    python -m tests.unit.backend.ascend.vendor_meta REGISTRATIONS

Registrations of torch hold for a whole process, hence one of its own. Only their text is used:
what they import of the vendor's library is replaced by a few constants.
"""

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.library
from torch import Tensor

from surefoot.backend.ascend.emulate import RELAXED, EmulatedVendor
from surefoot.backend.ascend.emulate.schemas import SCHEMAS
from tests.unit.backend.ascend.vendor_cases import cases

# Numbers of dtypes that torch itself does not have.
CONSTANTS = {
    "int4": 285,
    "hifloat8": 290,
    "float8_e8m0fnu": 293,
    "float4_e2m1fn_x2": 296,
    "float4_e1m2fn_x2": 297,
}


def main(registrations: Path) -> int:
    """Print what differs, or how many calls agree."""
    known = load(registrations)
    if missing := SCHEMAS.keys() - known:
        print(f"no function for {sorted(missing)}")
        return 1
    vendor, compared, differing = EmulatedVendor(RELAXED), 0, 0
    for name, call in cases():
        there = shapes(getattr(torch.ops.npu, name)(**at_no_place(call)))
        here = shapes(getattr(vendor, name)(**call))
        compared += 1
        if here != there:
            differing += 1
            print(f"{name}: emulated {here}, theirs {there}")
    print(f"{compared} calls of {len(known)} operators, {differing} differ")
    return min(differing, 1)


def load(registrations: Path) -> set[str]:
    """Define the operators and run the registrations; which of them have a function."""
    library, known = torch.library.Library("npu", "DEF"), set()
    for schema in SCHEMAS.values():
        library.define(schema)
    text = registrations.read_text(encoding="utf-8")
    for name in set(re.findall(r"torch\.ops\.npu\.(\w+)", text)) - SCHEMAS.keys():
        library.define(f"{name}() -> ()")
    register = torch.library.impl

    def impl(target: torch.library.Library, name: str, *key: str) -> Any:
        if target.ns != "npu" or name not in SCHEMAS:
            return lambda function: function
        known.add(name)
        return register(target, name, *key)

    pretend("torch_npu", **CONSTANTS)
    pretend("torch_npu.utils")
    words = ("PARAM", "TYPE", "VALUE", "PTR", "NOT_SUPPORT", "ACL")
    codes = SimpleNamespace(**{word: word for word in words})
    pretend("torch_npu.utils._error_code", ErrCode=codes, ops_error=lambda code: f" ({code})")
    pretend("torch_npu.npu")
    pretend("torch_npu.npu.utils", get_cann_version=lambda: "8.5.0")
    pretend("torch_npu.npu._backends", get_soc_version=lambda: 220)
    vars(torch.library)["impl"] = impl
    # Kept, for a library forgets its registrations when it is collected.
    module = pretend("registrations", kept=library)
    exec(compile(text, registrations, "exec"), vars(module))
    return known


def pretend(name: str, **contents: object) -> ModuleType:
    module = sys.modules[name] = ModuleType(name)
    vars(module).update(contents)
    return module


def at_no_place(value: Any) -> Any:
    """The arguments with tensors that have a shape and no memory."""
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, dict):
        return {name: at_no_place(each) for name, each in value.items()}
    return [at_no_place(each) for each in value] if isinstance(value, list) else value


def shapes(result: object) -> list[tuple[tuple[int, ...], torch.dtype]]:
    tensors = result if isinstance(result, tuple | list) else () if result is None else (result,)
    return [(tuple(each.shape), each.dtype) for each in tensors]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
