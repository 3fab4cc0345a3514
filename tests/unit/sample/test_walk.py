"""Choose + walk while equal, on models small enough to enumerate."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from surefoot.params import SamplingParams
from surefoot.sample.processors import RowContext
from surefoot.sample.seeds import derive_seed
from tests.unit.sample.law import ALPHA, Chooser, choose, context, law, p_value

# From (tokens so far, how many are wanted, seed) to drafts.
Drafter = Callable[[list[int], int, int], list[int]]

PROMPT = [0, 2]
NEW = 4
SEEDS = 6
SETTINGS = {
    "plain": SamplingParams(),
    "cut": SamplingParams(temperature=1.4, top_k=3, top_p=0.9, min_p=0.1),
    "penalties": SamplingParams(
        presence_penalty=0.7, frequency_penalty=0.9, repetition_penalty=1.4
    ),
    "masks": SamplingParams(min_tokens=2, logit_bias={2: 1.0}),
    "greedy": SamplingParams(temperature=0, frequency_penalty=0.9),
}


class Model:
    """Logits are a table over the last two tokens."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        generator = torch.Generator().manual_seed(vocab)
        self.table = 1.5 * torch.randn(vocab, vocab, vocab, generator=generator)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        return self.table[tokens[-2], tokens[-1]]

    def row(self, params: SamplingParams, tokens: Sequence[int], seed: int) -> RowContext:
        ends, bad = frozenset({1}), ((1, 2), (0, 0, 1))
        return context(params, tuple(tokens), prompt=len(PROMPT), ends=ends, bad=bad, seed=seed)


def plain(model: Model, params: SamplingParams, seed: int, chooser: Chooser = choose) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(NEW):
        tokens += chooser(model.logits(tokens)[None], [model.row(params, tokens, seed)])
    return tokens


def speculative(
    model: Model,
    params: SamplingParams,
    seeds: Sequence[int],
    drafter: Drafter,
    depth: int,
    chooser: Chooser = choose,
    new: int = NEW,
) -> list[list[int]]:
    """Requests that differ in their seeds, verified together, each walking its own draft."""
    length = len(PROMPT) + new
    requests = {seed: list(PROMPT) for seed in seeds}
    while running := [seed for seed in seeds if len(requests[seed]) < length]:
        drafts = {seed: drafter(requests[seed], depth, seed) for seed in running}
        nodes = [
            (seed, [*requests[seed], *drafts[seed][:place]])
            for seed in running
            for place in range(len(drafts[seed]) + 1)
        ]
        logits = torch.stack([model.logits(node) for _, node in nodes])
        chosen = iter(chooser(logits, [model.row(params, node, seed) for seed, node in nodes]))
        for seed in running:
            run = [next(chosen) for _ in range(len(drafts[seed]) + 1)]
            requests[seed] += walk(drafts[seed], run)
    return [requests[seed][:length] for seed in seeds]


def walk(drafts: list[int], chosen: list[int]) -> list[int]:
    """Go on while the draft equals the chosen tokens; the first that differs is replaced."""
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == chosen[accepted]:
        accepted += 1
    return chosen[: accepted + 1]


