from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from surefoot.backend.noise import NoiseField, _gumbel, gumbel, gumbel_at, noise_key
from surefoot.sample.seeds import derive_seed, fresh_seed

MASK32 = 2**32 - 1
MASK64 = 2**64 - 1
SEEDS = (0, 1, 2**32, 2**63, 2**64 - 1)


def mix64(value: int) -> int:
    value &= MASK64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK64
    return value ^ (value >> 31)


def exact_noise(seed: int, position: int, token: int) -> float:
    golden = 0x9E3779B97F4A7C15
    key = mix64(mix64(seed + golden) + position * golden)
    bits = token * 0x9E3779B1 + key & MASK32
    bits = (bits ^ bits >> 16) * 0x85EBCA6B + (key >> 32) & MASK32
    bits = (bits ^ bits >> 15) * 0xC2B2AE35 & MASK32
    fraction = ((bits ^ bits >> 16) % 2**31 + 0.5) * 2**-31
    return -math.log(-math.log1p(-fraction))


def distance_from_gumbel(noise: Tensor) -> float:
    """Kolmogorov-Smirnov distance, times the root of the number of draws."""
    ordered = noise.flatten().to(torch.float64).sort().values
    law = (-(-ordered).exp()).exp()
    ranks = torch.arange(1, len(ordered) + 1, dtype=torch.float64) / len(ordered)
    gap = torch.maximum((ranks - law).abs(), (ranks - 1 / len(ordered) - law).abs()).max()
    return float(gap) * math.sqrt(len(ordered))


def correlation(left: Tensor, right: Tensor) -> float:
    """In units of its standard deviation for independent draws."""
    pair = torch.stack([left.flatten(), right.flatten()]).to(torch.float64)
    return abs(float(torch.corrcoef(pair)[0, 1])) * math.sqrt(pair.shape[1])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("position", [0, 1, 4095, 10**6])
def test_noise_is_the_hash_of_seed_position_and_token(seed: int, position: int) -> None:
    noise = gumbel([seed], [position], 149, "cpu")[0]
    exact = torch.tensor([exact_noise(seed, position, token) for token in range(149)])
    # Low noise comes from fractions near 1, where float32 is coarse; it never wins.
    torch.testing.assert_close(noise, exact, rtol=0, atol=1e-2)
    torch.testing.assert_close(noise[exact > 0], exact[exact > 0], rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("vocab", [1, 2, 7, 15, 16, 17, 31, 33, 63, 65, 129, 1023, 40961, 49157])
def test_bits_do_not_depend_on_how_many_are_asked_for(vocab: int) -> None:
    whole = gumbel([3, 4, 5], [9, 8, 7], 65539, "cpu")
    assert torch.equal(gumbel([4], [8], vocab, "cpu")[0], whole[1, :vocab])
    assert torch.equal(NoiseField(vocab, "cpu").gumbel(noise_key(5, 7)), whole[2, :vocab])


def test_bits_do_not_depend_on_the_place_in_a_tensor() -> None:
    whole = gumbel([11], [5], 300, "cpu")[0]
    for start in range(40):
        for length in (1, 3, 16, 37, 200):
            ids = torch.arange(start, start + length)
            other = torch.arange(length % 7)
            both = torch.cat((other, ids))
            owners = (torch.arange(len(both)) >= len(other)).long()
            few = gumbel_at([noise_key(2, 5), noise_key(11, 5)], owners, both)
            assert torch.equal(few[len(other) :], whole[ids])


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = gumbel([1], [1], 100_003, "cpu")
        torch.set_num_threads(3)
        three = gumbel([1], [1], 100_003, "cpu")
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one, three)


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_of_a_row_follows_the_gumbel_law(seed: int) -> None:
    assert distance_from_gumbel(gumbel([seed], [0], 151_936, "cpu")) < 2.3


def test_noise_of_a_token_follows_the_law_over_positions_and_over_seeds() -> None:
    draws = 20_000
    token, owners = torch.full((draws,), 17), torch.arange(draws)
    over_positions = gumbel_at([noise_key(5, i) for i in range(draws)], owners, token)
    over_seeds = gumbel_at([noise_key(i, 5) for i in range(draws)], owners, token)
    for noise in (over_positions, over_seeds):
        assert distance_from_gumbel(noise) < 2.3
        for lag in (1, 2, 3, 16):
            assert correlation(noise[lag:], noise[:-lag]) < 4.5


def test_neighbouring_tokens_positions_and_seeds_are_independent() -> None:
    vocab = 49_152
    base = gumbel([5], [5], vocab, "cpu")[0]
    for lag in (1, 2, 4, 16, 64, 128, 1024, 4096):
        assert correlation(base[lag:], base[:-lag]) < 4.5
    for position in (4, 6, 7, 133):
        assert correlation(base, gumbel([5], [position], vocab, "cpu")) < 4.5
    for bit in range(0, 64, 3):
        assert correlation(base, gumbel([5 ^ 1 << bit], [5], vocab, "cpu")) < 4.5


def test_the_law_test_notices_a_fraction_that_is_used_twice() -> None:
    base = gumbel([5], [5], 20_000, "cpu")[0]
    assert correlation(base[1:] + base[:-1], base[1:]) > 4.5
    assert distance_from_gumbel(base + 0.05) > 2.3


def test_the_smallest_and_the_largest_fraction_give_finite_noise() -> None:
    ends = torch.tensor([0.5 * 2**-31, 2**-25, 0.5, 1 - 2**-24])
    exact = [-math.log(-math.log1p(-float(end))) for end in ends]
    torch.testing.assert_close(_gumbel(ends), torch.tensor(exact), rtol=1e-6, atol=1e-6)


def test_the_logarithm_is_exact_to_a_few_ulps_over_the_whole_range() -> None:
    fractions = torch.logspace(-9.6, -1e-4, 200_000, dtype=torch.float64).to(torch.float32)
    exact = -(-torch.log1p(-fractions.to(torch.float64))).log()
    torch.testing.assert_close(_gumbel(fractions).to(torch.float64), exact, rtol=5e-7, atol=5e-7)


def test_the_bound_is_never_below_the_noise_and_tight_where_it_matters() -> None:
    field = NoiseField(49_152, "cpu")
    for position in range(30):
        noise, bound = (
            field.gumbel(noise_key(7, position)),
            field.bound([(1, 2), noise_key(7, position)])[1],
        )
        assert bool((bound >= noise).all())
        assert float((bound - noise)[noise > 4].max()) < 0.08


def test_derived_seeds_are_64_bit_and_all_differ() -> None:
    derived = {derive_seed(seed, sample) for seed in (*range(200), *SEEDS) for sample in range(16)}
    assert len(derived) == 203 * 16
    assert all(0 <= seed < 2**64 for seed in derived)
    assert max(derived) > 2**63


def test_fresh_seeds_are_64_bit_and_differ() -> None:
    seeds = {fresh_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**64 for seed in seeds)
