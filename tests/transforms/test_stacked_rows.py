"""Transforms that are shown stacked rows of memory, of one env or of a pool: when, who acts, and what fails.

That they show the data of each env by itself is part of `test_contract`. What is compared with here stands behind a
transform more, which does nothing and cannot be stacked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule

from envkit import (
    Compose,
    GymEnv,
    GymWrapper,
    NormalizeReward,
    ObservationNorm,
    ParallelEnv,
    RewardScaling,
    RewardSum,
    SerialEnv,
    StepCounter,
    SyncDataCollector,
    TransformedEnv,
    VecNorm,
    VecNormV2,
    compile_policy,
)
from envkit.batched.bound_envs import row_core
from envkit.batched.exchange import behind_transforms
from envkit.errors import ClosedEnvError, NotResetError, WorkerError
from envkit.transforms.core.fusable import FusableTransform
from tests.batched.test_faults import interrupt_at_random
from tests.bridges.compare import assert_same
from tests.zoo.envs import Count
from tests.zoo.transforms import Opaque, Walk, episodes, frames, names, primed, values

STEPS = 25
ROWS = 4


CHAINS = {
    "episodes": episodes,
    "values": partial(values, torch.float16),
    "entries": lambda: [*episodes(), *frames(), *names()],
    "primed": primed,
    "none": list,
}


def walk(chain: Callable[[], list], fails_at: int | None = None) -> TransformedEnv:
    return TransformedEnv(GymWrapper(Walk(fails_at)), Compose(*chain()))


def one_by_one(chain: Callable[[], list], fails_at: int | None = None) -> TransformedEnv:
    """The same env, which is not stepped on rows."""
    return walk(lambda: [*chain(), Opaque()], fails_at)


def actions(seed: int = 1) -> torch.Tensor:
    drawn = torch.randint(2, (STEPS,), generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.one_hot(drawn, 2)


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
def two(request):
    """An env on its row, and the same one through TensorDicts."""
    chain = CHAINS[request.param]
    return walk(chain), one_by_one(chain)


@pytest.mark.parametrize("way", WAYS)
def test_the_data_is_that_of_the_way_through_tensordicts(two, way):
    on_row, through = two
    if (
        way in ("on leaves", "compiled", "on TensorDicts")
        and "place" not in on_row.observation_spec.keys()
    ):
        pytest.skip("this chain shows no place")

    shown, expected = told_by(on_row, way), told_by(through, way)

    assert on_row._row is not None
    assert through._row is None
    for one, other in zip(shown, expected, strict=True):
        assert_same(one, other)


def chain(*more) -> TransformedEnv:
    return TransformedEnv(GymWrapper(Walk()), Compose(StepCounter(9), RewardSum(), *more))


@pytest.fixture
def env():
    return chain()


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


def test_memory_of_transforms_travels_with_the_rows_of_a_pool():
    def make_env(*more):
        return TransformedEnv(GymWrapper(Walk()), Compose(StepCounter(4), RewardSum(), *more))

    for policy in (None, on_leaves, compiled):
        rollouts = []
        for make in (make_env, lambda: make_env(lambda td: td)):
            pool = SerialEnv(3, make)
            pool.set_seed(1)
            rollouts.append(pool.rollout(100, policy, break_when_any_done=False))
        assert_same(*rollouts)


POOLS = [SerialEnv, partial(ParallelEnv, num_processes=2)]


both = pytest.mark.parametrize("batched", POOLS, ids=["serial", "parallel"])


def play(env, steps: int = 20) -> list[TensorDictBase]:
    """Run, step with and without masks, reset in part; gives all that was shown."""
    env.set_seed(3)
    choices = torch.rand(2 * steps, ROWS, generator=torch.Generator().manual_seed(1)) < 0.5
    turns = iter(torch.nn.functional.one_hot(choices.long(), 2))

    def act(td):
        return td.set("action", next(turns).clone())

    shown = [env.rollout(steps, act, break_when_any_done=False), env.reset()]
    root = shown[-1].clone()
    for turn in range(steps):
        if turn % 3 == 1:
            root["_step"] = torch.arange(ROWS) != turn % ROWS
        data, root = env.step_and_maybe_reset(act(root))
        shown += [data.clone(), root.clone()]
        if turn % 5 == 4:
            root["_reset"] = torch.tensor([[False], [True], [False], [True]])
            root = env.reset(root)
            shown.append(root.clone())
    return shown


def assert_told_the_same(left: list[TensorDictBase], right: list[TensorDictBase]) -> None:
    for one, other in zip(left, right, strict=True):
        assert_same(one, other)


# ---------------------------------------------------------------------------- rows inside pools


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_envs_behind_what_stacks_have_rows(chain):
    nested = TransformedEnv(walk(chain), RewardSum(["reward"], ["outer"]))

    assert row_core(walk(chain)) is not None and row_core(one_by_one(chain)) is None
    assert chain in (CHAINS["entries"],) or row_core(nested) is not None


@pytest.mark.parametrize(
    "env",
    [
        lambda: walk(lambda: [VecNorm(["place"])]),
        lambda: walk(lambda: [StepCounter(), Opaque()]),
        lambda: walk(lambda: [learned()]),
        lambda: TransformedEnv(GymWrapper(Walk(), run_type_checks=True), StepCounter()),
        lambda: Overriding(GymWrapper(Walk()), StepCounter()),
    ],
    ids=["with state", "opaque", "learned", "checked", "overriding"],
)
def test_what_needs_each_env_by_itself_is_not_stacked(env):
    assert row_core(env()) is None


def learned() -> ObservationNorm:
    norm = ObservationNorm(torch.zeros(2), torch.ones(2), ["place"])
    norm.scale.requires_grad_()
    return norm


class Overriding(TransformedEnv):
    """Steps in a way of its own."""

    def step(self, tensordict):
        return super().step(tensordict)


@both
def test_rows_whose_transforms_are_set_differently_keep_their_own(opened, batched):
    limits = (2, 3, 4, 5)
    makers = [partial(walk, partial(limited, limit)) for limit in limits]
    references = [partial(one_by_one, partial(limited, limit)) for limit in limits]

    told, expected = play(opened(batched(ROWS, makers))), play(opened(SerialEnv(ROWS, references)))

    assert_told_the_same(told, expected)
    assert (told[0]["next", "step_count"].amax((1, 2)) <= torch.tensor(limits)).all()


def limited(limit: int) -> list:
    return [StepCounter(limit), RewardSum()]


def test_a_number_that_is_set_while_rows_run_counts_from_the_next_step(opened):
    envs: list[TransformedEnv] = []

    def make():
        envs.append(walk(lambda: [StepCounter(), ObservationNorm(0.0, torch.ones(2), ["place"])]))
        return envs[-1]

    env = opened(SerialEnv(ROWS, make))
    before = env.rollout(3, break_when_any_done=False)
    counter, norm = envs[1].transform
    counter.max_steps = 1
    norm.scale.mul_(0)
    after = env.rollout(3, break_when_any_done=False)

    assert before["place"].any(-1).all()
    assert after["next", "truncated"][1].all()
    assert after["place"].any(-1).all(-1).tolist() == [True, False, True, True]


WRITES = {
    "in place": lambda scale: scale.mul_(0),
    "by data": lambda scale: scale.data.fill_(0),
    "by NumPy": lambda scale: np.multiply(scale.numpy(), 0, out=scale.numpy()),
}


@pytest.mark.parametrize("way", WRITES)
@pytest.mark.parametrize("row", [0, 2])
def test_however_the_numbers_of_a_row_are_written_the_next_step_uses_them(opened, way, row):
    norms = [ObservationNorm(0.0, torch.ones(2), ["place"]) for _ in range(ROWS)]
    env = opened(SerialEnv(ROWS, [partial(walk, lambda n=n: [n]) for n in norms]))
    env.rollout(2)  # numbers are equal, and found to be

    WRITES[way](norms[row].scale)

    seen = env.rollout(3, break_when_any_done=False)["place"].any(-1).any(-1)
    assert seen.tolist() == [index != row for index in range(ROWS)]


@both
@pytest.mark.parametrize(
    "fails_at", [*(pytest.param(at, marks=pytest.mark.slow) for at in (2, 3, 4)), 7]
)
def test_rows_that_fail_are_told_and_the_others_go_on(opened, batched, fails_at):
    """Fails in a step or in the reset after it, of one row or of two."""
    ways = [None, fails_at, None, fails_at + 1]
    options = {"on_worker_failure": "restart", "max_restarts": 999}
    makers = [partial(walk, partial(limited, 2), way) for way in ways]
    references = [partial(one_by_one, partial(limited, 2), way) for way in ways]

    told = play(opened(batched(ROWS, makers, **options)))
    expected = play(opened(SerialEnv(ROWS, references, **options)))

    assert_told_the_same(told, expected)


class Refusing(FusableTransform):
    """Looks at values: refuses rows whose reward is above 1."""

    def step_leaves(self, root, following, constants):
        if bool((following[("reward",)] > 1.0).any()):
            raise ValueError(f"paid {following[('reward',)].max():.3f}")
        return {}

    def reset_leaves(self, fresh, constants):
        return {}


def refusing() -> list:
    return [Refusing()]


@both
def test_a_transform_that_raises_is_told_of_the_rows_it_raised_for(opened, batched):
    def failures(env) -> list[tuple[tuple[int, ...], str]]:
        env.set_seed(3)
        failed = []
        for _ in range(6):
            try:
                env.step(env.rand_action(env.reset()))
            except WorkerError as error:
                failed += [(one.rows, str(one.exception)) for one in error.failures]
        return failed

    stacked = failures(opened(batched(ROWS, partial(walk, refusing))))
    apart = failures(opened(SerialEnv(ROWS, partial(one_by_one, refusing))))

    assert stacked == apart != []


# ---------------------------------------------------------------------------- around pools


@pytest.fixture
def recordings(monkeypatch):
    """Count the rollouts that are recorded on rows."""
    are_recorded = []

    def counted(env, rows, run, **options):
        made = recorded(env, rows, run, **options)
        are_recorded.append(made is not None)
        return made

    recorded = behind_transforms.recorded
    monkeypatch.setattr(behind_transforms, "recorded", counted)
    return are_recorded


@pytest.fixture(scope="module")
def pools():
    """Two equal pools in this process, and two with workers."""
    by_kind = {
        kind: [kind(ROWS, lambda: GymWrapper(Walk())) for _ in range(2)]
        for kind in (SerialEnv, ParallelEnv)
    }
    yield by_kind
    for pair in by_kind.values():
        for pool in pair:
            pool.close()


def behind(pool, chain, *more):
    return TransformedEnv(pool, Compose(*chain(), *more))


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_rollouts_of_a_pool_are_recorded_on_rows(pools, recordings, chain):
    behind(pools[SerialEnv][0], chain).rollout(3)

    assert recordings == [True]


STATISTICS = {
    "of observations": lambda: [VecNorm(["place"], decay=0.9), StepCounter(4)],
    "of two entries": lambda: [RewardSum(), VecNorm(["place", "episode_reward"], ["x", "y"])],
    "of returns": lambda: [NormalizeReward(gamma=0.9), RewardSum()],
    "frozen": lambda: [VecNorm(["place"]).freeze()],
    "of each row": lambda: [RewardSum(), VecNormV2(["place", "episode_reward"], ["x", "y"])],
    "of rows together": lambda: [VecNormV2(["place"], decay=0.9, reduce_batch_dims=True)],
    "of each row, frozen": lambda: [VecNormV2(["place"]).freeze(), StepCounter(5)],
}


@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
@pytest.mark.parametrize("chain", STATISTICS.values(), ids=STATISTICS)
def test_statistics_count_what_single_steps_count(pools, recordings, kind, chain):
    fast, slow = behind(pools[kind][0], chain), behind(pools[kind][1], chain, Opaque())

    told, expected = play(fast), play(slow)

    assert_told_the_same(told, expected)
    assert recordings == [True]
    for one, other in zip(fast.transform[:-1] or fast.transform, slow.transform, strict=False):
        assert one.state_dict().keys() == other.state_dict().keys()
        for name, value in one.state_dict().items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other.state_dict()[name]))


@pytest.mark.parametrize("norm", [VecNorm, VecNormV2, NormalizeReward])
def test_a_hook_of_a_subclass_or_of_one_object_is_honoured_around_a_pool(pools, norm):
    def marked(hook):
        return lambda td, following: hook(td, following).set("reward", torch.full((ROWS, 1), 7.0))

    class Marked(norm):
        def _step(self, td, next_td):
            return marked(super()._step)(td, next_td)

    def build(kind):
        return kind() if norm is NormalizeReward else kind(["place"])

    pool = pools[SerialEnv][0]
    of_class = TransformedEnv(pool, build(Marked))
    of_object = TransformedEnv(pool, build(norm))
    of_object.rollout(2, break_when_any_done=False)
    of_object.transform._step = marked(of_object.transform._step)

    for env in (of_class, of_object):
        data = env.rollout(4, break_when_any_done=False)
        assert (data["next", "reward"] == 7).all()


def test_statistics_that_are_no_numbers_of_numpy_count():
    norm = VecNorm(["place"])
    for dtype in (torch.bfloat16, torch.float32):
        norm(TensorDict({"place": torch.ones(ROWS, 2, dtype=dtype)}, [ROWS]))

    assert norm.statistics["place", "mean"].dtype == torch.bfloat16
    assert norm.statistics["place", "weight"] > ROWS


def test_a_default_device_leaves_rows_where_they_are(pools, recordings):
    pool = pools[SerialEnv][0]
    envs = [TransformedEnv(pool, VecNorm(["place"])), TransformedEnv(pool, VecNormV2(["place"]))]
    for env in envs:
        env.reset()
        with torch.device("meta"):
            data = env.rollout(4, break_when_any_done=False)
        assert data["next", "place"].device.type == "cpu"
    assert recordings == [True, True]


def test_rows_that_are_not_finite_are_counted_and_told_as_by_single_steps(recordings):
    class Gap(Walk):
        """Gives no number now and then."""

        def _observe(self):
            observation = super()._observe()
            if self.calls % 7 == 5:
                observation["place"][0] = np.nan
            return observation

    results = []
    for more in ([], [Opaque()]):
        pool = SerialEnv(ROWS, lambda: GymWrapper(Gap()))
        env = TransformedEnv(pool, Compose(VecNorm(["place"]), *more))
        env.set_seed(0)
        with pytest.warns(UserWarning, match="NaN or an infinite number"):
            data = env.rollout(20, break_when_any_done=False)
        results.append((data, env.transform[0].skipped_rows, env.transform[0].statistics))
        pool.close()

    assert recordings == [True]
    assert int(results[0][1]) == int(results[1][1]) > 0
    shown = [data["next", "place"] for data, _, _ in results]
    assert torch.equal(shown[0].nan_to_num(5.5), shown[1].nan_to_num(5.5))
    assert_same(results[0][2], results[1][2])


@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
def test_transforms_of_an_env_inside_are_one_chain_with_those_around_it(pools, recordings, kind):
    fast, slow = pools[kind]

    def nested(pool, *more):
        inside = TransformedEnv(TransformedEnv(pool, StepCounter(5)), RewardSum())
        outside = StepCounter(4, step_count_key="steps"), VecNorm(["place"])
        return TransformedEnv(inside, Compose(*outside, *more))

    env, other = nested(fast), nested(slow, Opaque())
    told, expected = play(env), play(other)

    assert_told_the_same(told, expected)
    assert recordings == [True]
    env.base_env.append_transform(RewardSum(out_keys=["again"]))
    data = env.rollout(3, break_when_any_done=False)
    assert recordings == [True, True]
    assert torch.equal(data["next", "again"], data["next", "episode_reward"])


class Module(torch.nn.Module):
    """Acts on what only transforms show."""

    def forward(self, td):
        up = (td["step_count"] + (td["episode_reward"] > 0)) % 2
        return td.set("action", torch.nn.functional.one_hot(up.squeeze(-1).long(), 2))


@pytest.mark.parametrize("stops", [True, False])
@pytest.mark.parametrize(
    "policy",
    [None, Module(), on_leaves, compiled],
    ids=["random", "of TensorDicts", "of leaves", "compiled"],
)
def test_whoever_acts_and_when_it_stops(pools, recordings, policy, stops):
    def chain():
        return [RewardSum(), StepCounter(4)]

    fast, slow = pools[SerialEnv]
    rolled = []
    for env in (behind(fast, chain), behind(slow, chain, Opaque())):
        env.set_seed(5)
        torch.manual_seed(0)
        data = env.rollout(70, policy, break_when_any_done=stops)
        root = env.step_mdp(data[..., -1])
        rolled += [
            data,
            env.rollout(9, policy, auto_reset=False, tensordict=root, break_when_any_done=stops),
        ]

    assert_told_the_same(rolled[:2], rolled[2:])
    assert recordings == [True, True]


def test_collectors_record_on_rows_too(pools, recordings):
    def batches(pool, *more):
        pool.set_seed(1)
        torch.manual_seed(0)
        env = TransformedEnv(pool, Compose(RewardSum(), StepCounter(3), *more))
        collector = SyncDataCollector(env, None, frames_per_batch=6 * ROWS, total_frames=18 * ROWS)
        return [batch.clone() for batch in collector]

    fast, slow = pools[SerialEnv]

    for one, other in zip(batches(fast), batches(slow, Opaque()), strict=True):
        assert_same(one, other)
    assert recordings == [True] * 3


def test_a_limit_that_is_set_between_steps_ends_episodes(pools, recordings):
    counter = StepCounter()
    env = TransformedEnv(pools[SerialEnv][0], counter)
    env.rollout(3, break_when_any_done=False)

    counter.max_steps = 2
    data = env.rollout(9, break_when_any_done=False)

    assert int(data["next", "step_count"].max()) == 2
    assert (data["next", "truncated"] >= (data["next", "step_count"] == 2)).all()
    assert (data["step_count"][:, 1:][data["next", "done"][:, :-1]] == 0).all()


class Remembered(Count):
    """A count that its caller keeps."""

    def __init__(self):
        super().__init__()
        self.state_spec = self.observation_spec.clone()


def test_what_cannot_be_shown_stacked_rows_goes_step_by_step(pools, recordings):
    pool = pools[SerialEnv][0]

    class Overriding(TransformedEnv):
        def step(self, tensordict):
            return super().step(tensordict)

    for env in (
        TransformedEnv(pool, VecNormV2(["place"], stateful=False)),
        TransformedEnv(pool, Compose(StepCounter(), Opaque())),
        Overriding(pool, StepCounter()),
        TransformedEnv(TransformedEnv(pool, Opaque()), StepCounter()),
        TransformedEnv(TransformedEnv(pool, VecNorm(["place"])), StepCounter(9)),
        TransformedEnv(SerialEnv(ROWS, Remembered, use_buffers=True), StepCounter()),
    ):
        assert env.rollout(3, break_when_any_done=False).shape == (ROWS, 3)
    assert not recordings


@pytest.mark.parametrize("calls", [{1}, {2, 3}, {33}])
@pytest.mark.parametrize(
    "use",
    [
        lambda env: env.step_and_maybe_reset(
            env.rand_action(env.fake_tensordict().exclude("next"))
        ),
        lambda env: env.base_env.rollout(3, break_when_any_done=False),
        lambda env: env.reset(seed=5),
    ],
    ids=["a step", "a rollout of the pool", "a reset"],
)
def test_a_policy_that_uses_the_env_changes_no_step_before(pools, use, calls):
    def played(env):
        count = 0

        def act(td):
            nonlocal count
            count += 1
            if count in calls:
                use(env)
            return Module()(td)

        env.set_seed(3)
        torch.manual_seed(0)
        return env.rollout(40, act, break_when_any_done=False)

    def chain():
        return [RewardSum(), StepCounter(5)]

    fast, slow = pools[SerialEnv]

    assert_same(played(behind(fast, chain)), played(behind(slow, chain, Opaque())))


def test_a_reset_of_one_row_by_a_policy_leaves_the_others_in_the_episode_just_begun(pools):
    pool, calls = pools[SerialEnv][0], []
    env = behind(pool, lambda: [RewardSum(), StepCounter(1)])  # each step begins all rows again
    first_row = TensorDict({"_reset": torch.arange(ROWS) == 0}, [ROWS])

    def act(td):
        calls.append(td["place"].clone())
        if len(calls) == 2:
            assert pool.reset(first_row)["place"][1:].equal(td["place"][1:])
        return env.rand_action(td)

    env.rollout(3, act, break_when_any_done=False)

    assert len(calls) == 3 and not calls[0].equal(calls[1])


def test_ctrl_c_at_any_moment_leaves_a_pool_that_goes_on(pools):
    env = behind(pools[ParallelEnv][0], lambda: [RewardSum(), StepCounter(5)])
    env.rollout(60, break_when_any_done=False)

    times = 20
    ended = interrupt_at_random(lambda: env.rollout(60, break_when_any_done=False), times)

    assert ended > 0.8 * times
    data = env.rollout(9, break_when_any_done=False)
    assert int(data["next", "step_count"].max()) <= 5
    assert (data["step_count"][:, 0] == 0).all()


def test_a_row_that_raises_is_named_and_the_pool_can_be_reset():
    makers = [lambda at=at: GymWrapper(Walk(at)) for at in (None, 4, None, None)]
    with SerialEnv(ROWS, makers) as pool:
        env = TransformedEnv(pool, Compose(RewardSum(), StepCounter()))

        with pytest.raises(WorkerError, match=r"row 1|env 1"):
            env.rollout(20, break_when_any_done=False)

        data = env.rollout(5, break_when_any_done=False)
        assert (data["step_count"][:, 0] == 0).all() and (data["episode_reward"][:, 0] == 0).all()


def test_a_pool_that_is_started_again_records_again(recordings):
    env = TransformedEnv(
        SerialEnv(2, lambda: GymEnv("CartPole-v1")), Compose(RewardSum(), StepCounter())
    )
    shapes = []
    for _ in range(2):
        shapes.append(env.rollout(5, break_when_any_done=False)["episode_reward"].shape)
        env.close()

    assert shapes == [(2, 5, 1)] * 2 and recordings == [True, True]


def test_another_default_device_changes_nothing(pools):
    def chain():
        return [RewardSum(), StepCounter(4)]

    fast, slow = pools[SerialEnv]
    fast.set_seed(2), slow.set_seed(2)
    wanted = behind(slow, chain).rollout(9, OfPlace(), break_when_any_done=False)

    with torch.device("meta"):
        data = behind(fast, chain).rollout(9, OfPlace(), break_when_any_done=False)

    assert_same(data, wanted)


class OfPlace:
    """Acts without making a tensor where the default device says."""

    def __call__(self, td):
        up = (td["place"].sum(-1, keepdim=True) > 0).long()
        return td.set("action", torch.cat([1 - up, up], -1))
