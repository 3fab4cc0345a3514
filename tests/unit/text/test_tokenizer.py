import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, models, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from surefoot.errors import PromptError, TokenizerError
from surefoot.text.gguf_vocab import tokenizer_from_gguf
from surefoot.text.tokenizer import Tokenizer, load_tokenizer, read_end_ids
from tests.unit.text.vocabularies import HELLO, byte_level

SPECIAL = ("<s>", "</s>", "<pad>")


def write_json(folder: Path, name: str, content: object) -> None:
    (folder / name).write_text(json.dumps(content))


def plain_backend() -> Backend:
    """Bytes and three vocabulary entries that nothing marks as special."""
    metadata = byte_level(merges=[("h", "i")], special=SPECIAL)
    metadata["tokenizer.ggml.token_type"] = [1] * (len(SPECIAL) + 257)
    return tokenizer_from_gguf(metadata)._backend


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    plain_backend().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def load(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


def test_a_folder_without_tokenizer_files_has_no_tokenizer(tmp_path: Path) -> None:
    write_json(tmp_path, "config.json", {"eos_token_id": 2})
    assert load_tokenizer(tmp_path) is None
    assert read_end_ids(tmp_path) == {2}


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer_config.json", "vocab.json"])
def test_other_formats_are_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(TokenizerError, match=rf"has {name} but no tokenizer\.json") as caught:
        load_tokenizer(tmp_path)
    assert caught.value.parameter == "model"


@pytest.mark.parametrize(
    "content", ["", "{", "{}", "[]", '{"version": "1.0", "model": {}}', "\xff"]
)
def test_a_damaged_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(TokenizerError, match="is damaged") as caught:
        load_tokenizer(tmp_path)
    assert str(path) in str(caught.value)


def test_a_truncated_tokenizer_is_named(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is damaged"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "name",
    ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json"],
)
@pytest.mark.parametrize("content", ["{", "[1]", "\xff"])
def test_a_damaged_side_file_is_named(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content, encoding="latin-1")
    with pytest.raises(TokenizerError, match=name):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "described", [{"x": {"content": "a"}}, {"0": {"content": "<s>", "special": 3}}]
)
def test_added_tokens_of_wrong_form_are_named(folder: Path, described: object) -> None:
    write_json(folder, "tokenizer_config.json", {"added_tokens_decoder": described})
    with pytest.raises(TokenizerError, match="added_tokens_decoder"):
        load_tokenizer(folder)


def test_special_tokens_are_recognised_whole_and_left_out_of_text(folder: Path) -> None:
    assert load(folder).encode("<s>") != [0]
    write_json(
        folder, "tokenizer_config.json", {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    )
    tokenizer = load(folder)
    assert tokenizer.begin_id == 0
    assert tokenizer.special_ids == {0, 1}
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    ids = tokenizer.encode("<s>hi</s>")
    assert ids == [0, tokenizer._backend.token_to_id("hi"), 1]
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special=False) == "<s>hi</s>"


def test_the_map_of_special_tokens_fills_what_the_settings_leave_open(folder: Path) -> None:
    write_json(folder, "special_tokens_map.json", {"bos_token": "<pad>", "eos_token": "</s>"})
    write_json(folder, "tokenizer_config.json", {"bos_token": "<s>"})
    assert load(folder).special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    write_json(folder, "tokenizer_config.json", {"bos_token": None})
    assert load(folder).begin_id is None


@pytest.mark.parametrize(
    "settings",
    [
        {"additional_special_tokens": ["<pad>"]},
        {"extra_special_tokens": {"blank_token": "<pad>"}},
        {"added_tokens_decoder": {"2": {"content": "<pad>", "special": True}}},
    ],
)
def test_further_special_tokens_are_marked(folder: Path, settings: dict[str, object]) -> None:
    write_json(folder, "tokenizer_config.json", settings)
    assert load(folder).special_ids == {2}


def test_a_special_token_outside_the_vocabulary_is_not_invented(folder: Path) -> None:
    size = load(folder).vocab_size
    write_json(folder, "tokenizer_config.json", {"pad_token": "[PAD]"})
    tokenizer = load(folder)
    assert tokenizer.vocab_size == size
    assert not tokenizer.special_ids


def test_added_tokens_take_the_ids_and_rules_that_the_settings_give(folder: Path) -> None:
    size = load(folder).vocab_size
    described = {
        str(size): {"content": "<tool>", "special": False},
        str(size + 1): {"content": "<end>", "special": True, "rstrip": True},
        str(size + 9): {"content": "<astray>"},
    }
    write_json(folder, "tokenizer_config.json", {"added_tokens_decoder": described})
    tokenizer = load(folder)
    assert tokenizer.encode("<tool><end>  ") == [size, size + 1]
    assert tokenizer.special_ids == {size + 1}
    assert tokenizer.vocab_size == size + 2


