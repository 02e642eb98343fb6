"""Agents that plan in a model of their env, or dream in one that they have learnt."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn

from envkit import (
    Compose,
    DoubleToFloat,
    DreamerEnv,
    EnvCreator,
    FrameSkipTransform,
    GymEnv,
    PendulumEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    SyncDataCollector,
    TensorDictPrimer,
    TransformedEnv,
    Unbounded,
    check_env_specs,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrl.data import LazyMemmapStorage, SliceSampler, TensorDictReplayBuffer
    from torchrl.modules import (
        MLP,
        DreamerActor,
        IndependentNormal,
        RSSMPosterior,
        RSSMPrior,
        RSSMRollout,
        SafeModule,
        SafeSequential,
        TanhNormal,
        WorldModelWrapper,
    )
    from torchrl.objectives import (
        DreamerActorLoss,
        DreamerModelLoss,
        DreamerValueLoss,
        ValueEstimators,
    )
from tests.reference.tasks.learning import descend, learned, sweep

pytestmark = pytest.mark.filterwarnings(
    r"ignore::DeprecationWarning:torchrl\..*", r"ignore::FutureWarning:torchrl\..*"
)


def test_a_planner_tries_many_futures_from_where_it_is():
    env = PendulumEnv(seed=0)
    now = env.reset()

    for _ in range(3):
        futures = now.select("th", "thdot", "params").expand(64).clone()
        plans = env.action_spec_unbatched.rand((4, 64))
        imagined = env.rollout(
            4, actions=plans, tensordict=futures, set_state=True, break_when_any_done=False
        )
        best = imagined["next", "reward"].sum(1).argmax()
        taken = env.step(now.set("action", plans[0, best]))
        assert imagined.shape == (64, 4)
        torch.testing.assert_close(taken["next", "th"], imagined["next", "th"][best, 0])
        now = env.step_mdp(taken)


STATE, BELIEF = 4, 6


def latents():
    return TensorDictPrimer(
        random=False, default_value=0, state=Unbounded((STATE,)), belief=Unbounded((BELIEF,))
    )


def drawn(loc, key):
    """Draw an entry around its mean, with a deviation of one."""
    return ProbabilisticTensorDictModule(
        in_keys=[loc],
        out_keys=[key],
        distribution_class=IndependentNormal,
        distribution_kwargs={"scale": 1.0, "event_dim": 1},
    )


def world_of(env, seen):
    prior = RSSMPrior(
        hidden_dim=BELIEF, rnn_hidden_dim=BELIEF, state_dim=STATE, action_spec=env.action_spec
    )
    posterior = RSSMPosterior(hidden_dim=BELIEF, state_dim=STATE)
    encoder = MLP(seen, 8, num_cells=[8])
    decoder = MLP(STATE + BELIEF, seen, num_cells=[8])
    reward = MLP(STATE + BELIEF, 1, num_cells=[8])
    rollout = RSSMRollout(
        TensorDictModule(
            prior,
            in_keys=["state", "belief", "action"],
            out_keys=[
                ("next", "prior_mean"),
                ("next", "prior_std"),
                "_",
                ("next", "belief"),
            ],
        ),
        TensorDictModule(
            posterior,
            in_keys=[("next", "belief"), ("next", "encoded_latents")],
            out_keys=[("next", "posterior_mean"), ("next", "posterior_std"), ("next", "state")],
        ),
    )
    transition = TensorDictSequential(
        TensorDictModule(encoder, [("next", "observation")], [("next", "encoded_latents")]),
        rollout,
        ProbabilisticTensorDictSequential(
            TensorDictModule(decoder, [("next", "state"), ("next", "belief")], ["loc"]),
            drawn("loc", ("next", "reco_observation")),
        ),
    )
    rewards = ProbabilisticTensorDictSequential(
        TensorDictModule(reward, [("next", "state"), ("next", "belief")], [("next", "loc")]),
        drawn(("next", "loc"), ("next", "reward")),
    )
    parts = {"prior": prior, "posterior": posterior, "encoder": encoder, "decoder": decoder}
    return WorldModelWrapper(transition, rewards), {**parts, "reward": reward}


def imagination_of(env, parts):
    world = WorldModelWrapper(
        TensorDictSequential(
            TensorDictModule(
                parts["prior"], ["state", "belief", "action"], ["_", "_", "state", "belief"]
            )
        ),
        TensorDictModule(parts["reward"], ["state", "belief"], ["reward"]),
    )
    imagined = DreamerEnv(
        world_model=world,
        prior_shape=torch.Size([STATE]),
        belief_shape=torch.Size([BELIEF]),
        obs_decoder=TensorDictModule(parts["decoder"], ["state", "belief"], ["reco_observation"]),
    )
    imagined.set_specs_from_env(env)
    return imagined


@sweep
@pytest.mark.filterwarnings("ignore:set_seed.. of DreamerEnv:UserWarning")
@pytest.mark.filterwarnings("ignore:(?s)the data of DreamerEnv:envkit.errors.EnvSpecWarning")
def test_dreamer():
    env = TransformedEnv(
        SerialEnv(1, EnvCreator(lambda: GymEnv("Pendulum-v1"))),
        Compose(DoubleToFloat(), RewardSum(), FrameSkipTransform(2), StepCounter(30)),
    )
    env.append_transform(latents())
    env.set_seed(0)
    check_env_specs(env)
    single = TransformedEnv(GymEnv("Pendulum-v1"), DoubleToFloat())
    single.append_transform(latents())
    world, parts = world_of(single, 3)
    imagined = imagination_of(single, parts)
    check_env_specs(imagined)
    net = DreamerActor(out_features=1, depth=1, num_cells=8, activation_class=nn.ELU)

    def acting():
        return ProbabilisticTensorDictSequential(
            TensorDictModule(net, ["state", "belief"], ["loc", "scale"]),
            ProbabilisticTensorDictModule(
                in_keys=["loc", "scale"],
                out_keys=["action"],
                default_interaction_type=InteractionType.RANDOM,
                distribution_class=TanhNormal,
                distribution_kwargs={"tanh_loc": True},
            ),
        )

    dreaming = acting()
    awake = SafeSequential(
        SafeModule(parts["encoder"], ["observation"], ["encoded_latents"]),
        SafeModule(parts["posterior"], ["belief", "encoded_latents"], ["_", "_", "state"]),
        acting(),
        SafeModule(
            parts["prior"],
            ["state", "belief", "action"],
            ["_", "_", "_", ("next", "belief")],
        ),
    )
    value = ProbabilisticTensorDictSequential(
        TensorDictModule(MLP(STATE + BELIEF, 1, num_cells=[8]), ["state", "belief"], ["loc"]),
        drawn("loc", "state_value"),
    )
    with torch.no_grad():
        awake(env.reset()[0])
        value(imagined.fake_tensordict())
    model_loss = DreamerModelLoss(world)
    model_loss.set_keys(pixels="observation", reco_pixels="reco_observation")
    actor_loss = DreamerActorLoss(dreaming, value, imagined, imagination_horizon=5)
    actor_loss.make_value_estimator(ValueEstimators.TDLambda, gamma=0.9, lmbda=0.9)
    value_loss = DreamerValueLoss(value)
    optims = [torch.optim.Adam(module.parameters(), lr=1e-2) for module in (world, dreaming, value)]
    collector = SyncDataCollector(
        env,
        awake,
        init_random_frames=60,
        frames_per_batch=60,
        total_frames=240,
        storing_device="cpu",
    )
    collector.set_seed(0)
    buffer = TensorDictReplayBuffer(
        prefetch=0,
        storage=LazyMemmapStorage(240, ndim=2),
        sampler=SliceSampler(
            slice_len=10, strict_length=False, traj_key=("collector", "traj_ids"), cache_values=True
        ),
        batch_size=60,
    )

    history = {"model": [], "actor": [], "value": []}
    model = ("loss_model_kl", "loss_model_reco", "loss_model_reward")
    kept = ("observation", "action", "state", "belief", "collector", "next", "done", "terminated")
    for data in collector:
        buffer.extend(data.select(*kept).exclude(("next", "state")))
        for _ in range(15):
            losses, sample = model_loss(buffer.sample().reshape(-1, 10))
            history["model"].append(descend(optims[0], losses, *model))
            acted, dream = actor_loss(sample.detach().reshape(-1))
            history["actor"].append(descend(optims[1], acted, "loss_actor"))
            judged, _ = value_loss(dream.detach())
            history["value"].append(descend(optims[2], judged, "loss_value"))
    collector.shutdown()

    assert learned(history["model"])
    assert np.isfinite(history["actor"] + history["value"]).all()
    assert dream.shape[-1] == 5
