"""What goes wrong at the front door is named, and the engine lives on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from surefoot.engine.models import LoadedModel
from surefoot.errors import EngineClosedError, PromptError, SettingError, TokenizerError
from surefoot.llm import LLM
from surefoot.params import SamplingParams
from tests.unit.llms import assert_at_rest, greedy, ids_of, llm_on, load_tiny

VOCAB = 259
LONGEST = 256


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A model without a tokenizer."""
    return load_tiny(tmp_path_factory.mktemp("bare"), tokenizer=False)


@pytest.fixture
def llm(target: LoadedModel) -> Iterator[LLM]:
    with llm_on(target) as opened:
        before = ids_of(opened, "ab", greedy())
        yield opened
        assert_at_rest(opened)
        assert ids_of(opened, "ab", greedy()) == before


BAD_PROMPTS: list[tuple[str | Sequence[int], str]] = [
    ("", "is empty"),
    ([], "is empty"),
    ([3, VOCAB], f"token id {VOCAB} is outside the vocabulary of {VOCAB} tokens"),
    ([-1], "token id -1 is outside"),
    ([True], "token id True is outside"),
    ([1] * LONGEST, f"has {LONGEST} tokens, and the context holds {LONGEST}"),
    ("x" * (LONGEST + 1), "shorten it or raise max_model_len"),
    ("\ud800", "lone surrogate"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS, ids=[m for _, m in BAD_PROMPTS])
def test_a_bad_prompt_is_named(llm: LLM, prompt: str | Sequence[int], message: str) -> None:
    with pytest.raises(PromptError, match=message) as caught:
        llm.generate(prompt, greedy())
    assert caught.value.parameter == "prompt"
    with pytest.raises(PromptError, match=message):
        llm.stream(prompt, greedy())


@pytest.mark.parametrize(
    ("prompt", "message"), BAD_PROMPTS[2:], ids=[m for _, m in BAD_PROMPTS[2:]]
)
def test_one_bad_prompt_stops_the_whole_call(
    llm: LLM, prompt: str | Sequence[int], message: str
) -> None:
    with pytest.raises(PromptError, match=message):
        llm.generate(["good", [1, 2], prompt, "good"], greedy())
    assert_at_rest(llm)


@pytest.mark.parametrize("prompts", [[1, "a"], ["a", None], [1.5], 7, None])
def test_prompts_of_the_wrong_type_are_named(target: LoadedModel, prompts: object) -> None:
    llm = llm_on(target)
    with pytest.raises(PromptError):
        llm.generate(prompts, greedy())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "parameter"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": (1, VOCAB)}, "allowed_token_ids"),
        ({"stop_token_ids": (VOCAB,)}, "stop_token_ids"),
    ],
)
def test_values_that_do_not_suit_the_model_are_named(
    llm: LLM, changes: dict[str, object], parameter: str
) -> None:
    with pytest.raises(SettingError) as caught:
        llm.generate(["good", "good"], [greedy(), greedy(12, **changes)])
    assert caught.value.parameter == parameter
    assert str(VOCAB) in str(caught.value)
    assert_at_rest(llm)


@pytest.mark.parametrize(
    ("values", "parameter"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"seed": -1}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": ("",)}, "stop"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": 0.0099}, "repetition_penalty"),
        ({"repetition_penalty": 101}, "repetition_penalty"),
        ({"logit_bias": {1: 100.5}}, "logit_bias"),
        ({"logit_bias": {1: -(10**400)}}, "logit_bias"),
        ({"temperature": 10**400}, "temperature"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ],
)
def test_values_out_of_range_are_named(values: dict[str, object], parameter: str) -> None:
    with pytest.raises(SettingError, match=parameter) as caught:
        SamplingParams(**values)  # type: ignore[arg-type]
    assert caught.value.parameter == parameter


def test_an_error_while_generating_ends_the_call_alone(target: LoadedModel) -> None:
    class Halt(Exception):
        pass

    def halt(count: int) -> None:
        raise Halt

    with llm_on(target) as llm:
        stream = llm.stream("other", greedy(6))
        with pytest.raises(Halt):
            llm.generate(["a", "b"], greedy(40), halt)
        assert llm.engine.usage.running + llm.engine.usage.waiting == 1
        assert len(list(stream)) >= 1
        assert_at_rest(llm)


def test_more_prompts_than_may_wait_are_worked_off(target: LoadedModel) -> None:
    prompts = [[token] for token in range(1, 20)]
    with llm_on(target) as roomy, llm_on(target, max_waiting=2, max_rows=2) as narrow:
        want = [ids_of(roomy, prompt, greedy(4)) for prompt in prompts]
        results = narrow.generate(prompts, greedy(4))
        assert [list(result.outputs[0].token_ids) for result in results] == want
        assert_at_rest(narrow)


