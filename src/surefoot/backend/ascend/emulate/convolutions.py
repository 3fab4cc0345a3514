"""A short causal convolution along each request, with the inputs before it kept in a cache."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from surefoot.backend.ascend.emulate.arithmetic import poison, rounded, wide
from surefoot.backend.ascend.emulate.contract import Contract, Operators, operator

PREFILL, DECODE = 0, 1
TAPS = 3
LONGEST_STEP = 6
MOST_REQUESTS, MOST_TOKENS = 256, 65536
LEAST_SIZE, MOST_SIZE, SIZE_UNIT = 128, 16384, 128


class Convolutions(Operators):
    """`npu_fused_causal_conv1d`."""

    @operator
    def npu_fused_causal_conv1d(
        self,
        x: Tensor,
        weight: Tensor,
        conv_states: Tensor,
        *,
        query_start_loc: Tensor | None = None,
        cache_indices: Tensor | None = None,
        initial_state_mode: Tensor | None = None,
        bias: Tensor | None = None,
        num_accepted_tokens: Tensor | None = None,
        activation: str | None = "None",
        pad_slot_id: int | None = -1,
        run_mode: int | None = 0,
        residual_connection: int | None = 0,
        max_query_len: int | None = -1,
        num_computed_tokens: Tensor | None = None,
        block_idx_first_scheduled_token: Tensor | None = None,
        block_idx_last_scheduled_token: Tensor | None = None,
        initial_state_idx: Tensor | None = None,
        block_size: int | None = 128,
        conv_mode: str | None = "default",
    ) -> Tensor:
        """y_i = sum over taps k of weight_k * x_(i - K + 1 + k), for each request apart.

        Rules of the operator's page and its tiling; where a slot's rows lie is told by the page of
        the newer operator that works in place. A slot of C rows holds the latest inputs at its
        end. A request with n accepted tokens reads rows n - 1 to n + K - 3, which are the last
        ones accepted if the step before had C - K + 2 tokens; without accepted counts it reads the
        last K - 1 rows. Then come its own inputs, and the last C of all that are kept.

        Args:
            x: [T, D], or [B, S, D] in decode; float16 or bfloat16, not empty.
            weight: [K, D], dtype of x, contiguous; K is 3, which a relaxed profile lifts.
            conv_states: [slots, C, D], dtype of x, at least B slots; written in place. C is K - 1
                in prefill, at least K + S - 2 in decode.
            query_start_loc: [B + 1] int32 running sums with a leading 0 up to T; needed by [T, D].
                Every request has a token, in decode at most six.
            cache_indices: [B] int32, slots; `pad_slot_id` for a request that is passed over, whose
                output is undefined. None for one slot after the other. Slot 0 may be shared.
            initial_state_mode: [B] int32, prefill only: 0 for zeros before the request, 1 for what
                its slot holds.
            bias: [D], dtype of x.
            num_accepted_tokens: [B] int32, 1 to the request's tokens; decode only.
            activation: "None", "silu" or "swish", which is silu.
            pad_slot_id: see `cache_indices`.
            run_mode: 0 for prefill, 1 for decode.
            residual_connection: 1 to add x.
            max_query_len: not looked at.
            num_computed_tokens: not emulated, like all that follow.
            block_idx_first_scheduled_token: see there.
            block_idx_last_scheduled_token: see there.
            initial_state_idx: see there.
            block_size: see there.
            conv_mode: "default".

        Returns:
            y like x.
        """
        contract = Contract("npu_fused_causal_conv1d", "aclnnFusedCausalConv1d", self.profile)
        contract.unused(
            num_computed_tokens=num_computed_tokens,
            block_idx_first_scheduled_token=block_idx_first_scheduled_token,
            block_idx_last_scheduled_token=block_idx_last_scheduled_token,
            initial_state_idx=initial_state_idx,
        )
        contract.emulated(conv_mode == "default", "conv_mode", "'default'", conv_mode)
        known = ("None", "silu", "swish")
        contract.require(activation in known, "activation", f"one of {known}", activation)
        modes = (PREFILL, DECODE)
        contract.require(run_mode in modes, "run_mode", "0 or 1", run_mode)
        adds = (0, 1)
        wanted = "0 or 1"
        contract.require(
            residual_connection in adds, "residual_connection", wanted, residual_connection
        )
        _check_tensors(contract, x, weight, conv_states, bias)
        call = _Call(contract, x, weight, conv_states, run_mode == DECODE)
        starts = call.starts(query_start_loc)
        slots = call.slots(cache_indices, pad_slot_id, len(starts) - 1)
        histories = call.histories(initial_state_mode, num_accepted_tokens, starts, slots)
        y = poison(x.shape, x.dtype).view(-1, x.shape[-1])
        inputs = x.reshape(-1, x.shape[-1])
        for request, (slot, history) in enumerate(zip(slots, histories, strict=True)):
            if history is None:
                continue
            own = inputs[starts[request] : starts[request + 1]]
            out = call.convolved(torch.cat([history, own])[-len(own) - len(weight) + 1 :], bias)
            out = torch.nn.functional.silu(out) if activation != "None" else out
            out = out + wide(own) if residual_connection else out
            y[starts[request] : starts[request + 1]] = rounded(out, x.dtype)
            kept = torch.cat([history, own])[-conv_states.shape[1] :]
            conv_states[slot, conv_states.shape[1] - len(kept) :] = kept
        return y.view(x.shape)


@dataclass(frozen=True)
class _Call:
    contract: Contract
    x: Tensor
    weight: Tensor
    states: Tensor
    decode: bool

    def starts(self, given: Tensor | None) -> list[int]:
        """Where each request's tokens start, and where the last one stops."""
        contract, x = self.contract, self.x
        if x.dim() == 3:
            contract.require(self.decode, "dimensions of x", "two in prefill", x)
            count, length, _ = x.shape
            starts = list(range(0, count * length + 1, length))
        else:
            contract.require(given is not None, "query_start_loc", "a tensor", given)
            assert given is not None
            contract.dtype("query_start_loc", given, torch.int32)
            contract.dims("query_start_loc", given, 1)
            contract.contiguous(query_start_loc=given)
            starts = given.tolist()
            closed = len(starts) > 1 and starts[0] == 0 and starts[-1] == len(x)
            wanted = f"running sums from 0 to {len(x)}"
            contract.trust(closed, "ends of query_start_loc", wanted, starts)
        self._check_lengths([b - a for a, b in pairwise(starts)])
        return starts

    def _check_lengths(self, lengths: list[int]) -> None:
        contract, taps, rows = self.contract, len(self.weight), self.states.shape[1]
        longest = LONGEST_STEP if self.decode else MOST_TOKENS
        fits = all(1 <= length <= longest for length in lengths)
        contract.trust(fits, "tokens of a request", f"1 to {longest}", lengths)
        count = len(lengths)
        most = f"at most {MOST_REQUESTS}"
        contract.require_size(count <= MOST_REQUESTS, "requests", most, count)
        enough = len(self.states) >= count
        contract.require(enough, "slots", f"at least {count}, one a request", self.states)
        if not self.decode:
            wanted = f"{taps - 1} rows in prefill"
            contract.require(rows == taps - 1, "rows of a slot", wanted, self.states)
            return
        least = taps - 2 + max(lengths)
        contract.require(rows >= least, "rows of a slot", f"at least {least}", self.states)

    def slots(self, given: Tensor | None, pad: int | None, requests: int) -> list[int | None]:
        """The slot of each request; None for those that are passed over."""
        if given is None:
            return list(range(requests))
        contract, count = self.contract, len(self.states)
        contract.dtype("cache_indices", given, torch.int32)
        contract.shape("cache_indices", given, requests)
        contract.contiguous(cache_indices=given)
        ids: list[int] = given.tolist()
        own = [slot for slot in ids if slot != pad]
        inside = all(0 <= slot < count for slot in own)
        contract.trust(inside, "range of cache_indices", f"slots below {count}", ids)
        lone = [slot for slot in own if slot != 0]
        once = len(lone) == len(set(lone))
        contract.trust(once, "repeats in cache_indices", "slots other than 0 once", ids)
        return [None if slot == pad else slot for slot in ids]

    def histories(
        self,
        initial: Tensor | None,
        accepted: Tensor | None,
        starts: list[int],
        slots: list[int | None],
    ) -> list[Tensor | None]:
        """What each request's slot held, with the rows that its first token meets at the end."""
        contract, before = self.contract, len(self.weight) - 1
        for name, given in (("initial_state_mode", initial), ("num_accepted_tokens", accepted)):
            if given is not None:
                contract.dtype(name, given, torch.int32)
                contract.shape(name, given, len(slots))
                contract.contiguous(**{name: given})
        stops = [self.states.shape[1]] * len(slots)
        fresh = [False] * len(slots)
        if self.decode:
            unread = initial is None
            contract.trust(unread, "initial_state_mode", "none in decode", initial)
            if accepted is not None:
                counts = accepted.tolist()
                lengths = [b - a for a, b in pairwise(starts)]
                fits = all(1 <= n <= most for n, most in zip(counts, lengths, strict=True))
                wanted = f"1 to the lengths {lengths}"
                contract.trust(fits, "num_accepted_tokens", wanted, counts)
                stops = [count - 1 + before for count in counts]
        else:
            contract.trust(accepted is None, "num_accepted_tokens", "none in prefill", accepted)
            contract.emulated(initial is not None, "initial_state_mode", "a tensor", initial)
            assert initial is not None
            flags = initial.tolist()
            known = all(flag in (0, 1) for flag in flags)
            contract.trust(known, "range of initial_state_mode", "0 or 1", flags)
            fresh = [flag == 0 for flag in flags]
        return [
            None if slot is None else self._history(slot, stop, new)
            for slot, stop, new in zip(slots, stops, fresh, strict=True)
        ]

    def _history(self, slot: int, stop: int, new: bool) -> Tensor:
        held = self.states[slot, :stop]
        return torch.zeros_like(held) if new else held.clone()

    def convolved(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """The sums over taps for all but the first K - 1 inputs, in float64."""
        windows = wide(inputs).unfold(0, len(self.weight), 1)
        out = (windows * wide(self.weight).t()).sum(-1)
        return out if bias is None else out + wide(bias)


def _check_tensors(
    contract: Contract, x: Tensor, weight: Tensor, states: Tensor, bias: Tensor | None
) -> None:
    contract.dtype("x", x, torch.float16, torch.bfloat16)
    contract.dims("x", x, 2, 3)
    size = x.shape[-1]
    contract.dims("weight", weight, 2)
    taps = len(weight)
    contract.shape("weight", weight, taps, size)
    contract.require_size(taps == TAPS, "taps", f"{TAPS}", taps)
    contract.require(taps >= 2, "taps", "at least 2", taps)
    contract.dims("conv_states", states, 3)
    contract.shape("conv_states", states, *states.shape[:2], size)
    if bias is not None:
        contract.dtype("bias", bias, x.dtype)
        contract.shape("bias", bias, size)
    for name, tensor in (("x", x), ("weight", weight), ("conv_states", states)):
        contract.dtype(name, tensor, x.dtype)
        contract.require(tensor.numel() > 0, f"{name} not empty", "elements", tensor)
    contract.contiguous(weight=weight, bias=bias)
    fits = LEAST_SIZE <= size <= MOST_SIZE and size % SIZE_UNIT == 0
    wanted = f"{LEAST_SIZE} to {MOST_SIZE} in steps of {SIZE_UNIT}"
    contract.require_size(fits, "size of x", wanted, size)
