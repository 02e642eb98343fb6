"""Vector envs whose data is torch tensors: the data of their steps, whatever autoreset does, and no NumPy and no wait on the way."""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from envkit import (
    Collector,
    Compose,
    GymWrapper,
    MixedEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TorchVectorWrapper,
    TransformedEnv,
    check_env_specs,
    evaluate,
    gae,
    make,
    to_gym_vector,
)
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    BatchSizeError,
    ClosedEnvError,
    EncodingError,
    InputError,
    OptionError,
    ResetMaskError,
    ResumeError,
    SpecError,
    StepMaskError,
)
from envkit.transforms.core import transform_stepping
from envkit_bridges.gym import torch_leaves, torch_rows, torch_vector
from tests.zoo.torch_envs import RowKeyword, RowNumbers, TorchPendulum

NEXT_STEP: dict[str, Any] = {"partial_reset": "reset_mask"}


def rows(mode: AutoresetMode = AutoresetMode.DISABLED, **options: Any) -> TorchVectorWrapper:
    return GymWrapper(  # type: ignore[return-value]
        TorchPendulum(mode=mode, **options),
        **(NEXT_STEP if mode == AutoresetMode.NEXT_STEP else {}),
    )


def unfinished(**options: Any) -> TorchVectorWrapper:
    pendulum = TorchPendulum(mode=AutoresetMode.SAME_STEP, final=None, **options)
    return GymWrapper(pendulum, final="missing")  # type: ignore[return-value]


WAYS = {
    "mask": rows,
    "next step": partial(rows, AutoresetMode.NEXT_STEP),
    "same step": partial(rows, AutoresetMode.SAME_STEP),
    "same step, older name": partial(rows, AutoresetMode.SAME_STEP, final="final_observation"),
    "numbers in options": lambda **options: GymWrapper(
        RowNumbers(**options), autoreset_mode="Disabled", partial_reset="env_idx"
    ),
    "numbers by keyword": lambda **options: GymWrapper(
        RowKeyword(**options), autoreset_mode="Disabled"
    ),
}
ways = pytest.mark.parametrize("way", list(WAYS))


def assert_same(left: Any, right: Any) -> None:
    assert set(left.keys(True, True)) == set(right.keys(True, True))
    for key in left.keys(True, True):
        torch.testing.assert_close(left[key], right[key], rtol=0, atol=0, equal_nan=True)


def push(observation: torch.Tensor) -> torch.Tensor:
    return observation[:, :1].sign()


# ------------------------------------------------------------------------------------------- data


def bare_run(steps: int) -> dict[str, torch.Tensor]:
    """Step the simulator by hand, and reset by a mask what has ended."""
    simulator = TorchPendulum()
    simulator.reset(seed=3)
    observation = simulator.reset()[0].clone()
    seen: dict[str, list[torch.Tensor]] = {}
    for _ in range(steps):
        action = push(observation)
        after, reward, terminated, truncated, _ = simulator.step(action)
        moment = (observation, action, after, reward[:, None], terminated[:, None])
        names = ("observation", "action", "after", "reward", "terminated")
        for name, value in zip(names, moment, strict=True):
            seen.setdefault(name, []).append(value.clone())
        over = terminated | truncated
        observation = simulator.reset(options={"reset_mask": over})[0].clone()
    return {name: torch.stack(values, 1) for name, values in seen.items()}


@ways
def test_each_way_gives_the_bits_of_the_bare_simulator(way):
    env = WAYS[way]()
    env.set_seed(3)

    data = env.rollout(16, push, break_when_any_done=False)

    bare = bare_run(16)
    assert torch.equal(data["observation"], bare["observation"])
    assert torch.equal(data["action"], bare["action"])
    assert torch.equal(data["next", "observation"], bare["after"])
    assert torch.equal(data["next", "reward"], bare["reward"])
    assert torch.equal(data["next", "terminated"], bare["terminated"])
    assert data["next", "truncated"].sum() >= 6


