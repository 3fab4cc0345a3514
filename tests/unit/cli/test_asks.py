import io
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.cli.asks import ASK_DEFAULTS, Ask, AskOptions, read_asks
from surefoot.errors import SettingError
from surefoot.params import SamplingParams

Lines = Callable[..., Path]


@pytest.fixture(autouse=True)
def _no_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))


def test_a_line_may_be_text_ids_or_an_object(lines: Lines) -> None:
    messages = [{"role": "user", "content": "hi"}]
    path = lines("one", [1, 2], {"prompt": "two", "seed": 5}, {"messages": messages, "n": 2})
    one, ids, two, talk = read_asks(path)
    assert (one.prompt, ids.prompt, two.prompt) == ("one", [1, 2], "two")
    assert two.sampling == {"seed": 5}
    assert (talk.messages, talk.sampling) == (messages, {"n": 2})
    assert talk.place.endswith("prompts.jsonl, line 4")


def test_blank_lines_are_skipped_and_text_may_hold_any_character(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('\n"ä\\u2028ö"\n   \n"b"\n', encoding="utf-8")
    assert [ask.prompt for ask in read_asks(path)] == ["ä\u2028ö", "b"]


@pytest.mark.parametrize(
    ("value", "parameter", "reason"),
    [
        (5, "prompt", "text or a list of token ids"),
        ([1, "x"], "prompt", "text or a list of token ids"),
        ([True], "prompt", "text or a list of token ids"),
        (None, "prompt", "text or a list of token ids"),
        ({"prompt": None}, "prompt", "text or a list of token ids"),
        ({"seed": 1}, "file", "one of prompt and messages"),
        ({"prompt": "a", "messages": []}, "file", "one of prompt and messages"),
        ({"messages": []}, "messages", "list of objects"),
        ({"messages": ["hi"]}, "messages", "list of objects"),
        ({"prompt": "a", "warmth": 1}, "warmth", "unknown key"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "whole number"),
    ],
)
def test_a_wrong_line_is_named(lines: Lines, value: object, parameter: str, reason: str) -> None:
    with pytest.raises(SettingError, match=rf"{reason}.*") as caught:
        read_asks(lines("fine", value))
    assert caught.value.parameter == parameter
    assert "prompts.jsonl, line 2" in str(caught.value)


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="cannot be read"):
        read_asks(tmp_path / "none.jsonl")
    with pytest.raises(SettingError, match="cannot be read"):
        read_asks(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(SettingError, match="holds no prompts"):
        read_asks(tmp_path / "empty.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'"\xe4"')
    with pytest.raises(SettingError, match="not UTF-8"):
        read_asks(tmp_path / "latin.jsonl")
    (tmp_path / "text.jsonl").write_text("plain text")
    with pytest.raises(SettingError, match="line 1 is not JSON"):
        read_asks(tmp_path / "text.jsonl")


def test_sampling_of_a_line_goes_before_the_rest(lines: Lines) -> None:
    path = lines({"prompt": "a", "top_p": 0.5, "logit_bias": {"7": 1}})
    params = read_asks(path)[0].params(SamplingParams(top_p=0.9, temperature=0.7))
    assert (params.top_p, params.temperature, params.logit_bias) == (0.5, 0.7, {7: 1})


def test_sampling_out_of_range_names_its_line(lines: Lines) -> None:
    ask = read_asks(lines({"prompt": "a", "top_p": 7}))[0]
    with pytest.raises(SettingError, match=r"not 7 \(.*line 1\)") as caught:
        ask.params(SamplingParams())
    assert caught.value.parameter == "top_p"


def test_arguments_flags_and_file_come_in_order(lines: Lines) -> None:
    options = AskOptions(prompt=["c"], file=lines("d"))
    assert [ask.prompt for ask in options.gather(["a", "b"])] == ["a", "b", "c", "d"]


def test_standard_input_is_one_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
    assert [ask.prompt for ask in ASK_DEFAULTS.gather([])] == ["two\nlines"]


def test_standard_input_is_left_alone_when_there_are_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stdin = io.StringIO("more")
    monkeypatch.setattr("sys.stdin", stdin)
    assert [ask.prompt for ask in ASK_DEFAULTS.gather(["a"])] == ["a"]
    assert stdin.read() == "more"


def test_a_terminal_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal("typed"))
    assert ASK_DEFAULTS.gather([]) == []


def test_chat_makes_conversations() -> None:
    asks = AskOptions(chat=True, system="be kind").gather(["hi"])
    assert asks[0].messages == (
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
    )
    assert AskOptions(chat=True).gather(["hi"])[0].messages == ({"role": "user", "content": "hi"},)


def test_a_conversation_keeps_its_own_system_message(lines: Lines) -> None:
    messages = [{"role": "system", "content": "mine"}, {"role": "user", "content": "hi"}]
    asks = AskOptions(file=lines({"messages": messages}), system="other").gather([])
    assert list(asks[0].messages) == messages


def test_the_system_message_reaches_conversations_of_a_file(lines: Lines) -> None:
    path = lines({"messages": [{"role": "user", "content": "hi"}]}, "plain")
    talk, plain = AskOptions(file=path, system="s").gather([])
    assert talk.messages[0] == {"role": "system", "content": "s"}
    assert (plain.prompt, plain.messages) == ("plain", ())


@pytest.mark.parametrize("options", [AskOptions(system="s"), AskOptions(chat_template_kwargs="{}")])
def test_chat_flags_without_a_chat_are_refused(options: AskOptions) -> None:
    with pytest.raises(SettingError, match="without --chat"):
        options.gather(["a"])


def test_no_template_takes_token_ids() -> None:
    with pytest.raises(SettingError, match="takes text, not token ids"):
        Ask(prompt=[1, 2]).as_chat(None)


def test_template_options() -> None:
    assert ASK_DEFAULTS.template_options() == {}
    assert AskOptions(chat_template_kwargs='{"a": 1}').template_options() == {"a": 1}
    with pytest.raises(SettingError, match="must be a JSON object"):
        AskOptions(chat_template_kwargs="[1]").template_options()
