"""A NaN among a row's inputs shows in that row's outputs and touches nothing of other rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.unit.backend.cuts import (
    PADS,
    Computes,
    Machine,
    Pad,
    Script,
    Setting,
    alone,
    one_by_one,
    same_bits,
    sequences_of,
    together,
)
from tests.unit.backend.recurrences import (
    NAN,
    RecurrentLayer,
    RecurrentMachine,
    Sizes,
    machine,
    setting_of,
)
from tests.unit.backend.small import VOCAB, PagedAttention, Vectors, window_attention
from tests.unit.backend.tiled import KERNELS

BAD = VOCAB - 1
LENGTHS = (19, 40, 7)
SICK = 1
CUTS: Sequence[Callable[[Sequence[int]], Script]] = (together, one_by_one)
on_cuts = pytest.mark.parametrize("cut", CUTS, ids=["together", "one by one"])
on_pads = pytest.mark.parametrize("pad", PADS, ids=["unpadded", "padded"])


def with_bad_token(setting: Setting) -> Setting:
    """Sequence SICK begins with the bad token, which no other has."""
    sequences = [[token % BAD for token in tokens] for tokens in setting.sequences]
    sequences[SICK][0] = BAD
    return replace(setting, sequences=sequences, garbage=NAN)


def bad(x: Tensor) -> Tensor:
    """What goes in for the bad token is NaN."""
    changed = x.clone()
    changed[BAD] = NAN
    return changed


def assert_contained(got: Sequence[Tensor], want: Sequence[Tensor], last: int) -> None:
    """The sick sequence is NaN up to its output `last`, and the others are as they should be."""
    assert bool(got[SICK][:last].isnan().all())
    assert torch.equal(got[SICK][last:], want[SICK][last:])
    healthy = [place for place in range(len(got)) if place != SICK]
    assert same_bits([got[place] for place in healthy], [want[place] for place in healthy])


@on_pads
@on_cuts
@pytest.mark.parametrize("kind", ["paged", "window"])
@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_attention_keeps_nan_in_its_row(
    part: str, kind: str, cut: Callable[[Sequence[int]], Script], pad: Pad
) -> None:
    good = Vectors.of(1, (6, 2), 20)
    setting = with_bad_token(Setting(sequences_of(3, VOCAB, LENGTHS), page_tokens=5))

    def played(vectors: Vectors) -> list[Tensor]:
        paged, window = PagedAttention(vectors), window_attention(vectors, window=64)
        model: Computes = paged if kind == "paged" else window
        return Machine(model, KERNELS, setting).play(cut(LENGTHS), pad)

    sick = replace(good, **{part: bad(getattr(good, part))})
    assert_contained(played(sick), played(good), 1 if part == "q" else LENGTHS[SICK])


SICKEN: Mapping[str, Callable[[RecurrentLayer], RecurrentLayer]] = {
    "q, k and v": lambda layer: replace(layer, table=bad(layer.table)),
    "decay": lambda layer: replace(layer, a=bad(layer.a)),
    "beta": lambda layer: replace(layer, b=bad(layer.b)),
}


@on_pads
@on_cuts
@pytest.mark.parametrize("part", SICKEN)
def test_recurrent_layers_keep_nan_in_their_row(
    part: str, cut: Callable[[Sequence[int]], Script], pad: Pad
) -> None:
    sizes, setting = Sizes(1, 3, 20, 7), with_bad_token(setting_of(LENGTHS))
    sick = SICKEN[part](RecurrentLayer.of(1, sizes, KERNELS))
    on = RecurrentMachine(sick, KERNELS, setting)
    assert_contained(
        on.play(cut(LENGTHS), pad),
        machine(sizes, setting, KERNELS).play(alone(LENGTHS)),
        LENGTHS[SICK],
    )
    healthy = [part for part in on.kept() if not part.isnan().any()]
    assert len(healthy) >= 2 * 5, "five caches of two sequences"


HEADS, WIDTH = 3, 20
ROWWISE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "rms_norm": lambda x: KERNELS.rms_norm(x, torch.ones(WIDTH), 1e-6),
    "gated_norm": lambda x: KERNELS.gated_norm(x, x.flip(1), torch.ones(WIDTH), 1e-6),
    "gate": lambda x: KERNELS.gate(x, x.flip(1)),
    "one gate": lambda x: KERNELS.gate(torch.ones(len(x), WIDTH), x[:, 0, :1]),
    "rotary": lambda x: KERNELS.rotary(x, torch.ones(len(x), 1, WIDTH), x[:, :1]),
    "delta_gates": lambda x: torch.cat(
        KERNELS.delta_gates(x[:, 0], x[:, 1], torch.ones(WIDTH), torch.ones(WIDTH)), 1
    ),
}


@pytest.mark.parametrize("name", ROWWISE)
def test_operators_on_rows_keep_nan_in_its_row(name: str) -> None:
    x = torch.randn(9, HEADS, WIDTH, generator=torch.Generator().manual_seed(1))
    want = ROWWISE[name](x)
    x[4] = NAN
    got = ROWWISE[name](x)
    assert bool(got[4].isnan().all())
    assert same_bits([got[:4], got[5:]], [want[:4], want[5:]])