@ways
def test_specs_and_data_agree(way):
    check_env_specs(WAYS[way](as_dict=True))


@ways
def test_single_steps_resets_and_masks_give_the_data_of_a_rollout(way):
    env = WAYS[way]()
    env.set_seed(0)
    data = env.rollout(9, push, break_when_any_done=False)

    env.set_seed(0)
    td, steps = env.reset(), []
    for _ in range(9):
        td = env.step(td.set("action", push(td["observation"])))
        steps.append(td)
        td = env.maybe_reset(env.step_mdp(td))

    assert_same(torch.stack(steps, 1), data)


@settings(max_examples=8)
@given(
    actions=st.lists(st.floats(-2, 2, width=32), min_size=3, max_size=14), limit=st.integers(1, 4)
)
def test_all_ways_give_the_same_data(actions, limit):
    runs = []
    for way in WAYS.values():
        env = way(limit=limit)
        env.set_seed(1)
        moves = [torch.full((3, 1), action) for action in actions]
        runs.append(env.rollout(len(moves), actions=moves, break_when_any_done=False))

    for run in runs[1:]:
        assert_same(run, runs[0])


@ways
def test_rows_that_have_ended_wait_for_the_others(way):
    data = WAYS[way]().rollout(9, push, break_when_all_done=True)

    assert data["next", "done"][..., 0].sum(1).tolist() == [3, 2, 1]
    assert data["next", "observation"][0, 3].equal(data["next", "observation"][0, 5])
    assert data["next", "reward"][0, 4:].eq(0).all()


@pytest.mark.parametrize("way", ["mask", "next step", "numbers in options", "numbers by keyword"])
def test_a_row_that_has_waited_is_reset_before_it_is_stepped(way):
    env = WAYS[way]()
    root = env.step_mdp(env.rollout(5, push, break_when_all_done=True)[:, -1])
    with pytest.raises(StepMaskError, match=r"rows \[0(, 1)?\] have ended.*Reset them first"):
        env.rand_step(root.copy())

    root = env.reset(root.set("_reset", torch.tensor([True, True, False])))
    data = env.rollout(2, push, auto_reset=False, tensordict=root, break_when_any_done=False)

    assert not data["next", "done"][:2].any() and data["next", "done"][2, 0]
    assert not torch.equal(data["observation"][0, 0], data["observation"][0, 1])


def test_any_rows_may_be_reset_where_the_simulator_resets_rows():
    env = rows()
    td = env.rand_step(env.reset())
    kept = td["next", "observation"][1].clone()

    root = env.reset(env.step_mdp(td).set("_reset", torch.tensor([True, False, True])))

    assert torch.equal(root["observation"][1], kept)
    assert root["observation"][::2].norm(dim=-1).allclose(torch.tensor(0.5))


def test_a_mask_of_nothing_resets_nothing():
    env = rows()
    root, count = env.reset(), env.resets

    again = env.reset(root.clone().set("_reset", torch.zeros(3, dtype=torch.bool)))

    assert_same(again, root)
    assert env.resets == count


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
def test_rows_that_end_together_are_reset_in_one_call(mode):
    env = GymWrapper(TorchPendulum(mode=mode), **(NEXT_STEP if mode.name == "NEXT_STEP" else {}))
    env.limits.fill_(4)
    env.reset()
    before = env.resets

    data = env.rollout(9, push, break_when_any_done=False)

    assert data["next", "done"].sum() == 6
    assert env.resets - before == (1 if mode == AutoresetMode.SAME_STEP else 3)


@pytest.mark.parametrize("categorical", [True, False], ids=["numbers", "one-hot"])
@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(4, start=2),
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiDiscrete([3, 3], start=[1, 2]),
        spaces.MultiBinary(3),
        spaces.Box(0, 5, (2,), "int32"),
        spaces.Dict(a=spaces.Discrete(3), b=spaces.Box(-1, 1, (), "float64")),
        spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2,)))),
    ],
    ids=str,
)
def test_actions_and_observations_of_each_kind_travel_there_and_back(space, categorical):
    env = GymWrapper(Echo(space), categorical)
    check_env_specs(env)
    root = env.rand_action(env.reset())

    following = env.step(root)["next"]

    for acted, seen in zip(env.action_keys, env.observation_keys, strict=True):
        assert torch.equal(root[acted], following[seen]), acted


