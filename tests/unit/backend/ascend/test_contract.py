from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.backend.ascend.emulate import RELAXED, STRICT, EmulatedVendor, RefusedError
from surefoot.backend.ascend.emulate.arithmetic import poison, rounded
from surefoot.backend.ascend.emulate.contract import Operators, Tensors, describe, operator


class Doubled(Operators):
    """One operator with an argument of each kind."""

    @operator
    def npu_double(
        self,
        x: Tensor,
        parts: Tensors | None = None,
        count: int = 1,
        scale: float = 2.0,
        mode: str = "",
        *,
        flag: bool = False,
        rest: Tensor | None = None,
    ) -> Tensor:
        """Twice x."""
        return x * scale


X = torch.ones(2)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"x": [1.0]}, "x"),
        ({"x": 1.0}, "x"),
        ({"x": None}, "x"),
        ({"x": X, "parts": X}, "parts"),
        ({"x": X, "parts": [1]}, "parts"),
        ({"x": X, "count": torch.tensor(1)}, "count"),
        ({"x": X, "count": 1.0}, "count"),
        ({"x": X, "count": True}, "count"),
        ({"x": X, "scale": torch.tensor(1.0)}, "scale"),
        ({"x": X, "mode": None}, "mode"),
        ({"x": X, "flag": 1}, "flag"),
        ({"x": X, "rest": 1.0}, "rest"),
    ],
    ids=str,
)
def test_an_argument_of_another_kind_is_refused(arguments: dict[str, Any], name: str) -> None:
    vendor = Doubled()
    with pytest.raises(RefusedError, match=f"for argument '{name}'") as caught:
        vendor.npu_double(**arguments)
    assert caught.value.rule == "host or device"
    assert caught.value.operator == "npu_double"


def test_arguments_of_the_right_kind_pass() -> None:
    vendor = Doubled()
    passed = vendor.npu_double(X, [X, X], 3, 2, "a", flag=True, rest=X)
    assert torch.equal(passed, 2 * X)
    assert torch.equal(vendor.npu_double(X, None, scale=3.0), 3 * X)


@pytest.mark.parametrize("lengths", [torch.tensor([1]), [torch.tensor(1)], [1.0], (True,), 1])
def test_host_lengths_are_lists_of_ints(lengths: Any) -> None:
    query = torch.zeros(1, 1, 16, dtype=torch.bfloat16)
    vendor: Any = EmulatedVendor(RELAXED)
    with pytest.raises(RefusedError, match="'actual_seq_lengths', that is a list of ints"):
        vendor.npu_fused_infer_attention_score(query, query, query, actual_seq_lengths=lengths)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda vendor: vendor.npu_double(X, eps=1), "Unknown keyword argument 'eps' for operator"),
        (lambda vendor: vendor.npu_double(), "missing a required argument: 'x'"),
        (lambda vendor: vendor.npu_double(X, None, 1, 1.0, "", True), "too many positional"),
    ],
    ids=["unknown", "missing", "too many"],
)
def test_a_call_that_fits_no_signature_is_refused(call: Callable[[Any], Tensor], text: str) -> None:
    with pytest.raises(RefusedError, match=text) as caught:
        call(Doubled())
    assert "npu::npu_double" in str(caught.value)
    assert "x, parts, count" in str(caught.value)


def test_an_operator_has_annotations_that_can_be_checked() -> None:
    def npu_odd(self: Operators, x: Fraction) -> None: ...

    with pytest.raises(TypeError, match="npu_odd: wanted annotations of"):
        operator(npu_odd)


def test_the_text_of_a_refusal_is_shaped_like_the_real_one() -> None:
    with pytest.raises(RefusedError) as caught:
        EmulatedVendor().npu_rms_norm(torch.ones(2, 4), torch.ones(3))
    first, second, third = str(caught.value).splitlines()
    assert first.startswith("npu_rms_norm: shape of gamma: wanted [4], got a float32 tensor of")
    assert second.startswith("call aclnnRmsNorm failed")
    assert second.endswith("error code is 161002")
    assert third.startswith("[ERROR] ERR01")


