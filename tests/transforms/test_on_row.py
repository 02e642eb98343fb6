"""One env behind transforms: stepped on a row of memory, with the data of the way through TensorDicts.

What is compared with is the same env behind a transform more, which does nothing and cannot be stacked.
"""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule

from envkit import (
    Compose,
    GymEnv,
    GymWrapper,
    RewardScaling,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    compile_policy,
)
from envkit.errors import ClosedEnvError, NotResetError
from tests.batched.test_transforms_in_workers import CHAINS, Walk, one_by_one, walk
from tests.bridges.compare import assert_same

STEPS = 25


def actions(seed: int = 1) -> torch.Tensor:
    drawn = torch.randint(2, (STEPS,), generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.one_hot(drawn, 2)


def stepped(env) -> list[TensorDictBase]:
    told, root = [], env.reset()
    for number, action in enumerate(actions()):
        root["action"] = action
        if number % 6 == 5:
            root["_step"] = torch.tensor(number % 12 == 5)
        data, root = env.step_and_maybe_reset(root)
        told += [data.clone(), root.clone()]
        if number % 7 == 6:
            root = env.reset(root.set("_reset", torch.tensor([True])))
            told.append(root.clone())
    return told


def ended(env) -> list[TensorDictBase]:
    root = env.reset()
    for action in actions(2):
        root = env.step(root.set("action", action))
        if env.any_done(root["next"]):
            break
        root = env.step_mdp(root)
    return [root]


def acting(policy, **options):
    return lambda env: [env.rollout(STEPS, policy, **options)]


def left(place: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot((place.sum(-1) > 0).long(), 2)


on_leaves = TensorDictModule(left, in_keys=["place"], out_keys=["action"])


class Left(torch.nn.Module):
    def forward(self, place: torch.Tensor) -> torch.Tensor:
        return left(place)


compiled = compile_policy(TensorDictModule(Left(), in_keys=["place"], out_keys=["action"]))


def on_tensordicts(td: TensorDictBase) -> TensorDictBase:
    return td.set("action", left(td["place"]))


def from_a_root(env) -> list[TensorDictBase]:
    data = env.rollout(3, break_when_any_done=False)
    root = env.step_mdp(data[-1])
    return [env.rollout(STEPS, auto_reset=False, tensordict=root, break_when_any_done=False)]


WAYS = {
    "steps": stepped,
    "an episode": ended,
    "random": acting(None, break_when_any_done=False),
    "random episode": acting(None),
    "all done": acting(None, break_when_all_done=True),
    "on leaves": acting(on_leaves, break_when_any_done=False),
    "compiled": acting(compiled, break_when_any_done=False),
    "on TensorDicts": acting(on_tensordicts),
    "replayed": lambda env: [env.rollout(STEPS, actions=actions(), break_when_any_done=False)],
    "from a root": from_a_root,
}


def told_by(env, way: str) -> list[TensorDictBase]:
    env.set_seed(3)
    return WAYS[way](env)


@pytest.fixture(scope="module", params=CHAINS)
def both(request):
    """An env on its row, and the same one through TensorDicts."""
    chain = CHAINS[request.param]
    return walk(chain), one_by_one(chain)


@pytest.mark.parametrize("way", WAYS)
def test_the_data_is_that_of_the_way_through_tensordicts(both, way):
    on_row, through = both
    if (
        way in ("on leaves", "compiled", "on TensorDicts")
        and "place" not in on_row.observation_spec.keys()
    ):
        pytest.skip("this chain shows no place")

    told, expected = told_by(on_row, way), told_by(through, way)

    assert on_row._row is not None
    assert through._row is None
    for one, other in zip(told, expected, strict=True):
        assert_same(one, other)


def chain(*more) -> TransformedEnv:
    return TransformedEnv(GymWrapper(Walk()), Compose(StepCounter(9), RewardSum(), *more))


@pytest.fixture
def env():
    return chain()


def test_a_chain_around_a_chain_steps_on_a_row():
    def nested(*more):
        return TransformedEnv(chain(), Compose(RewardScaling(0.0, 2.0), *more))

    told, expected = (told_by(nested(*more), "steps") for more in ([], [lambda td: td]))

    for one, other in zip(told, expected, strict=True):
        assert_same(one, other)


def test_a_transform_that_is_appended_inside_shows_at_the_next_step():
    inner = chain()
    outer = TransformedEnv(inner, StepCounter(step_count_key="outer"))
    outer.step(outer.reset().set("action", actions()[0]))

    inner.append_transform(RewardScaling(0.0, 0.0))
    stepped = outer.step(outer.reset().set("action", actions()[0]))

    assert stepped["next", "reward"] == 0
    assert (outer.rollout(3)["next", "reward"] == 0).all()


def test_what_the_base_env_steps_meanwhile_has_moved_the_simulator(env):
    other = chain(lambda td: td)
    seen = []
    for each in (env, other):
        each.set_seed(0)
        root = each.reset().set("action", actions()[0])
        data, root = each.step_and_maybe_reset(root)
        each.base_env.step(data.exclude("next").set("action", actions()[1]))
        seen.append(each.step(root.set("action", actions()[2])))

    assert_same(*seen)


def test_a_transform_that_is_appended_shows_at_the_next_step(env):
    env.reset()

    env.append_transform(RewardScaling(0.0, 0.0))
    td = env.step(env.reset().set("action", actions()[0]))

    assert td["next", "reward"] == 0
    assert td["next", "episode_reward"] != 0


def test_a_number_that_is_set_counts_from_the_next_step(env):
    env.append_transform(RewardScaling(0.0, 1.0))
    root = env.reset().set("action", actions()[0])
    env.step(root.copy())

    env.transform[-1].scale.fill_(0.0)

    assert env.step(root)["next", "reward"] == 0


@pytest.mark.parametrize("count", [torch.tensor([5], dtype=torch.int32), None])
def test_memory_in_another_form_takes_the_general_way(count):
    seen = []
    for each in (chain(), chain(lambda td: td)):
        each.set_seed(0)
        root = each.reset().set("action", actions()[0])
        root = root.exclude("step_count") if count is None else root.set("step_count", count)
        seen.append(each.step(root))

    assert_same(*seen)


def test_a_sum_of_rewards_keeps_its_graph(env):
    root = env.reset().set("action", actions()[0])
    root["episode_reward"] = torch.zeros(1, requires_grad=True)

    assert env.step(root)["next", "episode_reward"].requires_grad


def test_a_seed_in_the_middle_of_an_episode_asks_for_a_reset(env):
    root = env.reset().set("action", actions()[0])
    env.set_seed(0)

    with pytest.raises(NotResetError, match="Call reset"):
        env.step(root)
    with pytest.raises(NotResetError, match="Call reset"):
        env.rollout(3, auto_reset=False, tensordict=root)
    env.step(env.reset().set("action", actions()[0]))


def test_a_closed_env_says_so(env):
    root = env.reset().set("action", actions()[0])
    env.close()

    with pytest.raises(ClosedEnvError):
        env.step(root)


def test_an_episode_that_is_written_down_goes_on_elsewhere():
    def made():
        return TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(), RewardSum()))

    one, other = made().record_for_resume(), made().record_for_resume()
    one.set_seed(0)
    data = one.rollout(5)
    root = one.step_mdp(data[-1])

    other.load_state_dict(one.state_dict())
    planned = {"actions": actions()[:3], "auto_reset": False}
    went_on, elsewhere = (each.rollout(3, tensordict=root, **planned) for each in (one, other))

    assert one._row is not None
    assert_same(went_on, elsewhere)
    assert went_on["step_count"][0] == 5


def test_memory_of_transforms_travels_with_the_rows_of_a_pool():
    def made(*more):
        return TransformedEnv(GymWrapper(Walk()), Compose(StepCounter(4), RewardSum(), *more))

    for policy in (None, on_leaves, compiled):
        told = []
        for make in (made, lambda: made(lambda td: td)):
            pool = SerialEnv(3, make)
            pool.set_seed(1)
            told.append(pool.rollout(100, policy, break_when_any_done=False))
        assert_same(*told)
