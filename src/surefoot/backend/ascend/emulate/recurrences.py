"""The gated delta rule, token by token and for whole prompts.

With S [dv, dk] the state before a token: S' = exp(g) S; S = S' + beta (v - S' k) k^T; the token's
output is S q * scale. Queries and keys come with unit length, beta in (0, 1). Between the tokens
of a call the state is not rounded.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from surefoot.backend.ascend.emulate.arithmetic import poison, rounded, wide
from surefoot.backend.ascend.emulate.contract import Contract, Operators, operator

BF16 = torch.bfloat16
LONGEST_STEP = 8
MOST_HEADS, LONGEST_HEAD = 256, 512
MOST_PROMPT_HEADS, PROMPT_HEAD = 64, 128
# What a unit vector may measure after rounding to bfloat16.
MOST_LENGTH = 1.01


class Recurrences(Operators):
    """`npu_recurrent_gated_delta_rule`, `npu_chunk_gated_delta_rule`."""

    @operator
    def npu_recurrent_gated_delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: Tensor,
        *,
        beta: Tensor | None = None,
        scale: float | None = None,
        actual_seq_lengths: Tensor | None = None,
        ssm_state_indices: Tensor | None = None,
        num_accepted_tokens: Tensor | None = None,
        g: Tensor | None = None,
        gk: Tensor | None = None,
    ) -> Tensor:
        """A few tokens of each request; the state after each token goes to a slot of its own.

        Rules of the operator's page and its tiling. A request starts from the slot of its token
        number `num_accepted_tokens` - 1, which the step before has written, and without accepted
        counts from that of its first token: so the kernel reads it; the page tells the index only.
        Tokens past the sum of the lengths are not computed. Slots may be shared within a request,
        where the last token wins; slot 0 may be shared by padding.

        Args:
            query: [T, nk, dk] bfloat16.
            key: the same.
            value: [T, nv, dv] bfloat16; nv a multiple of nk.
            state: [slots, nv, dv, dk] bfloat16, contiguous, at least T slots; written in place.
            beta: [T, nv] bfloat16; must be given.
            scale: on the output; must be given.
            actual_seq_lengths: [B] int32, each 1 to 8; must be given.
            ssm_state_indices: [T] int32 slots; must be given.
            num_accepted_tokens: [B] int32, each 1 to the request's length; None for 1.
            g: [T, nv] float32, at most 0; None for 0.
            gk: not emulated.

        Returns:
            [T, nv, dv] bfloat16.
        """
        contract = Contract(
            "npu_recurrent_gated_delta_rule", "aclnnRecurrentGatedDeltaRule", self.profile
        )
        contract.unused(gk=gk)
        beta, lengths, slots = (
            _given(contract, name, tensor)
            for name, tensor in (
                ("beta", beta),
                ("actual_seq_lengths", actual_seq_lengths),
                ("ssm_state_indices", ssm_state_indices),
            )
        )
        contract.require(scale is not None, "scale", "a number", scale)
        inputs = Inputs(query, key, value, beta, g, 1.0 if scale is None else scale)
        _check_inputs(contract, inputs)
        _check_step_sizes(contract, inputs, state)
        _check_state(contract, "state", state, inputs)
        straight = state.is_contiguous()
        contract.trust(straight, "state contiguous", "memory without gaps", state.stride())
        starts = _starts(contract, lengths, len(query), LONGEST_STEP)
        contract.dtype("ssm_state_indices", slots, torch.int32)
        contract.shape("ssm_state_indices", slots, len(query))
        entries = _entries(contract, num_accepted_tokens, starts)
        rows = _check_slots(contract, slots, starts, entries, len(state))
        out = poison(value.shape, BF16)
        before = [wide(state[row[entry]]) for row, entry in zip(rows, entries, strict=True)]
        for start, row, now in zip(starts, rows, before, strict=False):
            for token, slot in enumerate(row, start):
                now, out[token] = inputs.step(now, token)
                state[slot] = rounded(now, BF16)
        return out

    @operator
    def npu_chunk_gated_delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        beta: Tensor | None = None,
        initial_state: Tensor | None = None,
        actual_seq_lengths: Tensor | None = None,
        scale: float | None = None,
        g: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """All tokens of each request, and the states they lead to.

        Rules of the operator's page and its tiling, which needs what the page calls optional.
        Tokens past the sum of the lengths are not computed.

        Args:
            query: [T, nk, dk] bfloat16.
            key: the same.
            value: [T, nv, dv] bfloat16, not empty; nv a multiple of nk.
            beta: [T, nv] bfloat16; must be given.
            initial_state: [B, nv, dv, dk] bfloat16; must be given.
            actual_seq_lengths: [B] int32, lengths, not their running sums; must be given.
            scale: on the output; None for 1.
            g: [T, nv] float32, at most 0; None for 0.

        Returns:
            [T, nv, dv] bfloat16; final states [B, nv, dv, dk] bfloat16.
        """
        contract = Contract("npu_chunk_gated_delta_rule", "aclnnChunkGatedDeltaRule", self.profile)
        beta, state, lengths = (
            _given(contract, name, tensor)
            for name, tensor in (
                ("beta", beta),
                ("initial_state", initial_state),
                ("actual_seq_lengths", actual_seq_lengths),
            )
        )
        inputs = Inputs(query, key, value, beta, g, 1.0 if scale is None else scale)
        _check_inputs(contract, inputs)
        contract.require(value.numel() > 0, "value not empty", "elements", value)
        heads = max(query.shape[1], value.shape[1])
        most = f"at most {MOST_PROMPT_HEADS}"
        contract.require_size(heads <= MOST_PROMPT_HEADS, "heads", most, heads)
        sizes = (query.shape[2], value.shape[2])
        fixed = sizes == (PROMPT_HEAD, PROMPT_HEAD)
        contract.require_size(fixed, "head sizes", f"{PROMPT_HEAD} both", sizes)
        _check_state(contract, "initial_state", state, inputs)
        contract.shape("actual_seq_lengths", lengths, len(state))
        starts = _starts(contract, lengths, len(query), None)
        found, final = inputs.together(wide(state), starts)
        out = torch.cat((found, poison((len(value) - len(found), *value.shape[1:]), BF16)))
        return out, rounded(final, BF16)


@dataclass(frozen=True)
class Inputs:
    """What the rule reads of all tokens; shapes as above."""

    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor
    decay: Tensor | None
    scale: float

    def together(self, states: Tensor, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Whole requests, token by token and side by side.

        Args:
            states: [B, nv, dv, dk] float64.
            starts: where each request's tokens begin, and where the last one's end.

        Returns:
            Outputs of all their tokens as bfloat16, and the states after them.
        """
        share = self.value.shape[1] // self.query.shape[1]
        q, k = (wide(x).repeat_interleave(share, 1)[..., None] for x in (self.query, self.key))
        v, beta = wide(self.value)[..., None], wide(self.beta)[..., None, None]
        fade = (
            torch.ones_like(beta) if self.decay is None else wide(self.decay).exp()[..., None, None]
        )
        out, states = torch.empty_like(v[: starts[-1]]), states.clone()
        lengths = [stop - start for start, stop in itertools.pairwise(starts)]
        for place in range(max(lengths, default=0)):
            some = [request for request, length in enumerate(lengths) if length > place]
            at = [starts[request] + place for request in some]
            state = states if len(some) == len(states) else states[some]
            state *= fade[at]
            error = beta[at] * (v[at] - state @ k[at])
            state.flatten(0, 1).baddbmm_(error.flatten(0, 1), k[at].mT.flatten(0, 1))
            out[at] = state @ q[at] * self.scale
            if state is not states:
                states[some] = state
        return rounded(out[..., 0], BF16), states

    def step(self, state: Tensor, token: int) -> tuple[Tensor, Tensor]:
        """The state after a token, and the token's output.

        Args:
            state: [nv, dv, dk] float64.
            token: which.
        """
        share = self.value.shape[1] // self.query.shape[1]
        q, k = (
            wide(x[token]).repeat_interleave(share, 0)[..., None] for x in (self.query, self.key)
        )
        if self.decay is not None:
            state = state * wide(self.decay[token]).exp()[:, None, None]
        error = wide(self.value[token])[..., None] - state @ k
        state = state + wide(self.beta[token])[:, None, None] * error @ k.mT
        return state, rounded((state @ q)[..., 0] * self.scale, BF16)


