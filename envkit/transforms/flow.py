"""Which rows are stepped, how often, and which steps precede an episode.

`ConditionalSkip` leaves elements out of a step, `FrameSkipTransform` repeats actions, `MultiAction` takes several.
`ConditionalPolicySwitch` has another policy take a step in between, `ActionChunkTransform` makes one action of several
decisions. `NoopResetEnv` begins episodes at other places, `RemoveEmptySpecs` hides nodes without leaves.

Conventions
    chunk  actions of several steps, stacked along one axis after the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from envkit import rules
from envkit.arrays import episode_counters
from envkit.arrays.integers import as_int
from envkit.data.arguments import as_bool, require_callable
from envkit.data.merging import merge_rows
from envkit.data.paths import Key, as_key, as_path
from envkit.data.timeline import seams
from envkit.data.transition import empty_like
from envkit.env.base import EnvBase
from envkit.env.torch_threads import act_with_fitting_threads, work_of_row
from envkit.errors import ArgumentError, ArgumentTypeError, MissingKeyError, NotCallableError
from envkit.specs import (
    Binary,
    BoundedContinuous,
    BoundedDiscrete,
    Composite,
    TensorSpec,
    Unbounded,
)
from envkit.transforms.core.kept_memory import is_kept
from envkit.transforms.core.leafwise import box_between
from envkit.transforms.core.transform import Transform, editable
from envkit.transforms.episodes import EpisodeTransform
from envkit.transforms.postprocess import windows_ahead

_Part = tuple[Any, torch.Generator | None]  # index into the batch, and where its numbers come from


class ConditionalSkip(Transform):
    """Do not step the elements for which a condition holds.

    They repeat their root values, with reward 0.

    Args:
        cond: function of the step's input that returns a bool, or a bool tensor of the batch size
            (a trailing singleton is accepted); True skips. A mask that is in the input already is
            only narrowed.

    Raises:
        ArgumentTypeError: (in a step) the condition gives something else.

    Example:
        >>> import torch
        >>> from envkit import ConditionalSkip, GymEnv, SerialEnv
        >>> env = SerialEnv(2, lambda: GymEnv("CartPole-v1"))
        >>> skip_first = ConditionalSkip(lambda td: torch.tensor([True, False]))
        >>> env.append_transform(skip_first).rollout(3)["next", "reward"].squeeze(-1)
        tensor([[0., 0., 0.],
                [1., 1., 1.]])
        >>> env.close()
    """

    only_adds_done = True

    def __init__(self, cond: Callable[[TensorDictBase], bool | torch.Tensor]):
        super().__init__()
        require_callable("cond", cond)
        self.cond = cond

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase:
        skips = self.cond(td)
        if not isinstance(skips, bool | torch.Tensor | np.bool_ | np.ndarray):
            raise ArgumentTypeError(
                f"the condition of ConditionalSkip returned {skips!r} of type {type(skips).__name__}, but "
                "must return bools. Return True, False, or a bool tensor of the batch size: True where the step is skipped."
            )
        skips = torch.as_tensor(skips, dtype=torch.bool, device=td.device)
        skips = skips.expand(td.batch_size) if not skips.ndim else skips
        moves = ~rules.step_mask(skips, td.batch_size)
        given = td.get(rules.STEP, None)
        if given is not None:
            moves = moves & rules.step_mask(given, td.batch_size)
        return td.set(rules.STEP, moves)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        raise NotCallableError(
            "ConditionalSkip decides what an environment steps and cannot be called on data. Put it "
            "into a TransformedEnv."
        )


class SteppingTransform(EpisodeTransform):
    """Base of transforms that step the env before them by themselves."""

    only_adds_done = False

    def _step_again(self, root: TensorDictBase) -> TensorDictBase:
        """Step the env before this transform with an input the inverse pass has gone through."""
        return self._env()._step_inverted(root)

    def _stepped(self, td: TensorDictBase) -> torch.Tensor:
        """Return which elements a step is for."""
        given = td.get(rules.STEP, None)
        everywhere = torch.ones(td.batch_size, dtype=torch.bool, device=td.device)
        return everywhere if given is None else given

    def _begun(self, td: TensorDictBase, batch: torch.Size) -> torch.Tensor:
        """Return which elements a reset begins again."""
        rows = torch.zeros(batch, dtype=torch.bool, device=td.device)
        for level in self._levels():
            mask = self._reset_mask(td, level)
            if mask is None:
                return torch.ones_like(rows)
            rows |= rules.reduce_mask(mask, batch, len(batch))
        return rows

    def _unended(self, root: TensorDictBase) -> TensorDictBase:
        """Copy a root without done flags: what is not reset may be done, and must stay as it is."""
        root = root.copy()
        for key in self._env().done_keys:
            root.set(key, torch.zeros_like(root.get(key)))
        return root


class FrameSkipTransform(SteppingTransform):
    """Take every action several times, and add up the rewards.

    Each element stops at its first done; the rest goes on. Bounds of rewards become those of the sum.

    Args:
        frame_skip: number of steps of the env for each step of the user.

    Raises:
        ArgumentError: (a ValueError) it is below 1.

    Example:
        >>> from envkit import FrameSkipTransform, GymEnv
        >>> env = GymEnv("CartPole-v1").append_transform(FrameSkipTransform(2))
        >>> env.rollout(3)["next", "reward"].flatten()
        tensor([2., 2., 2.])
        >>> env.close()
    """

    _in_repr = ("frame_skip",)

    def __init__(self, frame_skip: int = 1):
        super().__init__()
        meaning = "the steps of the env for each step of the user"
        self.frame_skip = as_int("frame_skip", frame_skip, least=1, meaning=meaning)

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        env, running = self._env(), self._stepped(td)
        assert self.container is not None
        actions = self.container.base_env.action_keys
        for _ in range(self.frame_skip - 1):
            running = running & ~env._rows_done(next_td)
            if not bool(running.any()):
                break
            root = env.step_mdp(td.copy().set("next", next_td))
            root.update(td.select(*actions))
            following = self._step_again(root.set(rules.STEP, running)).get("next")
            for key in env.reward_keys:
                following.set(key, episode_counters.added(next_td.get(key), following.get(key)))
            next_td = following
        return next_td

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        for key, leaf in list(reward_spec.items(True, True)):
            reward_spec[key] = self._summed(leaf)
        return reward_spec

    def _summed(self, leaf: TensorSpec) -> TensorSpec:
        """Declare the sum of 1 to ``frame_skip`` values of a leaf; a box keeps bounds."""
        if self.frame_skip == 1 or isinstance(leaf, Unbounded):
            return leaf
        if isinstance(leaf, Binary) and leaf.dtype != torch.bool:
            leaf = box_between(leaf.zero(), torch.ones_like(leaf.zero()))
        if not isinstance(leaf, BoundedContinuous | BoundedDiscrete):
            return Unbounded(leaf.shape, leaf.device, leaf.dtype)
        assert leaf.dtype is not None
        info = (torch.finfo if leaf.dtype.is_floating_point else torch.iinfo)(leaf.dtype)
        low, high = (
            (end.double() * self.frame_skip).clamp(info.min, info.max)
            for end in (leaf.low, leaf.high)
        )
        return box_between(
            leaf.low.minimum(low.to(leaf.dtype)), leaf.high.maximum(high.to(leaf.dtype))
        )


class ConditionalPolicySwitch(SteppingTransform):
    """Have another policy take one step where a condition holds after a step or a reset.

    As in a game where an opponent moves. The user is shown what came after that step, with its reward, and
    the action that was given. An episode that has ended is not stepped on; one that ends in the step after its
    reset begins again. Only transforms before this one see what happens in between.

    Args:
        policy: function of the data that gives it with an action of the env before this transform.
        condition: function of what a step or a reset produced that gives a bool, or a bool tensor of the batch
            size (a trailing singleton is accepted).

    Example:
        >>> from envkit import ConditionalPolicySwitch, TicTacToeEnv, TransformedEnv
        >>> game = TicTacToeEnv()
        >>> opponent = ConditionalPolicySwitch(
        ...     game.rand_action, lambda td: td["turn"] == 1
        ... )
        >>> env = TransformedEnv(game, opponent)
        >>> env.rollout(2)["turn"].flatten()
        tensor([0, 0], dtype=torch.int32)
    """

    def __init__(
        self,
        policy: Callable[[TensorDictBase], TensorDictBase],
        condition: Callable[[TensorDictBase], bool | torch.Tensor],
    ):
        super().__init__()
        require_callable("policy", policy)
        require_callable("condition", condition)
        self.policy = policy
        self.condition = condition

    def _moved(self, td: TensorDictBase) -> torch.Tensor:
        moves = torch.as_tensor(self.condition(td), dtype=torch.bool, device=td.device)
        moves = moves.reshape(()) if moves.numel() == 1 else moves
        return rules.step_mask(
            moves.expand(td.batch_size) if not moves.ndim else moves, td.batch_size
        )

    def _acted(self, root: TensorDictBase, moves: torch.Tensor) -> TensorDictBase:
        """Step the rows of ``moves`` by the policy; gives the whole transition."""
        work = work_of_row(self.policy) * root.batch_size.numel()
        acting = act_with_fitting_threads(work, self.policy, root.copy())
        return self._env().step(acting if bool(moves.all()) else acting.set(rules.STEP, moves))

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        env, given = self._env(), td.get(rules.STEP, None)
        moves = self._moved(next_td) & ~env._rows_done(next_td)
        moves = moves if given is None else moves & rules.step_mask(given, td.batch_size)
        if not bool(moves.any()):
            return next_td
        root = env.step_mdp(td.exclude(rules.STEP).set("next", next_td))
        following = self._acted(root, moves).get("next")
        return following if bool(moves.all()) else merge_rows(next_td, following, {(): moves})

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        env = self._env()
        moves = self._moved(td_reset) & self._begun(td, td_reset.batch_size)
        if not bool(moves.any()):
            return td_reset
        root = self._unended(td_reset)
        root = env.maybe_reset(env.step_mdp(self._acted(root, moves)))
        return root.select(*td_reset.keys(True, True))


class NoopResetEnv(SteppingTransform):
    """Begin every episode with a few random actions.

    The rewards of these steps are lost. An episode that ends meanwhile begins again.

    Args:
        noops: most actions taken; 0 takes none.
        random: take between 1 and ``noops`` of them, drawn for each element. False: always ``noops``.

    Actions and their numbers are drawn from the seeds of the env: for sub-envs each from its own, so that
    it does not matter whether this transform is inside of them or around them.

    Raises:
        ArgumentError: (a ValueError) ``noops`` is negative.

    Example:
        >>> from envkit import Compose, GymEnv, NoopResetEnv, StepCounter
        >>> noops = NoopResetEnv(3, random=False)
        >>> env = GymEnv("CartPole-v1").append_transform(Compose(StepCounter(), noops))
        >>> env.reset()["step_count"]
        tensor([3])
        >>> env.close()
    """

    _in_repr = ("noops", "random")

    _changes_with_use = ("_parts",)

    def __init__(self, noops: int = 30, random: bool = True):
        super().__init__()
        self.noops = as_int("noops", noops, least=0, meaning="a number of steps")
        self.random = as_bool("random", random)
        self._parts: list[_Part] | None = None

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return recorded data as it is."""
        return tensordict

    def _set_seed(self, seed: int | None) -> None:
        self._parts = None  # the env that tells them is seeded after its transforms

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        env = self._env()
        assert self.container is not None
        base = self.container.base_env
        if not self._parts:
            device = base.device or torch.device("cpu")
            self._parts = [(part, _generator(seed, device)) for part, seed in base._seeded_parts]
        begun = self._begun(td, td_reset.batch_size)
        wanted = self._lengths(begun.cpu(), self._parts).to(begun.device)
        root = td_reset
        for number in range(int(wanted.max())):
            moving = wanted > number
            root = self._acted(base, self._unended(root), moving, self._parts)
            done = self._step_again(root.set(rules.STEP, moving))
            root = env.maybe_reset(env.step_mdp(done))
        return root.select(*td_reset.keys(True, True))

    def _own_state(self) -> dict[str, Any]:
        draws = any(generator is not None for _, generator in self._parts or ())
        return super()._own_state() if draws else {}

    def _acted(
        self, base: EnvBase, root: TensorDictBase, moving: torch.Tensor, parts: list[_Part]
    ) -> TensorDictBase:
        """Draw actions for those parts of the batch in which anything moves."""
        if base._draws_own_actions:
            return base.rand_action(root)
        if len(parts) == 1:
            return root.update(base._drawn_actions(root, parts[0][1]))
        actions = base.full_action_spec.zero()  # of rows that do not move, and which are not read
        for part, generator in parts:
            if bool(moving[part].any()):
                actions[part] = base._drawn_actions(root, generator, part)
        return root.update(actions)

    def _lengths(self, begun: torch.Tensor, parts: list[_Part]) -> torch.Tensor:
        """Return how many actions each element takes, 0 where no episode has begun."""
        lengths = torch.full(begun.shape, self.noops)
        for part, generator in parts if self.random and self.noops else ():
            if bool(begun[part].any()):
                shape = begun[part].shape
                kind: dict[str, Any] = {} if generator is None else {"device": generator.device}
                lengths[part] = torch.randint(
                    1, self.noops + 1, shape, generator=generator, **kind
                ).to(lengths.device)
        return lengths * begun


