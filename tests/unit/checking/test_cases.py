import random
from dataclasses import replace
from itertools import combinations, islice, product

import pytest

from surefoot.checking.cases import Amount, Ask, Case, Scope, Wanted, pairwise, plan
from surefoot.params import MAX_SEED

SCOPE = Scope(["none", "ngram", "replay", "wrong"])
SIZES = [3, 4, 3, 3, 2, 3, 3]


def first_round(scope: Scope, seed: int = 0) -> list[Case]:
    return next(plan(scope, seed))


def case(**changes: object) -> Case:
    values: dict[str, object] = {
        "number": 1,
        "round": 0,
        "seed": 0,
        "drafter": "ngram",
        "depth": 3,
        "sampling": "sampled",
        "batch": 4,
        "prefix_cache": True,
        "chunk": 5,
        "pressure": "calm",
    }
    return Case(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(5))
def test_every_pair_of_values_meets(seed: int) -> None:
    rows = pairwise(SIZES, random.Random(seed))
    for one, other in combinations(range(len(SIZES)), 2):
        met = {(row[one], row[other]) for row in rows}
        assert met == set(product(range(SIZES[one]), range(SIZES[other])))


@pytest.mark.parametrize("seed", range(5))
def test_pairs_take_few_combinations(seed: int) -> None:
    assert len(pairwise(SIZES, random.Random(seed))) <= 2 * 4 * 3


def test_a_dimension_without_values_has_no_combinations() -> None:
    assert pairwise([3, 0, 2], random.Random(0)) == []


def test_a_round_brings_each_drafter_together_with_each_other_setting() -> None:
    drafted = [case for case in first_round(SCOPE) if case.drafter != "none"]
    drafters = ["ngram", "replay", "wrong"]
    assert {(c.drafter, c.depth) for c in drafted} == set(product(drafters, SCOPE.depths[0]))
    assert {(c.drafter, c.batch) for c in drafted} == set(product(drafters, SCOPE.batches))
    assert {(c.drafter, c.chunk) for c in drafted} == set(product(drafters, SCOPE.chunks))
    assert {(c.drafter, c.sampling) for c in drafted} == set(product(drafters, SCOPE.samplings))
    assert {(c.drafter, c.pressure) for c in drafted} == set(product(drafters, SCOPE.pressures))
    assert {(c.drafter, c.prefix_cache) for c in drafted} == set(product(drafters, (True, False)))


def test_a_round_has_some_cases_without_drafter() -> None:
    plain = [case for case in first_round(SCOPE) if case.drafter == "none"]
    assert len(plain) >= 4
    assert {case.depth for case in plain} == {0}


def test_without_drafters_only_cuts_are_checked() -> None:
    cases = first_round(Scope(["none"]))
    assert {case.drafter for case in cases} == {"none"}
    assert {(c.batch, c.chunk) for c in cases} >= set(product((8, 4, 1), (256, 24, 5)))


def test_the_same_seed_brings_the_same_cases() -> None:
    assert first_round(SCOPE, 7) == first_round(SCOPE, 7)
    assert first_round(SCOPE, 7) != first_round(SCOPE, 8)


def test_rounds_differ_and_never_end() -> None:
    rounds = list(islice(plan(SCOPE, 0), 4))
    names = [case.name for cases in rounds for case in cases]
    assert len(set(names)) == len(names)
    assert [case.number for cases in rounds for case in cases] == [*range(1, len(names) + 1)]


def test_names_say_what_the_case_does() -> None:
    assert case().name == "01 ngram k=3 sampled batch=4 cache chunk=5 calm"
    assert case(depth=None, prefix_cache=False).name.startswith(
        "01 ngram k=auto sampled batch=4 no"
    )
    assert case(drafter="none").name.startswith("01 none sampled")


@pytest.mark.parametrize("batch", [1, 2, 4, 8])
def test_more_requests_than_a_batch_and_some_prompts_again(batch: int) -> None:
    asks = case(batch=batch).asks(prompts=12)
    assert len(asks) > batch
    assert set(asks[:batch]) & set(asks[batch:])


def test_the_first_answer_of_some_cases_is_long() -> None:
    numbers = range(1, 65)
    long = {n: [ask.long for ask in case(number=n).asks(12, long=True)] for n in numbers}
    some = [n for n in numbers if any(long[n])]
    assert 3 <= len(some) <= 5
    assert all(long[n][0] and not any(long[n][1:]) for n in some)
    assert not any(ask.long for n in numbers for ask in case(number=n).asks(12))
    amount = Amount(new_tokens=8, long_tokens=90)
    first, *_, last = case(number=some[0]).asks(12, long=True)
    assert (
        amount.new_tokens_of(first),
        amount.new_tokens_of(replace(first, turn=1)),
        amount.new_tokens_of(last),
    ) == (90, 8, 8)
    assert first.params([1], 90).ignore_eos


def test_few_prompts_are_enough() -> None:
    assert {ask.prompt for ask in case(batch=8).asks(prompts=2)} == {0, 1}


def test_later_rounds_draw_other_noise_for_the_same_prompts() -> None:
    early, late = case(round=0).asks(12), case(round=1).asks(12)
    assert [ask.prompt for ask in early] == [ask.prompt for ask in late]
    assert all(one.seed != other.seed for one, other in zip(early, late, strict=True))


def test_greedy_requests_share_their_plain_runs_over_rounds() -> None:
    assert case(sampling="greedy").asks(12) == case(sampling="greedy", round=3).asks(12)


def test_the_greatest_seed_is_a_seed() -> None:
    for ask in case(seed=MAX_SEED, round=9).asks(12):
        assert ask.params([1], 8).seed == ask.seed


def test_sampling_options_are_those_of_the_name() -> None:
    prompt = [5, 6, 7]
    assert Ask(0, "greedy", 0).params(prompt, 8).greedy
    cut, whole = (Ask(index, "sampled", 1).params(prompt, 8) for index in (0, 1))
    assert (cut.top_k, cut.top_p) == (50, 0.95)
    assert (whole.top_k, whole.top_p) == (0, 1.0)
    penalised = Ask(0, "penalties", 1).params(prompt, 8)
    assert penalised.needs_history
    assert penalised.min_p > 0
    assert penalised.logit_bias
    assert {p.max_tokens for p in (cut, whole, penalised)} == {8}


def test_what_is_wanted_takes_the_place_of_the_usual() -> None:
    scope = Wanted(depths=[2], caches=[False]).over(["ngram"])
    assert (scope.drafters, scope.depths, scope.caches) == (["ngram"], [[2]], [False])
    assert scope.batches == SCOPE.batches


def test_rounds_take_other_depths_in_turn() -> None:
    rounds = list(islice(plan(SCOPE, 0), 4))
    met = [{case.depth for case in cases if case.drafter != "none"} for cases in rounds]
    assert met == [set(depths) for depths in (*SCOPE.depths, SCOPE.depths[0])]
    assert set().union(*met) == {*range(1, 9), None}


def test_the_next_turn_asks_what_was_answered_before() -> None:
    asks, turns = case().asks(12), case().follow_ups(12)
    assert [ask.turn for ask in turns] == [1, 1, 1]
    assert [Ask(ask.prompt, ask.sampling, ask.seed) for ask in turns] == asks[:3]
    assert case(prefix_cache=False).follow_ups(12) == []
