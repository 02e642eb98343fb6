"""What tells of a run rather than of the world: how long things take, and whether all numbers are finite."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch
from tensordict import TensorDictBase

from envkit.data.paths import Key, as_key
from envkit.data.transition import leaves
from envkit.errors import NotFiniteError, OptionError
from envkit.specs import Composite, Unbounded
from envkit.transforms.core.transform import Transform, as_keys
from envkit.transforms.episodes import EpisodeTransform


class FiniteTensorDictCheck(Transform):
    """Raise as soon as an entry holds a number that is not finite.

    Raises:
        NotFiniteError: (a ValueError) one does; it names the entries.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import FiniteTensorDictCheck
        >>> check = FiniteTensorDictCheck()
        >>> sorted(check(TensorDict(reward=torch.ones(1))).keys())
        ['reward']
        >>> try:
        ...     check(TensorDict(reward=torch.tensor([torch.inf])))
        ... except ValueError as error:
        ...     print(type(error).__name__)
        NotFiniteError
    """

    only_adds_done = True

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        wrong = [
            as_key(path)
            for path, value in leaves(next_td)
            if isinstance(value, torch.Tensor) and not bool(torch.isfinite(value).all())
        ]
        if wrong:
            raise NotFiniteError(
                f"{wrong} hold numbers that are not finite. Look at what the env, or the transforms before "
                "FiniteTensorDictCheck, compute there."
            )
        return next_td

    _reset = Transform._reset_like_step


class Timer(EpisodeTransform):
    """Show how many seconds steps, resets and the policy take.

    Adds three entries of the batch's shape: the time of the step, that of the policy (between what this
    transform showed and the next step), and that of the reset. A reset shows zeros for the first two, a step
    for the third. All rows of a batch show the same.

    Args:
        out_keys: names of the three; ``time_step``, ``time_policy`` and ``time_reset`` by default.
        time_key: what these names begin with.

    Raises:
        OptionError: (a TypeError) there are not three ``out_keys``.

    Example:
        >>> from envkit import GymEnv, Timer
        >>> env = GymEnv("CartPole-v1").append_transform(Timer())
        >>> bool((env.rollout(3)["next", "time_step"] > 0).all())
        True
        >>> env.close()
    """

    keeps_books = True
    only_adds_done = False  # a step and a reset made in one go could not be told apart

    def __init__(self, out_keys: Sequence[Key] | None = None, time_key: str = "time"):
        if out_keys is None:
            out_keys = [f"{time_key}_step", f"{time_key}_policy", f"{time_key}_reset"]
        super().__init__([], as_keys(list(out_keys) if isinstance(out_keys, tuple) else out_keys))
        if len(self.out_keys) != 3:
            raise OptionError(
                f"out_keys is {self.out_keys}, but must name three entries. Pass a name for each of the times of the "
                "step, of the policy and of the reset."
            )
        self.time_key = time_key
        self._shown_s = self._begun_s = perf_counter()
        self._policy_s = 0.0

    def _timed(self, td: TensorDictBase, *seconds: float) -> TensorDictBase:
        for key, number in zip(self.out_keys, seconds, strict=True):
            td.set(key, torch.full(td.batch_size, number, device=td.device))
        self._shown_s = perf_counter()
        return td

    def _reset_env_preprocess(self, td: TensorDictBase) -> TensorDictBase:
        self._begun_s = perf_counter()
        return td

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        return self._timed(td_reset, 0.0, 0.0, perf_counter() - self._begun_s)

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase:
        self._begun_s = perf_counter()
        self._policy_s = self._begun_s - self._shown_s
        return td

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        return self._timed(next_td, perf_counter() - self._begun_s, self._policy_s, 0.0)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        for key in self.out_keys:
            observation_spec[key] = Unbounded(
                observation_spec.shape, observation_spec.device, torch.get_default_dtype()
            )
        return observation_spec
