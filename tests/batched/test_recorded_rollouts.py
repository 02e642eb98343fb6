"""Whole rollouts over shared rows give the data of single steps, whatever the policy does, and wherever they begin.

Conventions
    name    of an env that records a rollout in rows.
    wanted  the same rollout of `SerialEnv` without rows, which makes one step after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule

from envkit import GymEnv, ParallelEnv, SerialEnv, compile_policy
from envkit.batched.batched_env import BatchedEnv
from envkit.batched.exchange.shared_memory import BufferExchange
from envkit.errors import InputError, WorkerError
from envkit.specs import Bounded, Composite, Unbounded
from tests.batched.test_faults import interrupt_at_random
from tests.bridges.compare import assert_same
from tests.zoo.envs import Chaos, Count

SEED, ROWS = 3, 4

pytestmark = pytest.mark.usefixtures("warm_fork_server")

together = {"break_when_any_done": False}


def cart_pole() -> GymEnv:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def lean(observation: torch.Tensor) -> torch.Tensor:
    return (observation[..., 2] > 0).long()


def lean_on_tensordicts(td: TensorDictBase) -> TensorDictBase:
    return td.set("action", lean(td["observation"]))


@pytest.fixture(scope="module")
def envs():
    """Give an env without rows, and envs with rows, by name."""
    envs_by_name = {
        "slow": SerialEnv(ROWS, cart_pole, use_buffers=False),
        "serial": SerialEnv(ROWS, cart_pole),
        "parallel": ParallelEnv(ROWS, cart_pole, num_processes=2),
    }
    yield envs_by_name
    for env in envs_by_name.values():
        env.close(raise_if_closed=False)


in_all_ways = pytest.mark.parametrize("name", ["serial", "parallel"])
ACTS = {"leaves": lean, "TensorDicts": lean_on_tensordicts, "random": None}


def rolled(
    env: BatchedEnv, policy: object, prepare: Callable = id, steps: int = 40
) -> TensorDictBase:
    """Roll out from a root that was prepared before."""
    env.set_seed(SEED)
    root = env.reset()
    prepare(root)
    start = {"auto_reset": False, "tensordict": root}
    return env.rollout(steps, policy, **start, **together)


# ------------------------------------------------------------------------------- where they begin


@in_all_ways
@pytest.mark.parametrize("policy", ACTS.values(), ids=ACTS)
def test_a_root_with_a_gradient_leaves_none_in_the_rows(envs, name, policy):
    def prepare(root):
        root["observation"].requires_grad_()

    data = rolled(envs[name], policy, prepare)
    after = envs[name].rollout(3, policy, **together)

    assert_same(data, rolled(envs["slow"], policy, prepare))
    assert not data["observation"].requires_grad and not after["observation"].requires_grad


@in_all_ways
@pytest.mark.parametrize("steps", [1, 5, 200])
@pytest.mark.parametrize("policy", ACTS.values(), ids=ACTS)
def test_a_rollout_that_stops_where_a_row_is_done_is_that_of_single_steps(
    envs, name, steps, policy
):
    runs = []
    for env in (envs[name], envs["slow"]):
        env.set_seed(SEED)
        runs.append([env.rollout(steps, policy), env.rollout(steps, policy), env.rand_action()])

    for own, other in zip(*runs, strict=True):
        assert_same(own, other)
    assert steps < 200 or runs[0][0]["next", "done"][:, -1].any()


def test_a_row_that_is_lost_leaves_no_gradient_in_the_rows(opened):
    env = opened(SerialEnv(2, Chaos, use_buffers=True, on_worker_failure="restart"))
    root = env.reset()
    root["draw"].requires_grad_()
    fault = torch.tensor([[Chaos.FAULTS.index("raise")], [0]])

    lost = env.step(root.set("action", fault))
    after = env.step(env.rand_action(env.reset()).set("action", torch.zeros(2, 1).long()))

    assert lost["next", "truncated"].flatten().tolist() == [True, False]
    assert not after["next", "draw"].requires_grad


def half(root: TensorDictBase) -> None:
    root["_step"] = torch.arange(ROWS) % 2 == 0


def told_before(root: TensorDictBase) -> None:
    root["next"] = TensorDict({"reward": torch.ones(ROWS, 1)}, [ROWS])


def doubles(root: TensorDictBase) -> None:
    root["observation"] = root["observation"].double() / 3


@pytest.mark.parametrize("prepare", [half, told_before, doubles])
@pytest.mark.parametrize("name", ["serial", "parallel"])
@pytest.mark.parametrize("policy", ACTS.values(), ids=ACTS)
def test_what_a_root_asks_for_is_obeyed(envs, name, prepare, policy):
    data = rolled(envs[name], policy, prepare)

    assert_same(data, rolled(envs["slow"], policy, prepare))


# --------------------------------------------------------------------------------- what policies do


class Leans(torch.nn.Module):
    """Leans to the side that a goal says."""

    def forward(self, observation, goal):
        return (observation[..., 2] > goal[..., 0]).long()


@in_all_ways
def test_a_compiled_policy_may_read_what_lies_beside_the_rows(envs, name):
    policy = compile_policy(TensorDictModule(Leans(), ["observation", "goal"], ["action"]))

    def towards(root: TensorDictBase) -> None:
        root["goal"] = torch.linspace(-0.1, 0.1, ROWS)[:, None]

    data = rolled(envs[name], policy, towards)

    assert_same(data, rolled(envs["slow"], policy, towards))


def halve(td: TensorDictBase) -> TensorDictBase:
    return td.set("observation", td["observation"].double() / 2)


def narrow(td: TensorDictBase) -> TensorDictBase:
    return td.set("observation", td["observation"][..., :1] + 1)


def say_as_integers(td: TensorDictBase) -> TensorDictBase:
    return td.set("done", td["done"].long() + 3)


def weigh(td: TensorDictBase) -> TensorDictBase:
    return td.set("observation", td["observation"] * torch.ones(4, requires_grad=True))


@in_all_ways
@pytest.mark.parametrize("change", [halve, narrow, say_as_integers, weigh])
def test_what_a_policy_puts_in_the_place_of_an_entry_keeps_its_form(envs, name, change):
    def act(tensordict: TensorDictBase) -> TensorDictBase:
        return change(lean_on_tensordicts(tensordict))

    data, wanted = rolled(envs[name], act), rolled(envs["slow"], act)

    assert_same(data, wanted)
    assert data["observation"].requires_grad is wanted["observation"].requires_grad


def one_step(env: BatchedEnv) -> None:
    """Step all rows, as one does that plans ahead."""
    env.step_and_maybe_reset(env.fake_tensordict().exclude("next"))


def a_rollout(env: BatchedEnv) -> None:
    env.rollout(3, lean, **together)


def begin_anew(env: BatchedEnv) -> None:
    env.reset(seed=5)


@in_all_ways
@pytest.mark.parametrize("use", [one_step, a_rollout, begin_anew])
@pytest.mark.parametrize("calls", [{1}, {2, 3}, {32}, {33}, {40}])
@pytest.mark.parametrize("reads", ["leaves", "TensorDicts"])
def test_a_policy_that_uses_the_env_changes_no_step_before(envs, name, use, calls, reads):
    def played(env: BatchedEnv) -> TensorDictBase:
        count = 0

        def act(observation: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += 1
            if count in calls:
                use(env)
            return lean(observation)

        def act_on_tensordict(tensordict: TensorDictBase) -> TensorDictBase:
            return tensordict.set("action", act(tensordict["observation"])).set(
                "turn", tensordict["turn"] + 1
            )

        def prepare(root: TensorDictBase) -> None:
            root["turn"] = torch.arange(ROWS)

        policy = act if reads == "leaves" else act_on_tensordict
        return rolled(env, policy, prepare)

    assert_same(played(envs[name]), played(envs["slow"]))


# -------------------------------------------------------------------------------------- large rows


class Large(Count):
    """Shows so much that memory is kept for only two moments of it, or for ``size`` less."""

    def __init__(self, n: int = 4, size: int = 300_000):
        super().__init__(n)
        self.size = size
        self.observation_spec = self.observation_spec.set("view", Unbounded((size,)))
        self.action_spec = Bounded(-9, 9, (1,))

    def _out(self):
        return super()._out().set("view", torch.full((self.size,), float(self.c)))


class LargeAndRead(Large):
    """Counts on from what it is given."""

    def __init__(self):
        super().__init__()
        self.state_spec = Composite(count=self.observation_spec["count"])

    def _step(self, td):
        self.c = int(td["count"])
        return super()._step(td)


@pytest.fixture(scope="module", params=[Large, LargeAndRead])
def large_envs(request):
    """Give an env without rows, and envs with large rows, by name."""
    envs_by_name = {
        "slow": SerialEnv(2, request.param, use_buffers=False),
        "serial": SerialEnv(2, request.param),
        "parallel": ParallelEnv(2, request.param, num_processes=2),
    }
    yield envs_by_name
    for env in envs_by_name.values():
        env.close(raise_if_closed=False)


def look(count: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    return view[..., :1] / 3 + count


def look_at_tensordicts(td: TensorDictBase) -> TensorDictBase:
    return td.update({"action": look(td["count"], td["view"]), "seen": td["view"][..., 1] + 1})


@in_all_ways
@pytest.mark.parametrize("stops", [True, False])
@pytest.mark.parametrize("policy", [look, look_at_tensordicts, None])
def test_rows_as_large_as_pictures_are_recorded_alike(large_envs, name, policy, stops):
    def played(env: BatchedEnv) -> list[TensorDictBase]:
        env.set_seed(SEED)
        first = env.rollout(11, policy, break_when_any_done=stops)
        return [first, env.rollout(2, policy, break_when_any_done=stops), env.rand_action()]

    runs = [played(large_envs[which]) for which in (name, "slow")]

    assert runs[0][0]["next", "done"].any()
    for own, other in zip(*runs, strict=True):
        assert_same(own, other)


@pytest.mark.parametrize("length", [59, 62, 64, 65, 300])
def test_as_many_actions_are_drawn_as_steps_are_made_wherever_a_run_stops(opened, length):
    """Memory for about 40 moments: a window lies across the 64 actions that are drawn at first."""
    runs = []
    for use_buffers in (True, False):
        env = opened(SerialEnv(2, partial(Large, length, 6500), use_buffers=use_buffers))
        env.set_seed(SEED)
        runs.append([env.rollout(length + 35), env.rand_action()])

    assert runs[0][0].shape == (2, length)
    for own, other in zip(*runs, strict=True):
        assert_same(own, other)


# ------------------------------------------------------------------------------------------ faults


@pytest.fixture(scope="module")
def counting():
    env = ParallelEnv(ROWS, partial(Count, 1000), num_processes=2)
    yield env
    env.close(raise_if_closed=False)


def idle(count: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(count)


class StopsError(Exception):
    pass


@pytest.mark.parametrize("error", [StopsError, KeyboardInterrupt])
@pytest.mark.parametrize("call", [0, 1, 31, 32, 130])
@pytest.mark.parametrize("reads", ["leaves", "TensorDicts"])
def test_a_policy_that_raises_leaves_every_row_where_it_is(counting, reads, call, error):
    calls = 0

    def act(count: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        if calls == call:
            raise error
        calls += 1
        return idle(count)

    def act_on_tensordicts(tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("action", act(tensordict["count"]))

    policy = act if reads == "leaves" else act_on_tensordicts
    root = counting.fake_tensordict().exclude("next")
    with pytest.raises(error):
        counting.rollout(200, policy, **together)

    assert list(counting.c) == [call] * ROWS
    after = counting.step(root)
    assert after["next", "count"].flatten().tolist() == [call + 1] * ROWS
    begun = counting.reset(root.set("_reset", torch.tensor([[True], [False], [False], [False]])))
    assert begun["count"][0].item() == 0 and list(counting.c) == [0, *[call + 1] * (ROWS - 1)]
    data = counting.rollout(3, idle, **together)
    assert data["next", "count"].squeeze(-1).tolist() == [[1, 2, 3]] * ROWS


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("policy", ACTS.values(), ids=ACTS)
def test_ctrl_c_at_any_moment_of_a_rollout_leaves_a_pool_that_goes_on(envs, policy):
    env = envs["parallel"]
    env.rollout(60, policy, **together)  # what is imported is

    times = 40
    assert interrupt_at_random(lambda: env.rollout(60, policy, **together), times) > 0.8 * times

    assert_same(rolled(env, policy), rolled(envs["slow"], policy))


def planned(**faults: str) -> dict[tuple[int, int], str]:
    """Plan faults named by step and row: ``s3r1="raise"``."""
    places = {place: place[1:].split("r") for place in faults}
    return {(int(step), int(row)): faults[place] for place, (step, row) in places.items()}


def following(plan: dict[tuple[int, int], str]) -> Callable[[TensorDictBase], TensorDictBase]:
    """Make a policy that has rows go wrong as planned, by the ``row`` and ``time`` in a root."""

    def act(td: TensorDictBase) -> TensorDictBase:
        places = zip(td["time"].tolist(), td["row"].tolist(), strict=True)
        faults = [[Chaos.FAULTS.index(plan.get(place, "none"))] for place in places]
        return td.update({"action": torch.tensor(faults), "time": td["time"] + 1, "row": td["row"]})

    return act


def started(env: ParallelEnv) -> TensorDictBase:
    env.set_seed(SEED)
    return env.reset().update({"time": torch.zeros(ROWS).long(), "row": torch.arange(ROWS)})


def recorded(env: ParallelEnv, plan: dict[tuple[int, int], str], steps: int = 14) -> TensorDictBase:
    start = {"auto_reset": False, "tensordict": started(env)}
    return env.rollout(steps, following(plan), **start, **together)


def by_steps(env: ParallelEnv, plan: dict[tuple[int, int], str], steps: int = 14) -> TensorDictBase:
    act, td, steps_made = following(plan), started(env), []
    for step in range(steps):
        if step == steps - 1:
            steps_made.append(env.step(act(td)))
        else:
            done, td = env.step_and_maybe_reset(act(td))
            steps_made.append(done)
    return torch.stack(steps_made, 1)


@pytest.mark.parametrize(
    "plan",
    [
        planned(s3r1="raise", s3r2="raise", s4r2="raise", s13r0="raise"),
        planned(s0r0="kill", s0r3="kill", s5r3="exit", s13r2="exit"),
        planned(s2r1="kill", s2r2="raise", s3r0="raise", s6r0="raise", s6r3="misfit"),
    ],
    ids=["raise", "die", "both"],
)
def test_rows_that_are_lost_are_made_good_as_step_by_step(opened, plan):
    restarting = {"on_worker_failure": "restart", "max_restarts": 40}
    env, other = (opened(ParallelEnv(ROWS, Chaos, num_processes=2, **restarting)) for _ in range(2))

    data = recorded(env, plan)

    assert data["next", "truncated"].sum() >= len(plan)
    assert_same(data, by_steps(other, plan))
    assert_same(recorded(env, {}), by_steps(other, {}))


def newest(env: ParallelEnv) -> list[int]:
    assert isinstance(env._exchange, BufferExchange)
    return env._exchange.newest()["count"].flatten().tolist()


def test_it_is_known_where_every_row_is(opened):
    env, failing = (
        opened(ParallelEnv(ROWS, partial(Chaos, 50), num_processes=2)) for _ in range(2)
    )

    recorded(env, {}, 3)
    with pytest.raises(WorkerError):
        recorded(failing, planned(s2r1="raise"), 3)

    assert newest(env) == [3, 3, 3, 3]
    assert newest(failing)[2:] == [3, 3]


def test_an_action_that_is_none_moves_nothing(opened):
    env = opened(ParallelEnv(ROWS, partial(Count, 1000), num_processes=2))

    def act(count: torch.Tensor) -> torch.Tensor:
        return torch.where(count == 5, 9, 0)

    with pytest.raises(InputError, match="row 0"):
        env.rollout(20, act, **together)

    assert newest(env) == list(env.c) and set(newest(env)) == {5}