class Echo(gymnasium.vector.VectorEnv):
    """Shows the last action, which must lie in its space."""

    def __init__(self, space: gymnasium.Space, num_envs: int = 5):
        self.num_envs, self.metadata = num_envs, {"autoreset_mode": AutoresetMode.DISABLED}
        self.single_action_space = self.single_observation_space = space

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if seed is not None:
            self.single_action_space.seed(seed)
        sample = [self.single_action_space.sample() for _ in range(self.num_envs)]
        return _stacked(self.single_action_space, sample), {}

    def step(self, action: Any) -> Any:
        for row in range(self.num_envs):
            assert self.single_action_space.contains(_row(action, row)), action
        nothing = torch.zeros(self.num_envs)
        return action, nothing, nothing.bool(), nothing.bool(), {}


def _stacked(space: gymnasium.Space, values: list[Any]) -> Any:
    if isinstance(space, spaces.Dict):
        return {name: _stacked(space[name], [value[name] for value in values]) for name in space}
    if isinstance(space, spaces.Tuple):
        return tuple(_stacked(one, [value[i] for value in values]) for i, one in enumerate(space))
    return torch.as_tensor(np.stack(values))


def _row(value: Any, row: int) -> Any:
    if isinstance(value, dict):
        return {name: _row(one, row) for name, one in value.items()}
    if isinstance(value, tuple):
        return tuple(_row(one, row) for one in value)
    return value[row].numpy()


# ------------------------------------------------------------------------------------------ devices


