import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from surefoot.errors import TokenizerError
from surefoot.text.detokenize import Detokenizer
from surefoot.text.tokenizer import Tokenizer

CUTS = st.lists(st.integers(0, 40), max_size=6)


def stream(
    tokenizer: Tokenizer, ids: Sequence[int], cuts: Sequence[int], skip_special: bool
) -> tuple[str, list[str]]:
    detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
    edges = [0, *sorted(place % (len(ids) + 1) for place in cuts), len(ids)]
    deltas = [detokenizer.push(ids[left:right]) for left, right in pairwise(edges)]
    deltas.append(detokenizer.finish())
    return "".join(deltas), deltas


def backend_decode(tokenizer: Tokenizer, ids: Sequence[int], skip_special: bool) -> str:
    text: str = tokenizer._backend.decode(list(ids), skip_special_tokens=skip_special)
    return text


# Bytes that make and break UTF-8: leads of each length, continuations, overlongs, surrogates.
TRICKY = [0x41, 0x20, 0x80, 0x9F, 0xA0, 0xAC, 0xBF, 0xC0, 0xC3, 0xE0, 0xE2, 0xED, 0xF0, 0xF4, 0xFF]


@given(st.lists(st.sampled_from(TRICKY), max_size=12), CUTS, st.booleans())
def test_any_bytes_in_any_cut_give_the_text_of_the_whole(
    bytes_only: Tokenizer, raw: list[int], cuts: list[int], skip_special: bool
) -> None:
    ids = [0, *(byte + 1 for byte in raw), 0]
    text, _ = stream(bytes_only, ids, cuts, skip_special)
    assert text == bytes_only.decode(ids, skip_special)
    assert text == backend_decode(bytes_only, ids, skip_special)


@given(st.data(), CUTS, st.booleans())
def test_any_tokens_of_a_real_vocabulary_in_any_cut(
    smollm2: Tokenizer, data: st.DataObject, cuts: list[int], skip_special: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, smollm2.vocab_size - 1), max_size=20))
    text, _ = stream(smollm2, ids, cuts, skip_special)
    assert text == smollm2.decode(ids, skip_special) == backend_decode(smollm2, ids, skip_special)


@given(st.data(), CUTS, st.booleans())
def test_any_tokens_of_a_sentence_piece_vocabulary_in_any_cut(
    hello: Tokenizer, data: st.DataObject, cuts: list[int], skip_special: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, hello.vocab_size - 1), max_size=20))
    text, _ = stream(hello, ids, cuts, skip_special)
    assert text == hello.decode(ids, skip_special)
    # The backend spoils a whole run of byte tokens for one broken byte; else both agree.
    if "\ufffd" not in backend_decode(hello, ids, skip_special):
        assert text == backend_decode(hello, ids, skip_special)


# What stands for a space in the vocabulary cannot stand for itself.
@given(st.text(st.characters(codec="utf-8", exclude_characters="▁"), max_size=30), CUTS)
def test_encoded_text_comes_back(
    bytes_only: Tokenizer, hello: Tokenizer, text: str, cuts: list[int]
) -> None:
    for tokenizer in (bytes_only, hello):
        ids = tokenizer.encode(text, add_special=False)
        assert stream(tokenizer, ids, cuts, skip_special=False)[0] == text


