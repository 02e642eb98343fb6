"""TorchRL's modules, losses and buffers take envkit's specs, and data rolled out of its envs."""

import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    NormalParamExtractor,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn

import envkit
from envkit import (
    Binary,
    Bounded,
    Categorical,
    Choice,
    Composite,
    GymEnv,
    InitTracker,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    TransformedEnv,
    Unbounded,
)
from tests.reference.compare import check_works_alike
from tests.reference.envs.zoo import several

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torchrl.data
    import torchrl.modules as modules
    import torchrl.objectives as objectives
    from torchrl.envs.utils import RandomPolicy
    from torchrl.objectives.value import GAE

pytestmark = pytest.mark.filterwarnings(  # of TorchRL and what it calls
    "ignore::UserWarning:torch", "ignore::DeprecationWarning:torch", "ignore::FutureWarning:torch"
)


@pytest.fixture(scope="module")
def cartpole():
    with GymEnv("CartPole-v1") as env:
        env.set_seed(0)
        yield env


@pytest.fixture(scope="module")
def pendulum():
    with GymEnv("Pendulum-v1") as env:
        env.set_seed(0)
        yield env


def q_actor(spec, features=4):
    torch.manual_seed(0)
    return modules.QValueActor(nn.Linear(features, 2), in_keys=["observation"], spec=spec)


def gaussian_actor(spec):
    scales = nn.Sequential(nn.Linear(3, 2), NormalParamExtractor())
    return modules.ProbabilisticActor(
        TensorDictModule(scales, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=spec,
        distribution_class=modules.TanhNormal,
        distribution_kwargs={"low": spec.space.low, "high": spec.space.high},
        return_log_prob=True,
        safe=True,
    )


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def forward(self, observation, action):
        return self.net(torch.cat([observation, action], -1))


def critic():
    return modules.ValueOperator(Critic(), in_keys=["observation", "action"])


def rollout(env, policy=None, steps=8):
    with torch.no_grad():
        return env.rollout(steps, policy, break_when_any_done=False)


# -- what is an instance of what -------------------------------------------------------

KINDS = {
    "bounded": lambda n: n.Bounded(0, 1, (2,)),
    "bounded integers": lambda n: n.Bounded(0, 1, (2,), dtype=torch.int64),
    "unbounded": lambda n: n.Unbounded(2),
    "unbounded integers": lambda n: n.Unbounded(2, dtype=torch.int64),
    "categorical": lambda n: n.Categorical(2),
    "one-hot": lambda n: n.OneHot(2),
    "multi-categorical": lambda n: n.MultiCategorical([2, 3]),
    "multi-one-hot": lambda n: n.MultiOneHot([2, 3]),
    "binary": lambda n: n.Binary(2),
    "object": lambda n: n.NonTensor((2,)),
    "choice": lambda n: n.Choice([n.Categorical(2)]),
    "composite": lambda n: n.Composite(),
    "stack": lambda n: torch.stack([n.Unbounded(2), n.Unbounded(3)]),
    "stack of composites": lambda n: torch.stack([n.Composite(a=n.Unbounded(i)) for i in (2, 3)]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_spec_is_an_instance_of_the_classes_its_namesake_is_one_of(kind):
    ours, theirs = KINDS[kind](envkit), KINDS[kind](torchrl.data)
    classes = [
        value
        for value in vars(torchrl.data).values()
        if isinstance(value, type) and issubclass(value, torchrl.data.TensorSpec)
    ]

    assert len(classes) > 10
    assert [isinstance(ours, c) for c in classes] == [isinstance(theirs, c) for c in classes]


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports", ["import envkit.specs, torchrl.data, envkit", "import torchrl.data, envkit"]
)
def test_which_library_is_imported_first_does_not_matter(imports):
    script = f"""
import sys, warnings
warnings.simplefilter("ignore")
{imports}
from torchrl.modules import QValueModule
assert QValueModule(spec=envkit.OneHot(3)).action_space == "one_hot"
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("envkit")]
"""

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_torchrl_may_be_imported_after_an_env_and_its_specs_were_made():
    script = """
import warnings
warnings.simplefilter("ignore")
from envkit import PendulumEnv
env = PendulumEnv()
spec = env.action_spec
from torchrl.data import Bounded
assert isinstance(env.action_spec, Bounded) and isinstance(spec, Bounded)
"""

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr


# -- actors and exploration ------------------------------------------------------------


def test_a_q_value_actor_takes_a_tree_of_specs(cartpole):
    assert q_actor(Composite(action=cartpole.action_spec)).spec["action"] == cartpole.action_spec


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (OneHot(3), "one_hot"),
        (Categorical(3), "categorical"),
        (MultiOneHot([2, 3]), "mult_one_hot"),
        (Binary(3), "binary"),
    ],
    ids=lambda value: str(value),
)
def test_the_action_space_is_told_by_the_spec(spec, name):
    assert modules.QValueModule(spec=spec).action_space == name


