"""Several actions for one decision of the policy, and several decisions as one action.

Conventions
    chunk  actions of several steps, stacked along one axis after the batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDictBase

from envkit import rules
from envkit.data.arguments import as_bool, as_int
from envkit.data.paths import Key, as_key, as_path
from envkit.errors import ArgumentError, MissingKeyError
from envkit.specs import Composite, TensorSpec
from envkit.transforms.core.base import Transform
from envkit.transforms.core.memory import is_kept
from envkit.transforms.flow import SteppingTransform

__all__ = ["ActionChunkTransform", "MultiAction"]

_REST = "_rest_of_chunk"


class MultiAction(SteppingTransform):
    """Take all actions of a chunk, one after the other, in one step of the user.

    Transforms before this one run at every action, those after it once for all. An element whose episode ends
    is not stepped any more: its further rewards are 0. Where all have ended, the stacks hold what was done and
    one entry for the rest.

    Args:
        dim: axis along which actions are stacked; 1 is the first after the batch.
        stack_rewards: give the reward of every action; False: the last one.
        stack_observations: give the observation after every action; False: the last one. A reset gives one.
        action_key: the action of the env; its only one by default.
        chunk_key: the user's name of the chunk; that of the action by default.

    Raises:
        ArgumentError: (a ValueError) ``dim`` is below 1, or the env has several actions and ``chunk_key`` is
            given without ``action_key``.
        MissingKeyError: the env has no such action, or a step is given no chunk.
    """

    _in_repr = ("dim", "action_key", "chunk_key")

    def __init__(
        self,
        *,
        dim: int = 1,
        stack_rewards: bool = True,
        stack_observations: bool = False,
        action_key: Key | None = None,
        chunk_key: Key | None = None,
    ):
        super().__init__()
        self.dim = as_int("dim", dim, least=1, meaning="1, the first axis after the batch, or more")
        self.stack_rewards = as_bool("stack_rewards", stack_rewards)
        self.stack_observations = as_bool("stack_observations", stack_observations)
        self.action_key = action_key
        self.chunk_key = chunk_key

    @classmethod
    def from_vla(cls, *, action_key: Key = "action", **kwargs: Any) -> MultiAction:
        """Make one that takes chunks from ``("vla_action", "chunk")``."""
        return cls(action_key=action_key, chunk_key=("vla_action", "chunk"), **kwargs)

    def _pairs(self) -> list[tuple[Key, Key]]:
        """List the actions of the env, each with the name of its chunk."""
        actions = self._env().action_keys if self.action_key is None else [self.action_key]
        if self.chunk_key is None:
            return [(key, key) for key in actions]
        if len(actions) > 1:
            raise ArgumentError(
                f"chunk_key is {self.chunk_key!r}, but the env has the actions {actions}. Say with "
                "action_key= which one it is, or leave chunk_key out."
            )
        return [(actions[0], self.chunk_key)]

    # ---------------------------------------------------------------------------------------- calls

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase:
        axis = td.batch_dims + self.dim - 1
        for action, chunk in self._pairs():
            actions = td.get(chunk, None)
            if actions is None:
                raise MissingKeyError(
                    f"MultiAction reads the chunk {chunk!r}, but the step was given "
                    f"{sorted(map(str, td.keys(True, True)))}."
                )
            rest = actions.narrow(axis, 1, actions.shape[axis] - 1)
            td.set((_REST, *as_path(action)), rest)
            td.set(action, actions.select(axis, 0))
        return td

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        env, axis, given = self._env(), td.batch_dims + self.dim - 1, td.get(rules.STEP, None)
        running = given
        if running is None:
            running = torch.ones(td.batch_size, dtype=torch.bool, device=td.device)
        actions = [action for action, _ in self._pairs()]
        chunks = {key: td.get((_REST, *as_path(key))).unbind(axis) for key in actions}
        moments, root = [next_td], td.exclude(_REST, rules.STEP)
        for number in range(len(chunks[actions[0]])):
            running = running & ~env._rows_done(next_td)
            if not bool(running.any()):
                moments.append(self._skipped(next_td))
                break
            root = env.step_mdp(root.set("next", next_td))
            for key in actions:
                root.set(key, chunks[key][number])
            stepping = root if bool(running.all()) else root.copy().set(rules.STEP, running)
            next_td = env.step(stepping).get("next")
            moments.append(next_td)
        return self._stacked(next_td, moments, axis)

    def _skipped(self, last: TensorDictBase) -> TensorDictBase:
        """Give what a step shows that moves no row: what was shown, and no reward."""
        skipped = last.copy()
        for key in self._env().reward_keys:
            skipped.set(key, torch.zeros_like(last.get(key)))
        return skipped

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Give recorded data as it is."""
        return tensordict

    def _stacked(
        self, last: TensorDictBase, moments: list[TensorDictBase], axis: int
    ) -> TensorDictBase:
        env, shown = self._env(), last.copy()
        keys = [
            *(env.reward_keys if self.stack_rewards else ()),
            *(_shown(env.observation_keys) if self.stack_observations else ()),
        ]
        for key in keys:
            shown.set(key, torch.stack([moment.get(key) for moment in moments], axis))
        if not self.stack_rewards:
            for key in env.reward_keys:
                shown.set(key, moments[-1].get(key))
        return shown

    # --------------------------------------------------------------------------------------- specs

    def _repeated(self, leaf: TensorSpec, batch_dims: int) -> TensorSpec:
        axis = batch_dims + self.dim - 1
        return leaf.unsqueeze(axis).make_neg_dim(axis)

    def transform_action_spec(self, action_spec: Composite) -> Composite:
        for action, chunk in self._pairs():
            leaf = action_spec.get(action, None)
            if leaf is None:
                raise MissingKeyError(
                    f"MultiAction takes chunks of {action!r}, but the env has the actions "
                    f"{list(action_spec.keys(True, True))}. Pass action_key=."
                )
            del action_spec[action]
            action_spec[chunk] = self._repeated(leaf, action_spec.ndim)
        return action_spec

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        return self._repeated_all(reward_spec) if self.stack_rewards else reward_spec

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        return self._repeated_all(observation_spec) if self.stack_observations else observation_spec

    def _repeated_all(self, spec: Composite) -> Composite:
        for key in _shown(spec.keys(True, True)):
            spec[as_key(as_path(key))] = self._repeated(spec[key], spec.ndim)
        return spec


