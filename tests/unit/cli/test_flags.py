import pytest
from cyclopts import Token

from surefoot.cli.flags import attribute_help, number, size, whole, wholes
from surefoot.config import EngineConfig
from surefoot.params import SamplingParams


def tokens(*values: str) -> list[Token]:
    return [Token(value=value) for value in values]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1073741824", 1 << 30),
        ("512MiB", 512 << 20),
        ("2GB", 2 * 10**9),
        ("1.5 gib", 3 << 29),
        ("7kb", 7000),
        ("64B", 64),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert size(int, tokens(text)) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2G", "5XB", "1e9", "0x10", "nan"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="must be a number of bytes"):
        size(int, tokens(text))


@pytest.mark.parametrize("text", ["1.5", "1.0", "1e3", "", "x", "1_000", "٣"])
def test_what_is_no_whole_number(text: str) -> None:
    with pytest.raises(ValueError, match="must be a whole number"):
        whole(int, tokens(text))


def test_whole_numbers_may_be_negative_and_large() -> None:
    assert whole(int, tokens("-7")) == -7
    assert wholes(list[int], tokens("1", str(1 << 64))) == [1, 1 << 64]


def test_numbers() -> None:
    assert number(float, tokens("1e-3")) == 0.001
    with pytest.raises(ValueError, match="must be a number, not 'warm'"):
        number(float, tokens("warm"))


@pytest.mark.parametrize(
    ("documented", "first", "last"),
    [(EngineConfig, "drafter", "revision"), (SamplingParams, "max_tokens", "speculate")],
)
def test_attributes_have_help(documented: type, first: str, last: str) -> None:
    about = attribute_help(documented)
    names = list(about)
    assert (names[0], names[-1]) == (first, last)
    assert all(len(words) > 10 and "None" not in words for words in about.values())


def test_help_runs_over_lines_and_stops_at_the_next_attribute() -> None:
    class Sample:
        """Two.

        Attributes:
            first: begins here
                and goes on; None is nothing.
            second: stands alone.

        Raises:
            ValueError: not an attribute.
        """

    assert attribute_help(Sample) == {
        "first": "Begins here and goes on; no value is nothing.",
        "second": "Stands alone.",
    }
