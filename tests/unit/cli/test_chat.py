import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from surefoot.cli.chat import Talk, stopping
from surefoot.cli.session import Session, WatchedEngine
from surefoot.cli.show import Screen
from surefoot.config import EngineConfig
from surefoot.engine.models import load
from surefoot.errors import SettingError
from surefoot.params import SamplingParams
from surefoot.text.messages import Message
from tests.unit.cli.commands import Run

Say = Callable[[str], list[str]]


class Paper(Screen):
    """Keeps what is said, and may press Ctrl-C after some pieces of text."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self.notes: list[str] = []
        self.press_after: int | None = None

    def text(self, piece: str) -> None:
        self.pieces.append(piece)
        if len(self.pieces) == self.press_after:
            signal.raise_signal(signal.SIGINT)

    def note(self, line: str, style: str | None = "dim") -> None:
        self.notes.append(line)

    def warn(self, line: str) -> None:
        self.notes.append(line)


class Prompts(Session):
    """Keeps the conversations that were rendered."""

    def __init__(self, engine: WatchedEngine) -> None:
        super().__init__(engine)
        self.seen: list[list[Message]] = []
        render = self.llm.render_chat

        def keep(messages: Sequence[Message], options: object) -> list[int]:
            self.seen.append(list(messages))
            return render(messages, {})

        self.llm.render_chat = keep  # type: ignore[method-assign]


@pytest.fixture
def session(tiny: Path) -> Iterator[Prompts]:
    config = EngineConfig(page_tokens=4, drafter="none")
    engine = WatchedEngine(load(str(tiny), config), config)
    yield Prompts(engine)
    engine.close()


def talk(session: Session, screen: Screen, max_tokens: int = 6, system: str | None = None) -> Talk:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return Talk(session, screen, params, {}, system)


def contents(messages: Sequence[Message]) -> list[object]:
    return [message["content"] for message in messages]


def test_a_conversation_grows(session: Prompts) -> None:
    paper = Paper()
    talking = talk(session, paper, system="s")
    talking.take("one")
    answer = "".join(paper.pieces).removesuffix("\n")
    talking.take("two")
    assert contents(session.seen[0]) == ["s", "one"]
    assert contents(session.seen[1]) == ["s", "one", answer, "two"]
    assert [message["role"] for message in session.seen[1]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]


def test_what_was_said_comes_from_the_cache(session: Prompts) -> None:
    paper = Paper()
    talking = talk(session, paper)
    talking.take("one")
    talking.take("two")
    assert "from the cache" not in paper.notes[0]
    assert "prompt tokens from the cache" in paper.notes[1]


def test_reset_forgets_and_system_is_set(session: Prompts) -> None:
    talking = talk(session, Paper())
    for line in ("one", "/reset", "/system be kind", "two", "/system", "three"):
        talking.take(line)
    assert contents(session.seen[1]) == ["be kind", "two"]
    assert contents(session.seen[2])[0] == "two"


def test_an_unknown_command_is_explained_and_not_said(session: Prompts) -> None:
    paper = Paper()
    talk(session, paper).take("/frob")
    assert paper.notes[0].startswith("/frob is unknown; /exit ends")
    assert session.seen == []


def test_ctrl_c_stops_an_answer_and_the_talk_goes_on(session: Prompts) -> None:
    paper = Paper()
    paper.press_after = 3
    talking = talk(session, paper, max_tokens=200)
    talking.take("one")
    assert paper.notes == ["stopped"]
    assert len(paper.pieces) == 4
    assert session.engine.idle
    session.engine.parts.ledger.audit()
    assert session.engine.usage.held_pages == 0
    talking.take("two")
    assert contents(session.seen[1]) == ["one", "".join(paper.pieces[:3]), "two"]
    assert len(paper.notes) == 2


def test_what_cannot_be_served_does_not_end_the_talk(session: Prompts) -> None:
    paper = Paper()
    talking = talk(session, paper)
    talking.take("long " * 200)
    assert paper.notes[0].startswith("prompt: has ")
    assert "/reset" in paper.notes[0]
    talking.take("one")
    assert contents(session.seen[1]) == ["one"]


def test_lines_are_taken_until_exit_or_the_end(session: Prompts) -> None:
    lines = iter(["one", "  ", "/exit", "two"])
    talk(session, Paper()).go(lambda: next(lines))
    assert [contents(seen) for seen in session.seen] == [["one"]]

    def end() -> str:
        raise EOFError

    talk(session, Paper()).go(end)


def test_one_sample_only(session: Prompts) -> None:
    with pytest.raises(SettingError, match="must be 1"):
        Talk(session, Paper(), SamplingParams(n=2), {}, None)


def test_a_second_ctrl_c_acts_at_once() -> None:
    with stopping() as stopped:
        signal.raise_signal(signal.SIGINT)
        assert stopped()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_command(surefoot: Run, tiny: Path) -> None:
    done = surefoot(
        *("chat", tiny, "--max-tokens", 4, "--drafter", "ngram", "--ignore-eos"),
        stdin="one\n/exit\ntwo\n",
    )
    assert done.status == 0
    assert done.err.splitlines()[0].startswith("/exit ends")
    assert done.err.splitlines()[1].startswith("4 tokens, ")
    assert len(done.err.splitlines()) == 2


def test_a_model_without_template_cannot_chat(surefoot: Run, tiny_ids: Path) -> None:
    done = surefoot("chat", tiny_ids, stdin="one\n")
    assert done.status == 2
    assert "has no chat template" in done.err