def _shown(keys: Iterable[Key]) -> list[Key]:
    return [key for key in keys if not is_kept(as_path(key))]


class ActionChunkTransform(Transform):
    """Write, for each step of recorded sequences, the actions from there on: what a policy over chunks predicts.

    Works on data alone, a single sequence along the time axis in each row; an env is left as it is.

    Args:
        chunk_size: number of actions in a chunk, H.
        action_key: the actions, shape ``(*batch, T, n)``.
        chunk_key: where the chunks go, shape ``(*batch, T, H, n)``. Beyond the end of a sequence the last
            action is repeated.
        pad_key: where that is marked, bool, shape ``(*batch, T, H)``.
        time_dim: axis of the actions that is time: the one before the last.
        done_key: flag in ``next`` that ends a sequence within a row; None, or data without it: only the end
            of the data does.

    Raises:
        ArgumentError: (a ValueError) ``chunk_size`` is below 1, or ``time_dim`` is another axis.
        MissingKeyError: the data has no such actions.
    """

    _in_repr = ("chunk_size",)

    only_adds_done = True

    def __init__(
        self,
        chunk_size: int,
        *,
        action_key: Key = "action",
        chunk_key: Key = ("vla_action", "chunk"),
        pad_key: Key = "action_is_pad",
        time_dim: int = -2,
        done_key: Key | None = "done",
    ):
        super().__init__([action_key], [chunk_key, pad_key])
        self.chunk_size = as_int(
            "chunk_size", chunk_size, least=1, meaning="the actions of a chunk"
        )
        self.action_key = action_key
        self.chunk_key = chunk_key
        self.pad_key = pad_key
        self.time_dim = as_int("time_dim", time_dim, least=None, meaning="the axis of time, -2")
        self.done_key = done_key

    @property
    def _declared_keys(self) -> list[Key]:
        return []

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        return next_td

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Add chunks to recorded data."""
        actions = tensordict.get(self.action_key, None)
        if actions is None:
            raise MissingKeyError(
                f"ActionChunkTransform reads {self.action_key!r}, but the data has "
                f"{sorted(map(str, tensordict.keys(True, True)))}. Pass action_key=."
            )
        if actions.ndim < 2 or self.time_dim not in (-2, actions.ndim - 2):
            raise ArgumentError(
                f"time_dim is {self.time_dim}, but actions of shape {tuple(actions.shape)} must have time as "
                "the axis before the last. Flatten the action, or permute it."
            )
        wanted = torch.arange(actions.shape[-2], device=actions.device)[:, None]
        wanted = wanted + torch.arange(self.chunk_size, device=actions.device)
        last = self._last_steps(tensordict, actions)[..., None]
        steps = torch.minimum(wanted, last).flatten(-2)[..., None]
        shape = (*actions.shape[:-1], self.chunk_size)
        chunks = actions.gather(-2, steps.expand(*steps.shape[:-1], actions.shape[-1]))
        chunks = chunks.unflatten(-2, (actions.shape[-2], self.chunk_size))
        tensordict.set(self.chunk_key, chunks)
        return tensordict.set(self.pad_key, (wanted > last).expand(shape).clone())

    def _last_steps(self, td: TensorDictBase, actions: torch.Tensor) -> torch.Tensor:
        """Give for each step the last one of its sequence, shape ``(*batch, T)``."""
        length = actions.shape[-2]
        done = None if self.done_key is None else td.get(("next", *as_path(self.done_key)), None)
        ends = torch.full(actions.shape[:-1], length - 1, device=actions.device)
        if done is not None:
            steps = torch.arange(length, device=actions.device)
            ends = torch.where(done.reshape(actions.shape[:-1]), steps, ends)
        return ends.flip(-1).cummin(-1).values.flip(-1)
