"""The conformance suite on 16-bit numbers: its float32 tensors are rounded for both sides.

A run hands float32 tensors to a backend. Here those that models keep in their own element type
go on as bfloat16 to the backend under test, and as float32 with the same values to the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from surefoot.backend.protocol import Backend

NARROW: Mapping[str, tuple[int, ...]] = {
    "paged_write": (0, 1),
    "paged_attention": (0, 1, 2),
    "attend_pages": (0, 1, 3),
    "ring_write": (0, 1),
    "window_attention": (0, 1, 2),
    "causal_conv": (0, 1, 2),
    "choose_entries": (0, 2),
    "attend_latents": (0, 1, 2),
    "attend_chosen": (0, 1, 2),
    "rms_norm": (0,),
    "join_tokens": (1, 2),
    "rotary": (0,),
    "gate": (0, 1),
    "gated_norm": (0, 1),
    "read_streams": (0,),
    "write_streams": (0, 1),
    "enter_streams": (0,),
    "pack_linear": (0, 1),
    "pack_gated": (0, 1),
    "pack_experts": (0, 1),
    "__call__": (0,),
    "add": (0, 1),
}
"""Which arguments of an operator have the model's element type."""

WRITTEN: Mapping[str, tuple[int, ...]] = {
    "paged_write": (0,),
    "attend_pages": (3,),
    "ring_write": (0,),
}
"""Which of them it writes to."""

Convert = Callable[[Tensor], Tensor]


def narrowed(x: Tensor) -> Tensor:
    """As bfloat16."""
    return x.bfloat16() if x.dtype == torch.float32 else x


def rounded(x: Tensor) -> Tensor:
    """As float32 with values of bfloat16."""
    return x.bfloat16().float() if x.dtype == torch.float32 else x


def mapped(value: Any, convert: Convert) -> Any:
    """The value with other tensors; tuples and operands are gone through."""
    if isinstance(value, Tensor):
        return convert(value)
    if isinstance(value, tuple):
        return tuple(mapped(part, convert) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        return replace(value, **{name: mapped(part, convert) for name, part in parts.items()})
    return value


class Converting:
    """Some operators, whose arguments and results are converted."""

    def __init__(self, inner: object, convert: Convert) -> None:
        self._inner, self._convert = inner, convert

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._inner, name)
        if not callable(inner):
            return inner
        if name == "rows":
            return lambda layout: Converting(inner(layout), self._convert)
        return self._converting(name, inner)

    def __call__(self, *args: Any) -> Any:
        return self._converting("__call__", cast("Callable[..., Any]", self._inner))(*args)

    def _converting(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            narrow, written = NARROW.get(name, ()), WRITTEN.get(name, ())
            given = [
                mapped(arg, self._convert) if place in narrow else arg
                for place, arg in enumerate(args)
            ]
            result = inner(*given, **kwargs)
            for place in written:
                put_back(args[place], given[place])
            if name.startswith("pack_") and name != "pack_angles":
                return Converting(result, self._convert)
            return mapped(result, lambda x: x.float() if x.dtype == torch.bfloat16 else x)

        return call


def put_back(target: Tensor | Sequence[Tensor], written: Tensor | Sequence[Tensor]) -> None:
    """Copy what an operator wrote to where the caller looks; it has 16 bits in the caches."""
    if isinstance(target, Tensor):
        assert isinstance(written, Tensor)
        target.copy_(written.bfloat16())
        return
    for each, other in zip(target, written, strict=True):
        put_back(each, other)


def narrow(backend: Backend) -> Backend:
    """A backend that gets bfloat16 where models would give it."""
    return cast("Backend", Converting(backend, narrowed))


def exact(reference: Backend) -> Backend:
    """The reference on the same values."""
    return cast("Backend", Converting(reference, rounded))