def drafters(model: Model, truth: list[list[int]]) -> dict[str, Drafter]:
    def shifted(tokens: list[int], count: int, seed: int, by: int) -> list[int]:
        true = truth[seed][len(tokens) : len(tokens) + count]
        return [(token + by) % model.vocab for token in true]

    def mixed(tokens: list[int], count: int, seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(derive_seed(seed, len(tokens)) % 2**62)
        wrong = torch.randint(0, model.vocab, (count,), generator=generator).tolist()
        return [*shifted(tokens, count // 2, seed, 0), *wrong][: len(tokens) % (count + 1)]

    def same_noise(tokens: list[int], count: int, seed: int) -> list[int]:
        drafts: list[int] = []
        for _ in range(count):
            row = model.row(SamplingParams(), [*tokens, *drafts], seed)
            drafts += choose(model.logits([*tokens, *drafts])[None] * 0.8, [row])
        return drafts

    return {
        "right": lambda tokens, count, seed: shifted(tokens, count, seed, 0),
        "wrong": lambda tokens, count, seed: shifted(tokens, count, seed, 1),
        "mixed": mixed,
        "same noise": same_noise,
        "constant": lambda tokens, count, seed: [tokens[-1]] * count,
    }


def equals_plain(
    params: SamplingParams, drafter: str, depths: Sequence[int], chooser: Chooser
) -> bool:
    model, seeds = Model(4), range(SEEDS)
    truth = [plain(model, params, seed) for seed in seeds]
    propose = drafters(model, truth)[drafter]
    wanted = truth if chooser is choose else [plain(model, params, s, chooser) for s in seeds]
    for depth in depths:
        for seed in seeds:
            if speculative(model, params, [seed], propose, depth, chooser) != [wanted[seed]]:
                return False
        if speculative(model, params, seeds, propose, depth, chooser) != wanted:
            return False
    return True


def noise_by_row_index(logits: Tensor, rows: Sequence[RowContext]) -> list[int]:
    return choose(logits, [replace(row, seed=row.seed + at) for at, row in enumerate(rows)])


def noise_by_step(logits: Tensor, rows: Sequence[RowContext]) -> list[int]:
    first = rows[0].position
    return choose(logits, [replace(row, seed=1000 * row.seed + first) for row in rows])


def stale_history(logits: Tensor, rows: Sequence[RowContext]) -> list[int]:
    """Each row sees the history of the first, filled up with a token of the prompt."""
    first = list(rows[0].history)
    stale = [[*PROMPT[:1] * at, *first] for at in range(len(rows))]
    return choose(
        logits,
        [
            replace(row, history=history, prompt_length=row.prompt_length + at)
            for at, (row, history) in enumerate(zip(rows, stale, strict=True))
        ],
    )


@pytest.mark.parametrize("drafter", ["right", "wrong", "mixed", "same noise", "constant"])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_walk_gives_the_plain_sequence(name: str, drafter: str) -> None:
    assert equals_plain(SETTINGS[name], drafter, (1, 2, 3), choose)


@pytest.mark.parametrize("fault", [noise_by_row_index, noise_by_step])
def test_noise_that_depends_on_the_step_is_noticed(fault: Chooser) -> None:
    assert not equals_plain(SETTINGS["plain"], "right", (3,), fault)


def test_penalties_from_a_stale_history_are_noticed() -> None:
    assert not equals_plain(SETTINGS["penalties"], "right", (3,), stale_history)
    assert not equals_plain(SETTINGS["greedy"], "right", (3,), stale_history)


@pytest.mark.parametrize("name", ["plain", "cut", "penalties", "masks"])
def test_the_walk_follows_the_enumerated_law(name: str) -> None:
    model, params, runs, length = Model(3), SETTINGS[name], 300, 3

    def against(tokens: list[int], count: int, seed: int) -> list[int]:
        return [(tokens[-1] + 1 + seed) % 3, seed % 3][:count]

    seeds = [derive_seed(1, run) for run in range(runs)]
    found = Counter(map(tuple, speculative(model, params, seeds, against, 2, new=length)))
    wanted = {
        path: probability(model, params, path)
        for path in itertools.product(range(3), repeat=length)
    }
    assert sum(wanted.values()) == pytest.approx(1)
    assert all(wanted[path[len(PROMPT) :]] for path in found)
    # Rare paths are pooled: chi-square wants about five of each.
    common = [path for path in wanted if wanted[path] * runs >= 5]
    counts = [found[(*PROMPT, *path)] for path in common]
    shares = [wanted[path] for path in common]
    counts, shares = [*counts, runs - sum(counts)], [*shares, max(0.0, 1 - sum(shares))]
    assert p_value(counts, shares) > ALPHA


def probability(model: Model, params: SamplingParams, path: tuple[int, ...]) -> float:
    tokens, product = list(PROMPT), 1.0
    for token in path:
        row = model.row(params, tokens, 0)
        product *= law(model.logits(tokens).tolist(), row)[token]
        tokens.append(token)
    return product
