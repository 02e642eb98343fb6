"""What `next` shows of rows that a `_step` mask leaves out: one answer, whatever carries the data."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from envkit import ParallelEnv, SerialEnv
from envkit.env.base import EnvBase
from envkit.errors import InputError
from envkit.specs import Composite, Unbounded

F, T = False, True

WAYS = {
    "rows": lambda: SerialEnv(2, Score, use_buffers=True),
    "tensordicts": lambda: SerialEnv(2, Score, use_buffers=False),
    "lazy stacks": lambda: SerialEnv(2, Score, share_individual_td=True),
    "processes": lambda: ParallelEnv(2, Score),
}


class Score(EnvBase):
    """Adds 1 to the reward that it is given, so that its reward is a state as well.

    ``bonus`` is a reward only.
    """

    def __init__(self):
        super().__init__()
        self.observation_spec = Composite(count=Unbounded((1,)))
        self.action_spec = Unbounded((1,))
        self.state_spec = Composite(reward=Unbounded((1,)))
        self.reward_spec = Composite(reward=Unbounded((1,)), bonus=Unbounded((1,)))
        self.count = 0.0

    def _reset(self, td, **kwargs):
        self.count = 0.0
        return TensorDict({"count": torch.zeros(1)}, [])

    def _step(self, td):
        self.count += 1
        reward = td["reward"] + 1
        count = torch.full((1,), self.count)
        return TensorDict({"count": count, "reward": reward, "bonus": torch.ones(1)}, [])

    def _set_seed(self, seed):
        pass


@pytest.fixture(params=WAYS)
def scores(request):
    env = WAYS[request.param]()
    yield env
    env.close()


def acted(root: TensorDict, **more: torch.Tensor) -> TensorDict:
    shape = (*root.batch_size, 1)
    return root.update({"action": torch.zeros(shape), "bonus": torch.full(shape, 7.0), **more})


def outcome(td: TensorDict) -> dict[str, list]:
    return {name: td["next", name].flatten().tolist() for name in ("count", "reward", "bonus")}


def test_a_single_env_that_is_not_stepped_keeps_a_reward_that_is_a_state():
    env = Score()
    root = acted(env.reset(), reward=torch.full((1,), 5.0), _step=torch.tensor(F))

    assert outcome(env.step(root)) == {"count": [0], "reward": [5], "bonus": [0]}


def test_a_row_that_is_not_stepped_keeps_a_reward_that_is_a_state(scores):
    root = acted(scores.reset(), reward=torch.full((2, 1), 5.0), _step=torch.tensor([T, F]))

    assert outcome(scores.step(root)) == {"count": [1, 0], "reward": [6, 5], "bonus": [1, 0]}


@pytest.mark.parametrize("stop", [{}, {"break_when_any_done": False}], ids=["any done", "nonstop"])
def test_a_reward_that_is_a_state_is_carried_through_a_rollout(scores, stop):
    root = scores.reset().set("reward", torch.full((2, 1), 5.0))

    data = scores.rollout(4, tensordict=root, auto_reset=False, **stop)

    assert data["reward"].squeeze(-1).tolist() == [[5, 6, 7, 8]] * 2
    assert data["next", "reward"].squeeze(-1).tolist() == [[6, 7, 8, 9]] * 2


def test_a_state_of_another_dtype_is_refused(scores):
    root = scores.reset()
    score = torch.zeros(*root.batch_size, 1, dtype=torch.float64)

    with pytest.raises(InputError, match="'reward'"):
        scores.step(acted(root, reward=score))
