"""Small vocabularies in the form of GGUF metadata, for the tests of this folder."""

from collections.abc import Sequence

from surefoot.text.pieces import BYTE_ALPHABET

Metadata = dict[str, object]

_BYTE_SYMBOLS = [symbol for symbol, _ in sorted(BYTE_ALPHABET.items(), key=lambda item: item[1])]


def byte_level_symbols(text: str) -> str:
    """The token text that stands for `text` in a byte-level vocabulary."""
    return "".join(_BYTE_SYMBOLS[byte] for byte in text.encode())


def byte_level(
    merges: Sequence[tuple[str, str]] = (), pre: str = "gpt-2", special: Sequence[str] = ("<s>",)
) -> Metadata:
    """All bytes, the given merges (as plain text), and special tokens in front."""
    pairs = [(byte_level_symbols(left), byte_level_symbols(right)) for left, right in merges]
    plain = [*_BYTE_SYMBOLS, *(left + right for left, right in pairs)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*special, *plain],
        "tokenizer.ggml.token_type": [3] * len(special) + [1] * len(plain),
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in pairs],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }


def sentence_piece(pieces: Sequence[str], user_defined: Sequence[str] = ()) -> Metadata:
    """<unk> <s> </s>, all bytes, user-defined tokens, then `pieces`, the best-scored first."""
    marks = ["<unk>", "<s>", "</s>"]
    raw = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*marks, *raw, *user_defined, *pieces]
    before = len(tokens) - len(pieces)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3]
        + [6] * 256
        + [4] * len(user_defined)
        + [1] * len(pieces),
        "tokenizer.ggml.scores": [0.0] * before + [-float(place) for place in range(len(pieces))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


WORDS = (
    "lo",
    "wo",
    "rl",
    "\u2581wo",
    "\u2581worl",
    "\u2581world",
    "he",
    "llo",
    "hello",
    "\u2581\u2581",
)
LETTERS = ("\u2581", *"helowrd", "\u00e9", "\U0001f389")
HELLO = sentence_piece([*WORDS, *LETTERS], user_defined=["<think>"])
