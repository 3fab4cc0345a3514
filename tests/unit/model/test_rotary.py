"""Rotary angles, and the scalings that checkpoints ask for."""

from __future__ import annotations

import math

import pytest
import torch

from surefoot.backend.cpu import CpuBackend
from surefoot.backend.protocol import Backend
from surefoot.backend.reference import ReferenceBackend
from surefoot.errors import ModelError
from surefoot.model.layers.attention import paired_order
from surefoot.model.layers.rotary import Rotary, make_partial_rotary, make_rotary

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


BACKEND = ReferenceBackend()
BACKENDS: tuple[Backend, ...] = (BACKEND, CpuBackend())


def frequencies(size: int, theta: float, scaling: dict[str, object] | None = None) -> list[float]:
    values: list[float] = make_rotary(size, theta, scaling).frequencies.tolist()
    return values


def test_frequencies_fall_from_one_by_powers_of_theta() -> None:
    assert frequencies(8, 10000.0) == pytest.approx([1, 0.1, 0.01, 0.001])


def test_rotating_turns_each_pair_by_position_times_frequency() -> None:
    cos, sin = make_rotary(4, 100.0, None).on(BACKEND)(torch.tensor([3]))
    assert cos.shape == sin.shape == (1, 1, 4)
    x = torch.tensor([[[1.0, 0.0, 0.0, 1.0]]])
    turned = BACKEND.rotary(x, cos, sin)[0, 0].tolist()
    slow = 3 * 0.1
    assert turned == pytest.approx(
        [math.cos(3), -math.sin(slow), math.sin(3), math.cos(slow)], abs=1e-6
    )


def test_position_zero_changes_nothing() -> None:
    cos, sin = make_rotary(6, 10000.0, None).on(BACKEND)(torch.tensor([0]))
    assert cos.tolist() == [[[1.0] * 6]]
    assert sin.abs().max() == 0