@given(st.text("é北🎉", min_size=1, max_size=6))
def test_half_a_character_is_never_shown(bytes_only: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(bytes_only)
    shown = ""
    for end, byte in enumerate(text.encode(), 1):
        shown += detokenizer.push([byte + 1])
        assert shown == text.encode()[:end].decode("utf-8", "ignore")


def test_an_unfinished_character_becomes_one_mark_at_the_end(bytes_only: Tokenizer) -> None:
    detokenizer = Detokenizer(bytes_only)
    assert detokenizer.push([byte + 1 for byte in b"a\xf0\x9f\x8e"]) == "a"
    assert detokenizer.finish() == "\ufffd"


def test_an_endless_run_of_broken_bytes_holds_nothing_back(bytes_only: Tokenizer) -> None:
    detokenizer = Detokenizer(bytes_only)
    assert all(detokenizer.push([0x80 + 1]) == "\ufffd" for _ in range(500))


def test_a_character_spelled_in_byte_tokens_is_shown_as_soon_as_it_is_complete(
    hello: Tokenizer,
) -> None:
    detokenizer = Detokenizer(hello)
    deltas = [detokenizer.push([3 + byte]) for byte in "北京".encode()]
    assert deltas == ["", "", "北", "", "", "京"]


def ids_of(tokenizer: Tokenizer, *texts: str) -> list[int]:
    found = [tokenizer._backend.token_to_id(text) for text in texts]
    return [token for token in found if token is not None]


def test_only_the_space_that_begins_the_whole_text_is_dropped(hello: Tokenizer) -> None:
    ids = ids_of(hello, "▁world", "</s>", "▁world", "▁▁")
    deltas = Detokenizer(hello)
    assert [deltas.push([token]) for token in ids] == ["world", "", " world", "  "]
    assert hello.decode(ids, skip_special=False) == "world</s> world  "


def test_a_dropped_space_may_be_a_token_of_its_own(hello: Tokenizer) -> None:
    ids = ids_of(hello, "<s>", "▁", "▁world")
    assert stream(hello, ids, [1, 2], skip_special=True)[1] == ["", "", " world", ""]


def test_a_continued_text_keeps_its_first_space(hello: Tokenizer) -> None:
    detokenizer = Detokenizer(hello, continues=True)
    assert detokenizer.push(ids_of(hello, "▁world")) == " world"


def small_backend(decoder: decoders.Decoder | None, *words: str) -> Tokenizer:
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<u>"))
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    if decoder is not None:
        backend.decoder = decoder
    return Tokenizer(backend)


@pytest.mark.parametrize(
    ("decoder", "words"),
    [
        (None, ("red", "", "green", "<u>")),
        (decoders.Metaspace(), ("▁red", "▁", "bl▁ue", "▁▁", "<u>")),
        (decoders.Metaspace(prepend_scheme="never"), ("▁red", "▁", "blue", "<u>")),
        (decoders.WordPiece(), ("re", "##d", ".", "n't", "<u>")),
        (decoders.Sequence([decoders.ByteLevel()]), ("red", "Ġx", "Ã", "©", "日", "<u>")),
        (
            decoders.Sequence(
                [decoders.Replace("_", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
            ),
            ("_", "__", "a_", "_b", "<u>"),
        ),
    ],
)
@given(data=st.data(), cuts=CUTS, skip_special=st.booleans())
def test_every_supported_decoder_streams_as_it_decodes(
    decoder: decoders.Decoder | None,
    words: tuple[str, ...],
    data: st.DataObject,
    cuts: list[int],
    skip_special: bool,
) -> None:
    tokenizer = small_backend(decoder, *words)
    ids = data.draw(st.lists(st.integers(0, len(words) + 2), max_size=8))
    text, _ = stream(tokenizer, ids, cuts, skip_special)
    assert text == tokenizer.decode(ids, skip_special)
    assert text == backend_decode(tokenizer, ids, skip_special)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip("x", 1, 0)]),
    ],
)
def test_a_decoder_that_needs_the_whole_text_is_refused(decoder: decoders.Decoder) -> None:
    with pytest.raises(TokenizerError, match="cannot be streamed"):
        small_backend(decoder, "<u>")


def elapsed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def test_a_token_costs_the_same_late_in_a_long_text(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("The quick brown fox é北🎉 jumps over the lazy dog. " * 400)
    half = len(ids) // 2
    long = Detokenizer(smollm2)
    long.push(ids[:half])
    early, late = [], []
    # In turns, so that whatever else the machine does at the moment slows both alike.
    for token in ids[half:]:
        short = Detokenizer(smollm2)
        early.append(elapsed(partial(short.push, [token])))
        late.append(elapsed(partial(long.push, [token])))
    assert median(late) < 3 * median(early)