def with_begin_token(backend: Backend) -> Backend:
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return backend


@pytest.mark.parametrize("flag", [True, False, None])
def test_the_begin_token_is_added_once_where_the_file_says_so(folder: Path, flag: bool) -> None:
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": flag}
    write_json(folder, "tokenizer_config.json", settings)
    assert load(folder).encode("hi")[0] != 0
    with_begin_token(plain_backend()).save(str(folder / "tokenizer.json"))
    tokenizer = load(folder)
    assert tokenizer.encode("hi").count(0) == 1
    assert tokenizer.encode("hi", add_special=False).count(0) == 0
    assert tokenizer.encode("hi") == AutoTokenizer.from_pretrained(folder)("hi").input_ids


@pytest.mark.parametrize(
    ("generation", "config", "settings", "expected"),
    [
        ({"eos_token_id": 7}, {"eos_token_id": 8}, {}, {7}),
        ({"eos_token_id": [7, 9]}, {}, {}, {7, 9}),
        ({}, {"eos_token_id": 8}, {}, {8}),
        ({"eos_token_id": None}, {"eos_token_id": [8, 5]}, {}, {8, 5}),
        ({}, {"text_config": {"eos_token_id": 6}}, {}, {6}),
        ({"eos_token_id": 7}, {}, {"eos_token": "</s>"}, {1, 7}),
        ({}, {}, {"eos_token": "</s>"}, {1}),
        ({}, {}, {"eos_token": "unknown"}, set()),
    ],
)
def test_end_tokens(
    folder: Path,
    generation: dict[str, object],
    config: dict[str, object],
    settings: dict[str, object],
    expected: set[int],
) -> None:
    write_json(folder, "generation_config.json", generation)
    write_json(folder, "config.json", config)
    write_json(folder, "tokenizer_config.json", settings)
    assert load(folder).end_ids == expected


@pytest.mark.parametrize("value", ["</s>", [1, "2"], -1, 1.5, {}])
def test_end_tokens_of_wrong_form_are_refused(folder: Path, value: object) -> None:
    write_json(folder, "generation_config.json", {"eos_token_id": value})
    with pytest.raises(TokenizerError, match=r"generation_config\.json: eos_token_id"):
        load_tokenizer(folder)


def test_chat_template_sources_in_order(folder: Path) -> None:
    assert load(folder).chat_template is None
    write_json(folder, "chat_template.json", {"chat_template": "from json"})
    assert load(folder).chat_template == "from json"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    write_json(folder, "tokenizer_config.json", {"chat_template": named})
    assert load(folder).chat_template == "d"
    write_json(folder, "tokenizer_config.json", {"chat_template": "from settings"})
    assert load(folder).chat_template == "from settings"
    (folder / "chat_template.jinja").write_text("from é file")
    assert load(folder).chat_template == "from é file"
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja"):
        load(folder)


def test_the_cut_and_padding_of_training_are_not_applied(folder: Path) -> None:
    backend = plain_backend()
    backend.enable_truncation(max_length=2)
    backend.enable_padding(length=8, pad_id=2)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load(folder)
    assert len(tokenizer.encode("abcd")) == 4
    assert len(tokenizer.encode("abcdefgxyzuvw")) == 13


def test_a_lone_surrogate_is_a_prompt_error(bytes_only: Tokenizer) -> None:
    with pytest.raises(PromptError, match="character 2 is the lone surrogate"):
        bytes_only.encode("ab\ud800")


def test_vocab_size_counts_holes_and_added_tokens() -> None:
    assert Tokenizer(Backend(models.WordLevel({"a": 0, "b": 41}, unk_token="a"))).vocab_size == 42
    backend = Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    backend.add_tokens([AddedToken("c")])
    assert Tokenizer(backend).vocab_size == 3


def test_ids_without_a_token_have_no_text(hello: Tokenizer) -> None:
    assert hello.decode([-1, 10**6]) == ""
    assert hello.token_text(10**6) == ""
    assert hello.token_text(-1) == ""


def test_token_text_is_for_display(hello: Tokenizer, bytes_only: Tokenizer) -> None:
    world = hello.encode(" world", add_special=False)[-1]
    assert hello.token_text(world) == " world"
    assert hello.token_text(1) == "<s>"
    assert bytes_only.token_text(1 + 0x80) == "\ufffd"


TEXTS = [
    "hello world hello",
    "  hello  world ",
    "<s>hello<think> world</s>",
    "héllo 🎉 北\n\t",
    "",
    " ",
    "▁hello",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_saved_sentence_piece_vocabulary_loads_as_in_transformers(
    tmp_path: Path, text: str
) -> None:
    tokenizer_from_gguf(HELLO)._backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    write_json(tmp_path, "tokenizer_config.json", settings)
    ours, theirs = load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    ids = ours.encode(text)
    assert ids == theirs(text).input_ids
    for skip in (True, False):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
