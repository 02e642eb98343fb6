"""Envs of envkit as vector envs of Gymnasium.

`to_gym_vector` decides, for each of the library's autoreset modes, which rows begin again at which call and what
is told of their last moment. Source of the modes: gymnasium.vector.AutoresetMode, Gymnasium 1.1 and later.

Conventions
    ended    rows whose episode ended in the step before, bool (num_envs,).
    info     "name" has a value for each row, "_name" says which rows have one; dicts nest.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from envkit.data.arguments import as_bool, require_option
from envkit.data.paths import Key, Path
from envkit.env.base import EnvBase
from envkit.env.runs import Moment
from envkit.env.seeding import checked_seed
from envkit.errors import (
    ArgumentError,
    ClosedEnvError,
    DoneError,
    EnvkitError,
    NotResetError,
    WorkerTimeoutError,
)
from envkit_bridges.exports.agent_rows import view_of
from envkit_bridges.exports.batch_view import BatchView, row_of

Infos = dict[str, Any]


def to_gym_vector(
    env: EnvBase,
    autoreset: str | AutoresetMode = "next_step",
    *,
    agents: str | None = None,
    info_keys: Iterable[Key] = (),
    to_numpy: bool = True,
) -> GymVectorView:
    """Show an env of batch size ``(num_envs,)`` as a vector env of Gymnasium.

    Around a pool of Gymnasium's environments, spaces, infos and rewards are those of the simulators. Else spaces are
    made from specs, options are numbers, and the state of a stateless env stays inside the adapter.

    Args:
        env: with one reward, and done flags at its root. Several actions are a dict.
        autoreset: "next_step": the step after the end of an episode resets that row, ignores its action and rewards
            nothing. "same_step": the step that ends an episode shows the first observation of the next, and the last
            one in ``infos["final_obs"]``. "disabled": the caller resets ended rows with
            ``reset(options={"reset_mask": mask})``; a step before that is refused. A
            `gymnasium.vector.AutoresetMode` is taken, too.
        agents: "rows" shows each agent of a game as a row, those of a game side by side, so that one policy learns from
            all of them; see `envkit_bridges.exports.agent_rows`.
        info_keys: observation entries that are infos beside those of the env, with all below them.
        to_numpy: False gives tensors on the env's device where arrays would be, and takes them as actions;
            ``final_obs`` then holds the last observations of all rows in one tensor. Gymnasium's wrappers need arrays.

    Raises:
        ArgumentTypeError: (a TypeError) ``env`` is no env, or ``to_numpy`` no bool.
        ArgumentError: (a ValueError) an unknown mode, "next_step" where a simulator steps all its rows together, or the
            env has no such form.
        MissingKeyError: (a KeyError) ``info_keys`` names what is no observation.
        MissingLibraryError: (an ImportError) Gymnasium is not installed.

    Calls out of order raise errors that are of Gymnasium's classes too: ``ResetNeeded`` before the first reset,
    ``ClosedEnvironmentError`` after `close`, and ``multiprocessing.TimeoutError`` where a worker exceeds its deadline.
    Another number of seeds than of rows, a mask of another form, and a step of rows that have ended are
    ``AssertionError`` as well.

    Example:
        >>> from envkit import GymEnv, SerialEnv, to_gym_vector
        >>> envs = to_gym_vector(SerialEnv(2, lambda: GymEnv("CartPole-v1")))
        >>> observation, infos = envs.reset(seed=0)
        >>> actions = envs.action_space.sample()
        >>> observation, reward, terminated, truncated, infos = envs.step(actions)
        >>> observation.shape, reward
        ((2, 4), array([1., 1.]))
        >>> envs.close()
    """
    to_numpy = as_bool("to_numpy", to_numpy)
    mode = _mode(autoreset)
    kind = view_of(agents)
    view = kind(env, spaces, whose="to_gym_vector", info_keys=info_keys, to_numpy=to_numpy)
    if mode == AutoresetMode.NEXT_STEP and (steps_all := env._facts.steps_all_rows):
        raise ArgumentError(
            f"autoreset is 'next_step', which leaves rows out of the step after their last, but {steps_all} steps all its rows "
            "together. Pass autoreset='same_step' or 'disabled'."
        )
    return GymVectorView(view, mode)


def _mode(autoreset: object) -> AutoresetMode:
    modes = {mode.name.lower(): mode for mode in AutoresetMode}
    if isinstance(autoreset, AutoresetMode):
        return autoreset
    name = autoreset.lower() if isinstance(autoreset, str) else autoreset
    require_option("autoreset", name, sorted(modes))
    return modes[cast(str, name)]


class GymVectorView(VectorEnv):
    """An env of envkit as a vector env; see `to_gym_vector`.

    Attributes:
        envkit_env: the env itself.
    """

    def __init__(self, view: BatchView, mode: AutoresetMode):
        self.view = view
        self.envkit_env = view.env
        self.num_envs = view.num_envs
        self.autoreset_mode = mode
        self.metadata = {**view.metadata, "autoreset_mode": mode}
        self.render_mode = view.render_mode
        self.single_observation_space = view.observation_space
        self.single_action_space = view.action_space
        self.observation_space = batch_space(view.observation_space, view.num_envs)
        self.action_space = batch_space(view.action_space, view.num_envs)
        self._spec: Any = None
        self._given_seed = -1
        self._ended = np.zeros(view.num_envs, bool)
        self._all = np.ones(view.num_envs, bool)
        self._step = {
            AutoresetMode.NEXT_STEP: self._step_then_reset_later,
            AutoresetMode.SAME_STEP: self._step_and_reset,
            AutoresetMode.DISABLED: self._step_alone,
        }[mode]

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[Any, Infos]:
        """Begin episodes in all rows, or in those of ``options["reset_mask"]``.

        With "next_step" a row has begun its next episode when the step that ends one is made. It is shown by the reset
        that follows, without another one of the simulator, unless that passes options or a seed for this row.

        Args:
            seed: one int s, with which the simulator of row i is reset with the seed s + i; or a list with the seed of
                each, of which None seeds nothing. Both are as in Gymnasium. One int is also given to the env's `set_seed`,
                from which transforms draw, and alone where all rows are one object. Rows that a mask leaves out are not
                seeded. A list, and a seed beside a mask that leaves rows out, need a pool of single envs.
            options: a "reset_mask", bool ``(num_envs,)``, and options of the simulators, which each row that is reset
                gets. Those need a pool of single envs.

        Raises:
            ArgumentError: (a ValueError) options or seeds of single rows where all rows are one object; or another
                number of seeds than of rows. Also a mask of another form or of no row, or with "next_step" one without
                the rows that have just ended.
            ResetNeeded, ClosedEnvironmentError: of Gymnasium, from all methods: see `to_gym_vector`.
        """
        with self._errors():
            return self._reset(seed, options)

    def _reset(self, seed: object, options: Mapping[str, Any] | None) -> tuple[Any, Infos]:
        mask, others = self._reset_mask(options)
        if mask is not None and self.autoreset_mode == AutoresetMode.NEXT_STEP:
            self._require_none_waits(mask)
        shown = self._all if mask is None else mask
        seeds = self._seeds(seed, mask)
        begins = shown.copy()
        if not others and (seed is None or seeds is not None):
            begins &= ~self._has_begun()
            begins[[row for row, one in (seeds or {}).items() if one is not None]] = True
        if begins.any():
            whole = None if begins.all() else begins
            root = self.view.reset(whole, [others] * self.num_envs, seeds)
        else:
            root = self.view.root
        self._ended = self.view.ended(root)
        infos = self._with_rows(
            _nested_infos(self.view.infos(root), shown), self.view.reset_infos(shown)
        )
        return self.view.observations(root), infos

    def _has_begun(self) -> np.ndarray:
        """Return which rows have begun an episode that was not shown yet: those that ended in the last step of "next_step"."""
        resets_later = self.autoreset_mode == AutoresetMode.NEXT_STEP and self.view.is_begun
        if not resets_later or not self._ended.any():
            return ~self._all
        return self._ended & ~self.view.ended(self.view.root)

    def _seeds(self, seed: Any, mask: np.ndarray | None) -> dict[int, int | None] | None:
        """Return the seeds of the rows that are reset; None where there are none, or all rows are one object, which is seeded."""
        if seed is None:
            return None
        rows = range(self.num_envs) if mask is None else np.flatnonzero(mask).tolist()
        if isinstance(seed, list | tuple):
            if len(seed) != self.num_envs:
                raise _MisuseError(
                    f"seed is {seed!r}, but there are {self.num_envs} rows. Pass one seed for each row, or one int."
                )
            return {row: seed[row] for row in rows}
        first = checked_seed(seed)
        if len(rows) == self.num_envs:
            self.view.env.set_seed(first)
            self._given_seed = first
            if self.view.pool is None:
                return None
        return {row: first + self.view.env_of(row) for row in rows}

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override] # as Gymnasium's own pools
        """The seed of each row, as its simulator says; -1 where it is not known.

        Where all rows are one object, it is the seed that `reset` was given last, for each row.
        """
        try:
            return tuple(self.view.get_attr("np_random_seed"))
        except AttributeError:
            return (self._given_seed,) * self.num_envs

    @property
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """The generator of each row's simulator; from worker processes a copy.

        Raises:
            AttributeError: the rows have none.
        """
        return tuple(self.view.get_attr("np_random"))

    @property
    def spec(self) -> Any:  # type: ignore[override]
        """The spec that was set, as ``gymnasium.make_vec`` does; else that of the env of a row, if all rows have the same."""
        return self.view.common("spec") if self._spec is None else self._spec

    @spec.setter
    def spec(self, spec: Any) -> None:  # type: ignore[override]
        self._spec = spec

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise errors of order and time as classes of Gymnasium as well."""
        if self.closed:
            raise _as_theirs(
                ClosedEnvError("this vector env is closed. Make another one: to_gym_vector(env).")
            )
        try:
            yield
        except tuple(_THEIRS) as error:
            raise _as_theirs(error) from error

    def _reset_mask(
        self, options: Mapping[str, Any] | None
    ) -> tuple[np.ndarray | None, dict[str, Any]]:
        """Return the reset mask and the other options."""
        others = dict(options or {})
        mask = others.pop("reset_mask", None)
        if mask is None:
            return None, others
        mask = mask.numpy(force=True) if isinstance(mask, torch.Tensor) else np.array(mask)
        if mask.dtype != bool or mask.shape != (self.num_envs,) or not mask.any():
            raise _MisuseError(
                f"reset_mask is {mask.dtype} of shape {mask.shape} and chooses {np.count_nonzero(mask)} rows, but "
                f"must be bool of shape {(self.num_envs,)} and choose one row or more. Pass True for rows to reset."
            )
        return mask, others

    def _require_none_waits(self, mask: np.ndarray) -> None:
        """Check that no row which is left out has ended: it has begun again already, and would be shown too early."""
        waiting = np.flatnonzero(self._ended & ~mask).tolist()
        if waiting:
            raise _MisuseError(
                f"reset_mask leaves out rows {waiting}, which have ended and begin again in the next step. Choose them "
                "too, or step first."
            )

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of each row's env, wrapper or simulator; an attribute is given as it is.

        Raises:
            AttributeError: there is none of this name.
        """
        with self._errors():
            return tuple(self.view.call(name, *args, **kwargs))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of each row's env, wrapper or simulator."""
        with self._errors():
            return tuple(self.view.get_attr(name))

    def set_attr(self, name: str, values: object) -> None:
        """Set an attribute of each row's env, wrapper or simulator.

        Args:
            name: of the attribute.
            values: a list or tuple of one value for each row, or one value for all.

        Raises:
            ArgumentError: (a ValueError) there is another number of values than of rows.
            AttributeError: all rows are one object, which has none of this name.
        """
        each = list(values) if isinstance(values, list | tuple) else [values] * self.num_envs
        if len(each) != self.num_envs:
            raise ArgumentError(
                f"values has {len(each)} entries, but there are {self.num_envs} rows. Pass one for each, or one value for "
                "all that is no list."
            )
        with self._errors():
            self.view.owners.set_attr(name, each)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, Infos]:
        """Advance every row: observations, rewards, terminations, truncations, infos.

        Raises:
            NotResetError: (a RuntimeError) before the first reset, and after a step that failed.
            InputError: (a ValueError) actions of another shape.
            DoneError: (a RuntimeError) with "disabled", rows have ended that were not reset.
            BusyError: (a RuntimeError) another thread uses the env.
        """
        with self._errors(), self.view.held:
            return self._step(actions)

    def _step_then_reset_later(self, actions: object) -> tuple[Any, Any, Any, Any, Infos]:
        """Skip rows that ended in the step before: they show the episode that has begun since."""
        begun = self._ended
        following, _ = self.view.advance(actions, ~begun if begun.any() else None)
        return self._shown_as_it_is(following, begun)

    def _step_and_reset(self, actions: object) -> tuple[Any, Any, Any, Any, Infos]:
        following, root = self.view.advance(actions)
        ended = self.view.ended(following)
        told = self.view.step_infos(ended)
        last = self._last_moments(following, ended, told)
        going = {row: info for row, info in told.items() if not ended[row]}
        return self._result(following, root, last, {**going, **self.view.reset_infos(ended)})

    def _step_alone(self, actions: object) -> tuple[Any, Any, Any, Any, Infos]:
        if self._ended.any():
            raise DoneError(
                f"rows {np.flatnonzero(self._ended).tolist()} have ended and were not reset. Call "
                'reset(options={"reset_mask": terminated | truncated}) first, or take another autoreset.'
            )
        return self._shown_as_it_is(self.view.step(actions), ~self._all)

    def _shown_as_it_is(
        self, following: Moment, begun: np.ndarray
    ) -> tuple[Any, Any, Any, Any, Infos]:
        """Show what a step gave, with the infos of resets in rows that have ``begun``; those that ended reset later."""
        self._ended = self.view.ended(following)
        told = {**self.view.step_infos(self._ended), **self.view.reset_infos(begun)}
        return self._result(following, following, {}, told)

    def _with_rows(self, infos: Infos, reported: Mapping[int, Any]) -> Infos:
        """Add the infos of single rows, as the library joins them; they come before entries of the same name."""
        joined: Infos = {}
        for row in sorted(reported):
            joined = self._add_info(joined, dict(reported[row]), row)
        return {**infos, **(joined if self.view.to_numpy else _with_tensors(joined))}

    def _result(
        self, following: Moment, shown: Moment, final: Infos, reported: Mapping[int, Any]
    ) -> tuple[Any, Any, Any, Any, Infos]:
        view = self.view
        infos = self._with_rows({**_nested_infos(view.infos(shown), self._all), **final}, reported)
        return view.observations(shown), view.rewards(following), *view.flags(following), infos

    def _last_moments(
        self, following: Moment, ended: np.ndarray, reported: Mapping[int, Any]
    ) -> Infos:
        """Return what rows that have ended showed last."""
        if not ended.any():
            return {}
        observations = self.view.observations(following)
        if self.view.to_numpy:
            last = np.full(self.num_envs, None, dtype=object)
            for row in np.flatnonzero(ended).tolist():
                last[row] = row_of(observations, row)
            observations = last
        of_ended = {row: info for row, info in reported.items() if ended[row]}
        return {
            "final_obs": observations,
            "_final_obs": ended,
            "final_info": self._with_rows(
                _nested_infos(self.view.infos(following), ended), of_ended
            ),
            "_final_info": ended.copy(),
        }

    def render(self) -> Any:
        """Draw each row, and give a tuple of the pictures; None where the simulators show themselves.

        Raises:
            UnsupportedError: (a NotImplementedError) the env draws nothing.
        """
        with self._errors():
            shown = self.view.render()
        return None if shown is None else tuple(shown)

    def close_extras(self, **kwargs: Any) -> None:
        """Close the env."""
        self.envkit_env.close(raise_if_closed=False)


