"""Run a policy in an environment: begin, act and step until a stop rule ends it, and stack what happened along time.

How a step is made, and what follows it, is asked of the env. One that can do a whole run at once offers it through
`Runs.record`.

Conventions
    stop    "never": what is done is reset; "any": after the first step in which an env is done; "all":
            when all are; what is done before is frozen: it repeats its last transition with reward 0.
    loop    a generator ``loop(env, root, act, steps, callback)`` of the transitions, batch size ``(*batch,)``.
    result  TensorDict of batch size (*batch, T); time is the last batch axis, named "time", and the last step may be
            marked as cut short.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sized
from typing import Any, TypeVar, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from envkit import rules
from envkit.arrays.integers import as_int
from envkit.data.arguments import as_bool, as_bool_or_none, require_tensordict
from envkit.data.paths import Key, as_key, as_path, leaf_paths
from envkit.data.transition import leaves
from envkit.env.bound_policy import BoundPolicy, bind_policy, on_device, replay
from envkit.env.policy import PolicyLike, policy_device
from envkit.env.policy_calls import recorded_calls
from envkit.env.runs import Run
from envkit.env.stepping import Stepping
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    BatchSizeError,
    DoneError,
    OptionError,
    RolloutError,
)
from envkit.specs import Composite, StackedComposite
from envkit.specs.annotations import Device, EnvData

Callback = Callable[[Any, TensorDictBase], Any]
_Env = TypeVar("_Env", bound=Stepping)


def rollout(
    self: _Env,
    max_steps: int,
    policy: PolicyLike = None,
    callback: Callable[[_Env, EnvData], object] | None = None,
    *,
    actions: Iterable[Any] | None = None,
    auto_reset: bool = True,
    auto_cast_to_device: bool = False,
    break_when_any_done: bool | None = None,
    break_when_all_done: bool | None = None,
    return_contiguous: bool | None = None,
    tensordict: TensorDictBase | None = None,
    set_truncated: bool = False,
    out: TensorDictBase | None = None,
    trust_policy: bool = False,
    storing_device: Device | None = None,
    set_state: bool | None = None,
    record_state: bool = True,
    check_every: int = 1,
    pipeline: int = 1,
) -> EnvData:
    """Run a policy for up to ``max_steps`` steps; a method of every env.

    Args:
        max_steps: most steps taken.
        policy: a function or module, called as ``policy(observation)``, which returns the action. One whose argument is
            named ``td`` or ``tensordict``, or is annotated as a TensorDict, is called as ``policy(td)`` and writes the
            action into it, as a `TensorDictModule` does. None takes random actions.
        callback: called as ``callback(env, td)`` after each step except the last, with the
            transition just completed; what it returns is dropped.
        actions: what is done instead of asking a policy: one action for each step (a tuple of them, or
            a TensorDict, where the env takes several). A sized one caps ``max_steps``.
        auto_reset: reset first; ``tensordict`` then gives batch size, parameters and state.
            False: ``tensordict`` is required, and what is done in it is reset.
        auto_cast_to_device: move data to the policy's device and back.
        break_when_any_done: stop after the first step in which any env is done (the default).
            With both rules False, done envs are reset and collection goes on.
        break_when_all_done: freeze done envs and stop when all are done. Frozen rows repeat their
            last transition with reward 0, so that a row's rewards sum up to its return.
        return_contiguous: True: stack densely, in contiguous memory, so that ``data.view(-1)`` works. False gives a lazy
            stack along time. None: densely, unless the specs hold a size of -1; a run of a stateless env that is one
            program then lies time first in memory, which saves a copy.
        tensordict: what to start from.
        set_truncated: mark the last step ``truncated`` and ``done``.
        out: preallocated destination, at least as long as the result, with an entry of the same
            shape and dtype for each of the result's.
        trust_policy: call ``policy`` with the TensorDict whatever its signature.
        storing_device: where the transitions are kept; None leaves them where the env gives them.
        set_state: of the first `reset`, where ``auto_reset`` is set.
        record_state: keep the ``state`` of a stateless env at root and next of every step. It is most of what
            a simulator records, and on a GPU lies in JAX's share of it.
        check_every: after how many steps a stop rule is asked about all of them. To ask waits for a GPU. Surplus
            steps are dropped: the data is the same, but a policy that acts step by step is called for it, up
            to ``check_every - 1`` times, and draws what it draws. Only for envs whose steps change nothing but data.
        pipeline: no longer there; leave it out.

    Returns:
        Transitions, batch size ``(*batch, T)``; T is the number of steps really taken.

    Raises:
        ArgumentError: (a ValueError) ``max_steps`` is below 1, or both ``policy`` and ``actions`` are given.
        ArgumentTypeError: (a TypeError) ``max_steps``, ``callback``, ``tensordict`` or ``out`` is of
            another type.
        OptionError: (a TypeError) both stop rules are True, ``out`` is to be a lazy stack, ``pipeline`` is given, or
            ``check_every`` where steps cannot be dropped, or with a callback or an iterator of actions.
        PolicyError: (a TypeError) ``policy`` is not callable, or gave something else than actions, or an item of
            ``actions`` is none.
        RolloutError: (a RuntimeError) ``auto_reset=False`` without ``tensordict``; ``actions`` end too
            early; steps cannot be stacked, or do not fit ``out``.
        BatchSizeError: ``out`` does not have room for the result.
        DoneError: ``set_truncated`` without a ``truncated`` leaf.

    Example:
        >>> from envkit import PendulumEnv
        >>> env = PendulumEnv()
        >>> env.rollout(5)["next", "reward"].shape
        torch.Size([5, 1])
    """
    max_steps = as_int("max_steps", max_steps, least=1, meaning="the most steps to take")
    auto_reset = as_bool("auto_reset", auto_reset)
    auto_cast_to_device = as_bool("auto_cast_to_device", auto_cast_to_device)
    set_truncated = as_bool("set_truncated", set_truncated)
    trust_policy = as_bool("trust_policy", trust_policy)
    record_state = as_bool("record_state", record_state)
    set_state = as_bool_or_none("set_state", set_state)
    stop = _stop_rule(
        as_bool_or_none("break_when_any_done", break_when_any_done),
        as_bool_or_none("break_when_all_done", break_when_all_done),
    )
    is_asked = return_contiguous = as_bool_or_none("return_contiguous", return_contiguous)
    if return_contiguous is None:
        return_contiguous = not self._has_varying_sizes
    _require_arguments(callback, tensordict, out, return_contiguous)
    if pipeline != 1:
        raise OptionError(
            f"pipeline={pipeline!r} is given, but rollout no longer splits rows into parts: it was slower than whole steps. "
            "Leave pipeline out; the data is the same."
        )
    check_every = _between_checks(self, check_every, callback, actions)
    if set_truncated:
        require_truncated(self)
    if actions is None:
        act = bind_policy(self, policy, trust=trust_policy)
    else:
        max_steps = _number_of(actions, max_steps, policy)
        policy = act = replay(self, actions)
    if policy is None and self._draws_own_actions:
        policy = act  # no other draw may take its place
    if auto_cast_to_device:
        act = on_device(act, policy_device(policy), self.device)
    runs = self._runs()
    if max_steps > 1 and auto_reset:
        runs.expect(stop, policy)
    is_whole = callback is None and return_contiguous and self._steps_by_itself
    unbegun = None
    if is_whole and stop == "never" and auto_reset and tensordict is None and set_state is None:
        unbegun = runs.unbegun_root(policy)
    root = _first_root(self, tensordict, auto_reset, set_state) if unbegun is None else unbegun
    steps = None
    with recorded_calls() as calls:
        if is_whole:
            run = Run(stop, root, max_steps, policy, act, record_state, check_every)
            steps = runs.record(run)
        if unbegun is not None:
            self._check_begun(cast(TensorDictBase, steps)[..., 0])
        if steps is None:
            hidden = unrecorded(self, record_state)
            made = steps_of(self, root, act, max_steps, stop, callback, check_every)
            steps = []
            for step in made:
                steps.append(_kept(step, hidden, storing_device))
                if _is_moved(
                    self, storing_device
                ):  # copies are recorded: what was there may be freed
                    calls.forget()
    if isinstance(steps, list):
        steps = stack_steps(self, steps, contiguous=return_contiguous)
    result = steps if storing_device is None else steps.to(storing_device)
    if set_truncated:
        truncate_last(self, result)
    if is_asked:
        result = result.contiguous()
    if out is not None:
        result = _written(result, out)
    return result.refine_names(..., "time") if return_contiguous else result


def _kept(step: TensorDictBase, hidden: list[Key], device: Device | None) -> TensorDictBase:
    """Return a step as it is recorded."""
    step = step.exclude(*hidden) if hidden else step
    return step if device is None else step.to(device)


def _is_moved(env: Stepping, device: Device | None) -> bool:
    """Check whether steps are copied to another device when they are kept."""
    here = "cpu" if env.device is None else env.device.type
    return device is not None and torch.device(device).type != here


def _require_arguments(
    callback: object, td: object, out: TensorDictBase | None, return_contiguous: bool
) -> None:
    if callback is not None and not callable(callback):
        raise ArgumentTypeError(
            f"callback is {callback!r}, of type {type(callback).__name__}, which cannot be called. "
            "Pass a function callback(env, td), or None."
        )
    if td is not None:
        require_tensordict("tensordict", td)
    if out is not None:
        _require_dense(out, return_contiguous)


def _between_checks(env: Stepping, check_every: int, callback: object, actions: object) -> int:
    """Return how many steps are made before a stop rule is asked, and check that some of them may be dropped."""
    every = as_int(
        "check_every", check_every, least=1, meaning="after how many steps flags are read"
    )
    if every == 1:
        return 1
    if callback is not None:
        raise OptionError(
            f"check_every={every} is given with a callback, which would be called for steps that are dropped "
            "afterwards. Leave one of them out."
        )
    if not isinstance(actions, Sized | None):
        raise OptionError(
            f"check_every={every} is given with actions of type {type(actions).__name__}, of which more would be "
            "taken than are done. Pass a list of them, or leave check_every out."
        )
    if kind := env._facts.steps_have_effects or env._steps_otherwise:
        raise OptionError(
            f"check_every={every} takes steps that may be dropped, but {kind} changes with each step, and not in its "
            "data alone. Leave check_every out."
        )
    return every


def _number_of(actions: Iterable[Any], max_steps: int, policy: PolicyLike) -> int:
    """Return the number of steps that actions are there for, ``max_steps`` at most."""
    if policy is not None:
        raise ArgumentError(
            "policy and actions are both given, but they say the same thing: what to do. Pass one of them."
        )
    if not isinstance(actions, Sized):
        return max_steps
    if not len(actions):
        raise RolloutError("actions is empty. Pass one action for each step.")
    return min(max_steps, len(actions))


def _stop_rule(any_done: bool | None, all_done: bool | None) -> rules.Stop:
    if any_done and all_done:
        raise OptionError(
            "break_when_any_done and break_when_all_done are both True, but they exclude each "
            "other. Pass one of them."
        )
    if all_done:
        return "all"
    return "never" if any_done is False else "any"


def _first_root(
    env: Stepping, td: TensorDictBase | None, auto_reset: bool, set_state: bool | None
) -> TensorDictBase:
    if td is not None:
        td = td.copy()  # what the caller has is not written to
        if td.device is None and env.device is not None:
            td = td.to(env.device)  # as all that follows
    if auto_reset:
        return env.reset(td) if set_state is None else env.reset(td, set_state=set_state)
    if td is None:
        raise RolloutError(
            "rollout(auto_reset=False) needs the data to start from. Pass tensordict=, e.g. "
            "env.step_mdp(last_rollout[..., -1]), or let auto_reset=True."
        )
    return env.maybe_reset(td)


# -------------------------------------------------------------------------------------- the loops


def nonstop(
    env: Stepping,
    td: TensorDictBase,
    act: BoundPolicy,
    steps: int,
    callback: Callback | None = None,
    *,
    acted: bool = False,
):
    """Reset whatever is done and go on; the last step triggers no reset.

    ``acted`` says that ``td`` already holds its action.
    """
    for index in range(steps):
        td = td if acted and index == 0 else act(td)
        if index == steps - 1:
            yield env.step(td) if index == 0 else env._step_last(td)
            return
        done, td = env.step_and_maybe_reset(td)
        yield done
        if callback is not None:
            callback(env, done)


def until_any_done(
    env: Stepping,
    td: TensorDictBase,
    act: BoundPolicy,
    steps: int,
    callback: Callback | None = None,
    *,
    acted: bool = False,
):
    """Stop after the first step in which any env is done.

    ``acted`` says that ``td`` already holds its action.
    """
    for index in range(steps):
        td = env.step(td if acted and index == 0 else act(td))
        yield td
        if index == steps - 1 or env._rows_done(td.get("next")).any():
            return
        if callback is not None:
            callback(env, td)
        td = env.step_mdp(td)


def until_all_done(
    env: Stepping, td: TensorDictBase, act: BoundPolicy, steps: int, callback: Callback | None
):
    """Freeze what is done with a `_step` mask until everything is."""
    running, last = None, None
    for index in range(steps):
        td = act(td)
        if running is not None:
            td.set(rules.STEP, running)
        td = env.step(td)
        if running is not None and not bool(running.all()):
            td = _repeat_frozen(running, td, last, env.full_reward_spec, env.state_keys)
        yield td
        running = ~env._rows_done(td.get("next"))
        if index == steps - 1 or not running.any():
            return
        if callback is not None:
            callback(env, td)
        last, td = td, env.step_mdp(td)


LOOPS: dict[rules.Stop, Callable] = {
    "never": nonstop,
    "any": until_any_done,
    "all": until_all_done,
}


def steps_of(
    env: Stepping,
    td: TensorDictBase,
    act: BoundPolicy,
    steps: int,
    stop: rules.Stop,
    callback: Callback | None,
    check_every: int,
) -> Iterator[TensorDictBase]:
    """Return the transitions of a rollout; a stop rule is asked after ``check_every`` steps."""
    if check_every == 1 or stop == "never":
        return LOOPS[stop](env, td, act, steps, callback)
    return _checked_now_and_then(env, td, act, steps, stop, check_every)


def _checked_now_and_then(
    env: Stepping, td: TensorDictBase, act: BoundPolicy, steps: int, stop: rules.Stop, every: int
) -> Iterator[TensorDictBase]:
    """Step on without asking whether a stop rule ends it, which is asked after ``every`` steps; drop what was too much.

    Only for envs whose steps change nothing but data. Frozen rows are stepped too, and shown as if they were not.
    """
    steps_made: list[TensorDictBase] = []
    ends: list[torch.Tensor] = []
    last, ended = td, None
    for index in range(steps):
        td = env._step_on(act(td))
        if stop == "all" and ended is not None and ended.ndim:
            td = _repeat_frozen(~ended, td, last, env.full_reward_spec, env.state_keys)
        ended = env._rows_done(td.get("next"))
        steps_made.append(td)
        ends.append(ended.all() if stop == "all" else ended.any())
        if len(steps_made) == every or index == steps - 1:
            flags = torch.stack(ends).cpu().tolist()
            if True in flags:
                yield from steps_made[: flags.index(True) + 1]
                return
            yield from steps_made
            steps_made, ends = [], []
        last, td = td, env.step_mdp(td)


def _repeat_frozen(
    running: torch.Tensor,
    td: TensorDictBase,
    last: TensorDictBase,
    specs: Composite,
    states: Collection[Key],
) -> TensorDictBase:
    """Replace the transition of finished rows by their last one, with reward 0.

    Args:
        running: rows that were stepped.
        td: the step just made.
        last: the one before.
        specs: of the rewards; those of unlike rows are stacked.
        states: entries that are repeated though they may be rewards as well.
    """
    if isinstance(td, LazyStackedTensorDict) and isinstance(last, LazyStackedTensorDict):
        dim = td.stack_dim
        parts = zip(running.unbind(dim), td.unbind(dim), last.unbind(dim), strict=True)
        rows = [
            _repeat_frozen(
                *part, specs[row] if isinstance(specs, StackedComposite) else specs, states
            )
            for row, part in enumerate(parts)
        ]
        return LazyStackedTensorDict(*rows, stack_dim=dim)
    if running.ndim:
        chosen = td.apply(  # which takes two thirds of the time of `merge_rows`
            lambda new, old: new if old is None else rules.choose(running, new, old),
            last,
            default=None,
        )
        shown = cast(TensorDictBase, chosen)
    else:
        shown = td if bool(running) else last.copy()
    following = shown.get("next").copy()
    for path in leaf_paths(specs):
        key = as_key(path)
        if key not in states and (paid := following.get(key, None)) is not None:
            following.set(key, rules.choose(running, paid, torch.zeros_like(paid)))
    return shown.set("next", following)


# ------------------------------------------------------------------------------------- the result


def unrecorded(env: Stepping, record_state: bool) -> list[Key]:
    """List what is left out of the steps of an env, at root and next: its state, unless that is recorded."""
    hidden = () if record_state else env._facts.unrecorded
    return [*hidden, *(("next", key) for key in hidden)]


def stack_steps(env: Stepping, steps: list[TensorDictBase], *, contiguous: bool) -> TensorDictBase:
    """Stack steps along a last axis of time, densely or lazily.

    Raises:
        RolloutError: they do not stack densely.
    """
    dim = len(steps[0].batch_size)
    if not contiguous:
        return LazyStackedTensorDict(*steps, stack_dim=dim, stack_dim_name="time")
    if strays := _strays(env, steps[0]):
        steps = [td.exclude(*strays, *(("next", *as_path(key)) for key in strays)) for td in steps]
    try:
        return cast(TensorDictBase, torch.stack(cast(list, steps), dim))
    except (RuntimeError, KeyError) as error:
        raise RolloutError(
            f"the steps of this rollout cannot be stacked into one tensor each: {_why(steps, error)}. "
            "Pass return_contiguous=False to get a lazy stack along time."
        ) from error


def _why(steps: list[TensorDictBase], error: Exception) -> str:
    """Return the name of an entry that only some steps have, as a policy writes it, or else what was raised."""
    counts = Counter(key for step in steps for key in step.keys(True, True))
    for key, count in counts.items():
        if count < len(steps):
            return f"{key!r} is in {count} of {len(steps)} steps. Write it in every step"
    return str(error).rstrip(".")


def _strays(env: Stepping, first: TensorDictBase) -> list[Key]:
    """List the outputs that no spec declares: only some roots hold them, so they are dropped."""
    declared = {
        *(*env.observation_keys, *env.reward_keys, *env.done_keys, *env.state_keys),
        *first.keys(True, True),
    }
    return [key for key in first.get("next").keys(True, True) if key not in declared]


def require_truncated(env: Stepping) -> None:
    """Check that an env can say that an episode was cut short.

    Raises:
        DoneError: it declares no ``truncated``.
    """
    if not any("truncated" in names for names in env.done_levels.values()):
        raise DoneError(
            "set_truncated=True needs a 'truncated' entry in the done spec, but the env declares "
            f"{env.done_keys}. Call env.add_truncated_keys() first."
        )


def truncate_last(env: Stepping, result: TensorDictBase) -> None:
    """Set ``truncated`` and ``done`` in the last step of a result, in place; ``terminated`` stays."""
    following = result.get("next")
    for level, names in env.done_levels.items():
        for name in ("truncated", "done") if "truncated" in names else ():
            key = as_key((*level, name))
            flags = following.get(key).clone()
            flags.select(len(result.batch_size) - 1, -1).fill_(True)
            following.set(key, flags)


def _written(result: TensorDictBase, out: TensorDictBase) -> TensorDictBase:
    """Write a result into the front of ``out``, and give that part; ``out`` itself when all is used."""
    *batch, steps = result.batch_size
    room = out.batch_size
    if not room or list(room[:-1]) != batch or room[-1] < steps:
        raise BatchSizeError(
            f"out has batch size {tuple(room)}, but the rollout has {tuple(result.batch_size)}. "
            "Allocate at least as many steps, time last: env.fake_tensordict() expanded and cloned."
        )
    destination = out if room[-1] == steps else cast(TensorDictBase, out[..., :steps])
    for path, value in leaves(result):
        _require_place(as_key(path), value, destination)
    return destination.update_(result)


def _require_dense(out: Any, return_contiguous: bool) -> None:
    require_tensordict("out", out, "one to write into: env.rollout(n, policy).clone()")
    if not return_contiguous:
        raise OptionError(
            "out is given and return_contiguous is False, but a lazy stack keeps the steps as they are "
            "and writes them nowhere. Leave one of them out."
        )


def _require_place(key: Key, value: Any, destination: TensorDictBase) -> None:
    """Check that ``destination`` holds an entry of the same shape and dtype."""
    place = destination.get(key, None)
    if place is None:
        raise RolloutError(
            f"out has no {key!r}, but the rollout has: it holds "
            f"{sorted(map(str, destination.keys(True, True)))}. Allocate it with every entry of a "
            "rollout: out = env.rollout(n, policy).clone()."
        )
    if not isinstance(value, torch.Tensor) or value.is_nested:
        return
    wanted = tuple(value.shape), value.dtype
    held = tuple(place.shape), getattr(place, "dtype", None)
    if held != wanted:
        raise RolloutError(
            f"{key!r} has shape {held[0]} and dtype {held[1]} in out, but shape {wanted[0]} and dtype "
            f"{wanted[1]} in the rollout. Allocate it so: out = env.rollout(n, policy).clone()."
        )
