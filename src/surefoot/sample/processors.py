"""The one chain from the model's logits to the tokens that may be chosen.

Every row, whether it decodes, verifies or ends a prompt, goes through the same steps:

    1  repetition, then frequency, then presence penalty
    2  logit_bias
    3  masks: allowed tokens, bad words, end tokens before min_tokens
    4  temperature (greedy rows stop here and take the best token)
    5  top_k
    6  top_p, on the probabilities of what top_k kept
    7  min_p, against the most likely token

`process` does steps 1 to 3, `temper` step 4, `truncate` steps 5 to 7. Each row is computed from
its own logits and its own history alone, so its result cannot depend on its neighbours.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.backend.order import Blocks
from surefoot.errors import SettingError
from surefoot.params import SamplingParams


class HistoryCounts:
    """Which tokens a request holds and how often they were generated, kept up to date.

    Attributes:
        length: how many leading tokens of the request are counted.
        prompt_length: how many of the request's tokens are its prompt.
    """

    __slots__ = ("_ids", "_output", "_places", "_vocab", "length", "prompt_length")

    def __init__(self, vocab: int, prompt_length: int, device: torch.device | str = "cpu") -> None:
        """Start with nothing counted, for token ids below `vocab` and logits on `device`."""
        self.length = 0
        self.prompt_length = prompt_length
        self._vocab = vocab
        self._places: dict[int, int] = {}
        self._ids = torch.zeros(0, dtype=torch.int64, device=device)
        self._output = torch.zeros(0, dtype=torch.float32, device=device)

    @property
    def ids(self) -> Tensor:
        """[n] int64, the distinct tokens in prompt and output."""
        return self._ids[: len(self._places)]

    @property
    def output(self) -> Tensor:
        """[n] float32, how often each of `ids` was generated; 0 if only the prompt has it."""
        return self._output[: len(self._places)]

    def advance(self, tokens: Sequence[int]) -> None:
        """Count what is new in `tokens`: all of the request's emitted tokens, no drafts.

        Cost grows with what is new, not with the length.
        """
        assert len(tokens) >= self.length, "counts hold tokens that the history does not have"
        tail = tokens[self.length :]
        self._note(tail)
        generated = Counter(tail[max(0, self.prompt_length - self.length) :])
        at = self._tensor([self._places[token] for token in generated], self._ids)
        self._output.index_add_(0, at, self._tensor(list(generated.values()), self._output))
        self.length = len(tokens)

    def after(self, history: Sequence[int]) -> HistoryCounts:
        """Counts for `history`: the counted tokens, and the drafts that may follow them.

        These counts stay as they are, so nothing is kept of the drafts.
        """
        if len(history) == self.length:
            return self
        copy = HistoryCounts(self._vocab, self.prompt_length, self._ids.device)
        copy.length = self.length
        copy._places = dict(self._places)
        copy._ids, copy._output = self._ids.clone(), self._output.clone()
        copy.advance(history)
        return copy

    def _note(self, tokens: Sequence[int]) -> None:
        """Give each token that was not seen before a place of its own."""
        known = len(self._places)
        fresh = [token for token in dict.fromkeys(tokens) if token not in self._places]
        # An accelerator would not report an index out of range until much later.
        assert not fresh or 0 <= min(fresh) <= max(fresh) < self._vocab, "no such token id"
        self._places.update(zip(fresh, range(known, known + len(fresh)), strict=True))
        lacking = len(self._places) - len(self._ids)
        if lacking > 0:
            room = lacking + len(self._ids)
            self._ids = torch.cat([self._ids, self._ids.new_zeros(room)])
            self._output = torch.cat([self._output, self._output.new_zeros(room)])
        self._ids[known : len(self._places)] = self._tensor(fresh, self._ids)

    @staticmethod
    def _tensor(values: list[int], like: Tensor) -> Tensor:
        return torch.tensor(values, dtype=like.dtype, device=like.device)


@dataclass(frozen=True, slots=True)
class RowContext:
    """All that the choice of one token depends on, besides the logits.

    Attributes:
        params: what the user asked for.
        history: every token before `position`: prompt, output, and the drafts before this row.
            Rows for which `reads_history` is false may pass an empty one.
        prompt_length: how many of them are the prompt.
        end_tokens: tokens that end the text.
        bad_sequences: token sequences that must not be generated; see `process`.
        seed: 64-bit key of the request's noise.
        position: index of the token to be chosen.
        counts: counts of the request's emitted tokens, so that penalties need not read the whole
            history; it may lag behind, since the rest is taken from `history`.
    """

    params: SamplingParams
    history: Sequence[int]
    prompt_length: int
    end_tokens: frozenset[int]
    bad_sequences: tuple[tuple[int, ...], ...]
    seed: int
    position: int
    counts: HistoryCounts | None = None

    @property
    def generated(self) -> int:
        """How many tokens of the history were generated."""
        return self.position - self.prompt_length

    @property
    def penalised(self) -> bool:
        """Whether tokens that occurred before are scored lower."""
        params = self.params
        return (
            params.repetition_penalty != 1
            or params.frequency_penalty != 0
            or params.presence_penalty != 0
        )

    @property
    def reads_history(self) -> bool:
        """Whether the choice depends on the tokens of the history, not just on their number."""
        return self.penalised or bool(self.bad_sequences)

    @property
    def too_short_to_end(self) -> bool:
        """Whether end tokens are masked."""
        return self.generated < self.params.min_tokens and bool(self.end_tokens)

    @property
    def untouched(self) -> bool:
        """Whether `process` returns the logits as they are."""
        params = self.params
        return not (
            self.reads_history
            or params.logit_bias
            or params.allowed_token_ids is not None
            or self.too_short_to_end
        )


def check_vocabulary(params: SamplingParams, vocab: int) -> None:
    """Refuse token ids that the model does not have; done once, when a request is admitted.

    Raises:
        SettingError: names logit_bias, allowed_token_ids or stop_token_ids.
    """
    named: dict[str, Collection[int]] = {
        "logit_bias": params.logit_bias.keys(),
        "allowed_token_ids": params.allowed_token_ids or (),
        "stop_token_ids": params.stop_token_ids,
    }
    for name, ids in named.items():
        for token in ids:
            if token >= vocab:
                raise SettingError(
                    name, f"token id {token} is not in the vocabulary; give ids below {vocab}"
                )


def process(logits: Tensor, row: RowContext) -> Tensor:
    """Steps 1 to 3 for one row.

    Presence and frequency penalty count generated tokens only; the repetition penalty counts the
    prompt too. A bad sequence is matched against generated tokens only: its last token is masked
    when the tokens just generated are its others.

    If the masks leave no token, min_tokens gives way, then bad words; allowed tokens never do.

    Args:
        logits: [V] float32, not written to.
        row: the row's own context.

    Returns:
        [V] float32, -inf at masked tokens; `logits` itself if there is nothing to do.
    """
    if row.untouched:
        return logits
    # A history one token short is the classic fault of speculation.
    assert not row.reads_history or len(row.history) == row.position, (
        f"position {row.position} needs as many tokens of history, not {len(row.history)}"
    )
    processed = logits.clone()
    if row.penalised:
        _penalise(processed, row)
    if row.params.logit_bias:
        _add_bias(processed, row.params.logit_bias)
    if row.params.allowed_token_ids is not None:
        processed = _only(processed, row.params.allowed_token_ids)
    _ban(processed, row)
    return processed


def truncate(scores: Blocks, params: SamplingParams) -> Tensor | None:
    """Steps 5 to 7: which tokens stay.

    Ties at the edge of top_k and top_p are broken by the lower id. top_p keeps the smallest
    prefix of the order whose probability reaches it; the best token always stays.

    Args:
        scores: tempered, best score 0.
        params: top_k, top_p and min_p are read.

    Returns:
        [n] int64 token ids in no particular order, or None if all stay.
    """
    kept = None
    if 0 < params.top_k < scores.size:
        kept = scores.best(params.top_k)
    if params.top_p < 1:
        kept = _nucleus(scores, kept, params.top_p)
    if params.min_p > 0:
        bound = math.log(params.min_p)
        kept = scores.at_least(bound) if kept is None else kept[scores.take(kept) >= bound]
    return kept


def _penalise(logits: Tensor, row: RowContext) -> None:
    counts = row.counts or HistoryCounts(len(logits), row.prompt_length, logits.device)
    counts = counts.after(row.history)
    ids, output, params = counts.ids, counts.output, row.params
    some = logits[ids]
    if params.repetition_penalty != 1:
        factor = params.repetition_penalty
        some = torch.where(some > 0, some / factor, some * factor)
    some = some - output * params.frequency_penalty
    some = some - output.clamp(max=1) * params.presence_penalty
    logits.index_copy_(0, ids, some)


def _add_bias(logits: Tensor, bias: Mapping[int, float]) -> None:
    ids = _ids_like(logits, bias)
    amounts = torch.tensor(list(bias.values()), dtype=logits.dtype, device=logits.device)
    logits.index_add_(0, ids, amounts)


def _only(logits: Tensor, allowed: Collection[int]) -> Tensor:
    ids = _ids_like(logits, allowed)
    return torch.full_like(logits, -torch.inf).index_copy_(0, ids, logits[ids])


def _ban(logits: Tensor, row: RowContext) -> None:
    """Mask the largest set of banned tokens that leaves one."""
    for banned in _bans(row):
        ids = _ids_like(logits, banned)
        before = logits[ids]
        logits.index_fill_(0, ids, -torch.inf)
        if logits.amax() > -torch.inf:
            return
        logits.index_copy_(0, ids, before)


def _ids_like(logits: Tensor, ids: Collection[int]) -> Tensor:
    return torch.tensor(list(ids), dtype=torch.int64, device=logits.device)


def _bans(row: RowContext) -> Iterator[set[int]]:
    """Sets of banned tokens, largest first; none at all if nothing is banned."""
    words = {
        sequence[-1] for sequence in row.bad_sequences if sequence and _ends_with(row, sequence)
    }
    if row.too_short_to_end:
        yield words | row.end_tokens
    if words:
        yield words


def _ends_with(row: RowContext, sequence: tuple[int, ...]) -> bool:
    """Whether all of a bad sequence but its last token has just been generated."""
    wanted = len(sequence) - 1
    if wanted > row.generated:
        return False
    return tuple(row.history[row.position - wanted :]) == sequence[:-1]


def _nucleus(scores: Blocks, kept: Tensor | None, top_p: float) -> Tensor:
    """The shortest prefix of the order with probability top_p; `kept` is already in order."""
    if kept is not None:
        reached = _reached(scores, kept)
        return _prefix(kept, reached, top_p * float(reached[-1]))
    total = float(scores.values.exp().sum(1, dtype=torch.float64).sum())
    wanted = top_p * total
    for bound in (scores.peak(64), scores.peak(512)):
        kept = scores.ranked(bound)
        reached = _reached(scores, kept)
        if float(reached[-1]) >= wanted:
            return _prefix(kept, reached, wanted)
    # Tokens below this probability hold less than 1 - top_p together: none of them is needed.
    kept = scores.ranked(math.log(total * (1 - top_p) / (2 * scores.size)))
    return _prefix(kept, _reached(scores, kept), wanted)


def _reached(scores: Blocks, kept: Tensor) -> Tensor:
    """[n] float64, the weight of each prefix."""
    return scores.take(kept).exp().to(torch.float64).cumsum(0)


def _prefix(kept: Tensor, reached: Tensor, wanted: float) -> Tensor:
    return kept[: int((reached < wanted).sum()) + 1]