def _generator(seed: int | None, device: torch.device) -> torch.Generator | None:
    return None if seed is None else torch.Generator(device).manual_seed(seed)


class RemoveEmptySpecs(Transform):
    """Hide nodes without leaves, in specs and in data, and put them back for the base env.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import RemoveEmptySpecs
        >>> data = TensorDict(observation=torch.zeros(4), empty=TensorDict())
        >>> list(RemoveEmptySpecs()(data).keys())
        ['observation']
    """

    only_adds_done = True

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        return _without_empty(editable(input_spec))

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        return _without_empty(editable(output_spec))

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        return next_td.filter_empty_()

    _reset = Transform._reset_like_step

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase:
        for key in self._empty_inputs():
            if td.get(key, None) is None:
                td.set(key, empty_like(td))
        return td

    def _reset_env_preprocess(self, td: TensorDictBase) -> TensorDictBase:
        return self._inv_call(td)

    def _empty_inputs(self) -> list[Key]:
        env = self.parent
        if env is None:
            return []
        return env._declared.cached(
            "empty_inputs",
            lambda: [as_key(path[1:]) for path in _empty_nodes(env.input_spec) if len(path) > 1],
        )


def _empty_nodes(spec: Composite) -> list[tuple[str, ...]]:
    """Paths of the highest nodes that hold no leaf, the kinds of specs themselves included."""
    empty: list[tuple[str, ...]] = []
    for key in spec.keys(True):
        path = as_path(key)
        node = spec[key]
        covered = any(path[: len(above)] == above for above in empty if len(above) > 1)
        if isinstance(node, Composite) and not covered and node.is_empty(recurse=True):
            empty.append(path)
    return empty