class Reads(TorchDispatchMode):
    """Counts the operations in which the host would wait for a device."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal")

    def __init__(self):
        super().__init__()
        self.count = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indexes = name == "index" and any(
            getattr(index, "dtype", None) == torch.bool for index in args[1]
        )
        if name in self.WAITING or indexes:
            self.count[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def waiting(monkeypatch) -> None:
    """Treat tensors of the CPU as those of a GPU."""
    for module in (torch_leaves, torch_rows, torch_vector, transform_stepping):
        monkeypatch.setattr(module, "reading_waits", lambda tensor: True)


@pytest.mark.parametrize("transform", [None, RewardSum], ids=["bare", "transformed"])
@pytest.mark.parametrize("wrap", [rows, partial(rows, AutoresetMode.SAME_STEP), unfinished])
def test_a_rollout_reads_no_value_where_reading_waits(wrap, transform, waiting):
    env = wrap() if transform is None else TransformedEnv(wrap(), transform())
    act, counts = torch.nn.Linear(2, 1), []
    for steps in (4, 12):
        with Reads() as reads, torch.no_grad():
            data = env.rollout(steps, act, break_when_any_done=False)
        counts.append(reads.count)

    assert data["next", "done"].sum() >= 6
    assert counts[0] == counts[1], counts  # the first reset alone may read


def test_a_mask_is_handed_over_without_a_read_and_gives_the_same_data(waiting):
    wanted = bare_run(12)["after"]
    for way in ("mask", "same step", "numbers in options"):
        env = WAYS[way]()
        env.set_seed(3)

        data = env.rollout(12, push, break_when_any_done=False)

        assert torch.equal(data["next", "observation"], wanted), way


def test_the_device_is_that_of_the_simulator():
    env = GymWrapper(RowKeyword(), autoreset_mode="Disabled")

    assert env.device == env.action_spec.device == env.reset().device == torch.device("cpu")


def test_an_action_is_the_simulators_own():
    env = rows()
    td = env.rand_action(env.reset())
    before = td["action"].clone()

    env.step(td)
    env.actions[-1].zero_()

    assert torch.equal(td["action"], before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64])
def test_an_action_of_another_dtype_is_converted(dtype):
    env = rows()

    env.step(env.reset().set("action", torch.ones(3, 1, dtype=dtype)))

    assert env.actions[-1].dtype == torch.float32
    assert env.actions[-1].eq(1).all()


class Drift(gymnasium.vector.VectorEnv):
    """A differentiable world without in-place writes, and without a ``device``: a row ends above 1."""

    num_envs = 4
    single_observation_space = spaces.Box(-9, 9, (1,))
    single_action_space = spaces.Box(-1, 1, (1,))

    def __init__(self, mode: AutoresetMode | None = AutoresetMode.DISABLED, **overrides: Any):
        self.metadata = {} if mode is None else {"autoreset_mode": mode}
        vars(self).update(overrides)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        mask = (options or {}).get("reset_mask")
        place = torch.zeros(4, 1)
        self.place = place if mask is None else torch.where(mask[:, None], place, self.place)
        return self.place, {}

    def step(self, action: torch.Tensor) -> Any:
        self.place = self.place + action
        over = self.place[:, 0] > 1
        return self.place, -((self.place[:, 0] - 0.5) ** 2), over, torch.zeros_like(over), {}


def test_gradients_flow_through_a_rollout_and_end_at_resets():
    push = torch.full((1,), 0.4, requires_grad=True)

    data = GymWrapper(Drift()).rollout(
        4, lambda observation: push.expand(4, 1), break_when_any_done=False
    )
    (gradient,) = torch.autograd.grad(data["next", "reward"].sum(), push)

    places = [0.4, 0.8, 1.2, 0.4]
    assert torch.allclose(data["next", "observation"][0, :, 0], torch.tensor(places))
    expected = 4 * sum(
        -2 * (place - 0.5) * steps for place, steps in zip(places, (1, 2, 3, 1), strict=True)
    )
    assert gradient.item() == pytest.approx(expected, rel=1e-5)


# --------------------------------------------------------------------------- last observations that are missing


def test_a_last_observation_that_is_missing_is_marked():
    env = unfinished(as_dict=True)
    check_env_specs(env)

    data = env.rollout(9, break_when_any_done=False)
    missing = data["next", "final_missing"][..., 0]

    assert torch.equal(missing, data["next", "done"][..., 0])
    assert not data["final_missing"].any()
    assert data["next", "angle"][missing].isnan().all()
    assert data["next", "angle"][~missing].isfinite().all()
    assert data["next", "clock", "elapsed"][missing].eq(0).all()
    assert data["angle"].isfinite().all()


class Ending(Echo):
    """Ends every episode after one step, and shows the first observation of the next one."""

    def __init__(self, space: gymnasium.Space):
        super().__init__(space)
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def step(self, action: Any) -> Any:
        action, reward, terminated, truncated, info = super().step(action)
        return action, reward, terminated, ~truncated, info


@pytest.mark.parametrize(
    ("space", "least"),
    [
        (spaces.Discrete(3), [1, 0, 0]),
        (spaces.MultiDiscrete([2, 3]), [1, 0, 1, 0, 0]),
        (spaces.Box(1, 5, (2,), "int32"), [1, 1]),
    ],
    ids=str,
)
def test_what_stands_for_a_missing_choice_lies_in_its_space(space, least):
    env = GymWrapper(Ending(space), final="missing")
    check_env_specs(env)

    shown = env.rollout(2, break_when_any_done=False)["next", "observation"]

    assert shown.tolist() == [[least] * 2] * 5


def test_gae_leaves_truncated_steps_out_whose_last_observation_is_missing():
    whole = rows(AutoresetMode.SAME_STEP).rollout(9, push, break_when_any_done=False)
    data = unfinished().rollout(9, push, break_when_any_done=False)
    flags = {"truncated": data["next", "truncated"] & (torch.arange(9) < 5)[None, :, None]}
    flags["terminated"] = data["next", "done"] & ~flags["truncated"]
    for run in (whole, data):
        run["next"].update(flags)
    value = lambda td: td["observation"].sum(-1, keepdim=True)  # noqa: E731

    shown = gae(whole, value, gamma=0.9, lmbda=0.0)
    result = gae(data, value, gamma=0.9, lmbda=0.0)

    unknown = flags["truncated"]
    assert unknown.any() and flags["terminated"].any()
    assert result["advantage"][unknown].eq(0).all()
    assert torch.equal(result["value_target"][unknown], value(data)[unknown])
    assert torch.equal(result["advantage"][~unknown], shown["advantage"][~unknown])


def test_a_simulator_that_hides_last_observations_is_refused():
    env = rows(AutoresetMode.SAME_STEP, final=None)

    with pytest.raises(EncodingError, match=r"rows \[0\] and reset them.*pass final='missing'"):
        env.rollout(9, push, break_when_any_done=False)


# ------------------------------------------------------------------------------------ with everything else


def test_it_stands_beside_others_in_a_mixed_env():
    env = MixedEnv([rows(), SerialEnv(2, lambda: GymWrapper(Observing()))])
    env.set_seed(0)

    data = env.rollout(9, break_when_any_done=False)

    assert data.shape == (5, 9)
    assert data["next", "done"][:3].any()


class Observing(gymnasium.Env):
    """A single env with the spaces of the pendulums."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,))
    action_space = spaces.Box(-2, 2, (1,))

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.ones(2, np.float32), 0.0, False, False, {}


