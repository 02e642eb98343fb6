"""Rewards for what a network does not know yet: random network distillation.

`RunningMeanStd` decides how statistics follow what is seen, `RNDTransform` which rows count and what is computed. How the
predictor learns is the business of a loss.

Conventions
    features  last axis of an observation; all axes before are rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from envkit import rules
from envkit.arrays import statistics
from envkit.data.arguments import as_bool, as_number
from envkit.env.own_state import loads_strictly
from envkit.errors import ArgumentError, ArgumentTypeError
from envkit.specs import Composite, Unbounded
from envkit.specs.lasting import lasting
from envkit.transforms.core.coupled import SkipsRows, by_rows
from envkit.transforms.core.leafwise import require_known
from envkit.transforms.core.transform import Keys, Transform, as_keys

_LEAST_VARIANCE = 1e-8


class RunningMeanStd(nn.Module):
    """Mean and variance of all that was seen, as buffers.

    Args:
        shape: of what the statistics are of, e.g. ``(features,)``; ``()`` for single numbers.
        epsilon: how much the first mean, 0, and variance, 1, weigh: as many rows.

    Attributes:
        mean, var: float32, of that shape.
        count: rows that were seen and ``epsilon``, float64, shape ().

    Example:
        >>> import torch
        >>> from envkit import RunningMeanStd
        >>> running = RunningMeanStd(())
        >>> running.update(torch.tensor([1.0, 3.0]))
        >>> running.normalize(torch.tensor([2.0, 3.0])).round(decimals=3)
        tensor([0., 1.])
    """

    mean: torch.Tensor
    var: torch.Tensor
    count: torch.Tensor

    def __init__(self, shape: Sequence[int] = (), epsilon: float = 1e-4):
        super().__init__()
        as_number("epsilon", epsilon, above=0, meaning="the weight of the first mean and variance")
        with lasting():
            self.register_buffer("mean", torch.zeros(tuple(shape)))
            self.register_buffer("var", torch.ones(tuple(shape)))
            self.register_buffer("count", torch.tensor(epsilon, dtype=torch.float64))

    @torch.no_grad()
    def update(self, x: torch.Tensor) -> None:
        """Count values.

        Args:
            x: of any dtype, shape ``(*rows, *shape)``.

        Example:
            >>> import torch
            >>> from envkit import RunningMeanStd
            >>> running = RunningMeanStd((2,))
            >>> running.update(torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
            >>> running.mean.round(decimals=3)
            tensor([2., 0.])
        """
        rows = x.to(self.mean.dtype).reshape(-1, *self.mean.shape)
        squares = self.var * self.count.to(self.var.dtype)
        count, mean, squares = statistics.moments_with_rows(
            (self.count, self.mean, squares), rows, 1.0
        )
        self.mean.copy_(mean)
        self.var.copy_(squares / count.to(squares.dtype))
        self.count.copy_(count)

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        """Subtract the mean and divide by the deviation.

        Args:
            x: of any dtype, shape ``(*rows, *shape)``.

        Returns:
            float32, of the shape of ``x``.

        Example:
            >>> import torch
            >>> from envkit import RunningMeanStd
            >>> RunningMeanStd((2,)).normalize(torch.tensor([[1.0, -1.0]]))
            tensor([[ 1., -1.]])
        """
        return (x.to(self.mean.dtype) - self.mean) / self._deviation()

    def _deviation(self) -> torch.Tensor:
        return self.var.clamp_min(_LEAST_VARIANCE).sqrt()


class RNDTransform(SkipsRows, Transform):
    """Add an intrinsic reward: how far a network is from predicting the output of a random one.

    Each step computes the mean square of ``predictor_network(observation) - target_network(observation)`` for the
    observation that it led to. Nothing is learned of it here: train the predictor, e.g. by TorchRL's ``RNDLoss``. In
    workers, networks are copies: put this transform around the pool, so that it has the predictor that is trained.

    Observations are standardised by running statistics of all rows that were stepped, and rewards divided by their running
    deviation. Neither changes in `evaluate`, nor while ``frozen`` is True. A row that holds NaN or an
    infinite number is left out of both: ``skipped_rows`` counts them, and the first one gives a warning.

    Source: Y. Burda, H. Edwards, A. Storkey, O. Klimov, "Exploration by Random Network Distillation", 2018.

    Args:
        target_network: takes observations, float32 ``(*rows, features)``, and returns ``(*rows, n)``. Its gradients are
            switched off.
        predictor_network: the same, to be trained.
        in_keys: the observation; one.
        out_keys: the reward, float32 ``(*rows, 1)``; ``intrinsic_reward`` by default.
        normalize_obs: standardise observations.
        normalize_reward: divide rewards by their running deviation.
        obs_clip: limit of standardised observations, on both sides.
        reward_clip: limit of divided rewards.

    Raises:
        ArgumentError: (a ValueError) there is more than one in_key or out_key, or a limit is not above 0.
        ArgumentTypeError: (a TypeError) a network is no ``torch.nn.Module``.
        MissingKeyError: (a KeyError) when specs are read: the environment has no such observation.

    Example:
        >>> import torch
        >>> from envkit import GymEnv, RNDTransform
        >>> target, predictor = torch.nn.Linear(4, 8), torch.nn.Linear(4, 8)
        >>> env = GymEnv("CartPole-v1").append_transform(RNDTransform(target, predictor))
        >>> env.rollout(3)["next", "intrinsic_reward"].shape
        torch.Size([3, 1])
        >>> env.close()
    """

    learns = True
    only_adds_done = True

    _in_repr = ("normalize_obs", "normalize_reward", "obs_clip", "reward_clip")

    def __init__(
        self,
        target_network: nn.Module,
        predictor_network: nn.Module,
        in_keys: Keys = None,
        out_keys: Keys = None,
        normalize_obs: bool = True,
        normalize_reward: bool = True,
        obs_clip: float = 5.0,
        reward_clip: float = 5.0,
    ):
        reads, writes = (
            as_keys(default if keys is None else keys)
            for keys, default in ((in_keys, "observation"), (out_keys, "intrinsic_reward"))
        )
        if len(reads) != 1 or len(writes) != 1:
            raise ArgumentError(
                f"in_keys is {reads} and out_keys {writes}, but RNDTransform reads one observation and writes one reward. Join "
                "several with CatTensors, or append one RNDTransform for each."
            )
        super().__init__(reads, writes)
        for name, network in (
            ("target_network", target_network),
            ("predictor_network", predictor_network),
        ):
            if not isinstance(network, nn.Module):
                raise ArgumentTypeError(
                    f"{name} is of type {type(network).__name__}, but must be a torch.nn.Module. Pass one that takes "
                    "observations, e.g. torch.nn.Linear(4, 64)."
                )
        self.target_network = target_network.requires_grad_(False)
        self.predictor_network = predictor_network
        self.normalize_obs = as_bool("normalize_obs", normalize_obs)
        self.normalize_reward = as_bool("normalize_reward", normalize_reward)
        self.obs_clip = as_number("obs_clip", obs_clip, above=0, meaning="a number of deviations")
        self.reward_clip = as_number(
            "reward_clip", reward_clip, above=0, meaning="the largest reward"
        )
        self._obs_rms: RunningMeanStd | None = None
        self._reward_rms: RunningMeanStd | None = None
        self._begin_count()

    @property
    def obs_rms(self) -> RunningMeanStd | None:
        """Statistics of observations; None before the specs of its environment are read, or without them."""
        return self._obs_rms

    @property
    def reward_rms(self) -> RunningMeanStd | None:
        """Statistics of rewards; None before the specs of its environment are read, or without them."""
        return self._reward_rms

    def _begin_statistics(self, features: int, device: Any) -> None:
        """Begin the statistics that are asked for, unless there are some."""
        if self.normalize_obs and self._obs_rms is None:
            self._obs_rms = RunningMeanStd((features,)).to(device)
        if self.normalize_reward and self._reward_rms is None:
            self._reward_rms = RunningMeanStd(()).to(device)

    @torch.no_grad()
    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        observation = next_td.get(self.in_keys[0], None)
        if observation is None:
            raise self._missing(self.in_keys[0], next_td, "Pass in_keys=.")
        observation = observation.to(torch.float32)
        self._begin_statistics(observation.shape[-1], observation.device)
        stepped, dims = td.get(rules.STEP, None), next_td.batch_dims
        if self._obs_rms is not None:
            self._count(self._obs_rms, observation, stepped, dims, warns=True)
            observation = self._obs_rms.normalize(observation).clamp(-self.obs_clip, self.obs_clip)
        wrong = self.predictor_network(observation) - self.target_network(observation)
        reward = (wrong * wrong).mean(-1, keepdim=True)
        if self._reward_rms is not None:
            self._count(self._reward_rms, reward, stepped, dims, warns=self._obs_rms is None)
            reward = (reward / self._reward_rms._deviation()).clamp(
                -self.reward_clip, self.reward_clip
            )
        return next_td.set(self.out_keys[0], reward)

    def _count(
        self,
        running: RunningMeanStd,
        value: torch.Tensor,
        mask: Any,
        batch_dims: int,
        *,
        warns: bool,
    ) -> None:
        """Count the rows that were stepped and are finite."""
        if self.frozen:
            return
        rows, is_new = by_rows(value, value.shape[-1:], mask, batch_dims)
        rows = rows if is_new is None else rows[is_new]
        is_finite = statistics.are_finite(rows)
        if warns:
            self._count_skipped(~is_finite)
        running.update(rows[is_finite])

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        require_known(self, self.in_keys, output_spec, ("observation",), "in_keys=")
        output_spec = super().transform_output_spec(output_spec)
        leaf = output_spec["full_observation_spec"][self.in_keys[0]]
        self._begin_statistics(leaf.shape[-1], leaf.device)
        reward = Unbounded((*leaf.shape[:-1], 1), dtype=torch.float32, device=leaf.device)
        output_spec["full_reward_spec"][self.out_keys[0]] = reward
        return output_spec

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Begin the statistics that are loaded, and forget those of which a new transform has none."""
        for name in ("_obs_rms", "_reward_rms"):
            mean = state_dict.get(f"{prefix}{name}.mean")
            if mean is not None and getattr(self, name) is None:
                setattr(self, name, RunningMeanStd(mean.shape).to(mean.device))
            elif mean is None and loads_strictly():
                setattr(self, name, None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