def test_a_distributional_q_value_actor_takes_a_spec(cartpole):
    net = modules.MLP(in_features=4, out_features=(3, 2), num_cells=[8])

    actor = modules.DistributionalQValueActor(
        net, in_keys=["observation"], support=torch.arange(3.0), spec=cartpole.action_spec
    )

    assert cartpole.action_spec.is_in(rollout(cartpole, actor)["action"])


def test_probabilistic_actors_draw_actions_of_the_spec(cartpole, pendulum):
    choosing = modules.ProbabilisticActor(
        TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"]),
        in_keys=["logits"],
        spec=cartpole.action_spec,
        distribution_class=modules.OneHotCategorical,
        safe=True,
    )

    assert cartpole.action_spec.is_in(rollout(cartpole, choosing)["action"])
    assert pendulum.action_spec.is_in(
        rollout(pendulum, gaussian_actor(pendulum.action_spec))["action"]
    )


def test_an_actor_of_several_actions_takes_their_specs_at_once():
    def rolled_out(lib):
        torch.manual_seed(0)
        env = several(lib)
        net = TensorDictModule(
            lambda count: (count, torch.ones_like(count), torch.zeros(3)),
            ["count"],
            [("params", "turn", "loc"), ("params", "turn", "scale"), ("params", "push", "logits")],
        )
        actor = modules.ProbabilisticActor(
            net,
            in_keys=["params"],
            out_keys=["turn", ("inner", "push")],
            distribution_class=CompositeDistribution,
            distribution_kwargs={
                "distribution_map": {
                    "turn": modules.TruncatedNormal,
                    "push": modules.OneHotCategorical,
                },
                "name_map": {"turn": "turn", "push": ("inner", "push")},
            },
            spec=env.full_action_spec,
        )
        return rollout(env, actor, 4)

    check_works_alike(rolled_out)


@pytest.mark.parametrize("composite", [False, True])
def test_a_safe_module_projects_onto_the_spec(pendulum, composite):
    leaf = Bounded(-1e-3, 1e-3, (1,))
    module = modules.SafeModule(
        nn.Linear(3, 1),
        in_keys=["observation"],
        out_keys=["action"],
        spec=Composite(action=leaf) if composite else leaf,
        safe=True,
    )

    action = modules.SafeSequential(module)(pendulum.reset())["action"]

    assert leaf.is_in(action.detach())
    assert isinstance(module.spec["action"], Bounded)


def test_an_actor_of_every_kind_of_spec_can_be_built():
    for spec in (
        *(Unbounded(2), Bounded(0, 3, (2,), dtype=torch.int64), NonTensor((2,)), Binary(2)),
        *(Categorical(2), OneHot(2), MultiCategorical([2, 3]), MultiOneHot([2, 3])),
        *(Choice([Categorical(2), Categorical(3)]), torch.stack([Unbounded(2), Unbounded(3)])),
    ):
        actor = modules.SafeModule(
            nn.Identity(), in_keys=["a"], out_keys=["action"], spec=Composite(action=spec)
        )
        assert actor.spec["action"] == spec


def test_epsilon_greedy_explores_within_the_mask():
    masked = modules.EGreedyModule(spec=OneHot(4), eps_init=1.0, action_mask_key="mask")
    mask = torch.tensor([False, False, True, False])

    action = masked(TensorDict(action=OneHot(4).rand(), mask=mask))["action"]

    assert torch.equal(action, mask)