def test_transforms_collectors_and_evaluate_take_it():
    env = TransformedEnv(rows(), Compose(StepCounter(3), RewardSum()))
    check_env_specs(env)

    (batch,) = Collector(env, frames_per_batch=24, total_frames=24)
    result = evaluate(rows(AutoresetMode.SAME_STEP), push, episodes=6)

    assert batch["next", "step_count"].max() == 3
    assert batch["next", "done"].sum() == 6
    assert len(result.returns) == 6


def test_a_gymnasium_vector_env_shows_it():
    view = to_gym_vector(rows(), "disabled")

    observation, _ = view.reset(seed=0)
    after, reward, *_ = view.step(view.action_space.sample())

    assert observation.shape == after.shape == (3, 2)
    assert reward.shape == (3,)


@pytest.mark.parametrize("autoreset", ["same_step", "disabled"])
def test_a_gymnasium_vector_env_goes_on_where_rows_end_at_different_times(autoreset):
    view = to_gym_vector(rows(), autoreset)
    view.reset(seed=0)
    ends = []

    for _ in range(9):
        *_, terminated, truncated, _ = view.step(view.action_space.sample())
        over = terminated | truncated
        ends.append(over.tolist())
        if autoreset == "disabled" and over.any():
            view.reset(options={"reset_mask": over})

    assert all(map(any, zip(*ends, strict=True)))
    assert any(any(over) and not all(over) for over in ends)


def test_infos_that_are_tensors_are_recorded():
    pendulum = TorchPendulum(mode=AutoresetMode.SAME_STEP)

    data = GymWrapper(pendulum, info=True).rollout(3)

    assert torch.equal(data["next", "speed"], data["next", "observation"][..., 1])


def test_values_that_are_not_finite_are_recorded_as_they_are():
    env = rows()
    td = env.reset()
    env.angle[1] = torch.nan

    following = env.rand_step(td)["next"]

    assert following["observation"].isnan().any(-1).tolist() == [False, True, False]


def test_a_copy_goes_on_by_itself():
    env = rows()
    env.set_seed(5)
    env.reset()
    twin = copy.deepcopy(env)

    assert_same(env.rollout(6, push), twin.rollout(6, push))


def test_a_state_dict_leaves_episodes_out():
    env = rows()
    env.reset()
    with pytest.warns(
        UserWarning,
        match=r"new ones begin\. Those of .* cannot be saved.*leave record_for_resume out",
    ):
        env.load_state_dict(env.state_dict())
    env.reset()
    env.record_for_resume()

    with pytest.raises(ResumeError, match=r"offers no state. Leave record_for_resume out"):
        env.state_dict()