def _without_empty(spec: Composite) -> Composite:
    for path in _empty_nodes(spec):
        if len(path) > 1:  # the composites of the kinds themselves may be empty
            del spec[path]
    return spec


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

    Example:
        >>> import torch
        >>> from envkit import GymEnv, MultiAction
        >>> env = GymEnv("Pendulum-v1").append_transform(MultiAction())
        >>> td = env.step(env.reset().set("action", torch.zeros(3, 1)))
        >>> td["next", "reward"].shape, td["next", "observation"].shape
        (torch.Size([3, 1]), torch.Size([3]))
        >>> env.close()
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
        """Make one that takes chunks from ``("vla_action", "chunk")``.

        Args:
            action_key: the action of the env.
            **kwargs: of the class.

        Example:
            >>> from envkit import MultiAction
            >>> MultiAction.from_vla().chunk_key
            ('vla_action', 'chunk')
        """
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
                raise self._missing(chunk, td, "Give each step a chunk of actions.")
            rest = actions.narrow(axis, 1, actions.shape[axis] - 1)
            td.set((_REST, *as_path(action)), rest)
            td.set(action, actions.select(axis, 0))
        return td

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        env, axis, running = self._env(), td.batch_dims + self.dim - 1, self._stepped(td)
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
        """Return what a step shows that moves no row: what was shown, and no reward."""
        skipped = last.copy()
        for key in self._env().reward_keys:
            skipped.set(key, torch.zeros_like(last.get(key)))
        return skipped

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return recorded data as it is."""
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
        done_key: flag in ``next`` that ends a sequence within a row. So do a change of trajectory ids, and a root that
            is not the ``next`` of the step before. None, or data without it: only these and the end of the data do.

    Raises:
        ArgumentError: (a ValueError) ``chunk_size`` is below 1, or ``time_dim`` is another axis.
        MissingKeyError: the data has no such actions.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import ActionChunkTransform
        >>> data = TensorDict(action=torch.arange(3.0)[:, None], batch_size=[3])
        >>> data = ActionChunkTransform(2)(data)
        >>> data["vla_action", "chunk"].squeeze(-1)
        tensor([[0., 1.],
                [1., 2.],
                [2., 2.]])
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
            raise self._missing(self.action_key, tensordict, "Pass action_key=.")
        if actions.ndim < 2 or self.time_dim not in (-2, actions.ndim - 2):
            raise ArgumentError(
                f"time_dim is {self.time_dim}, but actions of shape {tuple(actions.shape)} must have time as "
                "the axis before the last. Flatten the action, or permute it."
            )
        done = None if self.done_key is None else ("next", *as_path(self.done_key))
        flags = None if done is None else tensordict.get(done, None)
        lead = actions.shape[:-1]
        ended = actions.new_zeros(lead, dtype=torch.bool) if flags is None else flags.reshape(lead)
        if tensordict.batch_size == lead:
            ended = ended | seams(tensordict, ended, len(lead) - 1, is_time=True)
        steps, is_pad = windows_ahead(ended, self.chunk_size)
        index = steps.flatten(-2)[..., None].expand(*lead[:-1], -1, actions.shape[-1])
        chunks = actions.gather(-2, index).unflatten(-2, (lead[-1], self.chunk_size))
        return tensordict.set(self.chunk_key, chunks).set(self.pad_key, is_pad)