class List(list[tuple[str, tuple[object, ...], dict[str, object]]]):
    """Takes calls down and makes them."""

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.append((function.__name__, args, kwargs))
        return function(*args, **kwargs)


def test_the_last_tape_takes_the_call_as_a_whole() -> None:
    vendor, outer, inner = Doubled(), List(), List()
    vendor.tapes.extend([outer, inner])
    assert torch.equal(vendor.npu_double(X, scale=4.0), 4 * X)
    assert outer == []
    assert inner == [("npu_double", (vendor, X), {"scale": 4.0})]


def test_a_call_through_a_tape_is_checked_each_time() -> None:
    vendor, tape = Doubled(), List()
    vendor.tapes.append(tape)
    wrong: Any = "3"
    with pytest.raises(RefusedError, match="'count'"):
        vendor.npu_double(X, count=wrong)
    assert len(tape) == 1


def test_a_relaxed_profile_lifts_sizes() -> None:
    x = torch.zeros(1, 1, 1, 32, dtype=torch.bfloat16)
    assert EmulatedVendor(RELAXED).npu_interleave_rope(x, x, x).shape == x.shape
    for vendor in (EmulatedVendor(), EmulatedVendor(STRICT)):
        with pytest.raises(RefusedError, match="D of x: wanted 64"):
            vendor.npu_interleave_rope(x, x, x)


def test_tensors_are_described_by_dtype_and_shape() -> None:
    half = torch.zeros(2, 0, dtype=torch.float16)
    assert describe(half) == "a float16 tensor of shape [2, 0]"
    assert describe([half, 3]) == "[a float16 tensor of shape [2, 0], 3]"
    assert describe((1, 2)) == "(1, 2)"


def nearest(value: float, dtype: torch.dtype) -> Any:
    """Rounded by comparing exact distances to the neighbours, ties to the even one."""
    near = torch.tensor(value, dtype=torch.float32).to(dtype)
    around = near.view(torch.int16) + torch.tensor([-1, 0, 1], dtype=torch.int16)
    candidates = [
        (float(each), int(bits)) for each, bits in zip(around.view(dtype), around, strict=True)
    ]
    exact = Fraction(value)
    return min(candidates, key=lambda each: (abs(Fraction(each[0]) - exact), each[1] % 2))[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_happens_once(dtype: torch.dtype) -> None:
    draws = torch.Generator().manual_seed(3)
    plain = torch.randn(150, dtype=torch.float64, generator=draws)
    # Just beside the middle between two neighbours, nearer to it than float32 can tell.
    middles = plain.to(dtype)
    above = (middles.view(torch.int16) + 1).view(dtype)
    ties = (middles.double() + above.double()) / 2
    tries = torch.cat([plain, ties, ties * (1 + 1e-12), ties * (1 - 1e-12)])
    expected = torch.tensor([nearest(float(each), dtype) for each in tries])
    assert torch.equal(rounded(tries, dtype).float(), expected)
    twice = tries.float().to(dtype).float()
    assert not torch.equal(twice, expected), "the tries include none that two roundings get wrong"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_keeps_what_is_no_common_number(dtype: torch.dtype) -> None:
    inf = float("inf")
    odd = torch.tensor([0.0, -0.0, inf, -inf, float("nan"), 1e300, -1e300], dtype=torch.float64)
    came = rounded(odd, dtype)
    assert came[:4].tolist() == [0.0, 0.0, inf, -inf]
    assert came[:2].signbit().tolist() == [False, True]
    assert came[4].isnan()
    assert came[5:].tolist() == [inf, -inf]


def test_poison_is_far_from_any_value() -> None:
    assert poison((2, 3), torch.bfloat16).isnan().all()
    assert poison([2], torch.int32).tolist() == [-(2**31)] * 2