def test_noise_on_actions_stays_within_the_spec(pendulum):
    spec = pendulum.action_spec
    actor = modules.Actor(nn.Linear(3, 1), spec=spec)
    env = TransformedEnv(GymEnv("Pendulum-v1"), InitTracker())

    for noise in (
        modules.AdditiveGaussianModule(spec=spec, sigma_init=9.0, sigma_end=9.0),
        modules.OrnsteinUhlenbeckProcessModule(spec=spec, sigma=9.0),
    ):
        assert spec.is_in(rollout(env, TensorDictSequential(actor, noise))["action"])
    env.close()


def test_a_random_policy_draws_from_a_spec(cartpole):
    assert cartpole.action_spec.is_in(
        rollout(cartpole, RandomPolicy(cartpole.action_spec))["action"]
    )


# -- buffers and losses ----------------------------------------------------------------


def test_dqn_learns_from_a_buffer_of_our_data(cartpole):
    actor = q_actor(cartpole.action_spec)
    buffer = torchrl.data.ReplayBuffer(storage=torchrl.data.LazyTensorStorage(32), batch_size=8)
    buffer.extend(rollout(cartpole, actor))

    for space in (cartpole.action_spec, None):
        loss = objectives.DQNLoss(actor, action_space=space, delay_value=True)
        out = loss(buffer.sample())["loss"]
        out.backward()
        assert loss.action_space == "one_hot" and out.isfinite()


def test_ppo_learns_from_our_data(pendulum):
    actor = gaussian_actor(pendulum.action_spec)
    value = modules.ValueOperator(nn.Linear(3, 1), in_keys=["observation"])
    data = GAE(gamma=0.9, lmbda=0.9, value_network=value)(rollout(pendulum, actor))

    losses = objectives.ClipPPOLoss(actor, value)(data)

    assert losses["loss_objective"].isfinite() and losses["loss_critic"].isfinite()


@pytest.mark.parametrize("name", ["SACLoss", "REDQLoss", "CQLLoss", "CrossQLoss"])
def test_losses_of_stochastic_actors_take_the_action_spec(pendulum, name):
    actor = gaussian_actor(pendulum.action_spec)

    loss = getattr(objectives, name)(actor, critic(), action_spec=pendulum.action_spec)

    assert loss(rollout(pendulum, actor))["loss_actor"].isfinite().all()


@pytest.mark.parametrize("name", ["TD3Loss", "TD3BCLoss"])
def test_losses_of_deterministic_actors_take_the_action_spec(pendulum, name):
    actor = modules.Actor(nn.Linear(3, 1), spec=pendulum.action_spec)

    loss = getattr(objectives, name)(actor, critic(), action_spec=pendulum.action_spec)

    assert loss(rollout(pendulum, actor))["loss_actor"].isfinite()
    assert loss.max_action.item() == 2


def test_discrete_sac_takes_the_action_spec(cartpole):
    actor = modules.ProbabilisticActor(
        TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"]),
        in_keys=["logits"],
        spec=cartpole.action_spec,
        distribution_class=modules.OneHotCategorical,
    )
    value = TensorDictModule(nn.Linear(4, 2), ["observation"], ["action_value"])

    loss = objectives.DiscreteSACLoss(
        actor, value, action_space=cartpole.action_spec, num_actions=2
    )

    assert loss(rollout(cartpole, actor))["loss_actor"].isfinite()


def test_a_spec_of_theirs_takes_ours_as_an_entry(cartpole, pendulum):
    theirs = torchrl.data.Composite(
        a=cartpole.action_spec, b=pendulum.action_spec, c=Composite(d=Unbounded(2))
    )

    drawn = theirs.rand()

    assert theirs.is_in(drawn)
    assert theirs["b"] == pendulum.action_spec
    assert theirs.to("cpu")["c", "d"] == Unbounded(2)
    assert theirs.expand(3)["a"].shape == (3, 2)


@pytest.mark.slow
def test_a_spec_that_was_loaded_is_known_to_torchrl(tmp_path):
    (tmp_path / "spec.pkl").write_bytes(pickle.dumps(envkit.Composite(a=envkit.OneHot(3))))
    script = f"""
import pickle, warnings
warnings.simplefilter("ignore")
import torchrl.data
spec = pickle.loads(open({str(tmp_path / "spec.pkl")!r}, "rb").read())
assert isinstance(spec, torchrl.data.Composite) and isinstance(spec["a"], torchrl.data.OneHot)
"""

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
