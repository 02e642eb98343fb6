"""Where a program of TorchRL's users gets more here than there, or an error sooner: lines of docs/deviations.md."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from envkit.errors import InputError
from tests.reference.compare import OURS, differs


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


def test_what_is_drawn_at_first_says_nothing_of_a_policy():
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
        found = ["log_prob" in batch.keys() for batch in collector]
        collector.shutdown()
        return found

    differs("nothing-is-made-up", call)
    assert call(OURS) == [False, True]


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
