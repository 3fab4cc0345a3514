"""The adaptive depth on a pretended machine: nearly as good as the best fixed depth, or none."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import pytest

from surefoot.draft.curve import CostCurve
from surefoot.draft.depth import AutoDepth, Depth, FixedDepth, StepCost
from surefoot.ids import RequestId
from surefoot.params import SamplingParams
from surefoot.request import Request

CEILING = 8


def request(number: int) -> Request:
    return Request(
        id=RequestId(number),
        tokens=[1],
        prompt_length=1,
        params=SamplingParams(),
        seed=0,
        length_limit=100,
    )


@dataclass(frozen=True)
class Machine:
    """Milliseconds of a step by its tokens, and of a drafter's pass by its rows."""

    step: Callable[[int], float]
    draft: Callable[[int], float] = lambda rows: 0.05 * rows


MACHINES = {
    "memory bound": Machine(lambda tokens: 30 + 0.5 * tokens),
    "compute bound": Machine(lambda tokens: 2 + 5.0 * tokens),
    "in between": Machine(lambda tokens: 15 + 3.0 * tokens),
    "tiles of 16": Machine(lambda tokens: 20.0 * -(-tokens // 16) + 0.3 * tokens),
    "second row is dear": Machine(lambda tokens: 20 + (tokens > 1) * 15 + 0.5 * tokens),
    "dear drafts": Machine(lambda tokens: 30 + 0.5 * tokens, lambda rows: 12.0 * rows),
    "dear passes": Machine(lambda tokens: 30 + 0.5 * tokens, lambda rows: 9 + 0.3 * rows),
}


class World:
    """Requests whose drafts are right with a chance of their own, on a machine."""

    def __init__(
        self, machine: Machine, chances: list[float], policy: Depth, seed: int = 0
    ) -> None:
        self.machine, self.chances, self.policy = machine, chances, policy
        self.requests = [request(number) for number in range(len(chances))]
        self.random = Random(seed)
        self.depths: list[list[int]] = []

    def rate(self, steps: int) -> float:
        """Tokens a second over `steps` steps."""
        tokens, seconds = 0.0, 0.0
        for _ in range(steps):
            more, cost = self._step()
            tokens, seconds = tokens + more, seconds + cost
        return tokens / seconds

    def _step(self) -> tuple[int, float]:
        depths = self.policy.limits(self.requests, 0)
        self.depths.append(depths)
        tokens = 0
        for one, chance, depth in zip(self.requests, self.chances, depths, strict=True):
            right = 0
            while right < depth and self.random.random() < chance:
                right += 1
            self.policy.learn(one.id, depth, right)
            tokens += 1 + right
        drafted = sum(depths)
        forward = self.machine.step(len(depths) + drafted)
        passes = max(depths)
        draft = sum(self.machine.draft(sum(depth > i for depth in depths)) for i in range(passes))
        forward = self.measured(forward)
        self.policy.measure(StepCost(len(depths) + drafted, forward, draft, drafted, passes))
        return tokens, forward + draft

    def measured(self, forward: float) -> float:
        """What the forward pass takes in the end."""
        return forward


def adaptive(machine: Machine) -> AutoDepth:
    """As an engine makes it: a few step costs are measured at the start."""
    return AutoDepth(CostCurve({n: machine.step(n) for n in (1, 2, 4, 8, 16, 32)}), CEILING)


def best_fixed(machine: Machine, chances: list[float]) -> float:
    """The greatest expected rate of any fixed depth."""
    rates = []
    for depth in range(CEILING + 1):
        tokens = sum(sum(p**place for place in range(depth + 1)) for p in chances)
        drafted = depth * len(chances)
        seconds = machine.step(len(chances) + drafted) + machine.draft(len(chances)) * depth
        rates.append(tokens / seconds)
    return max(rates)


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("machine", MACHINES)
def test_it_is_within_five_percent_of_the_best_fixed_depth(
    machine: str, chance: float, rows: int
) -> None:
    chances = [chance] * rows
    world = World(MACHINES[machine], chances, adaptive(MACHINES[machine]))
    world.rate(60)
    assert world.rate(1500 // rows) >= 0.95 * best_fixed(MACHINES[machine], chances)


def test_it_is_better_than_any_fixed_depth_where_requests_differ() -> None:
    machine, chances = MACHINES["in between"], [0.02, 0.95, 0.02, 0.95]
    world = World(machine, chances, adaptive(machine))
    world.rate(100)
    assert world.rate(400) > 1.05 * best_fixed(machine, chances)
    unlucky = [depths[0] + depths[2] for depths in world.depths[100:]]
    lucky = [depths[1] + depths[3] for depths in world.depths[100:]]
    assert sum(unlucky) < 0.2 * sum(lucky)


def test_nothing_is_drafted_when_nothing_is_accepted() -> None:
    machine = MACHINES["in between"]
    world = World(machine, [0.0], adaptive(machine))
    world.rate(50)
    world.rate(480)
    later = [depths[0] for depths in world.depths[50:]]
    # One token now and then, to see whether it is still so.
    assert max(later) <= 1
    assert 1 <= sum(later) <= len(later) / 20


def test_it_comes_back_when_drafts_are_right_again() -> None:
    machine = MACHINES["in between"]
    world = World(machine, [0.0], adaptive(machine))
    world.rate(300)
    world.chances = [0.95]
    world.rate(200)
    assert world.rate(300) >= 0.95 * best_fixed(machine, [0.95])


def test_it_stops_when_drafts_are_no_longer_right() -> None:
    machine = MACHINES["in between"]
    world = World(machine, [0.95], adaptive(machine))
    world.rate(200)
    world.chances = [0.0]
    world.rate(40)
    assert world.rate(300) >= 0.95 * best_fixed(machine, [0.0])


@pytest.mark.parametrize("factor", [0.4, 2.5])
@pytest.mark.parametrize("chance", [0.2, 0.5, 0.8])
def test_costs_measured_at_a_busy_moment_do_no_lasting_harm(factor: float, chance: float) -> None:
    now = MACHINES["in between"]
    was = Machine(lambda tokens: factor * now.step(tokens), now.draft)
    world = World(now, [chance], adaptive(was))
    world.rate(200)
    assert world.rate(1500) >= 0.95 * best_fixed(now, [chance])


def test_it_learns_that_tokens_have_become_dearer() -> None:
    was = Machine(lambda tokens: 20 + tokens, lambda rows: 0.05 * rows)
    now = Machine(lambda tokens: 20 + 15.0 * tokens)
    world = World(was, [0.5], adaptive(was))
    world.rate(100)
    world.machine = now
    world.rate(300)
    assert world.rate(600) >= 0.95 * best_fixed(now, [0.5])


class Moody(World):
    """The first steps after a change between drafting and not are dearer, by half."""

    changed = 0
    drafting = False

    def _step(self) -> tuple[int, float]:
        tokens, seconds = super()._step()
        drafts = any(self.depths[-1])
        self.changed = self.changed + 1 if drafts == self.drafting else 0
        self.drafting = drafts
        return tokens, seconds

    def measured(self, forward: float) -> float:
        """What the step took, by how long it has been so."""
        drafts = any(self.depths[-1])
        first = drafts != self.drafting or self.changed < 2
        return forward * (1.5 if first else 1.0)


@pytest.mark.parametrize("chance", [0.3, 0.5])
def test_plain_steps_between_drafted_ones_do_not_make_plain_decoding_look_dear(
    chance: float,
) -> None:
    """Drafts lose here, if only a little; who judges by single plain steps drafts all the same."""
    machine = Machine(lambda tokens: 20 + 8.0 * tokens)
    world = Moody(machine, [chance] * 4, adaptive(Machine(lambda tokens: 20 + 1.0 * tokens)))
    world.rate(400)
    asked = [sum(depths) > 0 for depths in world.depths[-300:]]
    assert sum(asked) < 60


def test_a_forgotten_request_starts_afresh() -> None:
    machine = MACHINES["in between"]
    policy = adaptive(machine)
    one = request(1)
    for _ in range(50):
        policy.learn(one.id, 4, 0)
    assert policy.limits([one], 0) == [0]
    policy.forget(one.id)
    for _ in range(200):
        policy.learn(RequestId(2), 8, 8)
    assert policy.limits([one], 0)[0] > 0


def test_requests_that_fill_the_step_anyway_are_drafted_for_less() -> None:
    machine = MACHINES["tiles of 16"]
    policy = adaptive(machine)
    for _ in range(100):
        policy.learn(RequestId(3), 4, 2)
    alone = policy.limits([request(1)], 0)[0]
    # Fifteen more tokens in the step: any draft opens another tile.
    assert policy.limits([request(2)], 15)[0] < alone


def test_a_fixed_depth_is_fixed() -> None:
    policy = FixedDepth(3)
    policy.learn(RequestId(1), 3, 0)
    policy.measure(StepCost(4, 1.0, 1.0, 3, 3))
    policy.forget(RequestId(1))
    assert policy.limits([request(1), request(2)], 99) == [3, 3]


def test_costs_between_measurements_lie_on_straight_lines() -> None:
    curve = CostCurve({1: 10.0, 4: 16.0})
    assert [curve.seconds(n) for n in (1, 2, 3, 4, 6)] == [10.0, 12.0, 14.0, 16.0, 20.0]
    assert CostCurve({2: 7.0}).seconds(1) == CostCurve({2: 7.0}).seconds(9) == 7.0


def test_the_cost_of_a_count_is_the_median_of_what_was_measured() -> None:
    curve = CostCurve({1: 10.0, 4: 16.0})
    for seconds in (12.0, 99.0, 11.0):
        curve.add(2, seconds)
    assert curve.seconds(2) == 12.0
    assert curve.seconds(3) == 14.0


def test_counts_not_met_since_the_start_follow_those_that_were() -> None:
    curve = CostCurve({1: 10.0, 4: 16.0, 8: 24.0})
    for _ in range(9):
        curve.add(2, 6.0)
    assert [curve.seconds(n) for n in (1, 2, 4, 8)] == [5.0, 6.0, 8.0, 12.0]
    curve.add(8, 24.0)
    assert curve.seconds(8) == 24.0


def test_a_clock_that_sees_no_time_pass_does_no_harm() -> None:
    policy = AutoDepth(CostCurve({1: 0.0, 2: 0.0}), CEILING)
    for _ in range(20):
        depth = policy.limits([request(1)], 0)[0]
        policy.learn(RequestId(1), depth, depth)
        policy.measure(StepCost(1 + depth, 1e-3, 0.0, depth, depth))
    assert policy.limits([request(1)], 0)[0] > 0


def test_a_dear_drafter_that_finds_nothing_is_hardly_asked() -> None:
    policy, asked = AutoDepth(CostCurve({1: 1.0, 2: 1.0, 8: 1.0}), CEILING), 0
    for _ in range(300):
        depth = policy.limits([request(1)], 0)[0]
        asked += depth > 0
        policy.learn(RequestId(1), 0, 0)
        policy.measure(StepCost(1, 1.0, 5.0 * (depth > 0), 0, depth))
    assert asked < 30


def test_who_finds_nothing_is_asked_once_more_at_once() -> None:
    """It may have let go of a request that no draft was asked for, and follows it from then on."""
    policy, asked = AutoDepth(CostCurve({1: 1.0, 2: 1.001, 8: 2.0}), CEILING), []
    for _ in range(1000):
        policy.learn(RequestId(1), 1, 0)
    for number in range(100):
        [depth] = policy.limits([request(1)], 0)
        asked += [number] * (depth > 0)
        policy.learn(RequestId(1), 0, 0)
        policy.measure(StepCost(1, 1.0, 0.0, 0, depth))
    first = asked[0]
    assert asked[:3] == [first, first + 1, first + 34]


@pytest.mark.parametrize("optimistic", [True, False])
def test_the_drafter_does_not_follow_where_drafts_do_not_pay(optimistic: bool) -> None:
    """Whether trials say so or, from the start, the costs; a trial itself is followed."""
    slope = 0.1 if optimistic else 5.0
    curve = CostCurve({tokens: 2 + slope * tokens for tokens in (1, 8, 64)})
    policy = AutoDepth(curve, CEILING, suspends=True)
    world = World(MACHINES["compute bound"], [0.5] * 8, policy)
    followed = []
    for _ in range(400):
        world.rate(1)
        followed.append(world.policy.follows)
    assert followed[0], "nothing was tried"
    assert followed.count(False) > 300
    for follows, depths in zip(followed, world.depths, strict=True):
        assert follows or not any(depths)


def test_the_drafter_follows_in_every_step_where_drafts_pay() -> None:
    curve = CostCurve({1: 30.0, 8: 34.0, 64: 62.0})
    policy = AutoDepth(curve, CEILING, suspends=True)
    world = World(MACHINES["memory bound"], [0.9] * 8, policy)
    for _ in range(400):
        world.rate(1)
        assert policy.follows


def test_who_may_not_be_drafted_for_does_not_hide_that_drafts_lose() -> None:
    """Half of the rows forbid drafts; all rows are in the steps that are measured."""
    policy = AutoDepth(CostCurve({n: 10 + 0.3 * n for n in (1, 8, 64)}), CEILING, suspends=True)
    requests, random = [request(number) for number in range(4)], Random(1)
    asked = []
    for _ in range(1000):
        depths = policy.limits(requests, 4)
        for one, depth in zip(requests, depths, strict=True):
            right = sum(random.random() < 0.35 for _ in range(min(depth, 1)))
            policy.learn(one.id, depth, right)
        drafted = sum(depths)
        # Drafts cost half as much again as their parts.
        rest = 10 + 0.3 * (8 + drafted) + 5.0 * (drafted > 0)
        policy.measure(StepCost(8 + drafted, rest, 0.5 * max(depths), drafted, max(depths)))
        asked.append(drafted > 0)
    assert sum(asked[-500:]) < 100


def test_a_drafter_that_cannot_miss_steps_always_follows() -> None:
    curve = CostCurve({tokens: 2 + 5.0 * tokens for tokens in (1, 8, 64)})
    policy = AutoDepth(curve, CEILING)
    world = World(MACHINES["compute bound"], [0.5] * 8, policy)
    for _ in range(200):
        world.rate(1)
        assert policy.follows
    assert sum(map(any, world.depths[-100:])) < 20, "drafts do not pay"


@pytest.mark.parametrize(("depth", "follows"), [(0, False), (1, True)])
def test_a_fixed_depth_of_none_is_not_followed(depth: int, follows: bool) -> None:
    assert FixedDepth(depth).follows is follows