def _given(contract: Contract, name: str, tensor: Tensor | None) -> Tensor:
    contract.require(tensor is not None, name, "a tensor", tensor)
    assert tensor is not None
    return tensor


def _check_inputs(contract: Contract, inputs: Inputs) -> None:
    tensors = {"query": inputs.query, "key": inputs.key, "value": inputs.value}
    for name, tensor in tensors.items():
        contract.dtype(name, tensor, BF16)
        contract.dims(name, tensor, 3)
    contract.shape("key", inputs.key, *inputs.query.shape)
    tokens, heads, _ = inputs.value.shape
    contract.require(len(inputs.query) == tokens, "tokens of query", f"{tokens}", inputs.query)
    divides = inputs.query.shape[1] > 0 and heads % inputs.query.shape[1] == 0
    contract.require(divides, "heads", "nv a multiple of nk", [heads, inputs.query.shape[1]])
    contract.dtype("beta", inputs.beta, BF16)
    contract.shape("beta", inputs.beta, tokens, heads)
    if inputs.decay is not None:
        contract.dtype("g", inputs.decay, torch.float32)
        contract.shape("g", inputs.decay, tokens, heads)
    _check_ranges(contract, inputs)


def _check_ranges(contract: Contract, inputs: Inputs) -> None:
    """Values that tell that a step before was left out; NaN passes."""
    for name, tensor in (("query", inputs.query), ("key", inputs.key)):
        longest = bool((wide(tensor).norm(dim=-1) > MOST_LENGTH).any())
        contract.trust(not longest, f"length of {name}", "unit vectors", tensor)
    beta = wide(inputs.beta)
    outside = bool(((beta < 0) | (beta > 1)).any())
    contract.trust(not outside, "range of beta", "numbers from 0 to 1", inputs.beta)
    if inputs.decay is not None:
        grows = bool((inputs.decay > 0).any())
        contract.trust(not grows, "range of g", "numbers up to 0", inputs.decay)