def test_scores_depend_on_distance_alone() -> None:
    rotary, backend = make_rotary(16, 10000.0, None), ReferenceBackend()
    draws = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 1, 16, generator=draws), torch.randn(1, 1, 16, generator=draws)
    scores = []
    for start in (0, 1000):
        turned_q = backend.rotary(q, *rotary.on(BACKEND)(torch.tensor([start + 7])))
        turned_k = backend.rotary(k, *rotary.on(BACKEND)(torch.tensor([start])))
        scores.append((turned_q * turned_k).sum().item())
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_angles_stay_exact_at_a_million_positions(
    backend: Backend,
) -> None:
    position, size = 1_048_573, 64
    cos, _ = make_rotary(size, 500_000.0, None).on(backend)(torch.tensor([position]))
    exact = [math.cos(position * 500_000.0 ** (-2 * i / size)) for i in range(size // 2)]
    assert cos[0, 0, : size // 2].tolist() == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_angle_does_not_depend_on_the_other_positions(backend: Backend) -> None:
    rotary = make_rotary(10, 10000.0, None)
    many = rotary.on(backend)(torch.arange(50))
    for position in (0, 7, 49):
        one = rotary.on(backend)(torch.tensor([position]))
        assert torch.equal(one[0][0], many[0][position])
        assert torch.equal(one[1][0], many[1][position])


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_linear_scaling_divides_every_frequency(key: str) -> None:
    scaled = frequencies(8, 10000.0, {key: "linear", "factor": 2.0})
    assert scaled == pytest.approx([0.5, 0.05, 0.005, 0.0005])


def test_llama3_keeps_fast_frequencies_and_divides_slow_ones() -> None:
    plain, scaled = frequencies(128, 500_000.0), frequencies(128, 500_000.0, LLAMA3)
    assert scaled[:20] == pytest.approx(plain[:20])
    assert scaled[-20:] == pytest.approx([value / 8 for value in plain[-20:]])
    ratios = [old / new for old, new in zip(plain, scaled, strict=True)]
    assert ratios == sorted(ratios)
    assert any(1.5 < ratio < 7.5 for ratio in ratios)


def test_yarn_keeps_fast_frequencies_and_raises_the_temperature() -> None:
    plain, rotary = frequencies(128, 1e6), make_rotary(128, 1e6, YARN)
    scaled = rotary.frequencies.tolist()
    assert scaled[:10] == pytest.approx(plain[:10])
    assert scaled[-10:] == pytest.approx([value / 4 for value in plain[-10:]])
    assert rotary.factor == pytest.approx(0.1 * math.log(4.0) + 1)


def test_yarn_takes_the_given_attention_factor() -> None:
    assert make_rotary(128, 1e6, YARN | {"attention_factor": 1.25}).factor == 1.25


def test_yarn_divides_its_two_scales() -> None:
    scales = {"mscale": 0.707, "mscale_all_dim": 1.0}
    growth = 0.1 * math.log(4.0)
    assert make_rotary(128, 1e6, YARN | scales).factor == pytest.approx(
        (0.707 * growth + 1) / (growth + 1)
    )
    assert make_rotary(128, 1e6, YARN | {"mscale": 0.707}).factor == pytest.approx(growth + 1)


def test_null_counts_as_absent() -> None:
    nulls: dict[str, object] = dict.fromkeys(("beta_fast", "beta_slow", "attention_factor"))
    plain, given = make_rotary(64, 1e6, YARN), make_rotary(64, 1e6, YARN | nulls)
    assert torch.equal(plain.frequencies, given.frequencies)
    assert plain.factor == given.factor


def test_a_partly_rotated_head_is_refused() -> None:
    with pytest.raises(ModelError, match="partial_rotary_factor is not supported"):
        make_rotary(8, 10000.0, {"rope_type": "default", "partial_rotary_factor": 0.5})


def test_the_factor_multiplies_both_angles() -> None:
    cos, sin = Rotary(torch.tensor([0.5], dtype=torch.float64), 2.0).on(BACKEND)(torch.tensor([1]))
    assert cos[0, 0].tolist() == pytest.approx([2 * math.cos(0.5)] * 2)
    assert sin[0, 0].tolist() == pytest.approx([-2 * math.sin(0.5), 2 * math.sin(0.5)])


def test_an_unknown_scaling_is_named() -> None:
    with pytest.raises(ModelError, match="'longrope' is not supported; known are default, linear"):
        make_rotary(8, 10000.0, {"rope_type": "longrope"})


@pytest.mark.parametrize(
    ("scaling", "name"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": "4"}, "factor"),
        ({**LLAMA3, "high_freq_factor": None}, "high_freq_factor"),
        ({"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings"),
    ],
)
def test_a_missing_number_is_named(scaling: dict[str, object], name: str) -> None:
    with pytest.raises(ModelError, match=name):
        make_rotary(8, 10000.0, scaling)


def test_numbers_that_pass_through_are_not_turned() -> None:
    rotary = make_partial_rotary(10, 4, 100.0, {"partial_rotary_factor": 0.4})
    assert rotary.frequencies.tolist() == pytest.approx([1, 0.1])
    order = paired_order(10, 4)
    assert order.tolist() == [0, 1, 4, 5, 6, 2, 3, 7, 8, 9]
    x = torch.randn(1, 2, 10, generator=torch.Generator().manual_seed(0))
    turned = BACKEND.rotary(x[..., order], *rotary.on(BACKEND)(torch.tensor([7])))
    back = torch.empty_like(turned).index_copy_(-1, order, turned)
    whole = BACKEND.rotary(x[..., :4], *make_rotary(4, 100.0, None).on(BACKEND)(torch.tensor([7])))
    assert torch.equal(back[..., 4:], x[..., 4:])
    torch.testing.assert_close(back[..., :4], whole)


def test_a_scalings_factor_spares_what_passes_through() -> None:
    rotary = make_partial_rotary(16, 8, 1e6, YARN)
    cos, sin = rotary.on(BACKEND)(torch.tensor([5]))
    assert rotary.factor > 1
    assert cos[0, 0, 4:8].tolist() == [1.0] * 4
    assert sin[0, 0, 12:].tolist() == [0.0] * 4
    assert torch.equal(rotary.frequencies, make_rotary(8, 1e6, YARN).frequencies)


@pytest.mark.parametrize(("size", "rotated"), [(8, 3), (7, 4), (8, 0), (8, 10)])
def test_a_rotation_that_is_not_of_pairs_is_refused(size: int, rotated: int) -> None:
    with pytest.raises(ModelError, match=f"cannot turn {rotated} of a head's {size} numbers"):
        make_partial_rotary(size, rotated, 10000.0, {})


def test_a_head_of_odd_size_is_refused() -> None:
    with pytest.raises(ModelError, match="15 numbers of a head in pairs"):
        make_rotary(15, 10000.0, None)