def test_more_samples_than_may_wait_are_refused(target: LoadedModel) -> None:
    with llm_on(target, max_waiting=3) as llm:
        assert len(llm.generate("ab", greedy(2, n=3))[0].outputs) == 3
        with pytest.raises(SettingError, match="3 requests wait already") as caught:
            llm.generate(["ab", "cd"], greedy(2, n=4))
        assert caught.value.parameter == "max_waiting"
        assert_at_rest(llm)
        assert len(ids_of(llm, "ab", greedy(2))) == 2


def test_a_full_line_refuses_a_stream(target: LoadedModel) -> None:
    with llm_on(target, max_waiting=1) as llm:
        stream = llm.stream("ab", greedy(2))
        with pytest.raises(SettingError, match="max_waiting"):
            llm.stream("cd", greedy(2))
        assert [token for piece in stream for token in piece.token_ids] == ids_of(
            llm, "ab", greedy(2)
        )


def test_without_a_tokenizer_token_ids_are_served(bare: LoadedModel) -> None:
    with llm_on(bare) as llm:
        (result,) = llm.generate([1, 2, 3], greedy(7))
        assert len(result.outputs[0].token_ids) == 7
        assert result.outputs[0].text == ""
        assert result.prompt is None
        assert [
            token for piece in llm.stream([1, 2, 3], greedy(7)) for token in piece.token_ids
        ] == (list(result.outputs[0].token_ids))


def test_without_a_tokenizer_text_is_refused(bare: LoadedModel) -> None:
    with llm_on(bare) as llm:
        with pytest.raises(PromptError, match="no tokenizer; give a list of token ids"):
            llm.generate("abc", greedy())
        with pytest.raises(TokenizerError, match="no chat template"):
            llm.chat([{"role": "user", "content": "hi"}])
        for name in ("stop", "bad_words"):
            with pytest.raises(SettingError, match="needs a tokenizer") as caught:
                llm.generate([1], greedy(12, **{name: ("x",)}))
            assert caught.value.parameter == name
        assert_at_rest(llm)
        assert len(ids_of(llm, [1], greedy(3))) == 3


def test_a_closed_engine_says_so(target: LoadedModel) -> None:
    llm = llm_on(target)
    begun = llm.stream("ab", greedy())
    next(begun)
    llm.close()
    llm.close()
    with pytest.raises(EngineClosedError, match="closed; open a new one"):
        llm.generate("ab", greedy())
    with pytest.raises(EngineClosedError):
        llm.stream("ab", greedy())
    with pytest.raises(EngineClosedError):
        list(begun)


def test_leaving_the_context_closes(target: LoadedModel) -> None:
    with llm_on(target) as llm:
        pass
    with pytest.raises(EngineClosedError):
        llm.generate("ab", greedy())


def test_an_error_inside_the_context_closes_too(target: LoadedModel) -> None:
    llm = llm_on(target)
    with pytest.raises(PromptError), llm:
        llm.generate("", greedy())
    with pytest.raises(EngineClosedError):
        llm.generate("ab", greedy())


def test_several_engines_may_share_a_model(target: LoadedModel) -> None:
    with llm_on(target) as one, llm_on(target) as other:
        assert ids_of(one, "ab", greedy()) == ids_of(other, "ab", greedy())
        one.close()
        assert len(ids_of(other, "ab", greedy())) == 12


@pytest.mark.parametrize(
    ("settings", "parameter"),
    [
        ({"max_rowz": 3}, "max_rowz"),
        ({"drafter": "psychic"}, "drafter"),
        ({"max_model_len": LONGEST + 1}, "max_model_len"),
        ({"memory": 100}, "memory"),
        ({"draft_tokens": 17}, "draft_tokens"),
        ({"drafter": "mtp"}, "drafter"),
        ({"trust_remote_code": True}, "trust_remote_code"),
    ],
)
def test_settings_that_cannot_be_had_are_named(
    target: LoadedModel, settings: dict[str, object], parameter: str
) -> None:
    with pytest.raises(SettingError) as caught:
        llm_on(target, **settings)
    assert caught.value.parameter == parameter


def test_a_model_that_is_not_there_is_named() -> None:
    with pytest.raises(SettingError, match="no-such-folder") as caught:
        LLM("./no-such-folder")
    assert caught.value.parameter == "model"
