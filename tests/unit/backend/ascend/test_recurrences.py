from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.backend.ascend.emulate import (
    RELAXED,
    STRICT,
    EmulatedVendor,
    NotEmulatedError,
    RefusedError,
    SilentError,
)
from tests.unit.backend.ascend.broken import Arguments, Broken, broken_cases

VENDOR: Any = EmulatedVendor(RELAXED)
BF, F32, INT32 = torch.bfloat16, torch.float32, torch.int32
KEY_HEADS, HEADS, KEY, VALUE = 2, 4, 6, 5


def draw(*shape: int, dtype: torch.dtype = BF, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=INT32)


def unit(*shape: int, seed: int) -> Tensor:
    return torch.nn.functional.normalize(draw(*shape, dtype=F32, seed=seed), dim=-1).to(BF)


def inputs(tokens: int, gated: bool = True) -> Arguments:
    gates = {"g": -draw(tokens, HEADS, dtype=F32, seed=4).abs()} if gated else {}
    return {
        "query": unit(tokens, KEY_HEADS, KEY, seed=1),
        "key": unit(tokens, KEY_HEADS, KEY, seed=2),
        "value": draw(tokens, HEADS, VALUE, seed=3),
        "beta": draw(tokens, HEADS, seed=5).sigmoid(),
        "scale": 0.4,
    } | gates