def _check_step_sizes(contract: Contract, inputs: Inputs, state: Tensor) -> None:
    heads = max(inputs.query.shape[1], inputs.value.shape[1])
    contract.require_size(heads <= MOST_HEADS, "heads", f"at most {MOST_HEADS}", heads)
    size = max(inputs.query.shape[2], inputs.value.shape[2])
    contract.require_size(size <= LONGEST_HEAD, "head sizes", f"at most {LONGEST_HEAD}", size)
    tokens = len(inputs.query)
    contract.require(len(state) >= tokens, "slots", f"at least {tokens}, one a token", state)


def _check_state(contract: Contract, name: str, state: Tensor, inputs: Inputs) -> None:
    contract.dtype(name, state, BF16)
    contract.dims(name, state, 4)
    contract.shape(name, state, len(state), *inputs.value.shape[1:], inputs.key.shape[2])


def _starts(contract: Contract, lengths: Tensor, tokens: int, longest: int | None) -> list[int]:
    """Where each request starts, and where the last one stops."""
    name = "actual_seq_lengths"
    contract.dtype(name, lengths, torch.int32)
    contract.dims(name, lengths, 1)
    counts = lengths.tolist()
    fits = all(count >= 1 and (longest is None or count <= longest) for count in counts)
    wanted = f"at least 1{'' if longest is None else f', at most {longest}'}"
    contract.trust(fits, name, wanted, counts)
    contract.trust(sum(counts) <= tokens, f"sum of {name}", f"at most {tokens} tokens", counts)
    return [0, *lengths.cumsum(0).tolist()]


def _entries(contract: Contract, accepted: Tensor | None, starts: list[int]) -> list[int]:
    """Which token of each request holds the state it starts from."""
    if accepted is None:
        return [0] * (len(starts) - 1)
    contract.dtype("num_accepted_tokens", accepted, torch.int32)
    contract.shape("num_accepted_tokens", accepted, len(starts) - 1)
    counts = accepted.tolist()
    lengths = [stop - start for start, stop in pairwise(starts)]
    fits = all(1 <= n <= length for n, length in zip(counts, lengths, strict=True))
    contract.trust(fits, "num_accepted_tokens", f"1 to the lengths {lengths}", counts)
    return [count - 1 for count in counts]


def _check_slots(
    contract: Contract, slots: Tensor, starts: list[int], entries: list[int], count: int
) -> list[list[int]]:
    """The slots of each request's tokens; no request touches those of another."""
    rows = [slots[a:b].tolist() for a, b in pairwise(starts)]
    outside = [slot for row in rows for slot in row if not 0 <= slot < count]
    contract.trust(not outside, "range of ssm_state_indices", f"slots below {count}", outside)
    owners: dict[int, int] = {}
    for request, row in enumerate(rows):
        for slot in set(row) - {0}:
            owner = owners.setdefault(slot, request)
            contract.trust(
                owner == request,
                "shared slot",
                "slots other than 0 in one request only",
                f"slot {slot} in requests {owner} and {request}",
            )
    return rows
