"""The commands on the packaged models; slow, so only in the deep runs."""

import pytest

from tests.unit.cli.commands import Run

pytestmark = pytest.mark.deep


def test_generate_compares_on_real_weights(surefoot: Run) -> None:
    done = surefoot("generate", "--compare", "--max-tokens", 96, "--json")
    assert done.status == 0
    assert done.json["comparison"]["identical"] is True
    assert done.json["comparison"]["accept_length"] > 1.5
    assert done.json["comparison"]["speedup"] > 1


def test_generate_knows_the_capital(surefoot: Run) -> None:
    done = surefoot("generate", "smollm2", "The capital of France is", "--max-tokens", 8)
    assert "Paris" in done.out


def test_inspect_reads_the_header(surefoot: Run) -> None:
    done = surefoot("inspect", "smollm2", "--json")
    assert done.json["layers"] == ["full"] * 30
    assert 130e6 < done.json["parameters"] < 140e6


def test_bench_measures(surefoot: Run) -> None:
    flags = ("--batch", "1,2", "--new-tokens", 16, "--repeats", 1)
    runs = surefoot("bench", *flags, "--json").json["runs"]
    assert [run["batch"] for run in runs] == [1, 1, 2, 2]
