import pytest

from surefoot.cli.show import Screen, amount, bytes_text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (512 << 20, "512.0 MiB")],
)
def test_bytes_for_reading(count: int, text: str) -> None:
    assert bytes_text(count) == text


def test_amounts() -> None:
    assert [amount(count, "token") for count in (0, 1, 2000)] == [
        "0 tokens",
        "1 token",
        "2,000 tokens",
    ]


def test_results_and_notes_go_apart_and_brackets_stay(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen.text("[bold]a")
    screen.line("[red]b[/red] :smile:", style="bold")
    screen.note("[c]")
    screen.warn("d")
    out, err = capsys.readouterr()
    assert out == "[bold]a[red]b[/red] :smile:\n"
    assert err == "[c]\nsurefoot: d\n"


def test_long_lines_are_not_broken(capsys: pytest.CaptureFixture[str]) -> None:
    Screen().line("word " * 100)
    assert capsys.readouterr().out.count("\n") == 1


def test_json_is_one_line_of_plain_letters(capsys: pytest.CaptureFixture[str]) -> None:
    Screen().json({"text": "\u00e4\n"})
    assert capsys.readouterr().out == '{"text": "\\u00e4\\n"}\n'


def test_a_table_rounds_and_aligns(capsys: pytest.CaptureFixture[str]) -> None:
    Screen().table("title", ("name", "speed"), [("a", 1.23456), ("b", 123.456)])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "title"
    assert lines[1] == "name  speed"
    assert lines[3:] == ["a     1.235", "b     123.5"]


def test_numbers_as_they_are_to_be_read_align_too(capsys: pytest.CaptureFixture[str]) -> None:
    Screen().table("", ("what", "bytes"), [("a", "1,234"), ("b", ""), ("c", 7)])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "what  bytes"
    assert lines[2:] == ["a     1,234", "b", "c         7"]
    Screen().table("", ("what",), [("1,234",), ("many",)])
    assert capsys.readouterr().out.splitlines()[2].startswith("1,234")


def test_a_table_in_a_file_is_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    Screen().table("", ("a", "b"), [("x" * 50, "y" * 50)])
    assert "x" * 50 + "  " + "y" * 50 in capsys.readouterr().out


def test_progress_stays_away_from_files(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    with screen.loading("model") as report:
        report("Fetching 5 files: 40%")
        report("model.layers.0.weight")
    with screen.counting("timing", 3) as count:
        count(1, "one")
    assert capsys.readouterr() == ("", "")


def test_progress_shows_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    screen = Screen()
    with screen.loading("model") as report:
        report("Fetching 5 files: 40%")
    with screen.counting("timing", 3) as count:
        count(2, "[b]")
    out, err = capsys.readouterr()
    assert out == ""
    assert "Fetching 5 files" in err
    assert "timing: 2/3 [b]" in err
