import copy
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerBase

from surefoot.errors import TokenizerError
from surefoot.text.gguf_vocab import PRE_TOKENIZERS, tokenizer_from_gguf
from surefoot.text.tokenizer import Tokenizer
from tests.unit.text.vocabularies import (
    HELLO,
    byte_level,
    byte_level_symbols,
    sentence_piece,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "def f(x: int) -> int:\n\tif x > 1:\n\t\treturn x ** 2  # it's squared\n\n\n    return 0\n",
    "naïve café, Ångström, Привет мир, שלום, 北京大学, こんにちは, 한국어, हिन्दी",
    "emoji 🎉 👩‍👩‍👧 🏳️‍🌈 and e\u0301 combined",
    "1234567890 3.14159e-10 0x1F 1,000,000 7th",
    "   leading,\ttabs\t\tand trailing   ",
    "\r\n\n\r\u00a0\u3000\u200b odd spaces\u2028x",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<repo_name>a/b<file_sep>x.py<|endoftext|>",
    "don't we'll I'VE they'RE it's",
    '{"key": ["value", null, -1.5e3]} <a href="x">&amp;</a>',
    "",
    " ",
    "a",
]


@pytest.mark.parametrize("text", CORPUS)
def test_smollm2_encodes_as_transformers(
    smollm2: Tokenizer, oracle: PreTrainedTokenizerBase, text: str
) -> None:
    assert smollm2.encode(text) == oracle(text).input_ids
    assert smollm2.decode(smollm2.encode(text), skip_special=False) == text


@given(st.text(st.characters(codec="utf-8") | st.sampled_from(" \n\t'<|>.,019aAéß"), max_size=40))
def test_smollm2_splits_digits_first_and_then_as_gpt2(
    smollm2: Tokenizer, split_oracle: PreTrainedTokenizerBase, text: str
) -> None:
    assert smollm2.encode(text) == split_oracle(text).input_ids


