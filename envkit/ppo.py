"""Train a policy in any env by proximal policy optimisation (PPO): one file, written to be read, copied and changed.

It takes from envkit what any trainer would. A `Collector` makes batches, and `compile_policy` makes a batch of a stateless env
one program. `RewardSum` is a transform of the env. `gae` computes advantages, and `minibatches` shuffles.

Conventions
    group    the entries beside one action: ``("agents", "observation")`` and ``("agents", "reward")`` belong to
             ``("agents", "action")``. An env without agents is one group, whose name is "". Where several actions are side by
             side, each is a separate group, with the name of the action.
    outputs  what an actor returns: means of a normal distribution, or a logit for each option.
    sample   what is drawn from the distribution: an action before it has the form that its spec asks for.
    batch    of the collector, batch size (*batch, T); entries of agents have their axis behind these.
    members  policies of a population, which train side by side. Their axis comes first: in parameters, buffers, batches
             ``(members, n, T)`` and samples ``(members, n)``. Without a population there is no such axis.

Sources: Schulman et al., "Proximal Policy Optimization Algorithms" (2017), eq. 7. Huang et al., "The 37 Implementation Details
of Proximal Policy Optimization" (2022), for initial weights, normalisation and most defaults.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Categorical as Options
from torch.distributions import Independent, Normal

from envkit import (
    Bounded,
    Collector,
    EnvBase,
    ExplorationType,
    RewardSum,
    TensorSpec,
    TransformedEnv,
    compile_policy,
    exploration_type,
    gae,
    minibatches,
    rules,
)
from envkit.arrays.integers import as_int
from envkit.data.arguments import (
    as_bool,
    as_number,
    require_callable,
    require_rows_of_policies,
)
from envkit.data.paths import Key, Path, as_path
from envkit.data.timeline import step_entry
from envkit.env.wrapper_hints import require_env
from envkit.errors import (
    ArgumentError,
    MissingKeyError,
    MissingLibraryError,
    NotFiniteError,
    ResumeError,
)
from envkit.installing import install_hint
from envkit.process_wide import interrupted_later
from envkit.specs import Binary, Categorical, MultiCategorical, MultiOneHot, OneHot
from envkit.specs.annotations import EnvData

Networks = nn.Module | Mapping[str, nn.Module] | None
Number = float | Tensor
"""One number, or one of each member."""

_SAMPLE, _LOG_PROB = "ppo_sample", "ppo_log_prob"
"""Entries that the policy writes beside each action."""

_RETURN = "ppo_return"
"""Entry that a transform writes beside each reward: the sum over the episode."""

_LOSSES = ("policy_loss", "value_loss", "entropy", "kl", "clipped")


class PPO:
    """Train an actor and a critic in an env, by proximal policy optimisation.

    `fit` collects and learns. ``policy`` then acts in every env with these specs, on raw observations.

    Actions may be continuous or discrete, one-hot or numbers, one or several; an ``action_mask`` beside the observation is
    obeyed. Agents of a group share networks, and each counts as a row; those that ``mask`` calls dead are left out.
    Each group has separate networks, and so has each of several actions that are side by side. A time limit is no end: the value of the last observation stands for what
    would follow. Training draws actions. Elsewhere, in `evaluate` and `record` too, ``policy`` takes the most likely ones unless
    `set_exploration_type` asks for draws.

    ``policies=`` trains a population: so many policies side by side, each from its own rows of the env, as it would alone. The
    first rows belong to the first policy. ``learning_rate``, ``gamma``, ``lmbda``, ``clip``, ``entropy`` and ``max_grad_norm`` may
    be tensors then, a number of each policy.

    Args:
        env: any env, of any batch size. It stays the caller's, who closes it.
        actor: network that is called with observations, float32 of shape ``(n, *event)``, and returns outputs ``(n, m)``: a mean for
            each number of a continuous action, or a logit for each option. By default two layers of 64 units. A dict by
            group where the env has several. It is trained in place; those of a population are copied.
        critic: network from observations to a value, ``(n, 1)``, in the same way.
        observation_keys: entries of a group with which actor and critic are called, in this order; paths may be nested.
        frames_per_batch: transitions between two updates, of all rows together. The default is as many as fit into 2048 of each
            policy, but at least 16 of each row.
        minibatch_size: samples of a gradient step, of each policy. The default is an eighth of the batch.
        epochs: how often an update goes through its batch.
        learning_rate: of Adam.
        anneal: lower the learning rate linearly, down to zero at the frames that `fit` is asked for.
        gamma: discount of a step, from 0 to 1.
        lmbda: weight of longer returns, from 0 to 1.
        clip: how far an update may move the probability of an action, as a share of what it was.
        entropy: weight of the policy's entropy in the objective.
        max_grad_norm: gradients of the actor, and those of the critic, are scaled down to this norm.
        normalize_observations: subtract the running mean of observations and divide by their deviation. The policy does it.
        normalize_rewards: learn from rewards that are divided by the running deviation of discounted returns, and clipped at 10,
            as `NormalizeReward` does step by step.
        policies: how many policies to train; the first axis of the env's batch is a multiple of it. None trains one, without
            an axis for it. ``actor`` and ``critic`` are lists then, of a network of each policy.
        seed: of networks, envs and draws; it seeds torch's generators too. The same seed trains the same policy.

    Attributes:
        policy: a module that acts, see `compile_policy`. Pass it to `evaluate`, `record` and ``env.rollout``. Of a population,
            ``policy.module.unstacked(i)`` is one that acts alone.
        returns: the return of each episode that ended in training, a mean over agents; `plot_returns` draws it. Of a population, a
            list of these for each policy: ``plot_returns(*ppo.returns)``. Batches passed to `update` need a `RewardSum` for it.

    Raises:
        ArgumentError: (a ValueError) a number is out of range, or a network or the space of actions does not fit.
        MissingKeyError: (a KeyError) the env has no such observation.
        BatchSizeError: (a RuntimeError) the first axis of the env is no multiple of ``policies``.

    Example:
        >>> from envkit import PPO, GymEnv, evaluate
        >>> env, test_env = GymEnv("CartPole-v1"), GymEnv("CartPole-v1")
        >>> ppo = PPO(env, frames_per_batch=64, seed=0)
        >>> ppo.fit(128, progress=False).frames
        128
        >>> evaluate(test_env, ppo.policy, 4, seed=1).returns.shape
        torch.Size([4])
        >>> ppo.close()
    """

    def __init__(
        self,
        env: EnvBase,
        actor: Networks | Sequence[Networks] = None,
        critic: Networks | Sequence[Networks] = None,
        *,
        observation_keys: Sequence[Key] = ("observation",),
        frames_per_batch: int | None = None,
        minibatch_size: int | None = None,
        epochs: int = 10,
        learning_rate: Number = 3e-4,
        anneal: bool = True,
        gamma: Number = 0.99,
        lmbda: Number = 0.95,
        clip: Number = 0.2,
        entropy: Number = 0.0,
        max_grad_norm: Number = 0.5,
        normalize_observations: bool = True,
        normalize_rewards: bool = True,
        policies: int | None = None,
        seed: int | None = None,
    ):
        require_env("env", env)
        self.epochs = as_int("epochs", epochs, least=1, meaning="how often to go through a batch")
        self.minibatch_size = minibatch_size
        if minibatch_size is not None:
            meaning = "samples of a gradient step"
            self.minibatch_size = as_int("minibatch_size", minibatch_size, least=1, meaning=meaning)
        self.policies = None
        if policies is not None:
            self.policies = as_int("policies", policies, least=1, meaning="how many to train")
            require_rows_of_policies("PPO", env.batch_size, self.policies)
        number = partial(_number_of_each, self.policies, env.device)
        self.learning_rate = number("learning_rate", learning_rate, above=0.0, meaning="a rate")
        self.anneal = as_bool("anneal", anneal)
        self.gamma = number("gamma", gamma, least=0.0, most=1.0, meaning="a discount")
        self.lmbda = number("lmbda", lmbda, least=0.0, most=1.0, meaning="a weight")
        self.clip = number("clip", clip, above=0.0, meaning="0.2 for example")
        self.entropy = number("entropy", entropy, least=0.0, meaning="0.01 for example")
        self.max_grad_norm = number("max_grad_norm", max_grad_norm, above=0.0, meaning="a norm")
        if seed is not None:
            torch.manual_seed(seed)
        keys = [observation_keys] if isinstance(observation_keys, str) else observation_keys
        actions = [as_path(key) for key in env.action_keys]
        levels = [path[:-1] for path in actions]
        groups = [Group(env, path, keys, is_alone=levels.count(path[:-1]) == 1) for path in actions]
        self._rows = rows = env.batch_size.numel()
        self._levels = [()] if () in env.done_levels else list(env.done_levels)
        normalizes = as_bool("normalize_observations", normalize_observations)
        self._normalizes_rewards = as_bool("normalize_rewards", normalize_rewards)
        members = [
            _networks(groups, acting, judging, normalizes=normalizes, device=env.device)
            for acting, judging in zip(
                _by_member("actor", actor, self.policies),
                _by_member("critic", critic, self.policies),
                strict=True,
            )
        ]
        self.policy, self._learners = _assembled(members, self.policies)
        of_member = rows // (self.policies or 1)
        self._collector = Collector(
            _with_returns(env, groups),
            self.policy,
            frames_per_batch=rows * max(16, 2048 // of_member)
            if frames_per_batch is None
            else frames_per_batch,
            seed=seed,
        )
        self.returns: Any = [] if self.policies is None else [[] for _ in range(self.policies)]
        self._episodes: Tensor | None = None  # the one of each row in which the last batch ended
        self._losses: dict[str, float] = {}

    @property
    def frames(self) -> int:
        """Transitions that were collected."""
        return self._collector.frames

    def fit(
        self,
        frames: int,
        callback: Callable[[PPO, EnvData], object] | None = None,
        *,
        progress: bool = True,
    ) -> Self:
        """Collect and learn until ``frames`` transitions were collected in all; the last batch is whole.

        After Ctrl-C, an error or `load_state_dict`, the same call goes on where training stopped. Ctrl-C waits for the end of an
        update; in the middle of a batch it ends the episodes under way.

        Args:
            frames: of the whole training, those of earlier calls included.
            callback: called as ``callback(ppo, batch)`` after each update: to log `scalars`, to evaluate, to save. Training ends
                where it returns True.
            progress: show a bar with the mean return of the last 100 episodes.

        Returns:
            This object.

        Raises:
            NotFiniteError: (a ValueError) an observation or reward is NaN or infinite.
            ArgumentError: (a ValueError) ``frames`` is below 1.
            MissingLibraryError: (an ImportError) there is no tqdm for the bar.

        Example:
            >>> from envkit import PPO, GymEnv
            >>> env, lengths = GymEnv("Pendulum-v1"), []
            >>> ppo = PPO(env, frames_per_batch=32)
            >>> ppo = ppo.fit(64, lambda ppo, batch: lengths.append(batch.numel()), progress=False)
            >>> lengths
            [32, 32]
            >>> ppo.close()
            >>> env.close()
        """
        frames = as_int("frames", frames, least=1, meaning="transitions of the whole training")
        require_callable("callback", callback, is_optional=True)
        with _bar(frames, self.frames, as_bool("progress", progress)) as show:
            while self.frames < frames:
                left = 1.0 - self.frames / frames
                batch: Any = self._collector.next()
                with interrupted_later():  # or a part of the batch would be learnt from
                    self.update(batch, self.learning_rate * (left if self.anneal else 1.0))
                show(batch.numel(), self.scalars())
                if callback is not None and callback(self, batch) is True:
                    break
        return self

    def scalars(self) -> dict[str, float]:
        """Return what to log, a flat dict of numbers for any logger.

        Returns:
            ``frames``, ``episodes``, ``return`` (the mean of the last 100 episodes, once one has ended), and of the last update, a mean
            over its gradient steps: ``policy_loss``, ``value_loss``, ``entropy``, ``kl`` (how far the policy moved, in nats),
            ``clipped`` (the share of samples whose ratio was clipped) and ``learning_rate``. Those of agents begin with their group,
            ``agents/policy_loss``. Those of a population begin with the policy, ``policy_0/return``; ``return`` is a mean over policies.

        Example:
            >>> from envkit import PPO, GymEnv
            >>> env = GymEnv("CartPole-v1")
            >>> ppo = PPO(env, frames_per_batch=64).fit(64, progress=False)
            >>> sorted(ppo.scalars())[:4]
            ['clipped', 'entropy', 'episodes', 'frames']
            >>> ppo.close()
            >>> env.close()
        """
        returns = self._returns_of_each
        means = [sum(of_one[-100:]) / len(of_one[-100:]) for of_one in returns if of_one]
        mean = {"return": sum(means) / len(means)} if means else {}
        if self.policies is not None and len(means) == self.policies:
            mean |= self._named("return", torch.tensor(means))
        episodes = sum(map(len, returns))
        return {"frames": self.frames, "episodes": episodes, **mean, **self._losses}

    def state_dict(self) -> dict[str, Any]:
        """Return all that training goes on from: networks, statistics, optimisers, envs, generators and counters.

        Example:
            >>> import tempfile
            >>> from envkit import PPO, GymEnv, load, save
            >>> env, path = GymEnv("CartPole-v1"), tempfile.mkdtemp() + "/ppo.pt"
            >>> _ = env.record_for_resume()
            >>> ppo = PPO(env, frames_per_batch=32).fit(32, progress=False)
            >>> save(path, ppo=ppo)
            >>> _ = load(path, ppo=ppo)
            >>> ppo.frames
            32
            >>> ppo.close()
            >>> env.close()
        """
        return {
            "networks": [
                {name: copy.deepcopy(part.state_dict()) for name, part in learner.parts().items()}
                for learner in self._learners
            ],
            "totals": [learner.totals for learner in self._learners],
            "episodes": self._episodes,
            "collector": self._collector.state_dict(),
            "returns": [torch.tensor(each, dtype=torch.float64) for each in self._returns_of_each],
            "losses": dict(self._losses),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the training that gave ``state``, with networks and an env of the same kind.

        Raises:
            ResumeError, RuntimeError: a network or the env is another one.
        """
        policies, own = len(state["returns"]), len(self._returns_of_each)
        if policies != own:
            raise ResumeError(
                f"the state is of {policies} policies, but this PPO trains {own}. Build it with policies={policies}."
            )
        for learner, saved in zip(self._learners, state["networks"], strict=True):
            for name, part in learner.parts().items():
                part.load_state_dict(saved[name])
        for learner, totals in zip(self._learners, state["totals"], strict=True):
            learner.totals = totals if totals is None else totals.to(learner.rewards.count.device)
        self._episodes = state["episodes"]
        self._collector.load_state_dict(state["collector"])
        returns = [each.tolist() for each in state["returns"]]
        self.returns = returns[0] if self.policies is None else returns
        self._losses = dict(state["losses"])

    def close(self) -> None:
        """End collecting; the env stays open."""
        self._collector.shutdown()

    def update(self, batch: EnvData, learning_rate: Number | None = None) -> None:
        """Take the gradient steps of one batch, as `fit` does with each.

        Call it for batches of a collector of your own, one with workers for example. Build it with ``policy``. To normalise
        rewards, returns are summed up from one batch to the next in each row that is still in the same episode.

        Args:
            batch: what ``policy`` did in the env, batch size ``(*batch, T)``, in the order of time.
            learning_rate: of these steps; None takes that of the object.

        Raises:
            MissingKeyError: (a KeyError) it was collected with another policy.
            ArgumentError: (a ValueError) its rows are no multiple of those of the env, or padding or dead agents leave policies of a
                population different numbers of samples.
            NotFiniteError: (a ValueError) an observation or reward is NaN or infinite: networks stay as they are. Or training has
                diverged.

        Example:
            >>> from envkit import PPO, Collector, GymEnv
            >>> env = GymEnv("CartPole-v1")
            >>> ppo = PPO(env, normalize_rewards=False)
            >>> for batch in Collector(env, ppo.policy, frames_per_batch=64, total_frames=128):
            ...     ppo.update(batch)
            >>> ppo.close()
            >>> env.close()
        """
        rate = self.learning_rate if learning_rate is None else learning_rate
        groups = [learner.actor.group for learner in self._learners]
        if self.policies is not None:
            batch = self._by_policy(batch)
        for group in groups:
            group.require_right(batch)
        parts = [batch] if self.policies is None else batch.unbind(0)
        for returns, part in zip(self._returns_of_each, parts, strict=True):
            returns += _ended_returns(part, groups, self._levels)
        self._losses = self._named("learning_rate", torch.as_tensor(rate, dtype=torch.float64))
        self._end_totals(batch)
        learnt_from = [self._samples(batch, learner) for learner in self._learners]
        for group, learner, samples in zip(groups, self._learners, learnt_from, strict=True):
            if not samples.batch_size.numel():
                continue  # no agent of this group was in the game
            size = self.minibatch_size or math.ceil(samples.batch_size[-1] / 8)
            shuffled = minibatches(samples, size, epochs=self.epochs, keep_dims=learner.axes)
            steps = [self._step(part, learner, rate) for part in shuffled]
            means = torch.stack(steps).mean(0)
            _require_finite(means, "a loss", _DIVERGED)
            prefix = f"{group.name}/" if group.name else ""
            for name, mean in zip(_LOSSES, means, strict=True):
                self._losses |= self._named(prefix + name, mean)
            # Only now: the log-probabilities above belong to the statistics with which the policy acted.
            learner.actor.observe(samples)

    def _by_policy(self, batch: EnvData) -> EnvData:
        """Show a batch as ``(policies, n, T)``. With several workers, each has rows of all policies.

        Raises:
            ArgumentError: it has other rows than the env.
        """
        steps = batch.batch_size[-1]
        if not steps or batch.numel() % (self._rows * steps):
            raise ArgumentError(
                f"the batch has batch size {tuple(batch.batch_size)}; expected a multiple of {self._rows} rows, as the env has them, "
                "and time as the last axis. Pass what a collector gave, its rows in their order."
            )
        policies = len(self.returns)
        of_workers = batch.reshape(-1, policies, self._rows // policies, steps)
        return of_workers.transpose(0, 1).flatten(1, 2)

    def _end_totals(self, batch: EnvData) -> None:
        """Set discounted returns to zero in rows that are in another episode than where the last batch ended."""
        # A rollout has no numbers of episodes, nor has a collector with track_traj_ids=False.
        episodes = batch.get(("collector", "traj_ids"), None)
        before, self._episodes = self._episodes, None if episodes is None else episodes[..., -1]
        if before is None or episodes is None or before.shape != episodes.shape[:-1]:
            for learner in self._learners:
                learner.totals = None
            return
        for learner in self._learners:
            learner.end_totals(before.to(episodes.device) != episodes[..., 0])

    @property
    def _returns_of_each(self) -> list[list[float]]:
        """Returns of each policy, also where there is one."""
        return [self.returns] if self.policies is None else self.returns

    def _named(self, name: str, numbers: Tensor) -> dict[str, float]:
        """Return a number by its name, or those of members each with its policy in front."""
        if self.policies is None:
            return {name: numbers.item()}
        each = numbers.expand(self.policies).tolist()
        return {f"policy_{place}/{name}": number for place, number in enumerate(each)}

    @torch.no_grad()
    def _samples(self, batch: EnvData, learner: Learner) -> EnvData:
        """Return what the loss reads, batch size ``(*members, n)``: each step of each agent that is in the game."""
        group = learner.actor.group
        counts = group.counts(batch)
        if learner.axes and counts is not None and not bool(counts.all()):
            raise ArgumentError(
                f"{group.alive_key or 'the mask of the batch'} says that some agents are not in the game, or that there is padding; expected "
                "neither in a population, whose policies learn from equally many samples. Train without policies=."
            )
        steps = self._judged(batch, learner, counts)
        for key in (group.sample_key, group.log_prob_key, *group.read_keys):
            steps[key] = batch[key].detach()
        is_whole = counts is None or learner.axes
        samples: Any = steps.flatten(learner.axes, -1) if is_whole else steps[counts]
        group.require_judged(samples)
        gain = samples["advantage"]
        if gain.numel():
            deviation = gain.std(-1, correction=0, keepdim=True)
            gain = (gain - gain.mean(-1, keepdim=True)) / (deviation + 1e-8)
            samples["advantage"] = gain.where(~samples["unknown"], 0.0)
        return samples.exclude("value", "unknown")

    def _judged(self, batch: EnvData, learner: Learner, counts: Tensor | None) -> EnvData:
        """Return value, advantage and value target of each step of each agent, batch size ``(*batch, T, *agents)``.

        ``unknown`` marks steps behind which an observation is missing: nothing is known of them.
        """
        group, following = learner.actor.group, batch["next"]
        value, next_value = (learner.value(td) for td in (batch, following))
        reward, done, terminated = group.outcome(following, value.shape)
        time_dim = batch.batch_dims - 1
        if self._normalizes_rewards:
            gamma = spread_over(self.gamma, value)
            reward = learner.normalized(reward, done, gamma, time_dim, counts)
        missing = following.get(rules.FINAL_MISSING, None)
        missing = torch.zeros_like(done) if missing is None else _spread(missing, value.shape)
        outcome = {"reward": reward, "done": done, "terminated": terminated}
        outcome |= {"state_value": next_value, rules.FINAL_MISSING: missing}
        judged = batch.copy().set("state_value", value)
        judged["next"] = following.copy().update(outcome)
        judged = gae(judged, gamma=self.gamma, lmbda=self.lmbda, time_dim=time_dim)
        entries = {
            "value": value,
            "advantage": judged["advantage"].squeeze(-1),
            "value_target": judged["value_target"],
            "unknown": (missing & ~terminated).squeeze(-1),
        }
        return TensorDict(entries, value.shape[:-1])

    def _step(self, samples: EnvData, learner: Learner, rate: Number) -> Tensor:
        """Take one gradient step, and return the numbers of ``_LOSSES``, each of shape ``(*members)``."""
        loss, *numbers = learner.each(_losses, samples, self.clip, self.entropy).unbind(-1)
        learner.optimizer.zero_grad()
        loss.sum().backward()  # no member's loss depends on another's networks
        # Apart, or large gradients of the critic would hold up the actor.
        for network in (learner.actor, learner.critic):
            _clip_gradients(network.parameters(), self.max_grad_norm, learner.axes)
        learner.descend(rate)
        return torch.stack(numbers).detach()


def _losses(
    actor: Actor, critic: nn.Module, samples: EnvData, clip: Number, entropy_weight: Number
) -> Tensor:
    """Return what is minimised, and the numbers of ``_LOSSES``, for samples ``(n,)`` of one policy."""
    observations = actor.observations(samples)
    distribution = actor.distribution(samples, observations)
    group = actor.group
    change = distribution.log_prob(samples[group.sample_key]) - samples[group.log_prob_key]
    ratio, advantage = change.exp(), samples["advantage"]
    clipped = ratio.clamp(1 - clip, 1 + clip)
    policy_loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
    entropy = distribution.entropy().mean()
    value_loss = (critic(*observations) - samples["value_target"]).square().mean()
    loss = policy_loss - entropy_weight * entropy + value_loss
    with torch.no_grad():
        kl, share = (ratio - 1 - change).mean(), (ratio != clipped).float().mean()
    return torch.stack([loss, policy_loss, value_loss, entropy, kl, share])


def _clip_gradients(parameters: Iterable[Tensor], most: Number, axes: int) -> None:
    """Scale the gradients of a network down to a norm, those of each member by themselves."""
    gradients = [one.grad for one in parameters if one.grad is not None]
    if not gradients:
        return
    norms = [one.reshape(*one.shape[:axes], -1).norm(dim=-1) for one in gradients]
    scale = (most / (torch.stack(norms, -1).norm(dim=-1) + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(spread_over(scale, gradient))


class Learner(nn.Module):
    """Actor, critic and optimiser of one group, of one policy or of all members.

    Args:
        actor, critic: networks; those of members have their axis in front of each parameter and buffer.
        members: how many there are; None for a policy without that axis.

    Attributes:
        axes: 1 where there are members, 0 otherwise.
        rewards: statistics of discounted returns, which rewards are divided by.
        totals: discounted return of each row so far, None before the first batch.
    """

    def __init__(self, actor: Actor, critic: nn.Module, members: int | None):
        super().__init__()
        self.actor, self.critic = actor, critic
        self.axes = 0 if members is None else 1
        self.optimizer = torch.optim.Adam(self.parameters(), eps=1e-5)
        leading = () if members is None else (members,)
        self.rewards = Normalizer(torch.Size([]), leading).to(next(self.parameters()).device)
        self.totals: Tensor | None = None

    def parts(self) -> dict[str, Any]:
        """Return what is saved."""
        names = ("actor", "critic", "rewards", "optimizer")
        return {name: getattr(self, name) for name in names}

    def forward(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Call ``function(actor, critic, *inputs)``."""
        return function(self.actor, self.critic, *inputs)

    def each(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Call ``function(actor, critic, *inputs)`` for each member, with its networks and its part of what has members.

        Args:
            function: written for one policy, returns a tensor.
            inputs: TensorDicts and tensors with the members along the first axis, and numbers for all of them.

        Returns:
            The tensors of all members, along a new first axis; without members, that of the policy.
        """
        if not self.axes:
            return self(function, *inputs)
        state = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        places = [None if isinstance(one, float | int) else 0 for one in inputs]

        def of_member(state: dict[str, Tensor], *inputs: Any) -> Any:
            return torch.func.functional_call(self, state, (function, *inputs))

        mapped = torch.func.vmap(of_member, in_dims=(0, *places), randomness="different")
        return mapped(state, *inputs)

    def value(self, td: EnvData) -> Tensor:
        """Return the value of observations, ``(*batch, 1)``."""

        def value(actor: Actor, critic: nn.Module, td: EnvData) -> Tensor:
            return actor.group.call(critic, actor.observations(td))

        return self.each(value, td.select(*self.actor.group.observation_keys))

    def normalized(
        self, reward: Tensor, done: Tensor, gamma: Number, time_dim: int, counts: Tensor | None
    ) -> Tensor:
        """Return rewards divided by the running deviation of discounted returns, which this batch changes.

        Args:
            reward, done: of a batch, with time on axis ``time_dim``. Rows go on where the last batch ended.
            gamma: discount, in the axes of ``reward``.
            counts: see `Group.counts`.
        """
        by_time = reward.movedim(time_dim, 0)
        total = self.totals
        if total is None or total.shape != by_time.shape[1:]:
            total = torch.zeros_like(by_time[0])
        totals, discount = [], gamma.squeeze(time_dim) if isinstance(gamma, Tensor) else gamma
        for now, ended in zip(by_time, done.movedim(time_dim, 0), strict=True):
            totals.append(now + discount * total)
            total = totals[-1].where(~ended, 0.0)
        self.totals = total
        seen = torch.stack(totals, time_dim)
        is_whole = counts is None or self.axes
        self.rewards.observe(seen.flatten(self.axes) if is_whole else seen.squeeze(-1)[counts])
        return (reward / spread_over(self.rewards.deviation, reward)).clamp(-10, 10)

    def end_totals(self, ended: Tensor) -> None:
        """Set the discounted returns of some rows, ``(*batch)``, to zero."""
        if self.totals is not None:
            self.totals = self.totals.where(~spread_over(ended, self.totals), 0.0)

    def descend(self, rate: Number) -> None:
        """Take a step of Adam, with a rate for all members or one for each."""
        options = self.optimizer.param_groups[0]
        if not isinstance(rate, Tensor):
            options["lr"] = rate
            self.optimizer.step()
            return
        before = [parameter.detach().clone() for parameter in self.parameters()]
        options["lr"] = 1.0
        self.optimizer.step()
        with torch.no_grad():
            for old, parameter in zip(before, self.parameters(), strict=True):
                parameter.copy_(torch.lerp(old, parameter, spread_over(rate, parameter)))


def spread_over(number: Number, values: Tensor) -> Any:
    """Show a number of each member in the axes of ``values``, whose first one has the members."""
    if not isinstance(number, Tensor) or not number.ndim:
        return number
    return number.reshape(*number.shape, *(1,) * (values.ndim - number.ndim))


class Group:
    """Find the entries that belong to one action of an env.

    Args:
        env: any env.
        action: path of the action.
        observation_keys: keys within the group of the entries with which networks are called.
        is_alone: whether no other action is beside this one.

    Raises:
        MissingKeyError: there is no such observation.
        ArgumentError: no observation is named, or the reward is more than one number.
    """

    def __init__(
        self, env: EnvBase, action: Path, observation_keys: Sequence[Key], *, is_alone: bool
    ):
        self.path = action[:-1]
        self.name = ".".join(self.path if is_alone else action)
        self.action_key = action
        end = "" if is_alone else f"_{action[-1]}"
        self.sample_key, self.log_prob_key = self.key(_SAMPLE + end), self.key(_LOG_PROB + end)
        if not observation_keys:
            raise ArgumentError(
                "observation_keys is empty. Pass the keys of one observation or more."
            )
        self.action_spec: Any = env.full_action_spec[action]
        self._observed: Any = env.observation_spec
        axes = env.full_action_spec[self.path].shape if self.path else env.batch_size
        self.axes = len(axes)
        """Batch axes of the entries, those of the env and those of the agents."""
        leaves = [as_path(key) for key in self._observed.keys(True, True)]
        self.observation_keys = [self.key(key) for key in observation_keys]
        if missing := [key for key in self.observation_keys if key not in leaves]:
            raise MissingKeyError(
                f"the env has no observation {missing}; it has {leaves}. Pass observation_keys=[...], keys of tensors "
                + (
                    f"within {self.name!r}, e.g. ('observation', 'position')."
                    if self.path
                    else "among these."
                )
            )
        self.event_shapes = [
            self._observed[key].shape[self.axes :] for key in self.observation_keys
        ]
        self.mask_key = self.key("action_mask") if self.key("action_mask") in leaves else None
        self.alive_key = self.key("mask") if self.path and self.key("mask") in leaves else None
        paid = [as_path(key) for key in env.reward_keys]
        self.reward_path = self.path if self.key("reward") in paid else ()
        self._reward_key = (*self.reward_path, "reward")
        paid_shape = env.full_reward_spec[self._reward_key].shape
        if paid_shape[-1:] != (1,):
            raise ArgumentError(
                f"{self._reward_key} has shape {tuple(paid_shape)}; PPO learns from one number a step, in a last axis of 1. Put a "
                "LineariseRewards around the env."
            )
        self._ends = [level for level in dict.fromkeys([(), self.path]) if level in env.done_levels]

    def key(self, key: Key) -> Path:
        """Return the path of an entry of this group."""
        return (*self.path, *as_path(key))

    @property
    def read_keys(self) -> list[Path]:
        """Entries of an observation that networks, masks and losses read."""
        return [*self.observation_keys, *(key for key in (self.mask_key, self.alive_key) if key)]

    def counts(self, batch: EnvData) -> Tensor | None:
        """Return which steps count, ``(*batch, T, *agents)``: not padding, nor those of dead agents. None: all do."""
        is_step = step_entry(batch, "mask")
        is_alive = None if self.alive_key is None else batch[self.alive_key]
        if is_step is None:
            return is_alive
        shape = batch[self.log_prob_key].shape
        is_step = _spread(is_step.unsqueeze(-1), torch.Size((*shape, 1))).squeeze(-1)
        return is_step if is_alive is None else is_step & is_alive

    def require_right(self, batch: EnvData) -> None:
        """Check a batch before anything is learnt from it.

        Raises:
            MissingKeyError: it was collected with another policy.
            NotFiniteError: an observation or reward that counts is NaN or infinite.
        """
        if batch.get(self.sample_key, None) is None:
            raise MissingKeyError(
                f"the batch has no {self.sample_key}, which the policy of this PPO writes. Collect it with ppo.policy."
            )
        counts = self.counts(batch)
        seen = [(batch[key], f"{key}") for key in self.observation_keys]
        paid = batch["next"][self._reward_key]
        if (
            paid.ndim == batch[self.log_prob_key].ndim + 1
        ):  # otherwise it is of agents, some of which may be dead
            seen.append((paid, f"{self._reward_key}"))
        for values, cause in seen:
            _require_finite(values if counts is None else values[counts], cause, _TO_FIND)

    def require_judged(self, samples: EnvData) -> None:
        """Check values and advantages of samples.

        Raises:
            NotFiniteError: one is NaN or infinite.
        """
        _require_finite(samples["value"], "what the critic returned", _DIVERGED)
        cause = f"{self._reward_key}, or an observation that follows a step,"
        _require_finite(samples["advantage"], cause, _TO_FIND)

    def outcome(self, following: EnvData, shape: torch.Size) -> tuple[Tensor, ...]:
        """Return reward, done and terminated of a batch's ``next``, all of ``shape``: ``(*batch, T, *agents, 1)``.

        Each agent has the reward and flags of the whole env, unless it has its own.
        """
        paid = _spread(following[self._reward_key], shape)
        done = terminated = torch.zeros(shape, dtype=torch.bool, device=paid.device)
        for level in self._ends:
            ends, dies = (
                _spread(following[(*level, name)], shape) for name in ("done", "terminated")
            )
            # An agent's own flags come last: in a game that is over, its own end may have been a time limit.
            terminated, done = dies.where(ends, terminated), done | ends
        return paid, done, terminated

    def call(self, network: nn.Module, observations: Sequence[Tensor]) -> Tensor:
        """Return outputs ``(*batch, n)`` for observations ``(*batch, *event)``, through a network that knows one batch axis."""
        shapes = zip(observations, self.event_shapes, strict=True)
        outputs = network(*[values.reshape(-1, *event) for values, event in shapes])
        batch_dims = observations[0].ndim - len(self.event_shapes[0])
        return outputs.reshape(*observations[0].shape[:batch_dims], -1)

    def fitting(self, role: str, network: nn.Module, outputs: int) -> nn.Module:
        """Return a network that gives ``outputs`` numbers for these observations.

        Raises:
            ArgumentError: it gives another shape.
        """
        tried = [torch.zeros(2, *shape) for shape in self.event_shapes]
        with torch.no_grad():
            try:
                outcome = network.cpu()(*tried)
            except (RuntimeError, TypeError, IndexError) as error:
                error.add_note(
                    f"The {role} of {self.action_key} was called with {self.observation_keys}: float32 tensors of the shapes "
                    f"{[tuple(values.shape) for values in tried]}, in this order. Pass a network that takes them."
                )
                raise
        if getattr(outcome, "shape", None) != (2, outputs):
            raise ArgumentError(
                f"the {role} of {self.action_key} returned {getattr(outcome, 'shape', type(outcome).__name__)} for two observations of "
                f"the shapes {[tuple(shape) for shape in self.event_shapes]}; expected shape (2, {outputs}). "
                f"Give its last layer {outputs} outputs."
            )
        return network

    def require_mask(self, options: int) -> None:
        """Check that the mask has a flag for each of so many options.

        Raises:
            ArgumentError: it has more or fewer.
        """
        if self.mask_key is None:
            return
        shape = self._observed[self.mask_key].shape[self.axes :]
        if shape.numel() != options:
            raise ArgumentError(
                f"{self.mask_key} has shape {tuple(shape)}, but {self.action_key} has {options} options in all. Give the mask a "
                "flag for each of them, or take it out with ExcludeTransform."
            )


class Policy(nn.Module):
    """Act for all groups of an env: the form in which any env takes a policy."""

    def __init__(self, actors: Sequence[Actor]):
        super().__init__()
        self.actors = nn.ModuleList(actors)

    def forward(self, td: EnvData) -> EnvData:
        """Write the action of each group, and what was drawn for it with its log-probability."""
        for actor in self.actors:
            actor(td)
        return td


class Actor(nn.Module):
    """Act for one group: normalise observations, ask the network, draw, and bring the sample to the action's form.

    Args:
        group: where the entries are.
        network: from observations to outputs; None makes two layers of 64 units.
        normalizes: whether observations are normalised.
    """

    def __init__(self, group: Group, network: nn.Module | None, normalizes: bool):
        super().__init__()
        self.group = group
        self.form = form_of(group)
        if network is None:
            network = MLP(group.event_shapes, self.form.outputs, scale=0.01)
        self.network = group.fitting("actor", network, self.form.outputs)
        shapes = group.event_shapes if normalizes else []
        self.normalizers: Any = nn.ModuleList(Normalizer(shape) for shape in shapes)

    def forward(self, td: EnvData) -> None:
        """Write action, sample and log-probability; see `Policy`."""
        group, distribution = self.group, self.distribution(td, self.observations(td))
        is_drawn = exploration_type() is ExplorationType.RANDOM
        sample = distribution.sample() if is_drawn else distribution.mode
        td[group.sample_key] = sample
        td[group.log_prob_key] = distribution.log_prob(sample)
        td[group.action_key] = self.form.action(sample)

    def observations(self, td: EnvData) -> list[Tensor]:
        """Return what networks are called with, each ``(*batch, *event)``, float32."""
        raw = [td[key].float() for key in self.group.observation_keys]
        if not self.normalizers:
            return raw
        return [shift(values) for shift, values in zip(self.normalizers, raw, strict=True)]

    def distribution(self, td: EnvData, observations: Sequence[Tensor]) -> Any:
        """Return the distribution of samples, with the mask of ``td``."""
        key = self.group.mask_key
        outputs = self.group.call(self.network, observations)
        return self.form.distribution(outputs, None if key is None else td[key])

    def observe(self, samples: EnvData) -> None:
        """Add samples ``(n,)`` to the statistics of observations."""
        if not self.normalizers:
            return
        for normalizer, key in zip(self.normalizers, self.group.observation_keys, strict=True):
            normalizer.observe(samples[key].float())


class Continuous(nn.Module):
    """Draw from a normal distribution, whose deviation does not depend on the observation; tanh brings samples within bounds.

    Args:
        spec: of the action.
        event: its shape without batch axes.
        bounds: lowest and highest action, each of shape ``event``; None where there are no bounds.
    """

    def __init__(self, spec: TensorSpec, event: torch.Size, bounds: tuple[Tensor, Tensor] | None):
        super().__init__()
        self.event, self.outputs, self.dtype = event, event.numel(), spec.dtype
        self.is_bounded = bounds is not None
        low, high = bounds or (torch.zeros(event, dtype=spec.dtype),) * 2
        self.low: Tensor
        self.high: Tensor
        self.register_buffer("low", low.flatten().clone())
        self.register_buffer("high", high.flatten().clone())
        self.log_std = nn.Parameter(torch.zeros(self.outputs))

    def distribution(self, outputs: Tensor, mask: Tensor | None) -> Independent:
        """Return the distribution of samples ``(*batch, outputs)``; there is nothing to mask."""
        normal = Normal(outputs, self.log_std.exp().expand_as(outputs), validate_args=False)
        return Independent(normal, 1, validate_args=False)

    def action(self, sample: Tensor) -> Tensor:
        """Bring a sample to the form of the action, ``(*batch, *event)``."""
        action = sample.to(self.dtype)
        if self.is_bounded:
            shown = self.low + (action.tanh() + 1) / 2 * (self.high - self.low)
            action = torch.minimum(torch.maximum(shown, self.low), self.high)  # sums round
        return action.reshape((*action.shape[:-1], *self.event))


class Discrete(nn.Module):
    """Draw options, each from its own logits.

    Args:
        counts: of the options of each choice.
        is_one_hot: whether an action has a flag for each option instead of the option's number.
        spec: of the action.
        event: its shape without batch axes.
    """

    def __init__(self, spec: TensorSpec, event: torch.Size, counts: list[int], *, is_one_hot: bool):
        super().__init__()
        self.event, self.dtype, self.counts, self.is_one_hot = event, spec.dtype, counts, is_one_hot
        self.outputs = sum(counts)

    def distribution(self, outputs: Tensor, mask: Tensor | None) -> Choices:
        """Return the distribution of samples ``(*batch, choices)``; what the mask forbids has no probability."""
        if mask is not None:
            allowed = mask.reshape(outputs.shape).bool()
            outputs = outputs.where(allowed, torch.finfo(outputs.dtype).min)
        return Choices(
            [Options(logits=part, validate_args=False) for part in outputs.split(self.counts, -1)]
        )

    def action(self, sample: Tensor) -> Tensor:
        """Bring a sample to the form of the action, ``(*batch, *event)``."""
        if self.is_one_hot:
            parts = zip(sample.unbind(-1), self.counts, strict=True)
            sample = torch.cat(
                [nn.functional.one_hot(option, count) for option, count in parts], -1
            )
        return sample.reshape((*sample.shape[:-1], *self.event)).to(self.dtype)


class Choices:
    """Several independent choices as one distribution, over samples ``(*batch, choices)``, int64."""

    def __init__(self, parts: list[Options]):
        self._parts = parts

    def sample(self) -> Tensor:
        """Draw an option of each choice."""
        return torch.stack([part.sample() for part in self._parts], -1)

    @property
    def mode(self) -> Tensor:
        """The most likely option of each choice."""
        return torch.stack([part.logits.argmax(-1) for part in self._parts], -1)

    def log_prob(self, sample: Tensor) -> Tensor:
        """Return the log-probability of all choices together, ``(*batch)``."""
        each = zip(self._parts, sample.unbind(-1), strict=True)
        return torch.stack([part.log_prob(option) for part, option in each]).sum(0)

    def entropy(self) -> Tensor:
        """Return the entropy of all choices together in nats, ``(*batch)``."""
        return torch.stack([part.entropy() for part in self._parts]).sum(0)


def form_of(group: Group) -> Continuous | Discrete:
    """Return what draws the actions of a group.

    Raises:
        ArgumentError: the space has no such distribution, or its mask has other options.
    """
    spec, event = group.action_spec, group.action_spec.shape[group.axes :]
    if isinstance(spec, OneHot):
        form = Discrete(spec, event, [spec.n] * event[:-1].numel(), is_one_hot=True)
    elif isinstance(spec, MultiOneHot):
        form = Discrete(spec, event, [box.n for box in spec.space.boxes], is_one_hot=True)
    elif isinstance(spec, MultiCategorical):
        counts = spec.nvec.reshape(-1, spec.nvec.shape[-1])[0].tolist()
        form = Discrete(spec, event, counts, is_one_hot=False)
    elif isinstance(spec, Categorical | Binary):
        count = spec.n if isinstance(spec, Categorical) else 2
        form = Discrete(spec, event, [count] * event.numel(), is_one_hot=False)
    elif spec.dtype.is_floating_point and isinstance(spec, Bounded):
        low, high = (bound[(0,) * group.axes] for bound in (spec.low, spec.high))
        is_bounded = bool(low.isfinite().all() and high.isfinite().all())
        if not is_bounded and bool(low.isfinite().any() or high.isfinite().any()):
            raise ArgumentError(
                f"the action {group.action_key} has bounds for some of its numbers alone, {low.tolist()} to {high.tolist()}. Give "
                "the env bounds for all of them or for none."
            )
        form = Continuous(spec, event, (low, high) if is_bounded else None)
    elif spec.dtype.is_floating_point:
        form = Continuous(spec, event, None)
    else:
        raise ArgumentError(
            f"the action {group.action_key} is a {type(spec).__name__} of {spec.dtype}; PPO draws floats, options and flags. "
            "Put a transform around the env that takes one of these."
        )
    if isinstance(form, Discrete):
        group.require_mask(form.outputs)
    return form


class Normalizer(nn.Module):
    """Subtract the running mean and divide by the running deviation of what was observed, and clip at 10.

    Source of the merge: Chan et al., "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances" (1979), eq. 2.1.

    Args:
        shape: of an event.
        members: ``(policies,)`` where policies have separate statistics.
    """

    count: Tensor
    mean: Tensor
    squares: Tensor

    def __init__(self, shape: torch.Size, members: tuple[int, ...] = ()):
        super().__init__()
        self.event_dims = len(shape)
        self.register_buffer("count", torch.zeros(members))
        self.register_buffer("mean", torch.zeros((*members, *shape)))
        # sum of squared deviations
        self.register_buffer("squares", torch.zeros((*members, *shape)))

    @property
    def deviation(self) -> Tensor:
        """Running standard deviation, in the shape of an event; 1 before anything was observed."""
        count = spread_over(self.count, self.squares)
        variance = self.squares / count.clamp(min=1.0)
        return variance.where(count > 0, 1.0).sqrt().clamp(min=1e-4)

    def forward(self, values: Tensor) -> Tensor:
        """Normalise, shape ``(*batch, *event)`` in and out."""
        return ((values - self.mean) / self.deviation).clamp(-10, 10)

    @torch.no_grad()
    def observe(self, values: Tensor) -> None:
        """Add observations ``(*members, n, *event)``."""
        axis = values.ndim - self.event_dims - 1
        number = values.shape[axis]
        if not number:
            return
        count = spread_over(self.count, self.mean)
        shift, total = values.mean(axis) - self.mean, count + number
        self.squares += values.var(axis, correction=0) * number
        self.squares += shift.square() * count * number / total
        self.mean += shift * number / total
        self.count += number


class MLP(nn.Module):
    """Two layers of 64 units with tanh, over all observations in one vector; initial weights are orthogonal.

    Args:
        event_shapes: of the observations.
        outputs: numbers that it returns.
        scale: of the initial weights of the last layer.
    """

    def __init__(self, event_shapes: Sequence[torch.Size], outputs: int, *, scale: float):
        super().__init__()
        inputs = sum(shape.numel() for shape in event_shapes)
        sizes = [(inputs, 64, math.sqrt(2)), (64, 64, math.sqrt(2)), (64, outputs, scale)]
        layers = [nn.Linear(before, after) for before, after, _ in sizes]
        for layer, (_, _, gain) in zip(layers, sizes, strict=True):
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)
        self.layers = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])

    def forward(self, *observations: Tensor) -> Tensor:
        """Return ``(n, outputs)`` for observations ``(n, *event)``."""
        vectors = [values.reshape(len(values), -1) for values in observations]
        return self.layers(torch.cat(vectors, -1))


def _number_of_each(
    policies: int | None, device: torch.device | None, name: str, value: Number, **limits: Any
) -> Number:
    """Return an argument that is a number, or a tensor with a number of each policy.

    Raises:
        ArgumentTypeError: (a TypeError) it is neither.
        ArgumentError: (a ValueError) a number is out of range, or there are not as many as policies.
    """
    if isinstance(value, list | tuple | np.ndarray):
        numbers = [as_number(name, one, **limits) for one in value]
        value = torch.tensor(numbers, dtype=torch.float32)
    if not isinstance(value, Tensor) or not value.ndim:
        return as_number(name, value, **limits)
    if policies is None or value.shape != (policies,):
        of_each = "" if policies is None else f"a tensor of {policies} numbers, or "
        raise ArgumentError(
            f"{name} has shape {tuple(value.shape)} and policies is {policies}; expected a number, or a tensor of shape (policies,). "
            f"Pass {of_each}one number."
        )
    return torch.tensor([as_number(name, one, **limits) for one in value], device=device)


def _by_member(
    role: str, networks: Networks | Sequence[Networks], policies: int | None
) -> Sequence[Networks]:
    """Return what was passed as the networks of each policy.

    Raises:
        ArgumentError: there are not as many as policies.
    """
    if policies is None:
        return [networks]  # type: ignore[list-item]
    if networks is None:
        return [None] * policies
    if isinstance(networks, list | tuple | nn.ModuleList) and len(networks) == policies:
        return networks  # type: ignore[return-value]
    raise ArgumentError(
        f"{role} is {networks!r}, but there are {policies} policies; expected a list with the network of each. Pass "
        f"{role}=[make() for _ in range({policies})]."
    )


def _networks(
    groups: Sequence[Group],
    actor: Networks,
    critic: Networks,
    *,
    normalizes: bool,
    device: torch.device | None,
) -> list[tuple[Actor, nn.Module]]:
    """Build actor and critic of each group for one policy, where None was passed."""
    networks = []
    actors, critics = _by_group("actor", actor, groups), _by_group("critic", critic, groups)
    for group, acting, judging in zip(groups, actors, critics, strict=True):
        acting = Actor(group, acting, normalizes).to(device)
        network = MLP(group.event_shapes, 1, scale=1.0) if judging is None else judging
        networks.append((acting, group.fitting("critic", network, 1).to(device)))
    return networks


def _by_group(role: str, networks: Networks, groups: Sequence[Group]) -> list[nn.Module | None]:
    """Return the network that was passed for each group.

    Raises:
        ArgumentError: it is no network, or there are not as many as groups.
    """
    names = [group.name for group in groups]
    if networks is None:
        return [None] * len(groups)
    if isinstance(networks, nn.Module) and len(groups) == 1:
        return [networks]
    if isinstance(networks, Mapping) and sorted(networks) == sorted(names):
        return [networks[name] for name in names]
    of_each = " for each, in a dict by name" if len(groups) > 1 else ""
    population = ""
    if isinstance(networks, list | tuple):
        population = f" A list is of a population: pass policies={len(networks)} with it."
    raise ArgumentError(
        f"{role} is {networks!r}, but the env has the groups {names}. Pass a torch module{of_each}.{population}"
    )


def _assembled(
    members: Sequence[Sequence[tuple[Actor, nn.Module]]], policies: int | None
) -> tuple[Any, list[Learner]]:
    """Return what acts for all groups, and the learner of each; networks of several members are stacked."""
    acting = [Policy([actor for actor, _ in networks]) for networks in members]
    judging = [nn.ModuleList(critic for _, critic in networks) for networks in members]
    policy: Any
    critics: Any
    if policies is None:
        policy, critics = compile_policy(acting[0]), judging[0]
        actors = policy.module.actors
    else:
        for number, networks in enumerate(zip(acting, judging, strict=True)):
            first, second = ({id(one) for one in part.parameters()} for part in networks)
            if first & second:
                raise ArgumentError(
                    f"actor and critic {number} share parameters; expected separate networks in a population, since the two are "
                    "stacked apart. Give each its own layers."
                )
        policy, critics = compile_policy(acting), compile_policy(judging).module.each
        actors = policy.module.each.actors
    pairs = zip(actors, critics, strict=True)
    return policy, [Learner(actor, critic, policies) for actor, critic in pairs]


def _with_returns(env: EnvBase, groups: Sequence[Group]) -> EnvBase:
    """Return the env with the return of each episode beside each reward."""
    paths = _reward_paths(groups)
    rewards = [(*path, "reward") for path in paths]
    return TransformedEnv(env, RewardSum(rewards, [(*path, _RETURN) for path in paths]))


_DIVERGED = "Training has diverged: build PPO with a lower learning_rate."
_TO_FIND = "Put a FiniteTensorDictCheck around the env to find the step."


def _require_finite(values: Tensor, cause: str, fix: str) -> None:
    """Check numbers before a NaN spoils networks.

    Raises:
        NotFiniteError: one is NaN or infinite.
    """
    if not values.isfinite().all():
        raise NotFiniteError(
            f"{cause} holds NaN or infinite numbers; expected finite numbers. {fix}"
        )


def _reward_paths(groups: Sequence[Group]) -> list[Path]:
    """Return where rewards are: at the root, or in groups of agents."""
    return sorted({group.reward_path for group in groups})


def _ended_returns(batch: EnvData, groups: Sequence[Group], levels: Sequence[Path]) -> list[float]:
    """Return the sum of rewards of each episode that ended in a batch, a mean over all agents; none where nothing summed them up.

    Args:
        batch: of a collector.
        groups: whose rewards are meant.
        levels: where flags say that an episode ended, the root if it has some; all of them must say so.
    """
    following, dims = batch["next"], batch.batch_dims
    sums = [following.get((*path, _RETURN), None) for path in _reward_paths(groups)]
    if any(each is None for each in sums):
        return []
    numbers = torch.cat([each.flatten(dims) for each in sums], -1)
    flags = [following[(*level, "done")].flatten(dims).any(-1) for level in levels]
    return numbers.mean(-1)[torch.stack(flags).all(0)].tolist()


def _spread(entry: Tensor, shape: torch.Size) -> Tensor:
    """Show an entry of the env, ``(*batch, T, 1)``, to each agent."""
    axes = (1,) * (len(shape) - entry.ndim)
    return entry.reshape(*entry.shape[:-1], *axes, entry.shape[-1]).expand(shape)


@contextmanager
def _bar(
    total: int, frames: int, progress: bool
) -> Iterator[Callable[[int, dict[str, float]], None]]:
    """Yield a function that shows how many frames were added, and the mean return."""
    if not progress:
        yield lambda count, scalars: None
        return
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise MissingLibraryError(
            f"progress=True shows a bar by tqdm, which is not installed. {install_hint('viz')}"
        ) from error
    with tqdm(total=total, initial=frames, unit=" frames", unit_scale=True) as bar:

        def show(count: int, scalars: dict[str, float]) -> None:
            if "return" in scalars:
                bar.set_postfix({"return": f"{scalars['return']:.4g}"}, refresh=False)
            bar.update(count)

        yield show
