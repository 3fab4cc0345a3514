from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.backend.ascend.emulate import (
    RELAXED,
    STRICT,
    EmulatedVendor,
    NotEmulatedError,
    SilentError,
)
from tests.unit.backend.ascend.broken import Arguments, Broken, broken_cases

VENDOR: Any = EmulatedVendor(RELAXED)
BF, HALF, INT32 = torch.bfloat16, torch.float16, torch.int32
SIZE = 4


def draw(*shape: int, dtype: torch.dtype = BF, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=INT32)


def convolved(history: list[Tensor], own: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Tap by tap; `history` holds the K - 1 inputs before."""
    line = [*history, *own]
    out = torch.zeros(own.shape, dtype=torch.float64)
    for at in range(len(own)):
        for tap in range(len(weight)):
            out[at] += weight[tap].double() * line[at + tap].double()
    return out if bias is None else out + bias.double()


def near(came: Tensor, wanted: Tensor) -> None:
    eps = torch.finfo(came.dtype).eps
    assert ((came.double() - wanted).abs() <= eps * wanted.abs() + 1e-9).all()


@pytest.mark.parametrize("dtype", [BF, HALF])
@pytest.mark.parametrize("taps", [2, 3, 4])
@pytest.mark.parametrize("lengths", [[5], [1, 2, 7], [1, 1]], ids=str)
@pytest.mark.parametrize("full", [False, True])
def test_prefill(full: bool, lengths: list[int], taps: int, dtype: torch.dtype) -> None:
    x, weight = draw(sum(lengths), SIZE, dtype=dtype), draw(taps, SIZE, dtype=dtype, seed=1)
    bias = draw(SIZE, dtype=dtype, seed=2) if full else None
    states = draw(6, taps - 1, SIZE, dtype=dtype, seed=3)
    states[4] = torch.nan
    before = states.clone()
    slots, modes = [3, 4, 1][: len(lengths)], [1, 0, 1][: len(lengths)]
    y = VENDOR.npu_fused_causal_conv1d(
        x,
        weight,
        states,
        query_start_loc=ints(0, *torch.tensor(lengths).cumsum(0).tolist()),
        cache_indices=ints(*slots),
        initial_state_mode=ints(*modes),
        bias=bias,
        activation="silu" if full else "None",
        residual_connection=int(full),
    )
    start = 0
    for length, slot, mode in zip(lengths, slots, modes, strict=True):
        own = x[start : start + length]
        history = list(before[slot] if mode else torch.zeros(taps - 1, SIZE, dtype=dtype))
        wanted = convolved(history, own, weight, bias)
        wanted = wanted / (1 + torch.exp(-wanted)) + own.double() if full else wanted
        near(y[start : start + length], wanted)
        assert torch.equal(states[slot], torch.stack([*history, *own][-(taps - 1) :]))
        start += length
    others = [slot for slot in range(6) if slot not in slots]
    assert torch.equal(states[others].view(torch.int16), before[others].view(torch.int16))


@pytest.mark.parametrize("taps", [3, 4])
@pytest.mark.parametrize("width", [1, 3, 6])
@pytest.mark.parametrize("packed", [False, True])
def test_steps_with_drafts_go_on_where_the_accepted_end(
    packed: bool, width: int, taps: int
) -> None:
    """Ten steps of one request and a padded one; only accepted inputs count."""
    draws = torch.Generator().manual_seed(9)
    weight = draw(taps, SIZE, seed=1)
    states = torch.zeros(5, taps - 1 + width - 1, SIZE, dtype=BF)
    line = [torch.zeros(SIZE, dtype=BF)] * (taps - 1)
    accepted = width
    for number in range(10):
        x = draw(3, width, SIZE, seed=20 + number)
        y = VENDOR.npu_fused_causal_conv1d(
            x.view(-1, SIZE) if packed else x,
            weight,
            states,
            query_start_loc=ints(0, width, 2 * width, 3 * width) if packed else None,
            cache_indices=ints(2, -1, 0),
            num_accepted_tokens=ints(accepted, 1, 1),
            run_mode=1,
        ).view(3, width, SIZE)
        near(y[0], convolved(line[-(taps - 1) :], x[0], weight, None))
        assert bool(y[1].isnan().all())
        accepted = int(torch.randint(1, width + 1, (), generator=draws))
        line += x[0, :accepted]
    assert not states[[1, 3, 4]].any()


def test_decode_without_drafts_reads_the_latest_inputs() -> None:
    weight, states = draw(3, SIZE, seed=1), draw(4, 5, SIZE, seed=2)
    x, before = draw(2, 1, SIZE), states.clone()
    y = VENDOR.npu_fused_causal_conv1d(x, weight, states, run_mode=1)
    for slot in (0, 1):
        near(y[slot], convolved(list(before[slot, -2:]), x[slot], weight, None))
        assert torch.equal(states[slot], torch.cat([before[slot, 1:], x[slot]]))
    assert torch.equal(states[2:], before[2:])


def test_a_short_step_leaves_the_oldest_rows() -> None:
    weight, states = draw(3, SIZE, seed=1), draw(2, 7, SIZE, seed=2)
    x, before = draw(2, SIZE), states.clone()
    y = VENDOR.npu_fused_causal_conv1d(
        x,
        weight,
        states,
        query_start_loc=ints(0, 2),
        cache_indices=ints(1),
        num_accepted_tokens=ints(2),
        run_mode=1,
    )
    near(y, convolved(list(before[1, 1:3]), x, weight, None))
    assert torch.equal(states[1], torch.cat([before[1, :2], before[1, :3], x]))


def test_it_writes_through_views() -> None:
    wide = draw(4, 2, 2 * SIZE, seed=2)
    twin, weight, x = wide.clone(), draw(3, SIZE, seed=1), draw(2, 1, SIZE)
    VENDOR.npu_fused_causal_conv1d(x, weight, wide[..., :SIZE], run_mode=1)
    assert torch.equal(wide[:2, 1, :SIZE], x[:, 0])
    assert torch.equal(wide[..., SIZE:], twin[..., SIZE:])


def prefill(**changes: object) -> Arguments:
    return {
        "x": draw(6, SIZE),
        "weight": draw(3, SIZE, seed=1),
        "conv_states": draw(4, 2, SIZE, seed=2),
        "query_start_loc": ints(0, 2, 6),
        "cache_indices": ints(1, 3),
        "initial_state_mode": ints(0, 1),
        "bias": draw(SIZE, seed=3),
    } | changes


def steps(**changes: object) -> Arguments:
    decode = {
        "conv_states": draw(4, 5, SIZE, seed=2),
        "initial_state_mode": None,
        "num_accepted_tokens": ints(1, 3),
        "run_mode": 1,
    }
    return prefill(**decode) | changes


WIDE = {
    "x": draw(6, 128),
    "weight": draw(3, 128),
    "conv_states": draw(4, 2, 128),
    "bias": draw(128),
}


@broken_cases(
    *(
        Broken(name, {name: ints(0, 0)}, NotEmulatedError)
        for name in (
            "num_computed_tokens",
            "block_idx_first_scheduled_token",
            "block_idx_last_scheduled_token",
            "initial_state_idx",
        )
    ),
    Broken("conv_mode", {"conv_mode": "other"}, NotEmulatedError),
    Broken("activation", {"activation": "relu"}),
    Broken("run_mode", {"run_mode": 2}),
    Broken("residual_connection", {"residual_connection": 2}),
    Broken("dtype of x", {"x": draw(6, SIZE).float()}),
    Broken("dimensions of x", {"x": draw(6 * SIZE)}),
    Broken("dimensions of x", {"x": draw(2, 3, SIZE)}, label="three in prefill"),
    Broken("dimensions of weight", {"weight": draw(3, 1, SIZE)}),
    Broken("shape of weight", {"weight": draw(3, SIZE - 1)}),
    Broken("taps", {"weight": draw(1, SIZE)}),
    Broken("dimensions of conv_states", {"conv_states": draw(8, SIZE)}),
    Broken("shape of conv_states", {"conv_states": draw(4, 2, SIZE + 1)}),
    Broken("dtype of bias", {"bias": draw(SIZE, dtype=HALF)}),
    Broken("shape of bias", {"bias": draw(1)}),
    Broken("dtype of weight", {"weight": draw(3, SIZE, dtype=HALF)}),
    Broken("dtype of conv_states", {"conv_states": draw(4, 2, SIZE, dtype=HALF)}),
    Broken("x not empty", {"x": draw(0, SIZE)}),
    Broken("weight contiguous", {"weight": draw(SIZE, 3).t()}),
    Broken("query_start_loc", {"query_start_loc": None}),
    Broken("dtype of query_start_loc", {"query_start_loc": ints(0, 2, 6).long()}),
    Broken("query_start_loc contiguous", {"query_start_loc": ints(0, 9, 2, 9, 6, 9)[::2]}),
    Broken("ends of query_start_loc", {"query_start_loc": ints(1, 2, 6)}, SilentError),
    Broken("ends of query_start_loc", {"query_start_loc": ints(0, 2, 5)}, SilentError, label="T"),
    Broken("tokens of a request", {"query_start_loc": ints(0, 6, 6)}, SilentError),
    Broken("slots", {"conv_states": draw(1, 2, SIZE)}),
    Broken("rows of a slot", {"conv_states": draw(4, 3, SIZE)}),
    Broken("dtype of cache_indices", {"cache_indices": ints(1, 3).long()}),
    Broken("shape of cache_indices", {"cache_indices": ints(1, 3, 2)}),
    Broken("cache_indices contiguous", {"cache_indices": ints(1, 9, 3, 9)[::2]}),
    Broken("range of cache_indices", {"cache_indices": ints(1, 4)}, SilentError),
    Broken("range of cache_indices", {"cache_indices": ints(1, -2)}, SilentError, label="-2"),
    Broken("repeats in cache_indices", {"cache_indices": ints(3, 3)}, SilentError),
    Broken("initial_state_mode", {"initial_state_mode": None}, NotEmulatedError),
    Broken("dtype of initial_state_mode", {"initial_state_mode": torch.tensor([False, True])}),
    Broken("shape of initial_state_mode", {"initial_state_mode": ints(1)}),
    Broken("range of initial_state_mode", {"initial_state_mode": ints(0, 2)}, SilentError),
    Broken("num_accepted_tokens", {"num_accepted_tokens": ints(1, 1)}, SilentError),
)
def test_prefill_contract(case: Broken) -> None:
    case.check(VENDOR.npu_fused_causal_conv1d, prefill())


@broken_cases(
    Broken("rows of a slot", {"conv_states": draw(4, 4, SIZE)}),
    Broken("initial_state_mode", {"initial_state_mode": ints(1, 1)}, SilentError),
    Broken("dtype of num_accepted_tokens", {"num_accepted_tokens": ints(1, 3).long()}),
    Broken("shape of num_accepted_tokens", {"num_accepted_tokens": ints(1)}),
    Broken("num_accepted_tokens", {"num_accepted_tokens": ints(0, 3)}, SilentError, label="0"),
    Broken("num_accepted_tokens", {"num_accepted_tokens": ints(3, 3)}, SilentError, label="many"),
    Broken(
        "tokens of a request",
        {"x": draw(9, SIZE), "query_start_loc": ints(0, 2, 9)},
        SilentError,
    ),
)
def test_steps_contract(case: Broken) -> None:
    case.check(VENDOR.npu_fused_causal_conv1d, steps())


@broken_cases(
    Broken("taps", {"weight": draw(4, 128), "conv_states": draw(4, 3, 128)}, profile=STRICT),
    Broken(
        "size of x",
        {
            "x": draw(6, 192),
            "weight": draw(3, 192),
            "conv_states": draw(4, 2, 192),
            "bias": draw(192),
        },
        profile=STRICT,
    ),
    Broken(
        "requests",
        {
            "x": draw(257, 128),
            "conv_states": draw(257, 2, 128),
            "query_start_loc": torch.arange(258, dtype=INT32),
            "cache_indices": None,
            "initial_state_mode": torch.zeros(257, dtype=INT32),
        },
        profile=STRICT,
    ),
)
def test_sizes_are_limited(case: Broken) -> None:
    vendor: Any = EmulatedVendor(STRICT)
    case.check(vendor.npu_fused_causal_conv1d, prefill(**WIDE))
