"""Where a program of TorchRL's users gets more here than there, or an error sooner: lines of docs/deviations.md."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
import torchrl.envs.transforms.functional
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

import envkit
from envkit.errors import BypassError, InputError, MissingKeyError, PlacementError, SpecMaskError
from tests.reference.compare import OURS, difference, differs


def test_every_inverse_reads_what_a_policy_writes():
    def call(lib):
        cast = lib.DeviceCastTransform("cpu", in_keys=[], in_keys_inv=["c"], out_keys_inv=["d"])
        return sorted(cast.inv(TensorDict({"d": torch.zeros(2)})).keys())

    differs("inverse-keys", call)
    assert call(OURS) == ["c", "d"]


def test_bounds_may_be_one_for_each_element():
    def call(lib):
        clip = lib.ClipTransform(["x"], low=torch.tensor([-1.0, 0.0]), high=None)
        return clip(TensorDict({"x": torch.tensor([[-3.0, -3.0]])}, [1]))["x"]

    differs("bounds-of-elements", call)
    assert call(OURS).tolist() == [[-1, 0]]


class Halves:
    """An env of either library whose action is one-hot; it shows how many ones it was given."""

    def __new__(cls, lib):
        class Env(lib.EnvBase):
            def __init__(self):
                super().__init__()
                self.observation_spec = lib.Composite(n=lib.Unbounded((1,)))
                self.action_spec = lib.OneHot(2)
                self.reward_spec = lib.Unbounded((1,))

            def _reset(self, td=None):
                return TensorDict({"n": torch.zeros(1)})

            def _step(self, td):
                ones = td["action"].sum(-1, keepdim=True).float()
                return TensorDict(
                    {"n": ones, "reward": torch.zeros(1), "done": torch.zeros(1, dtype=torch.bool)}
                )

            def _set_seed(self, seed):
                pass

        return Env()


def test_a_choice_of_nothing_is_told_by_a_batch():
    def call(lib):
        batch = lib.SerialEnv(2, lambda: Halves(lib))
        nothing = torch.zeros(2, 2, dtype=torch.bool)
        return batch.rollout(2, lambda td: td.set("action", nothing))["next", "n"]

    differs("choices-are-made", call)
    with pytest.raises(InputError, match="must be one-hot"):
        call(OURS)


def test_a_primer_that_was_passed_is_not_written_to():
    def call(lib):
        primer = lib.TensorDictPrimer(memory=lib.Unbounded((3,)), expand_specs=True)
        batch = lib.SerialEnv(2, lambda: Halves(lib))
        shape = lib.TransformedEnv(batch, primer).reset()["memory"].shape
        return tuple(shape), tuple(primer.primers["memory"].shape)

    differs("primers-are-copied", call)
    assert call(OURS) == ((2, 3), (3,))


def test_an_env_keeps_its_done_flag_whatever_is_selected():
    def call(lib):
        env = lib.TransformedEnv(Halves(lib), lib.SelectTransform("n", keep_dones=False))
        return sorted(map(str, env.reset().keys()))

    differs("flags-stay", call)
    with pytest.raises(ValueError, match="an env needs one"):
        call(OURS)


def test_a_value_drawn_from_one_choice_has_the_shape_of_its_spec():
    def call(lib):
        spec = lib.MultiCategorical(5)
        return tuple(spec.shape), tuple(spec.rand().shape)

    differs("all-specs-answer", call)
    assert call(OURS)[0] == call(OURS)[1]


def test_steps_that_torch_refuses_for_data_are_refused_for_specs():
    def call(lib):
        return tuple(lib.Unbounded((3, 4), dtype=torch.int64)[::-1].shape)

    differs("misuse-is-refused", call)
    with pytest.raises(ValueError, match="step"):
        call(OURS)


def test_frames_of_random_actions_have_zeros_for_what_the_policy_writes():
    def call(lib):
        policy = TensorDictModule(
            lambda o: (o[..., :1], o.sum(-1)),
            in_keys=["observation"],
            out_keys=["action", "log_prob"],
        )
        collector = lib.Collector(
            lambda: lib.GymEnv("Pendulum-v1"),
            policy,
            frames_per_batch=4,
            total_frames=8,
            init_random_frames=4,
        )
        found = [batch["log_prob"].shape for batch in collector]
        collector.shutdown()
        return found

    assert difference(call) is None


def test_a_collector_leaves_the_env_open_that_it_was_given():
    def call(lib):
        env = lib.GymEnv("CartPole-v1")
        lib.Collector(env, None, frames_per_batch=4, total_frames=4).shutdown()
        return env.is_closed

    differs("envs-of-the-caller", call)
    assert not call(OURS)


def test_a_batch_that_is_not_locked_takes_any_batch():
    def call(lib):
        class Free(type(Halves(lib))):
            _batch_locked = False

            def _reset(self, td=None):
                size = () if td is None else td.batch_size
                return TensorDict({"n": torch.zeros(*size, 1)}, size)

            def _step(self, td):
                size = td.batch_size
                return TensorDict(
                    {
                        "n": td["action"].sum(-1, keepdim=True).float(),
                        "reward": torch.zeros(*size, 1),
                        "done": torch.zeros(*size, 1, dtype=torch.bool),
                    },
                    size,
                )

        env = Free()
        return env.rollout(2, tensordict=TensorDict({}, [3]), auto_reset=True).batch_size

    differs("batches-are-free", call)
    assert call(OURS) == (3, 2)


def test_an_integer_in_a_dict_of_actions_is_an_integer():
    class Two(gymnasium.Env):
        action_space = gymnasium.spaces.Dict(a=gymnasium.spaces.Discrete(2))
        observation_space = gymnasium.spaces.Box(-1, 1)

        def reset(self, *, seed=None, options=None):
            return np.zeros(1, np.float32), {}

        def step(self, action):
            self.seen = type(action["a"]).__name__
            return np.zeros(1, np.float32), 0.0, False, False, {}

    def call(lib):
        simulator = Two()
        lib.GymWrapper(simulator).rollout(1)
        return simulator.seen

    differs("integers-in-dicts", call)
    assert call(OURS) == "int"


def test_a_transform_that_lacks_its_count_says_so_at_the_first_use():
    def build(lib):
        limit = lib.RandomTruncationTransform(min_horizon=1, max_horizon=5)
        return type(lib.TransformedEnv(Halves(lib), limit)).__name__

    differs("told-at-first-use", build)
    env = OURS.TransformedEnv(Halves(OURS), OURS.RandomTruncationTransform(1, 5))
    with pytest.raises(PlacementError, match="Put a StepCounter before it"):
        env.reset()


def test_a_transform_for_records_is_refused_when_a_batch_makes_its_envs():
    def build(lib):
        inside = lambda: lib.TransformedEnv(Halves(lib), lib.Reward2GoTransform())  # noqa: E731
        return type(lib.SerialEnv(2, inside)).__name__

    differs("told-at-first-use", build)
    batch = OURS.SerialEnv(2, lambda: OURS.TransformedEnv(Halves(OURS), OURS.Reward2GoTransform()))
    with pytest.raises(RuntimeError, match="needs whole episodes"):
        batch.reset()


def test_an_input_that_is_not_there_is_told_before_statistics_are_made():
    def call(lib):
        env = lib.TransformedEnv(Halves(lib), lib.ObservationNorm(in_keys=["n", "m"]))
        env.transform.init_stats(3, key="n", reduce_dim=0, cat_dim=0)
        return sorted(env.observation_spec.keys())

    differs("inputs-are-looked-for", call)
    with pytest.raises(MissingKeyError, match=r"ObservationNorm reads \['m'\]"):
        call(OURS)


def test_recorded_rewards_are_summed_where_rollouts_have_them():
    def call(lib):
        data = TensorDict({("next", "reward"): torch.ones(3, 1)}, [3], names=["time"])
        summed = lib.RewardSum(in_keys=["reward"], out_keys=["total"])(data)
        return summed["next", "total"]

    differs("records-have-rewards-in-next", call)
    assert call(OURS).flatten().tolist() == [1, 2, 3]


def test_the_mask_of_windows_has_an_entry_for_each_frame_of_each_step():
    functional = {"envkit": envkit.cat_frames, "torchrl": torchrl.envs.transforms.functional}

    def call(lib):
        theirs = functional["torchrl"].cat_frames
        cat_frames = functional["envkit"] if lib is OURS else theirs
        other = torch.zeros(1, 4, 2, dtype=torch.bool)
        other[0, 2, 0] = True
        frames = torch.arange(4.0).view(1, 4, 1)
        return cat_frames(frames, N=2, dim=-1, time_dim=-2, done_mask=other)

    differs("windows-of-episodes", call)
    assert call(OURS)[0].tolist() == [[0, 0], [0, 1], [2, 2], [2, 3]]


class Board(gymnasium.Env):
    """Each step fills a free field; the mask shows the fields."""

    action_space = gymnasium.spaces.MultiDiscrete([2, 3])
    observation_space = gymnasium.spaces.Dict(
        board=gymnasium.spaces.Box(0, 1, (2, 3), np.float32),
        action_mask=gymnasium.spaces.Box(0, 1, (2, 3), bool),
    )

    def _shown(self):
        return {"board": self.board.copy(), "action_mask": self.board == 0}

    def reset(self, *, seed=None, options=None):
        self.board = np.zeros((2, 3), np.float32)
        return self._shown(), {}

    def step(self, action):
        row, column = action
        self.board[row, column] = 1
        return self._shown(), 0.0, bool(self.board.all()), False, {}


def test_a_mask_over_combinations_is_refused():
    def call(lib):
        env = lib.TransformedEnv(
            lib.GymWrapper(Board(), categorical_action_encoding=True), lib.ActionMask()
        )
        return env.rollout(6).batch_size

    differs("joint-masks", call)
    with pytest.raises(SpecMaskError, match=r"broadcast to \(5,\)"):
        call(OURS)


def test_a_limit_of_the_collector_and_a_count_of_the_env_go_together():
    def call(lib):
        collector = lib.Collector(
            lambda: lib.TransformedEnv(Halves(lib), lib.StepCounter()),
            None,
            frames_per_batch=6,
            total_frames=6,
            max_frames_per_traj=3,
        )
        counts = [batch["step_count"].flatten().tolist() for batch in collector]
        collector.shutdown()
        return counts

    differs("limits-beside-counts", call)
    assert call(OURS) == [[0, 1, 2, 0, 1, 2]]


def test_a_tree_has_no_dtype_of_its_own():
    def call(lib):
        return lib.Composite(n=lib.Unbounded((1,), dtype=torch.int64)).dtype

    differs("trees-have-no-dtype", call)
    assert call(OURS) is None


def test_a_state_that_a_step_returns_is_the_next_one():
    def call(lib):
        class Counter(type(Halves(lib))):
            def __init__(self):
                super().__init__()
                self.action_spec = lib.Unbounded((1,))
                self.state_spec = lib.Composite(turns=lib.Unbounded((1,)))

            def _reset(self, td=None):
                return super()._reset(td).set("turns", torch.zeros(1))

            def _step(self, td):
                return super()._step(td).set("turns", td["turns"] + 1)

        return Counter().rollout(3)["turns"]

    differs("states-go-on", call)
    assert call(OURS).flatten().tolist() == [0, 1, 2]


def test_rows_of_a_pool_do_not_pass_by_transforms():
    def call(lib):
        makers = [lambda: Halves(lib)] * 2
        pool = lib.AsyncEnvPool(makers, backend="threading")
        env = lib.TransformedEnv(pool, lib.StepCounter())
        try:
            env.async_step_send(env.rand_action(env.reset()))
            return "step_count" in env.async_step_recv(2)["next"].keys()
        finally:
            pool.close(raise_if_closed=False)

    differs("pools-under-transforms", call)
    with pytest.raises(BypassError, match="Put them inside the envs of the pool"):
        call(OURS)


def test_gradients_flow_through_a_batch_that_shares_its_data():
    def call(lib):
        class Push(type(Halves(lib))):
            def __init__(self):
                super().__init__()
                self.action_spec = lib.Unbounded((1,))

            def _step(self, td):
                return super()._step(td).update({"reward": td["action"] * 2, "n": torch.zeros(1)})

        linear = torch.nn.Linear(1, 1)
        policy = TensorDictModule(linear, in_keys=["n"], out_keys=["action"])
        batch = lib.SerialEnv(2, Push, share_individual_td=True)
        batch.rollout(3, policy)["next", "reward"].sum().backward()
        return linear.bias.grad

    differs("graphs-stay", call)
    assert call(OURS).tolist() == [12]


def test_a_primer_fills_with_zeros_what_its_defaults_leave_out():
    def call(lib):
        primers = {"x": lib.Unbounded((2,)), "y": lib.Unbounded((2,))}
        primer = lib.TensorDictPrimer(primers=primers, default_value={"x": 1.0})
        root = lib.TransformedEnv(Halves(lib), primer).reset()
        return root.select("x", "y")

    differs("defaults-are-zero", call)
    assert call(OURS)["x"].tolist() == [1, 1] and call(OURS)["y"].tolist() == [0, 0]
