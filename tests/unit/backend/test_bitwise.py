"""The cpu backend gives a token the same bits however the work is cut, operator by operator.

So do the tiled forms, which it has for other types than float32.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
import torch

from surefoot.backend.blockwise.attention import ProductShape, dots, least_tile_width
from surefoot.backend.blockwise.linear import swiglu
from surefoot.backend.blockwise.tiles import TILE_TOKENS
from surefoot.backend.cpu import CpuBackend
from surefoot.backend.series import log1p
from tests.unit.backend.cuts import (
    Computes,
    Machine,
    Setting,
    alone,
    assert_row_invariant,
    differing_cuts,
    same_bits,
    sequences_of,
    shuffled,
    together,
)
from tests.unit.backend.small import VOCAB, PagedAttention, Vectors, window_attention
from tests.unit.backend.tiled import KERNELS, TILED, on_both

Shape = tuple[tuple[int, int], int, int]

# Query and key heads, head size, tokens per page. The small ones lie where the library takes
# another kernel for small products.
SHAPES: list[Shape] = [
    ((4, 4), 8, 4),
    ((4, 2), 64, 16),
    ((9, 3), 16, 32),
    ((16, 2), 128, 8),
    ((16, 2), 2, 8),
    ((8, 2), 6, 4),
    ((5, 5), 10, 5),
    ((3, 1), 20, 1),
    ((4, 2), 8, 16),
    ((6, 2), 32, 32),
]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def attentions(shape: Shape, window: int) -> list[Computes]:
    vectors = Vectors.of(1, shape[0], shape[1])
    return [PagedAttention(vectors), window_attention(vectors, window)]


@on_both
@pytest.mark.parametrize("kind", [0, 1], ids=["paged", "window"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_has_the_same_bits_for_every_cut(
    shape: Shape, kind: int, backend: CpuBackend
) -> None:
    setting = Setting(sequences_of(3, VOCAB, (37, 1, 18)), shape[2])
    assert differing_cuts(attentions(shape, window=8)[kind], backend, setting, seed=7) == []


@on_both
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 40])
def test_window_attention_has_the_same_bits_for_every_window(
    window: int, backend: CpuBackend
) -> None:
    setting = Setting(sequences_of(3, VOCAB, (37, 20)), page_tokens=16, depth=3)
    model = attentions(((4, 2), 16, 16), window)[1]
    assert differing_cuts(model, backend, setting, seed=window) == []


@pytest.mark.deep
@on_both
@pytest.mark.parametrize("seed", range(40))
def test_attention_has_the_same_bits_for_random_shapes(seed: int, backend: CpuBackend) -> None:
    rng = random.Random(seed)
    heads = rng.choice([(4, 4), (4, 2), (9, 3), (16, 2), (3, 1), (5, 5)])
    shape = heads, rng.choice([2, 6, 8, 10, 20, 64, 80, 128]), rng.choice([3, 4, 8, 16, 32, 64])
    lengths = [rng.randint(1, 90) for _ in range(rng.randint(1, 4))]
    setting = Setting(
        sequences_of(seed, VOCAB, lengths), shape[2], rng.choice([1, 4, 8]), scatter=seed % 2 == 0
    )
    for model in attentions(shape, rng.choice([1, 3, 8, 16, 33])):
        assert differing_cuts(model, backend, setting, seed) == []


@pytest.mark.deep
@pytest.mark.usefixtures("two_threads")
def test_attention_in_tiles_has_the_same_bits_with_two_threads() -> None:
    for shape in SHAPES:
        setting = Setting(sequences_of(3, VOCAB, (40, 1, 18)), shape[2])
        lengths = setting.lengths
        for model in attentions(shape, window=8):
            mixed = shuffled(lengths, setting.depth, random.Random(1))
            two = [Machine(model, TILED, setting).play(cut) for cut in (together(lengths), mixed)]
            torch.set_num_threads(1)
            one = Machine(model, TILED, setting).play(alone(lengths))
            torch.set_num_threads(2)
            assert same_bits(two[0], one), shape
            assert same_bits(two[1], one), shape


@pytest.mark.deep
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("width", [33, 67, 200, 1536])
def test_elementwise_operators_have_the_same_bits_with_two_threads(width: int) -> None:
    """Threads divide large tensors anywhere, in the middle of a row as well."""
    draws = torch.Generator().manual_seed(width)
    x, weight = 4 * torch.randn(700, 2 * width, generator=draws), torch.randn(2 * width)
    two = swiglu(x), TILED.rms_norm(x, weight, 1e-6)
    torch.set_num_threads(1)
    assert same_bits(two, (swiglu(x), TILED.rms_norm(x, weight, 1e-6)))
    assert torch.equal(swiglu(x[5:7]), two[0][5:7])
    torch.set_num_threads(2)


@pytest.mark.parametrize("shape", [*SHAPES, ((2, 2), 64, 32), ((1, 1), 4, 4)], ids=str)
def test_tiles_of_the_least_width_and_wider_agree(shape: Shape) -> None:
    (heads, keys), size, page_tokens = shape
    group = heads // keys
    least = least_tile_width(ProductShape(keys, group, size, page_tokens, 0.3))
    assert 1 <= least <= TILE_TOKENS
    draws = torch.Generator().manual_seed(99)
    left = torch.randn(3, TILE_TOKENS * group, size, generator=draws)
    right = torch.randn(3, page_tokens, size, generator=draws)
    whole = dots(torch.zeros(()), left, right, 0.3)
    for width in range(least, TILE_TOKENS + 1):
        part = left[:, : width * group].contiguous()
        product = dots(torch.zeros(()), part, right, 0.3)
        assert torch.equal(product, whole[:, : width * group]), width


def test_some_shape_needs_wide_tiles() -> None:
    """Otherwise the measurement would measure nothing on this machine."""
    widths = [
        least_tile_width(ProductShape(keys, heads // keys, size, page_tokens, 0.3))
        for (heads, keys), size, page_tokens in SHAPES
    ]
    assert max(widths) > 1


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [(KERNELS, torch.float32), (TILED, torch.float32), (KERNELS, torch.bfloat16)],
    ids=["kernels", "tiled", "bfloat16"],
)
@pytest.mark.parametrize("width", [1, 2, 3, 7, 15, 17, 20, 31, 33, 64, 67, 127, 192])
def test_elementwise_operators_have_the_same_bits_at_any_width(
    width: int, backend: CpuBackend, dtype: torch.dtype
) -> None:
    draws = torch.Generator().manual_seed(width)
    weight = torch.randn(width, generator=draws).to(dtype)
    x = (4 * torch.randn(40, width, generator=draws)).to(dtype)
    assert_row_invariant(lambda part: backend.rms_norm(part, weight, 1e-5), x)
    wide = (4 * torch.randn(40, 2 * width, generator=draws)).to(dtype)
    assert_row_invariant(swiglu, wide)


@on_both
@pytest.mark.parametrize("size", [2, 6, 10, 16, 64])
def test_operators_on_heads_have_the_same_bits_for_any_rows(size: int, backend: CpuBackend) -> None:
    draws = torch.Generator().manual_seed(size)
    fused = torch.randn(40, 7, size, generator=draws)
    angles = torch.randn(40, 1, size, generator=draws)
    assert_row_invariant(lambda part: backend.rms_norm(part, torch.ones(size), 1e-6), fused[:, :5])
    both = torch.cat((fused, angles), dim=1)
    assert_row_invariant(
        lambda part: backend.rotary(part[:, :5], part[:, 7:], part[:, 7:]).contiguous(), both
    )


def test_log1p_is_right_and_the_same_anywhere_in_a_tensor() -> None:
    draws = torch.Generator().manual_seed(1)
    x = torch.cat((torch.rand(500, generator=draws), torch.tensor([0.0, 1e-30, 1e-7, 1.0])))
    got, want = log1p(x), torch.log1p(x.double())
    assert ((got.double() - want).abs() <= 2.5e-7 * want).all()
    assert log1p(torch.tensor([math.nan])).isnan().all()
    for start in range(20):
        for stop in range(start + 1, start + 40):
            assert torch.equal(log1p(x[start:stop]), got[start:stop])
