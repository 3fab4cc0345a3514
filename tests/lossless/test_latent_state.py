"""After any accepted count every cache of DeepSeek V4 is, to the last bit, that of a plain run."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import pytest
from torch import Tensor

from surefoot.model.deepseek_v4 import LatentModel
from surefoot.state.spec import Ring
from tests.lossless.harness import LATENTS, VOCAB, Bench
from tests.unit.backend.cuts import Machine, Piece, Setting, rejecting, same_bits, sequences_of
from tests.unit.model.models import Logits
from tests.unit.model.settling import SettlingMachine

DEPTH = 8
WINDOWS = {"window": 8, "sparse.raw": 8, "heavy.raw": 16}
"""Positions up to a token that it may read in a ring, its own included."""
TWO = Setting(sequences_of(2, VOCAB, (48, 48)), page_tokens=16, dirty=False)
rings = pytest.mark.parametrize("cache", WINDOWS)
STARTS = range(41)
Kept = list[Tensor]


@pytest.fixture(scope="module")
def model(bench: Bench) -> LatentModel:
    model = bench.target(LATENTS).model
    assert isinstance(model, LatentModel)
    return model


def after_two_rows(model: LatentModel, bench: Bench, count: int, verify: bool) -> list[Kept]:
    """Outputs, and all that may be read, after `count` tokens behind each start and as many again.

    They come in rows of nine tokens whose others are rejected, or with the start, then one by one.
    """
    lengths = [start + 2 * count for start in STARTS]
    sequences = sequences_of(4, VOCAB, lengths)
    setting = Setting(sequences, page_tokens=16, depth=DEPTH)
    machine = SettlingMachine(model, bench.target(LATENTS).backend, setting)

    def pieces(skipped: int, length: int, wrong: int = 0) -> list[Piece]:
        return [Piece(i, start + skipped, length, wrong) for i, start in enumerate(STARTS)]

    begin = [Piece(i, 0, start) for i, start in enumerate(STARTS) if start]
    wrong = DEPTH + 1 - count
    if verify:
        halves = [[begin, pieces(0, count, wrong)], [pieces(count, count, wrong)]]
    else:
        halves = [
            [[Piece(i, 0, start + count) for i, start in enumerate(STARTS)]],
            [pieces(count + more, 1) for more in range(count)],
        ]
    seen = []
    for script in halves:
        outputs = [out[-count:] for out in machine.play(script)]
        seen.append(outputs + machine.kept())
    return seen


@pytest.mark.parametrize("count", range(1, DEPTH + 2))
def test_caches_are_those_of_a_plain_run_after_any_accepted_count(
    count: int, bench: Bench, model: LatentModel
) -> None:
    got = after_two_rows(model, bench, count, verify=True)
    want = after_two_rows(model, bench, count, verify=False)
    assert all(bool(part.isfinite().all()) for half in want for part in half)
    assert [same_bits(*halves) for halves in zip(got, want, strict=True)] == [True, True]


@dataclass(frozen=True)
class ShortRing(Ring):
    """A ring that lacks some of its columns."""

    missing: int = 0

    def capacity(self, draft_tokens: int) -> int:
        """See Ring."""
        return super().capacity(draft_tokens) - self.missing


def ring_of(model: LatentModel, cache: str) -> Ring:
    [spec] = [spec for spec in model.description.caches if spec.name == cache]
    assert isinstance(spec, Ring)
    return spec


def shortened(model: LatentModel, cache: str, missing: int) -> LatentModel:
    """The model with one of its rings so many columns short of what is planned."""
    spec = ring_of(model, cache)
    short = ShortRing(spec.name, spec.layers, spec.parts, spec.window, spec.held, missing)
    caches = tuple(short if each is spec else each for each in model.description.caches)
    changed = copy.copy(model)
    changed.description = replace(model.description, caches=caches)
    return changed


@pytest.mark.parametrize("depth", [1, 3, DEPTH])
@rings
def test_a_ring_one_column_short_of_what_drafts_need_is_caught(
    cache: str, depth: int, bench: Bench, model: LatentModel
) -> None:
    """A row of `depth` drafts writes over position first + depth - capacity; the next token, at
    first + 1, still reads first + 2 - window.
    """
    setting = replace(TWO, depth=depth)
    least = WINDOWS[cache] + depth - 1
    spare = ring_of(model, cache).capacity(depth) - least
    assert ring_of(model, cache).window == WINDOWS[cache]
    assert spare >= 0

    def outputs(missing: int) -> list[Tensor]:
        short = Logits(shortened(model, cache, missing))
        machine = Machine(short, bench.target(LATENTS).backend, setting)
        return machine.play(rejecting(TWO.lengths, depth))

    planned = outputs(0)
    assert same_bits(outputs(spare), planned)
    assert not same_bits(outputs(spare + 1), planned)


@rings
def test_a_row_that_reaches_into_the_window_is_seen_in_the_caches(
    cache: str, bench: Bench, model: LatentModel
) -> None:
    """Two columns less than planned, the oldest position that is kept is written over."""
    want = after_two_rows(model, bench, 1, verify=True)
    for missing, same in ((1, True), (2, False)):
        got = after_two_rows(shortened(model, cache, missing), bench, 1, verify=True)
        assert same_bits(got[1], want[1]) is same
