"""The offline front door: prompts in, results out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from surefoot.engine.models import LoadedModel
from surefoot.errors import PromptError, SettingError, TokenizerError
from surefoot.llm import LLM, Prompt
from surefoot.params import SamplingParams
from surefoot.testing.tiny_models import CHAT_TEMPLATE
from surefoot.text.template import ChatTemplate
from tests.unit.llms import assert_at_rest, greedy, ids_of, joined, llm_on, load_tiny, sampled

PROMPT = "sure foot, sure foot, sure f"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def llm(target: LoadedModel) -> Iterator[LLM]:
    with llm_on(target) as opened:
        yield opened
        assert_at_rest(opened)


def test_a_text_becomes_a_result(llm: LLM) -> None:
    (result,) = llm.generate("abc", greedy(6))
    assert result.prompt == "abc"
    assert result.prompt_token_ids == (97, 98, 99)
    (output,) = result.outputs
    assert (output.index, output.finish_reason, output.error) == (0, "length", None)
    assert len(output.token_ids) == 6
    assert output.logprobs is None
    assert result.prompt_logprobs is None


def test_the_text_is_that_of_the_tokens(llm: LLM) -> None:
    assert llm.engine.tokenizer is not None
    (result,) = llm.generate(PROMPT, sampled(3, 30, ignore_eos=True))
    output = result.outputs[0]
    assert output.text == llm.engine.tokenizer.decode(output.token_ids)


def test_token_ids_do_the_same_as_their_text(llm: LLM) -> None:
    (by_text,) = llm.generate("abc", greedy())
    (by_ids,) = llm.generate([97, 98, 99], greedy())
    assert by_ids.prompt is None
    assert by_ids.outputs == by_text.outputs


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts: list[Prompt] = [PROMPT, "b", [3, 4, 5], "dd" * 20, "eee", [7], PROMPT]
    together = llm.generate(prompts, greedy())
    alone = [ids_of(llm, prompt, greedy()) for prompt in prompts]
    assert [list(result.outputs[0].token_ids) for result in together] == alone
    texts = [PROMPT, "b", None, "dd" * 20, "eee", None, PROMPT]
    assert [result.prompt for result in together] == texts


def test_each_prompt_may_have_its_own_params(llm: LLM) -> None:
    results = llm.generate(["a", "b"], [greedy(3), greedy(5)])
    assert [len(result.outputs[0].token_ids) for result in results] == [3, 5]


def test_params_must_be_one_or_one_for_each(llm: LLM) -> None:
    with pytest.raises(SettingError, match=r"params: 2 for 3 prompts; give one or one for each"):
        llm.generate(["a", "b", "c"], [greedy(), greedy()])


def test_progress_counts_every_token(llm: LLM) -> None:
    counts: list[int] = []
    results = llm.generate(["a", PROMPT], [greedy(5), greedy(9, n=2)], counts.append)
    assert sum(counts) == sum(len(o.token_ids) for r in results for o in r.outputs) == 23


@pytest.mark.parametrize("drafter", ["none", "ngram"])
@pytest.mark.parametrize("seed", [None, 5])
def test_a_stream_adds_up_to_the_result(
    target: LoadedModel, seed: int | None, drafter: str
) -> None:
    params = greedy(20) if seed is None else sampled(seed, 20)
    with llm_on(target, drafter=drafter) as llm:
        (result,) = llm.generate(PROMPT, params)
        pieces = list(llm.stream(PROMPT, params))
        assert joined(pieces) == (result.outputs[0].text, list(result.outputs[0].token_ids))
        reasons = [piece.finish_reason for piece in pieces]
        assert reasons[-1] == result.outputs[0].finish_reason
        assert set(reasons[:-1]) <= {None}
        assert_at_rest(llm)


def test_a_stream_of_samples_marks_each_piece(llm: LLM) -> None:
    params = sampled(9, 6, n=3, ignore_eos=True)
    pieces = list(llm.stream("ab", params))
    (result,) = llm.generate("ab", params)
    for output in result.outputs:
        own = [piece for piece in pieces if piece.index == output.index]
        assert joined(own) == (output.text, list(output.token_ids))
        assert [piece.finish_reason for piece in own if piece.finish_reason] == ["length"]


def test_leaving_a_stream_early_ends_the_request(llm: LLM) -> None:
    for piece in llm.stream("ab", greedy(50)):
        assert piece.finish_reason is None
        break
    assert_at_rest(llm)


def test_closing_a_stream_before_its_first_piece_ends_the_request(target: LoadedModel) -> None:
    llm = llm_on(target)
    stream = llm.stream("ab", greedy(50))
    stream.close()
    assert_at_rest(llm)


def test_streams_may_be_read_in_turn(llm: LLM) -> None:
    one, other = llm.stream("ab", greedy()), llm.stream(PROMPT, greedy())
    pieces = [list(pair) for pair in zip(one, other, strict=True)]
    assert joined([pair[0] for pair in pieces])[1] == ids_of(llm, "ab", greedy())
    assert joined([pair[1] for pair in pieces])[1] == ids_of(llm, PROMPT, greedy())


def test_generating_during_a_stream_disturbs_neither(llm: LLM) -> None:
    stream = llm.stream(PROMPT, greedy(15))
    first = [next(stream)]
    between = ids_of(llm, "ab", greedy())
    rest = list(stream)
    assert joined(first + rest)[1] == ids_of(llm, PROMPT, greedy(15))
    assert between == ids_of(llm, "ab", greedy())


MESSAGES = [{"role": "user", "content": "hi"}]


def test_chat_goes_through_the_template(llm: LLM) -> None:
    (result,) = llm.chat(MESSAGES, greedy())
    assert bytes(result.prompt_token_ids) == b"user: hi\nassistant:"
    assert list(result.outputs[0].token_ids) == ids_of(llm, "user: hi\nassistant:", greedy())


def test_chat_takes_several_conversations(llm: LLM) -> None:
    longer = [*MESSAGES, {"role": "assistant", "content": "yo"}, {"role": "user", "content": "?"}]
    results = llm.chat([MESSAGES, longer], greedy())
    alone = [llm.chat(one, greedy())[0] for one in (MESSAGES, longer)]
    assert [r.outputs[0].token_ids for r in results] == [r.outputs[0].token_ids for r in alone]


def test_template_options_reach_the_template(llm: LLM) -> None:
    (result,) = llm.chat(MESSAGES, greedy(1), {"add_generation_prompt": False})
    assert bytes(result.prompt_token_ids) == b"user: hi\n"
    assert "add_generation_prompt" in CHAT_TEMPLATE


def test_a_template_is_compiled_once(target: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    sources: list[str] = []

    class Counted(ChatTemplate):
        def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
            sources.append(source)
            super().__init__(source, special_tokens)

    monkeypatch.setattr("surefoot.engine.models.ChatTemplate", Counted)
    with llm_on(replace(target)) as llm:
        first = llm.render_chat(MESSAGES, {})
        assert [llm.render_chat(MESSAGES, {}) for _ in range(3)] == [first] * 3
    assert sources == [CHAT_TEMPLATE]


def test_template_options_may_have_any_name(llm: LLM) -> None:
    plain = llm.render_chat(MESSAGES, {})
    assert llm.render_chat(MESSAGES, {"self": 1, "variables": 2, "opens": 3}) == plain


@pytest.mark.parametrize("messages", [[{"content": "hi"}], [{"role": 3, "content": "hi"}]])
def test_messages_without_a_role_are_refused(llm: LLM, messages: list[dict[str, object]]) -> None:
    with pytest.raises(PromptError, match="role"):
        llm.chat(messages, greedy())


def test_samples_differ_and_are_numbered(llm: LLM) -> None:
    (result,) = llm.generate("ab", sampled(1, 16, n=4))
    assert [output.index for output in result.outputs] == [0, 1, 2, 3]
    assert len({output.token_ids for output in result.outputs}) == 4


def test_sample_i_does_not_depend_on_how_many_there_are(llm: LLM) -> None:
    (many,) = llm.generate("ab", sampled(1, 16, n=4))
    (two,) = llm.generate("ab", sampled(1, 16, n=2))
    assert two.outputs == many.outputs[:2]
    assert ids_of(llm, "ab", sampled(1, 16)) == list(many.outputs[0].token_ids)


def test_a_seed_repeats_and_another_does_not(llm: LLM) -> None:
    first = ids_of(llm, "ab", sampled(1, 16))
    assert ids_of(llm, "ab", sampled(1, 16)) == first
    assert ids_of(llm, "ab", sampled(2, 16)) != first


def test_a_seed_repeats_beside_other_prompts(llm: LLM) -> None:
    alone = ids_of(llm, "ab", sampled(1, 16))
    many = llm.generate(["x", "ab", PROMPT, "y", "z"], sampled(1, 16))
    assert list(many[1].outputs[0].token_ids) == alone


def test_without_a_seed_every_run_differs(llm: LLM) -> None:
    runs = {tuple(ids_of(llm, "ab", sampled(None, 16))) for _ in range(4)}
    (result,) = llm.generate("ab", sampled(None, 16, n=4))
    assert len(runs | {output.token_ids for output in result.outputs}) == 8


def test_greedy_ignores_the_seed(llm: LLM) -> None:
    assert ids_of(llm, "ab", greedy(seed=1)) == ids_of(llm, "ab", greedy(seed=2))


def test_a_stop_string_ends_the_text(llm: LLM) -> None:
    free = llm.generate(PROMPT, sampled(3, 40, ignore_eos=True))[0].outputs[0]
    stop = free.text[5:7]
    cut = llm.generate(PROMPT, sampled(3, 40, ignore_eos=True, stop=(stop,)))[0].outputs[0]
    kept = free.text[: free.text.index(stop)]
    assert (cut.text, cut.finish_reason) == (kept, "stop")
    params = sampled(3, 40, ignore_eos=True, stop=(stop,), include_stop_str_in_output=True)
    assert llm.generate(PROMPT, params)[0].outputs[0].text == kept + stop


def test_logprobs_come_with_each_token(llm: LLM) -> None:
    (output,) = llm.generate("ab", greedy(5, logprobs=3))[0].outputs
    assert output.logprobs is not None
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert len(entry) == 3
        assert max(entry, key=lambda one: entry[one]) == token
        assert all(value <= 0 for value in entry.values())
    (bare,) = llm.generate("ab", greedy(5, logprobs=0))[0].outputs
    assert bare.logprobs is not None
    assert [set(entry) for entry in bare.logprobs] == [{token} for token in bare.token_ids]


def test_prompt_logprobs_are_those_of_the_same_tokens_generated(llm: LLM) -> None:
    (made,) = llm.generate("ab", sampled(4, 20, logprobs=2, ignore_eos=True))
    output = made.outputs[0]
    again = [*made.prompt_token_ids, *output.token_ids]
    (scored,) = llm.generate(again, greedy(1, prompt_logprobs=2))
    assert scored.prompt_logprobs is not None
    assert scored.prompt_logprobs[0] is None
    assert len(scored.prompt_logprobs) == len(again)
    assert scored.prompt_logprobs[2:] == output.logprobs


def test_prompt_logprobs_are_whole_however_the_prompt_is_cut(target: LoadedModel) -> None:
    prompt, params = PROMPT * 4, greedy(2, prompt_logprobs=1)
    with llm_on(target) as llm:
        (first,) = llm.generate(prompt, params)
        (second,) = llm.generate(prompt, params)
    with llm_on(target, prefill_chunk=5) as llm:
        (chunked,) = llm.generate(prompt, params)
    assert first.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == len(prompt)
    assert second.prompt_logprobs == chunked.prompt_logprobs == first.prompt_logprobs
    assert second.cached_tokens == 0
    given = zip(first.prompt_token_ids[1:], first.prompt_logprobs[1:], strict=True)
    for token, entry in given:
        assert entry is not None
        assert math.isfinite(entry[token])


def test_a_prompt_of_one_token_has_no_prompt_logprobs(llm: LLM) -> None:
    assert llm.generate([5], greedy(1, prompt_logprobs=1))[0].prompt_logprobs == (None,)


def test_a_repeated_prompt_is_read_from_the_cache(llm: LLM) -> None:
    first, second = (llm.generate(PROMPT * 2, greedy())[0] for _ in range(2))
    assert first.cached_tokens == 0
    assert second.cached_tokens == (len(PROMPT * 2) - 1) // 8 * 8
    assert first.outputs == second.outputs


def test_speculation_is_counted_and_changes_nothing(target: LoadedModel) -> None:
    outputs = []
    for drafter in ("none", "ngram"):
        with llm_on(target, drafter=drafter, draft_tokens=4) as llm:
            (result,) = llm.generate([1, 2, 3] * 8, greedy(60, ignore_eos=True))
            outputs.append(result.outputs)
            counts = result.speculation
            assert counts.drafter == drafter
            assert counts.accepted_tokens == sum(counts.accepted_per_position)
            assert counts.accepted_tokens <= counts.drafted_tokens <= 4 * counts.drafts
            assert (counts.drafts > 0) == (drafter == "ngram")
            assert counts.accept_length == pytest.approx(
                1 + counts.accepted_tokens / max(1, counts.drafts)
            )
    assert outputs[0] == outputs[1]


def test_a_request_may_refuse_drafts(target: LoadedModel) -> None:
    with llm_on(target, drafter="ngram", draft_tokens=4) as llm:
        (result,) = llm.generate([1, 2, 3] * 8, greedy(30, ignore_eos=True, speculate=False))
        assert result.speculation.drafts == 0


def test_times_are_measured(llm: LLM) -> None:
    timing = llm.generate("ab", greedy(8))[0].timing
    assert timing.ttft_s > 0
    assert timing.decode_tokens_per_s > 0
    assert llm.generate("ab", greedy(1))[0].timing.decode_tokens_per_s == 0


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (None, {"temperature": 0.0}),
        ({}, {"temperature": 0.0}),
        ({"eos_token_id": 256}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20},
            {"temperature": 0.6, "top_p": 0.9, "top_k": 20},
        ),
        ({"temperature": 0.6, "top_p": None}, {"temperature": 0.6}),
    ],
)
def test_defaults_are_those_of_the_checkpoint(
    stored: dict[str, object] | None, wanted: dict[str, float], tmp_path: Path
) -> None:
    if stored is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(stored))
    with llm_on(load_tiny(tmp_path)) as llm:
        assert llm.default_params() == SamplingParams(**wanted)  # type: ignore[arg-type]


def test_without_params_the_defaults_are_used(llm: LLM) -> None:
    params = llm.default_params()
    assert llm.generate("ab")[0].outputs == llm.generate("ab", params)[0].outputs
    assert joined(list(llm.stream("ab")))[1] == ids_of(llm, "ab", params)


def test_a_model_is_opened_by_its_folder(tmp_path: Path) -> None:
    load_tiny(tmp_path)
    lines: list[str] = []
    with LLM(str(tmp_path), progress=lines.append, memory=1 << 23, drafter="none") as llm:
        assert llm.config.memory == 1 << 23
    assert lines


def test_no_chat_template_is_an_error_that_says_so(tmp_path: Path) -> None:
    load_tiny(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with (
        LLM(str(tmp_path), memory=1 << 23, drafter="none") as llm,
        pytest.raises(TokenizerError, match="no chat template; use generate"),
    ):
        llm.chat(MESSAGES)