# ---------------------------------------------------------------------------------------- bad input


class Spoilt(Drift):
    """Returns something else in the place of one of the five values of a step."""

    def __init__(self, place: int, value: Any):
        super().__init__()
        self.spoilt = place, value

    def step(self, action: torch.Tensor) -> Any:
        result = [*super().step(action)]
        place, value = self.spoilt
        result[place] = value
        return tuple(result)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (
            0,
            torch.zeros(3, 1),
            r"'observation' as a tensor of shape \(3, 1\); expected .* \(4, 1\)",
        ),
        (0, np.zeros((4, 1)), "'observation' as ndarray; expected a tensor"),
        (0, torch.zeros(4, 1, dtype=torch.complex64), "of dtype torch.complex64; expected"),
        (1, torch.zeros(4, 2), r"reward as a tensor of shape \(4, 2\); expected .* \(4,\)"),
        (1, 0.0, "reward as float; expected a tensor"),
        (2, torch.zeros(4), "terminated of dtype torch.float32; expected bools"),
        (3, torch.zeros(5, dtype=torch.bool), r"truncated as a tensor of shape \(5,\)"),
    ],
)
def test_values_that_do_not_fit_are_refused(place, value, words):
    env = GymWrapper(Spoilt(place, value))

    with pytest.raises(EncodingError, match=words):
        env.rand_step(env.reset())


class EchoOnce(Echo):
    """Shows something else in the place of the next observation."""

    def __init__(self, space: gymnasium.Space, value: torch.Tensor):
        super().__init__(space)
        self.value = value

    def step(self, action: Any) -> Any:
        return self.value, *super().step(action)[1:]


@pytest.mark.parametrize("categorical", [True, False], ids=["numbers", "one-hot"])
@pytest.mark.parametrize(
    ("space", "value", "words"),
    [
        (
            spaces.Discrete(3),
            torch.full((5,), 3),
            r"3, 3\], which is not in its space Discrete\(3\)",
        ),
        (spaces.Discrete(3, start=2), torch.full((5,), 1), "which is not in its space"),
        (spaces.MultiDiscrete([2, 3]), torch.full((5, 2), 2), "which is not in its space"),
        (spaces.Discrete(3), torch.full((5,), 1.5), "dtype torch.float32; expected torch.int64"),
    ],
    ids=str,
)
def test_numbers_of_options_that_do_not_fit_are_refused(space, value, words, categorical):
    env = GymWrapper(EchoOnce(space, value), categorical)

    with pytest.raises(EncodingError, match=words):
        env.rand_step(env.reset())


