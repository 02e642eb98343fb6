"""A model of the pendulum is learnt from random actions, and plans in it swing the real one up.

The model is a small network for the changes of angle and velocity and for the reward. Plans are made by the
cross-entropy method in rollouts of a `ModelBasedEnvBase` around it; the first action of each plan is taken.
"""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from envkit import Composite, ModelBasedEnvBase, PendulumEnv, Unbounded

HORIZON, CANDIDATES, BEST, STEPS, ROWS = 20, 64, 10, 100, 4


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.Linear(4, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 3)]
        self.layers = nn.Sequential(*layers)

    def forward(self, th, thdot, action):
        place = torch.stack([th.cos(), th.sin(), thdot / 8], -1)
        turn, push, pay = self.layers(torch.cat([place, action / 2], -1)).unbind(-1)
        return th + turn, thdot + push, 10 * pay.unsqueeze(-1)


class LearntPendulum(ModelBasedEnvBase):
    def __init__(self, world_model):
        super().__init__(world_model)
        self.set_specs_from_env(PendulumEnv())
        known = Composite(th=Unbounded(()), thdot=Unbounded(()))
        self.observation_spec, self.state_spec = known, known.clone()

    def _reset(self, td):
        return td.select("th", "thdot").clone()


def learnt(seed):
    """Learn a model from 10000 random steps."""
    torch.manual_seed(seed)
    env = PendulumEnv(seed=seed)
    data = env.rollout(40, tensordict=env.gen_params(batch_size=[250])).reshape(-1)
    model = TensorDictModule(Network(), ["th", "thdot", "action"], ["th", "thdot", "reward"])
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.01, 700)
    for _ in range(700):
        batch = data[torch.randint(len(data), (512,))]
        found, true = model(batch.select("th", "thdot", "action")), batch["next"]
        angle = 2 * (1 - (found["th"] - true["th"]).cos()).mean()
        velocity = (found["thdot"] - true["thdot"]).square().mean()
        reward = (found["reward"] - true["reward"]).square().mean()
        optimiser.zero_grad()
        (angle + velocity + reward / 100).backward()
        optimiser.step()
        schedule.step()
    return LearntPendulum(model)


@torch.no_grad()
def planned(model, root, mean):
    """Improve a plan, shape (rows, HORIZON, 1), from where the pendulums are."""
    start, spread = root.select("th", "thdot").unsqueeze(1).expand(ROWS, CANDIDATES), 1.5
    for _ in range(3):
        noise = torch.randn(ROWS, CANDIDATES, HORIZON, 1)
        plans = (mean.unsqueeze(1) + spread * noise).clamp(-2, 2)
        data = model.rollout(HORIZON, actions=plans.unbind(2), tensordict=start.clone())
        best = data["next", "reward"].sum((-1, -2)).topk(BEST, 1).indices
        best = plans.gather(1, best[:, :, None, None].expand(-1, -1, HORIZON, 1))
        mean, spread = best.mean(1), best.std(1).unsqueeze(1)
    return mean


def hanging(env):
    start = env.reset(env.gen_params(batch_size=[ROWS]))
    return start.set("th", torch.full((ROWS,), 3.14))


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in (1, 2))]
)
def test_plans_in_a_learnt_model_swing_the_real_pendulum_up(seed):
    env, model = PendulumEnv(seed=100 + seed), learnt(seed)
    root, total = hanging(env), 0.0
    at_random = env.rollout(STEPS, tensordict=root.clone(), auto_reset=False)["next", "reward"]

    mean = torch.zeros(ROWS, HORIZON, 1)
    for _ in range(STEPS):
        mean = planned(model, root, mean)
        td = env.step(root.set("action", mean[:, 0]))
        total = total + td["next", "reward"].mean().item()
        root = env.step_mdp(td)
        mean = torch.cat([mean[:, 1:], torch.zeros(ROWS, 1, 1)], 1)

    # Measured with 10 seeds: -352 to -372 where random actions get -824 to -890.
    assert total > 0.55 * at_random.sum(1).mean().item()
    assert (root["th"].abs() < 0.5).all()
