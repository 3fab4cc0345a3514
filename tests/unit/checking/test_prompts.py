import pytest

from surefoot.checking.prompts import Prompt, fit, random_prompts, text_prompts
from surefoot.testing.tiny_models import make_byte_tokenizer
from surefoot.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def texts() -> list[Prompt]:
    return text_prompts(Tokenizer(make_byte_tokenizer(259)))


def common(prompts: list[Prompt]) -> int:
    """The longest beginning that two of them share, in tokens."""
    heads = [tuple(prompt.tokens) for prompt in prompts]
    pairs = [(one, other) for one in heads for other in heads if one is not other]
    return max(_shared(one, other) for one, other in pairs)


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


def test_labels_are_unique(texts: list[Prompt]) -> None:
    for prompts in (texts, random_prompts(64, 0)):
        assert len({prompt.label for prompt in prompts}) == len(prompts) == 12


def test_some_texts_have_a_long_beginning_in_common(texts: list[Prompt]) -> None:
    assert common(texts) > 600


def test_texts_hold_more_than_ascii(texts: list[Prompt]) -> None:
    assert any(max(prompt.tokens) > 127 for prompt in texts)


def test_random_ids_share_beginnings_and_repeat_themselves() -> None:
    prompts = random_prompts(1000, 0)
    assert common(prompts) >= 140
    last = list(prompts[-1].tokens)
    assert last[:19] == last[19:38]
    assert min(len(prompt.tokens) for prompt in prompts) == 1


@pytest.mark.parametrize("vocab", [2, 50_000])
def test_random_ids_lie_in_the_vocabulary(vocab: int) -> None:
    prompts = random_prompts(vocab, 4)
    assert all(0 <= token < vocab for prompt in prompts for token in prompt.tokens)
    assert prompts == random_prompts(vocab, 4)


def test_fit_repeats_and_cuts_to_the_length() -> None:
    prompts = [Prompt("a", [1, 2, 3]), Prompt("b", list(range(20)))]
    assert [prompt.tokens for prompt in fit(prompts, 100, 7)] == [
        [1, 2, 3, 1, 2, 3, 1],
        [0, 1, 2, 3, 4, 5, 6],
    ]


def test_fit_cuts_to_what_there_is_room_for() -> None:
    prompts = [Prompt("a", [1, 2, 3])]
    assert fit(prompts, 2)[0].tokens == [1, 2]
    assert fit(prompts, 2, 9)[0].tokens == [1, 2]
    assert fit(prompts, 9)[0].tokens == [1, 2, 3]