_THEIRS: dict[type[EnvkitError], type[Exception]] = {
    NotResetError: gymnasium.error.ResetNeeded,
    ClosedEnvError: gymnasium.error.ClosedEnvironmentError,
    WorkerTimeoutError: multiprocessing.TimeoutError,
    DoneError: AssertionError,
}
"""Errors of envkit, and the classes of the same meaning that Gymnasium's vector envs raise."""


class _MisuseError(ArgumentError, AssertionError):
    """An argument that Gymnasium's vector envs refuse by an assertion."""


def _as_theirs(error: Exception) -> Exception:
    """Return an error that is of its class and of the one of Gymnasium as well."""
    kind = type(error)
    [theirs] = {theirs for ours, theirs in _THEIRS.items() if issubclass(kind, ours)}
    both = _both(kind, theirs)(*error.args)
    vars(both).update(vars(error))
    return both


@functools.cache
def _both(kind: type[Exception], theirs: type[Exception]) -> type[Exception]:
    return type(kind.__name__, (kind, theirs), {"__doc__": kind.__doc__})


def _with_tensors(infos: Infos) -> Infos:
    """Return infos with tensors in place of arrays of numbers; masks stay arrays."""
    return {
        name: _with_tensors(value)
        if isinstance(value, dict)
        else value
        if name.startswith("_") or value.dtype == object
        else torch.from_numpy(value)
        for name, value in infos.items()
    }


def _nested_infos(values: Mapping[Path, Any], mask: np.ndarray) -> Infos:
    """Nest infos by name, a mask of rows beside each."""
    nested: Infos = {}
    for path, value in values.items():
        node = nested
        for name in path[:-1]:
            node[f"_{name}"] = mask.copy()
            node = node.setdefault(name, {})
        node[path[-1]], node[f"_{path[-1]}"] = value, mask.copy()
    return nested