@pytest.fixture(scope="session")
def split_oracle(oracle: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Transformers' tokenizer, with the split that this vocabulary was trained with.

    From a GGUF file transformers takes the plain split of GPT-2, which differs where several
    spaces precede a digit and in digits other than 0 to 9.
    """
    changed = copy.deepcopy(oracle)
    changed._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return changed


def test_smollm2_roles(smollm2: Tokenizer, oracle: PreTrainedTokenizerBase) -> None:
    assert smollm2.vocab_size == len(oracle) == 49152
    assert smollm2.begin_id == oracle.bos_token_id == 1
    assert smollm2.end_ids == {oracle.eos_token_id} == {2}
    assert smollm2.special_tokens == oracle.special_tokens_map
    assert smollm2.special_ids == set(oracle.added_tokens_decoder)
    assert smollm2.chat_template == oracle.chat_template


SPLITS = [
    ("gpt-2", "I'll say 12345  \n x!?", ["I", "'ll", " say", " 12345", "  \n", " x", "!?"]),
    ("gpt-2", "I'LL", ["I", "'", "LL"]),
    ("smollm", "a 12  3 ²", ["a", " ", "1", "2", "  ", "3", " ", "²"]),
    ("starcoder", "a 12", ["a", " ", "1", "2"]),
    ("default", "x=12345, y", ["x", "=", "123", "45", ",", " y"]),
    ("llama-bpe", "I'LL (say) 12345", ["I", "'LL", " (", "say", ")", " ", "123", "45"]),
    ("llama-bpe", "a\n\n  x", ["a", "\n\n", " ", " x"]),
    ("llama3", "a1234", ["a", "123", "4"]),
    ("llama-v3", "a1234", ["a", "123", "4"]),
    ("qwen2", "I'LL be 123", ["I", "'LL", " be", " ", "1", "2", "3"]),
    ("qwen2", "e\u0301", ["\u00e9"]),
    ("qwen35", "e\u0323\u0302x 12", ["\u1ec7x", " ", "1", "2"]),
    ("qwen35", "हिन्दी!", ["हिन्दी", "!"]),
    ("qwen2", "हिन्दी!", ["ह", "िन", "्द", "ी!"]),
    ("tekken", "HelloWorld JSONs 12\n", ["Hello", "World", " JSONs", " ", "1", "2", "\n"]),
    ("tekken", "a/b.//\n", ["a", "/b", ".//\n"]),
]  # fmt: skip


@pytest.mark.parametrize(("pre", "text", "expected"), SPLITS)
def test_pre_tokenizers_split_as_their_models(pre: str, text: str, expected: list[str]) -> None:
    backend = tokenizer_from_gguf(byte_level(pre=pre))._backend
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert pieces == [byte_level_symbols(piece) for piece in expected]


def test_every_pre_tokenizer_is_tested() -> None:
    assert {pre for pre, _, _ in SPLITS} == set(PRE_TOKENIZERS)


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
@given(text=st.text(st.characters(codec="utf-8"), max_size=30))
def test_no_pre_tokenizer_loses_text(pre: str, text: str) -> None:
    tokenizer = tokenizer_from_gguf(byte_level(pre=pre))
    normalizer = tokenizer._backend.normalizer
    whole = normalizer.normalize_str(text) if normalizer is not None else text
    assert tokenizer.decode(tokenizer.encode(text, add_special=False), False) == whole


def test_merges_never_cross_a_split() -> None:
    tokenizer = tokenizer_from_gguf(byte_level(merges=[("1", "2"), ("a", "b")], pre="smollm"))
    assert [tokenizer.token_text(token) for token in tokenizer.encode("12ab")] == ["1", "2", "ab"]


@pytest.mark.parametrize(("pre", "expected"), [("llama-bpe", ["abc"]), ("gpt-2", ["ab", "c"])])
def test_whole_words_are_taken_without_merging_where_the_model_does_so(
    pre: str, expected: list[str]
) -> None:
    metadata = byte_level(merges=[("a", "b"), ("b", "c"), ("a", "bc")], pre=pre)
    tokenizer = tokenizer_from_gguf(metadata)
    ids = tokenizer.encode("abc", add_special=False)
    assert [tokenizer.token_text(token) for token in ids] == expected


@pytest.mark.parametrize(
    ("pre", "flags", "expected"),
    [
        ("gpt-2", {}, [98]),
        ("gpt-2", {"add_bos_token": True}, [0, 98]),
        ("gpt-2", {"add_eos_token": True}, [98, 0]),
        ("llama-bpe", {}, [0, 98]),
        ("llama-bpe", {"add_bos_token": False}, [98]),
    ],
)
def test_what_surrounds_a_text(pre: str, flags: dict[str, bool], expected: list[int]) -> None:
    metadata = byte_level(pre=pre)
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in flags.items()}
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.encode("a") == expected
    assert tokenizer.encode("a", add_special=False) == [98]


def test_all_end_keys_end_a_text() -> None:
    metadata = byte_level(special=("<s>", "</s>", "<eot>", "<eom>"))
    metadata |= {
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 2,
        "tokenizer.ggml.eom_token_id": 3,
    }
    assert tokenizer_from_gguf(metadata).end_ids == {1, 2, 3}


def test_user_defined_tokens_are_whole_but_not_special(hello: Tokenizer) -> None:
    ids = hello.encode("<think>hello", add_special=False)
    assert [hello.token_text(token) for token in ids] == ["<think>", " ", "hello"]
    assert hello.decode(ids) == "<think> hello"
    assert hello.special_ids == {0, 1, 2}


def test_special_tokens_may_use_any_character() -> None:
    names = ("<s>", "<｜begin▁of▁sentence｜>", "<a b:0>")
    metadata = byte_level(special=names)
    metadata |= {"tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.add_bos_token": True}
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.encode("<｜begin▁of▁sentence｜>") == [2, 1]
    assert tokenizer.decode([2, 1], skip_special=False) == "<a b:0><｜begin▁of▁sentence｜>"
    assert tokenizer.vocab_size == 259


def join_best(text: str, pieces: Sequence[str]) -> list[str]:
    """SentencePiece in a few lines: join the neighbours with the best union, the leftmost first."""
    symbols = list(text)
    rank = {piece: place for place, piece in enumerate(pieces)}
    while True:
        unions = [left + right for left, right in pairwise(symbols)]
        known = [(rank[union], place) for place, union in enumerate(unions) if union in rank]
        if not known:
            return symbols
        place = min(known)[1]
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]


@st.composite
def trained_pieces(draw: st.DrawFn) -> list[str]:
    """Pieces as training yields them: each joins two that were there before."""
    letters = list("▁ab")
    pieces: list[str] = []
    for _ in range(draw(st.integers(0, 12))):
        known = st.sampled_from(pieces + letters)
        union = draw(known) + draw(known)
        if union not in pieces:
            pieces.append(union)
    return pieces + letters


@given(trained_pieces(), st.text("ab ", max_size=24))
def test_merging_by_score_is_that_of_sentence_piece(pieces: list[str], text: str) -> None:
    tokenizer = tokenizer_from_gguf(sentence_piece(pieces))
    ids = tokenizer.encode(text, add_special=False)
    marked = "▁" + text.replace(" ", "▁") if text else ""
    assert [tokenizer._backend.id_to_token(token) for token in ids] == join_best(marked, pieces)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello world", ["<s>", "▁", "hello", "▁world"]),
        ("  hello", ["<s>", "▁▁", "▁", "hello"]),
        ("xé", ["<s>", "▁", "<0x78>", "é"]),
        ("北", ["<s>", "▁", "<0xE5>", "<0x8C>", "<0x97>"]),
        ("</s>hello", ["<s>", "</s>", "▁", "hello"]),
        ("<0x41>", ["<s>", "▁", *(f"<0x{ord(c):02X}>" for c in "<0x41>")]),
        ("", ["<s>"]),
    ],
)
def test_sentence_piece_spelling(hello: Tokenizer, text: str, expected: list[str]) -> None:
    assert [hello._backend.id_to_token(token) for token in hello.encode(text)] == expected


def test_text_that_looks_like_a_byte_token_is_text() -> None:
    pieces = ["<0", "x4", "1>", "<0x4", "▁", *"<0x41>"]
    tokenizer = tokenizer_from_gguf(sentence_piece(pieces))
    ids = tokenizer.encode("<0x41>", add_special=False)
    assert [tokenizer.token_text(token) for token in ids] == [" ", "<0x4", "1>"]


def test_without_a_space_prefix_text_is_taken_as_it_is() -> None:
    tokenizer = tokenizer_from_gguf(HELLO | {"tokenizer.ggml.add_space_prefix": False})
    ids = tokenizer.encode("hello world", add_special=False)
    assert [tokenizer.token_text(token) for token in ids] == ["hello", " world"]
    assert tokenizer.decode(tokenizer.encode(" world")) == " world"


def test_sentence_piece_defaults() -> None:
    keys = ("bos_token_id", "eos_token_id", "unknown_token_id")
    metadata = {k: v for k, v in HELLO.items() if k.rpartition(".")[2] not in keys}
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.begin_id == 1
    assert tokenizer.end_ids == {2}
    assert tokenizer.encode("hello")[0] == 1


def without(metadata: dict[str, object], name: str) -> dict[str, object]:
    return {key: value for key, value in metadata.items() if key != f"tokenizer.ggml.{name}"}


BYTES = byte_level(merges=[("a", "b")])
TOKENS = BYTES["tokenizer.ggml.tokens"]
assert isinstance(TOKENS, list)
DAMAGE: list[tuple[dict[str, object], str]] = [
    ({}, r"tokenizer\.ggml\.model is None; supported are gpt2, llama"),
    ({"tokenizer.ggml.model": "bert"}, "model is 'bert'"),
    (BYTES | {"tokenizer.ggml.pre": "viking"}, r"pre is 'viking'; supported are default, gpt-2"),
    (without(BYTES, "pre"), r"pre is None; supported"),
    (without(BYTES, "tokens"), r"tokens must be a list of str"),
    (without(BYTES, "merges"), r"merges must be a list of str"),
    (without(HELLO, "scores"), r"scores must be a list of float"),
    (BYTES | {"tokenizer.ggml.tokens": [1, 2]}, r"tokens must be a list of str"),
    (BYTES | {"tokenizer.ggml.tokens": [*TOKENS[:-1], "a"]}, r"has 'a' twice, as token 98 and"),
    (BYTES | {"tokenizer.ggml.token_type": [1, 2]}, r"token_type has 2 entries, but there are"),
    (BYTES | {"tokenizer.ggml.merges": ["ab"]}, r"merges has 'ab', which is no pair"),
    (BYTES | {"tokenizer.ggml.merges": ["q zz"]}, r"merges do not fit the tokens"),
    (BYTES | {"tokenizer.ggml.eos_token_id": 9999}, r"eos_token_id must be a token below"),
    (BYTES | {"tokenizer.ggml.bos_token_id": "1"}, r"bos_token_id must be a token below"),
    (BYTES | {"tokenizer.ggml.add_bos_token": "yes"}, r"add_bos_token must be true or false"),
    (
        without(BYTES, "bos_token_id") | {"tokenizer.ggml.add_bos_token": True},
        r"add_bos_token is set but bos_token_id is missing",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("metadata", "message"), DAMAGE)
def test_damaged_metadata_is_an_error_that_names_the_key(
    metadata: dict[str, object], message: str
) -> None:
    with pytest.raises(TokenizerError, match=message):
        tokenizer_from_gguf(metadata)
