"""The emulation's signatures are the published ones."""

import inspect
from typing import get_args, get_type_hints

import pytest
import torch

from surefoot.backend.ascend.emulate import EmulatedVendor
from surefoot.backend.ascend.emulate.contract import KINDS
from surefoot.backend.ascend.emulate.schemas import SCHEMAS

# Types as torch prints them when it parses a schema.
TYPES = {
    "Tensor": "Tensor",
    "Optional[Tensor]": "Tensor | None",
    "List[Tensor]": "Tensors",
    "Optional[List[Tensor]]": "Tensors | None",
    "List[int]": "HostInts",
    "Optional[List[int]]": "HostInts | None",
    "int": "int",
    "Optional[int]": "int | None",
    "float": "float",
    "Optional[float]": "float | None",
    "bool": "bool",
    "str": "str",
    "Optional[str]": "str | None",
}


def operators() -> dict[str, inspect.Signature]:
    methods = inspect.getmembers(EmulatedVendor, inspect.isfunction)
    return {name: inspect.signature(method) for name, method in methods if name[0] != "_"}


def test_every_operator_has_its_schema_and_every_schema_its_operator() -> None:
    assert operators().keys() == SCHEMAS.keys()


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_signature_is_the_published_one(name: str) -> None:
    schema = torch._C.parse_schema(f"npu::{SCHEMAS[name]}")
    parameters = list(operators()[name].parameters.values())[1:]
    assert [each.name for each in parameters] == [each.name for each in schema.arguments]
    for ours, published in zip(parameters, schema.arguments, strict=True):
        assert str(ours.annotation) == TYPES[str(published.type)], ours.name
        keyword = ours.kind is inspect.Parameter.KEYWORD_ONLY
        assert keyword == published.kwarg_only, ours.name
        has_default = ours.default is not inspect.Parameter.empty
        assert has_default == published.has_default_value(), ours.name
        if has_default:
            assert (ours.default, type(ours.default)) == (
                published.default_value,
                type(published.default_value),
            ), ours.name


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_result_is_the_published_one(name: str) -> None:
    schema = torch._C.parse_schema(f"npu::{SCHEMAS[name]}")
    result = get_type_hints(getattr(EmulatedVendor, name))["return"]
    tensors: list[object] = [torch.Tensor] * len(schema.returns)
    assert list(get_args(result) or (result,)) == (tensors or [type(None)])


def test_every_published_type_can_be_checked() -> None:
    assert {each.removesuffix(" | None") for each in TYPES.values()} == KINDS.keys()
