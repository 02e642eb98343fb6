"""A whole rollout of one gymnasium env, written straight into its result.

The simulator writes each observation where the result has it; no TensorDict is built for a step but
the one the policy sees, and none at all for random actions. Results equal those of stepping one by
one, bit for bit. What the policy does that this way of recording has no room for is met by going on
step by step from there.

Conventions
    entry    leaf by path; in memory time is the leading axis.
    roots    entries the env makes for the root of a step: observations and end flags.
    others   root entries of the caller's or the policy's; carried on as `EnvBase.step_mdp` would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envkit import rules
from envkit.data.paths import Key, Path, as_key, as_path, tensordict_of
from envkit.data.transition import leaves
from envkit.env.policy import Policy
from envkit.env.runs import Run
from envkit.specs import Composite, TensorSpec, draws_in_order
from envkit.specs.inputs import ActionInput
from envkit_bridges.gym.codecs import numpy_dtype
from envkit_bridges.gym.rows import DONE, GymCore, flags_of, reward_array, taken_as_they_are

__all__ = ["Leaves", "Recorder", "Written", "is_plain"]

Leaves = dict[Path, torch.Tensor]
Recorded = TensorDictBase | list[TensorDictBase] | None

_FIRST_STEPS = 64


@dataclass(frozen=True)
class Recorder:
    """Records rollouts of one env.

    Args:
        core: steps its simulator.
        observation, done: full specs of what it shows.
        rewards: paths of its rewards, whose roots are not carried on.
        paid: dtype of what a step pays.
        action: spec of its action, or actions.
        inputs: what is made of each action, by key.
        generator: where random actions are drawn; None is torch's global one.
        device: where data is delivered.
        go_on: what does the rest, step by step, from a root that holds its action, and so many steps at most.
        stops: end at the end of an episode; False: reset there.
    """

    core: GymCore
    observation: Composite
    done: Composite
    rewards: Sequence[Path]
    paid: np.dtype
    action: TensorSpec
    inputs: Mapping[Key, ActionInput]
    generator: torch.Generator | None
    device: torch.device | None
    go_on: Callable[[TensorDictBase, int], Iterable[TensorDictBase]]
    stops: bool

    def record(self, run: Run) -> Recorded:
        """Do a whole rollout, as `EnvBase._fast_rollout` promises."""
        record = _Record(self, run.steps)
        if not record.fits(run.root):
            return None
        if run.policy is None and draws_in_order(self.action):
            return self._record_random(record, run.root)
        return self._record_policy(record, run.root, run.act)

    def _record_policy(self, record: _Record, root: TensorDictBase, act: Policy) -> Recorded:
        paths = list(self.core.action.leaves)
        written = Written({*paths, *self.rewards})
        td, current = root, record.first_root(root)
        while True:
            td = act(td)
            given = written.take(td, current)
            if given is None or not given.keys() >= set(paths):
                return self._going_on(record, written, td)
            if record.step(self._decoded(given)):
                break
            current = record.root()
            td = tensordict_of({**current, **written.others}, torch.Size(()), self.device)
        return record.result(written.stacks(record.count))

    def _decoded(self, given: Leaves) -> Any:
        paths = self.core.action.leaves
        taken = {path: self.inputs[as_key(path)].take(given[path]) for path in paths}
        return self.core.action.decode(taken)

    def _going_on(
        self, record: _Record, written: Written, td: TensorDictBase
    ) -> list[TensorDictBase]:
        rest = self.go_on(td, record.steps - record.count)
        if not record.count:
            return list(rest)
        done = record.result(written.stacks(record.count))
        return [*done.unbind(0), *rest]

    def _record_random(self, record: _Record, root: TensorDictBase) -> Recorded:
        (path,) = self.core.action.leaves
        record.first_root(root)
        known = {*record.root_paths, path}
        others = {at: value for at, value in leaves(root) if at not in known}
        if not others.keys().isdisjoint(self.rewards) or not all(
            is_plain(at, value) for at, value in others.items()
        ):
            return None
        parts: list[torch.Tensor] = []
        first = _FIRST_STEPS if self.stops else record.steps
        for drawn, rewind in _draws(self.action, self.generator, record.steps, first):
            used, is_over = 0, False
            for action in self.core.action.read({path: drawn.numpy()}):
                used, is_over = used + 1, record.step(action)
                if is_over:
                    break
            parts.append(drawn[:used])
            if is_over:
                rewind(used)
                break
        kept = {at: torch.stack([value] * record.count) for at, value in others.items()}
        return record.result({**kept, path: torch.cat(parts)})


def _draws(
    spec: TensorSpec, generator: torch.Generator | None, steps: int, count: int
) -> Iterator[tuple[torch.Tensor, Callable[[int], None]]]:
    """Draw actions many at a time, first ``count``, the same that drawing one by one gives.

    Yields:
        Actions of shape ``(count, *spec.shape)``, and what to call with the number of those used:
        it leaves the generator as if only they had been drawn.
    """
    source = torch.default_generator if generator is None else generator
    while steps:
        count = min(count, steps)
        before = source.get_state()

        def rewind(used: int, before: torch.Tensor = before, count: int = count) -> None:
            if used < count:
                source.set_state(before)
                spec.rand((used,), generator)

        yield spec.rand((count,), generator), rewind
        steps, count = steps - count, 2 * count


def is_plain(path: Path, value: Any) -> bool:
    """Say whether an entry does no more than stand at the root of a step."""
    return (
        isinstance(value, torch.Tensor)
        and path[0] != "next"
        and path[-1] not in (rules.STEP, rules.RESET)
    )


# ------------------------------------------------------------------------------- what is written down


class Written:
    """What the policy leaves at the root, step by step."""

    def __init__(self, dropped: set[Path]):
        self._dropped = dropped
        self._values: dict[Path, list[torch.Tensor]] = {}
        self.others: Leaves = {}

    def take(self, td: TensorDictBase, current: Leaves) -> Leaves | None:
        """Note the entries that the env has not made itself, and give them.

        Returns:
            None, with nothing noted, when ``td`` holds what must be stepped one by one: other
            entries than before, roots that were replaced or taken out, masks, a preset ``next``.
        """
        given: Leaves = {}
        roots = 0
        for path, value in leaves(td):
            known = current.get(path)
            if known is value:
                roots += 1
            elif known is not None or not is_plain(path, value):
                return None
            else:
                given[path] = value
        if roots < len(current) or (self._values and given.keys() != self._values.keys()):
            return None
        for path, value in given.items():
            self._values.setdefault(path, []).append(value)
        dropped = self._dropped
        self.others = {path: value for path, value in given.items() if path not in dropped}
        return given

    def stacks(self, count: int) -> Leaves:
        """Stack the entries of the first ``count`` steps along time."""
        return {path: torch.stack(values[:count]) for path, values in self._values.items()}


class _Record:
    """What the simulator did: observations in memory of their own, scalars in lists."""

    def __init__(self, recorder: Recorder, steps: int):
        self.steps, self.stops = steps, recorder.stops
        self.count = 0
        self._device, self._core, self._paid = recorder.device, recorder.core, recorder.paid
        self._taken = taken_as_they_are(recorder.paid)
        self._observed = {
            as_path(key): leaf for key, leaf in recorder.observation.items(True, True)
        }
        self.root_paths = [*self._observed, *DONE]
        first = min(_FIRST_STEPS, steps) if self.stops else steps
        self._stacks = {path: _Stack(spec, first) for path, spec in self._observed.items()}
        self._flags = [_Stack(recorder.done[name], first) for (name,) in DONE]
        self._starts: dict[int, Leaves] = {}
        self._outcomes: list[tuple[Any, Any, Any]] = []
        self._last: Leaves = {}

    def fits(self, root: TensorDictBase) -> bool:
        """Say whether a root has all that the env itself would have given it."""
        for path in self.root_paths:
            value = root.get(as_key(path), None)
            spec = self._observed.get(path)
            if value is None or (spec and (value.shape, value.dtype) != (spec.shape, spec.dtype)):
                return False
        return True

    def first_root(self, root: TensorDictBase) -> Leaves:
        """Take the entries of the given root."""
        self._starts[0] = {path: root.get(as_key(path)) for path in self.root_paths}
        return self._starts[0]

    def step(self, action: Any) -> bool:
        """Step, and say whether the rollout is over. If not, what has ended begins anew."""
        observation, reward, terminated, truncated, info = self._core.step(action)
        if reward.__class__ not in self._taken:
            reward = reward_array(reward, (), self._paid)[()]
        if terminated is not False or truncated is not False:
            terminated, truncated = flags_of(terminated, truncated)
        self._last = self._write(observation, info)
        self._outcomes.append((reward, terminated, truncated))
        self.count += 1
        over = terminated or truncated
        if self.count == self.steps or (over and self.stops):
            return True
        if over:
            self._starts[self.count] = self._fresh(*self._core.env.reset())
        return False

    def root(self) -> Leaves:
        """Give the root of the next step."""
        current = self._starts.get(self.count)
        if current is None:
            current = dict(self._last)
        for path, flags in zip(DONE, self._flags, strict=True):
            _, current[path] = flags.next()
        return current

    def _write(self, observation: Any, info: Any) -> Leaves:
        rows, views = {}, {}
        for path, stack in self._stacks.items():
            rows[path], views[path] = stack.next()
        self._core.writer(rows)(observation, info)
        return views

    def _fresh(self, observation: Any, info: Any) -> Leaves:
        rows = {
            path: np.empty(tuple(spec.shape), numpy_dtype(spec.dtype))
            for path, spec in self._observed.items()
        }
        self._core.writer(rows)(observation, info)
        return {path: torch.from_numpy(row) for path, row in rows.items()}

    def result(self, others: Leaves) -> TensorDict:
        """Show all steps, batch size ``(count,)``; ``others`` are stacked over time already."""
        count = self.count
        rewards, *flags = zip(*self._outcomes, strict=True)
        terminated, truncated = (np.array(flag, bool).reshape(count, 1) for flag in flags)
        entries = {**others, **self._roots()}
        for path, stack in self._stacks.items():
            entries[("next", *path)] = stack.tensor(count)
        try:
            paid = np.array(rewards, self._paid).reshape(count, 1)
        except OverflowError:
            for reward in rewards:
                reward_array(reward, (), self._paid)  # raises, and says what is too large
            raise
        outcome = (paid, terminated | truncated, terminated, truncated)
        for path, value in zip((("reward",), *DONE), outcome, strict=True):
            entries[("next", *path)] = torch.from_numpy(value)
        return tensordict_of(entries, torch.Size((count,)), self._device)

    def _roots(self) -> Leaves:
        count, roots = self.count, {}
        for path, stack in self._stacks.items():
            roots[path] = stack.tensor(count).roll(1, 0)
        for path in DONE:
            roots[path] = torch.zeros(count, 1, dtype=torch.bool, device="cpu")
        for start, entries in self._starts.items():
            if start < count:
                for path, value in entries.items():
                    roots[path][start] = value
        return roots


class _Stack:
    """One leaf over time, zeros at first; it grows, and what was handed out stays where it is."""

    def __init__(self, spec: TensorSpec, size: int):
        assert spec.dtype is not None
        self._shape, self._dtype = tuple(spec.shape), numpy_dtype(spec.dtype)
        self._chunks: list[np.ndarray] = []
        self._size, self._used = size, size

    def next(self) -> tuple[np.ndarray, torch.Tensor]:
        """Give the memory of the next moment, as an array and as a tensor."""
        if self._used == self._size:
            if self._chunks:
                self._size *= 2
            chunk = np.zeros((self._size, *self._shape), self._dtype)
            self._chunks.append(chunk)
            self._views, self._used = torch.from_numpy(chunk).unbind(0), 0
        index, self._used = self._used, self._used + 1
        return self._chunks[-1][index, ...], self._views[index]

    def tensor(self, count: int) -> torch.Tensor:
        """Give the first ``count`` moments, shape ``(count, *leaf)``."""
        if len(self._chunks) == 1 and len(self._chunks[0]) == count:
            return torch.from_numpy(self._chunks[0])
        return torch.from_numpy(np.concatenate(self._chunks)[:count].copy())