class Filled(Ending):
    """Fills the rows that go on in last observations, and those that are not reset, with -1."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        shown, info = super().reset(seed=seed)
        mask = (options or {}).get("reset_mask")
        return shown if mask is None else torch.where(mask, shown, -1), info

    def step(self, action: Any) -> Any:
        action, reward, terminated, truncated, _ = super().step(action)
        truncated[0] = False
        last = torch.where(truncated, action, -1)
        return action, reward, terminated, truncated, {"final_obs": last}


def test_numbers_of_options_of_rows_that_are_not_asked_for_may_be_anything():
    env = GymWrapper(Filled(spaces.Discrete(3)), partial_reset="reset_mask")
    root = env.reset()

    data = env.rollout(3, break_when_any_done=False)
    fresh = env.reset(root.set("_reset", torch.arange(5)[:, None] == 2))

    assert data["next", "done"].sum() == 12
    assert (fresh["observation"].sum(-1) == 1).all()


def test_a_dtype_that_its_space_holds_is_cast():
    env = GymWrapper(EchoOnce(spaces.Box(0, 5, (2,), "int64"), torch.ones(5, 2, dtype=torch.int32)))

    shown = env.rand_step(env.reset())["next", "observation"]

    assert shown.dtype == torch.int64 and (shown == 1).all()


def test_a_missing_member_of_a_dict_is_named():
    simulator = TorchPendulum(as_dict=True)
    simulator._observed = lambda **_: {"angle": simulator.angle}
    env = GymWrapper(simulator)

    with pytest.raises(EncodingError, match=r"reset .* without 'clock'"):
        env.reset()


@pytest.mark.parametrize(
    ("wrap", "error", "words"),
    [
        (lambda: GymWrapper(Drift(None)), ArgumentError, r"does not say .* Pass autoreset_mode="),
        (
            lambda: GymWrapper(Drift(), autoreset_mode="no"),
            ArgumentError,
            "is 'no'; expected one of",
        ),
        (lambda: GymWrapper(Drift(), partial_reset="no"), ArgumentError, "partial_reset is 'no'"),
        (lambda: GymWrapper(Drift(), final="kept"), ArgumentError, "final is 'kept'"),
        (lambda: GymWrapper(Drift(), final="missing"), ArgumentError, "Leave final out"),
        (
            lambda: GymWrapper(Drift(AutoresetMode.NEXT_STEP)),
            ArgumentError,
            "their action is ignored.*Pass partial_reset=",
        ),
        (lambda: GymWrapper(Drift(), frame_skip=2), OptionError, "frame_skip"),
        (
            lambda: GymWrapper(Drift(), batch_size=[2]),
            BatchSizeError,
            r"is \(2,\), but .* has 4 rows",
        ),
        (
            lambda: GymWrapper(Drift(single_action_space=spaces.Text(3))),
            SpecError,
            "no counterpart in tensors of a vector env",
        ),
        (
            lambda: TorchVectorWrapper(gymnasium.make("CartPole-v1")),
            ArgumentTypeError,
            r"has no num_envs .* GymWrapper\(env\)",
        ),
        (
            lambda: TorchVectorWrapper(gymnasium.make_vec("CartPole-v1", 2)),
            ArgumentTypeError,
            r"no torch tensor.*GymWrapper\(env\)",
        ),
        (
            lambda: GymWrapper(
                gymnasium.wrappers.TimeLimit(RowKeyword(), 3), autoreset_mode="Disabled"
            ),
            ArgumentError,
            r"Wrap env.unwrapped",
        ),
    ],
)
def test_what_cannot_be_wrapped_is_refused(wrap, error, words):
    with pytest.raises(error, match=words):
        wrap()


def test_a_subclass_that_reads_arrays_is_sent_to_the_class_for_tensors():
    class Mine(GymWrapper):
        pass

    with pytest.raises(ArgumentError, match="derive from TorchVectorWrapper"):
        Mine(Drift())


gymnasium.register("TorchPendulum-v0", vector_entry_point=TorchPendulum)


def test_make_takes_an_id_that_is_registered_as_a_vector_env():
    env = make("gym/TorchPendulum-v0", 5, backend="vector", limit=2)

    assert type(env) is TorchVectorWrapper
    assert env.rollout(9)["next", "truncated"].shape == (5, 2, 1)


def test_rows_of_a_simulator_that_resets_none_are_not_reset():
    env = rows(AutoresetMode.SAME_STEP)
    root = env.step_mdp(env.rand_step(env.reset()))

    with pytest.raises(ResetMaskError, match=r"rows \[0\] are to be reset, but .* here \[\]"):
        env.reset(root.set("_reset", torch.tensor([True, False, False])))


def test_a_row_that_goes_on_cannot_be_left_out():
    env = rows()
    td = env.rand_action(env.reset()).set("_step", torch.tensor([True, False, True]))

    with pytest.raises(StepMaskError, match=r"rows \[1\] are to be left out .* here \[\]"):
        env.step(td)


@pytest.mark.parametrize("action", [torch.zeros(3, 2), torch.full((3, 1), torch.nan)])
def test_an_action_that_does_not_fit_is_refused(action):
    env = rows()

    with pytest.raises(InputError, match="'action'"):
        env.step(env.reset().set("action", action))


def test_a_closed_env_says_so():
    env = rows()
    env.close()

    with pytest.raises(ClosedEnvError, match="is closed"):
        env.reset()