def matrix_form(call: Arguments, token: int, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token by S (a (I - b k k^T)) + b v k^T, head after head."""
    out, after = torch.zeros(HEADS, VALUE).double(), state.clone()
    for head in range(HEADS):
        q, k = (
            call[name][token, head // (HEADS // KEY_HEADS)].double() for name in ("query", "key")
        )
        beta = call["beta"][token, head].double()
        decay = call["g"][token, head].double().exp() if "g" in call else 1.0
        forget = torch.eye(KEY).double() - beta * torch.outer(k, k)
        after[head] = state[head] @ (decay * forget)
        after[head] += beta * torch.outer(call["value"][token, head].double(), k)
        out[head] = after[head] @ q * call["scale"]
    return out, after


def near(came: Tensor, wanted: Tensor) -> None:
    """Equal but for the last bit, or what little is left of numbers that cancel."""
    assert came.dtype == BF
    assert ((came.double() - wanted).abs() <= 0.008 * wanted.abs() + 1e-9).all()


LENGTHS = [[1], [3, 1, 8], [1] * 4, [2, 2]]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("accepts", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_recurrent_rule(lengths: list[int], accepts: bool, gated: bool) -> None:
    tokens = sum(lengths) + 1
    call = inputs(tokens, gated)
    state = draw(tokens + 3, HEADS, VALUE, KEY, seed=6)
    draws = torch.Generator().manual_seed(7)
    slots = (torch.randperm(tokens + 2, generator=draws)[:tokens] + 1).to(INT32)
    slots[-1] = 10_000
    accepted = [max(1, length - 1) for length in lengths]
    before = state.clone()
    out = VENDOR.npu_recurrent_gated_delta_rule(
        state=state,
        actual_seq_lengths=ints(*lengths),
        ssm_state_indices=slots,
        num_accepted_tokens=ints(*accepted) if accepts else None,
        **call,
    )
    token, written = 0, set()
    for length, count in zip(lengths, accepted, strict=True):
        entry = int(slots[token + (count - 1 if accepts else 0)])
        now = before[entry].double()
        for _ in range(length):
            wanted, now = matrix_form(call, token, now)
            near(out[token], wanted)
            near(state[int(slots[token])], now)
            written.add(int(slots[token]))
            token += 1
    kept = [slot for slot in range(len(state)) if slot not in written]
    assert torch.equal(state[kept], before[kept])
    assert bool(out[token:].isnan().all())


def test_the_last_token_wins_in_a_slot_and_padding_shares_slot_0() -> None:
    call, state = inputs(4), draw(5, HEADS, VALUE, KEY, seed=6)
    before = state.clone()
    VENDOR.npu_recurrent_gated_delta_rule(
        state=state, actual_seq_lengths=ints(2, 1, 1), ssm_state_indices=ints(3, 3, 0, 0), **call
    )
    now = before[3].double()
    for token in (0, 1):
        _, now = matrix_form(call, token, now)
    near(state[3], now)
    assert torch.equal(state[[1, 2, 4]], before[[1, 2, 4]])


def test_garbage_stays_in_the_request_that_starts_from_it() -> None:
    call, state = inputs(3), draw(4, HEADS, VALUE, KEY, seed=6)
    state[2] = torch.nan
    out = VENDOR.npu_recurrent_gated_delta_rule(
        state=state, actual_seq_lengths=ints(1, 1, 1), ssm_state_indices=ints(1, 2, 3), **call
    )
    assert out.isnan().flatten(1).any(1).tolist() == [False, True, False]


def step(**changes: object) -> Arguments:
    lengths = {"actual_seq_lengths": ints(2, 3), "ssm_state_indices": ints(4, 1, 2, 6, 3)}
    accepted = {"num_accepted_tokens": ints(2, 1)}
    state = {"state": draw(7, HEADS, VALUE, KEY, seed=6)}
    return inputs(5) | lengths | accepted | state | changes


RULES = [
    Broken("dtype of query", {"query": unit(5, KEY_HEADS, KEY, seed=1).half()}),
    Broken("dtype of key", {"key": unit(5, KEY_HEADS, KEY, seed=1).float()}),
    Broken("dtype of value", {"value": draw(5, HEADS, VALUE, dtype=F32)}),
    Broken("dimensions of query", {"query": unit(1, 5, KEY_HEADS, KEY, seed=1)}),
    Broken("dimensions of value", {"value": draw(5, HEADS * VALUE)}),
    Broken("shape of key", {"key": unit(5, 1, KEY, seed=1)}),
    Broken("tokens of query", {"value": draw(4, HEADS, VALUE)}),
    Broken("heads", {"query": unit(5, 3, KEY, seed=1), "key": unit(5, 3, KEY, seed=1)}),
    Broken("beta", {"beta": None}),
    Broken("dtype of beta", {"beta": torch.rand(5, HEADS)}),
    Broken("shape of beta", {"beta": torch.rand(5, 1).to(BF)}),
    Broken("dtype of g", {"g": -torch.rand(5, HEADS).to(BF)}),
    Broken("shape of g", {"g": -torch.rand(5, 1)}),
    Broken("length of query", lambda good: {"query": good["query"] * 2}, SilentError),
    Broken("length of key", lambda good: {"key": good["key"] * 2}, SilentError),
    Broken("range of beta", lambda good: {"beta": good["beta"] + 1}, SilentError),
    Broken("range of beta", lambda good: {"beta": -good["beta"]}, SilentError, label="negative"),
    Broken("range of g", lambda good: {"g": -good["g"]}, SilentError),
    Broken("actual_seq_lengths", {"actual_seq_lengths": None}),
    Broken("dtype of actual_seq_lengths", {"actual_seq_lengths": ints(2, 3).long()}),
    Broken("sum of actual_seq_lengths", {"actual_seq_lengths": ints(2, 4)}, SilentError),
    Broken("actual_seq_lengths", {"actual_seq_lengths": ints(0, 3)}, SilentError, label="0"),
]


@broken_cases(
    *RULES,
    Broken("gk", {"gk": torch.zeros(5, HEADS, KEY)}, NotEmulatedError),
    Broken("ssm_state_indices", {"ssm_state_indices": None}),
    Broken("scale", {"scale": None}),
    Broken("dimensions of actual_seq_lengths", {"actual_seq_lengths": ints(2, 3)[None]}),
    Broken("dtype of state", {"state": draw(7, HEADS, VALUE, KEY, dtype=F32)}),
    Broken("dimensions of state", {"state": draw(7, HEADS, VALUE * KEY)}),
    Broken("shape of state", {"state": draw(7, HEADS, KEY, VALUE)}),
    Broken("slots", {"state": draw(4, HEADS, VALUE, KEY)}),
    Broken("state contiguous", {"state": draw(7, HEADS, KEY, VALUE).mT}, SilentError),
    Broken("dtype of ssm_state_indices", {"ssm_state_indices": ints(4, 1, 2, 6, 3).long()}),
    Broken("shape of ssm_state_indices", {"ssm_state_indices": ints(4, 1, 2, 6)}),
    Broken("range of ssm_state_indices", {"ssm_state_indices": ints(4, 1, 2, 7, 3)}, SilentError),
    Broken(
        "range of ssm_state_indices",
        {"ssm_state_indices": ints(4, 1, 2, -1, 3)},
        SilentError,
        label="-1",
    ),
    Broken("shared slot", {"ssm_state_indices": ints(4, 1, 2, 4, 3)}, SilentError),
    Broken("dtype of num_accepted_tokens", {"num_accepted_tokens": ints(2, 1).long()}),
    Broken("shape of num_accepted_tokens", {"num_accepted_tokens": ints(2)}),
    Broken("num_accepted_tokens", {"num_accepted_tokens": ints(3, 1)}, SilentError),
    Broken("num_accepted_tokens", {"num_accepted_tokens": ints(2, 0)}, SilentError, label="0"),
)
def test_recurrent_rule_contract(case: Broken) -> None:
    case.check(VENDOR.npu_recurrent_gated_delta_rule, step())


def test_at_most_eight_tokens_in_a_step() -> None:
    good = step(state=draw(12, HEADS, VALUE, KEY)) | inputs(9)
    good |= {"ssm_state_indices": ints(*range(1, 10)), "num_accepted_tokens": None}
    VENDOR.npu_recurrent_gated_delta_rule(**good | {"actual_seq_lengths": ints(8, 1)})
    with pytest.raises(SilentError) as caught:
        VENDOR.npu_recurrent_gated_delta_rule(**good | {"actual_seq_lengths": ints(9)})
    assert caught.value.rule == "actual_seq_lengths"


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("lengths", [[7], [70, 1, 3], [1]], ids=str)
def test_chunk_rule(lengths: list[int], gated: bool) -> None:
    call = inputs(sum(lengths) + 2, gated)
    state = draw(len(lengths), HEADS, VALUE, KEY, seed=6)
    out, final = VENDOR.npu_chunk_gated_delta_rule(
        initial_state=state, actual_seq_lengths=ints(*lengths), **call
    )
    token = 0
    for request, length in enumerate(lengths):
        now = state[request].double()
        for _ in range(length):
            wanted, now = matrix_form(call, token, now)
            near(out[token], wanted)
            token += 1
        near(final[request], now)
    assert bool(out[token:].isnan().all())


def test_the_rules_agree_and_scale_defaults_to_1() -> None:
    call, start = inputs(6), draw(2, HEADS, VALUE, KEY, seed=6)
    lengths = ints(2, 4)
    out, final = VENDOR.npu_chunk_gated_delta_rule(
        initial_state=start, actual_seq_lengths=lengths, **call | {"scale": None}
    )
    state = torch.zeros(8, HEADS, VALUE, KEY, dtype=BF)
    state[1], state[3] = start
    other = VENDOR.npu_recurrent_gated_delta_rule(
        state=state,
        actual_seq_lengths=lengths,
        ssm_state_indices=ints(1, 2, 3, 4, 5, 6),
        **call | {"scale": 1.0},
    )
    assert torch.equal(out, other)
    assert torch.equal(final, state[[2, 6]])


def prompt(**changes: object) -> Arguments:
    start = {"initial_state": draw(2, HEADS, VALUE, KEY), "actual_seq_lengths": ints(2, 3)}
    return inputs(5) | start | changes


EMPTY = {
    "query": draw(0, KEY_HEADS, KEY),
    "key": draw(0, KEY_HEADS, KEY),
    "value": draw(0, HEADS, VALUE),
    "beta": draw(0, HEADS),
    "g": draw(0, HEADS, dtype=F32),
}


@broken_cases(
    *RULES,
    Broken("initial_state", {"initial_state": None}),
    Broken("dtype of initial_state", {"initial_state": draw(2, HEADS, VALUE, KEY, dtype=F32)}),
    Broken("shape of initial_state", {"initial_state": draw(2, HEADS, KEY, VALUE)}),
    Broken("shape of actual_seq_lengths", {"actual_seq_lengths": ints(5)}),
    Broken("value not empty", EMPTY),
)
def test_chunk_rule_contract(case: Broken) -> None:
    case.check(VENDOR.npu_chunk_gated_delta_rule, prompt())


@pytest.mark.parametrize("rule", ["npu_recurrent_gated_delta_rule", "npu_chunk_gated_delta_rule"])
def test_sizes_are_limited(rule: str) -> None:
    many = {
        "query": torch.zeros(1, 300, 2, dtype=BF),
        "key": torch.zeros(1, 300, 2, dtype=BF),
        "value": torch.zeros(1, 300, 2, dtype=BF),
        "beta": torch.zeros(1, 300, dtype=BF),
        "actual_seq_lengths": ints(1),
        "scale": 1.0,
    }
    state = torch.zeros(1, 300, 2, 2, dtype=BF)
    if rule == "npu_chunk_gated_delta_rule":
        many |= {"initial_state": state}
    else:
        many |= {"state": state, "ssm_state_indices": ints(0)}
    getattr(VENDOR, rule)(**many)
    with pytest.raises(RefusedError, match="heads"):
        getattr(EmulatedVendor(STRICT), rule)(**many)


@broken_cases(
    Broken("head sizes", {}, profile=STRICT),
)
def test_prompts_have_heads_of_one_size(case: Broken) -> None:
    vendor: Any = EmulatedVendor(STRICT)
    with pytest.raises(RefusedError) as caught:
        vendor.npu_chunk_gated_delta_rule(**prompt())
    assert caught.value.rule == case.rule
