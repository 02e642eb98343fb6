"""The env and the policy of a runner: completed for each other, on their devices, tried out once.

Conventions
    parts  what the user passed: an env or what makes one, a policy or what makes one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from envkit.collectors.runner import OWN_STEP_COUNT, POLICY_VERSION, EnvRunner, RunnerOptions
from envkit.data.paths import Path, as_path
from envkit.data.transition import leaves
from envkit.env.base import EnvBase
from envkit.env.bound_policy import BoundPolicy, bind_policy, on_device, shape_advice
from envkit.env.learning import any_learns, not_learning
from envkit.env.policy import (
    BindsToEnv,
    RandomPolicy,
    policy_device,
    set_exploration_type,
)
from envkit.env.rollout import require_truncated, unrecorded
from envkit.env.wrapper_hints import require_env, wrapping_of
from envkit.errors import (
    ArgumentTypeError,
    InputError,
    KeyCollisionError,
    MissingKeyError,
    OptionError,
    PolicyError,
    UnsupportedError,
)
from envkit.transforms.core.transformed_env import TransformedEnv
from envkit.transforms.episodes import StepCounter
from envkit.transforms.primer import with_policy_transforms


@dataclass(frozen=True)
class Parts:
    """The parts that a runner is built from."""

    make_env: Callable[..., EnvBase] | EnvBase
    policy: Any
    options: RunnerOptions


def build_runner(parts: Parts, *, first_number: int = 0, stride: int = 1) -> EnvRunner:
    """Build env and policy, and the runner of both.

    Raises:
        PolicyError: (a TypeError) the policy writes no action.
        InputError: (a ValueError) it writes one of another shape.
        DoneError: the env cannot say that an episode was cut short, and is to.
    """
    factory = parts.options.policy_factory
    policy = parts.policy if factory is None else factory()
    env = _made_env(parts)
    try:
        return _runner_in(env, policy, parts, first_number, stride)
    except BaseException:
        if env is not parts.make_env:
            env.close(raise_if_closed=False)
        raise


def _runner_in(
    raw_env: EnvBase, policy: Any, parts: Parts, first_number: int, stride: int
) -> EnvRunner:
    options = parts.options
    env = _completed(raw_env, policy, options)
    if isinstance(policy, RandomPolicy):
        policy.set_action_spec_from_env(env)
    if options.set_truncated:
        require_truncated(env)
    if options.track_policy_version:
        _require_no_version(env)
    policy = _on_its_device(policy, options.policy_device)
    bind = partial(_act_of, env, options)
    runner = EnvRunner(env, policy, bind, options, first_number=first_number, stride=stride)
    is_known = isinstance(policy, BindsToEnv) or options.trust_policy or options.cudagraph_policy
    if isinstance(policy, nn.Module) and not is_known:
        with not_learning(env):
            runner.begin_anew()
            _try_out(env, policy, options, runner)
        if any_learns(env):  # what it has learnt from this root, it learns from the first one
            runner.root = None
    return runner


def _require_no_version(env: EnvBase) -> None:
    """Check that an env has no entry of the name under which the version of the policy is recorded.

    Raises:
        KeyCollisionError: (a RuntimeError) it has.
    """
    taken = {POLICY_VERSION[0]} & {*env.observation_keys, *env.state_keys, *env.action_keys}
    if taken:
        raise KeyCollisionError(
            f"track_policy_version=True records {POLICY_VERSION[0]!r}, but {type(env).__name__} has an entry of this name. "
            "Rename that with RenameTransform, or leave track_policy_version out."
        )


def _made_env(parts: Parts) -> EnvBase:
    make_env, kwargs = parts.make_env, parts.options.create_env_kwargs or {}
    if isinstance(make_env, EnvBase):
        if kwargs:
            raise OptionError(
                f"create_env_kwargs is {dict(kwargs)}, but create_env_fn is an env, which is built "
                "already. Pass what makes it, or leave the keywords out."
            )
        return make_env
    if not isinstance(make_env, type) and hasattr(make_env, "reset") and hasattr(make_env, "step"):
        raise ArgumentTypeError(
            f"create_env_fn is {type(make_env).__name__} of another library, but must be an env of envkit or make "
            f"one. Wrap it: {wrapping_of(make_env)}."
        )
    env = make_env(**kwargs)
    require_env("the result of create_env_fn", env, "Return one, or wrap it: GymWrapper(env).")
    return env


def _completed(env: EnvBase, policy: Any, options: RunnerOptions) -> EnvBase:
    """Return the env with what the policy and a limit of steps need, on its device."""
    if options.env_device is not None and env.device != options.env_device:
        env = env.to(options.env_device)
    if isinstance(policy, nn.Module) and options.auto_register_policy_transforms is not False:
        env = with_policy_transforms(env, policy)
    if options.max_frames_per_traj:
        env = TransformedEnv(env, _limit_for(env, options.max_frames_per_traj))
    return env.record_for_resume() if options.record_for_resume else env


def _limit_for(env: EnvBase, steps: int) -> StepCounter:
    """Cut episodes short; where the env has its own count, ours has another name."""
    taken = any(as_path(key)[-1] == "step_count" for key in env.observation_keys)
    return StepCounter(steps, step_count_key=OWN_STEP_COUNT if taken else "step_count")


def _on_its_device(policy: Any, device: torch.device | None) -> Any:
    """Return the policy where it acts: itself, or a copy on another device."""
    if device is None or not isinstance(policy, nn.Module):
        return policy
    if policy_device(policy) in (None, device):
        return policy
    return copy.deepcopy(policy).to(device)


def _act_of(env: EnvBase, options: RunnerOptions, policy: Any) -> BoundPolicy:
    compiled = _compiled(policy, options)
    act = bind_policy(env, compiled, trust=bool(options.trust_policy), original=policy)
    there = options.policy_device
    return act if there is None or there == env.device else on_device(act, there, env.device)


def _compiled(policy: Any, options: RunnerOptions) -> Any:
    """Compile a policy by torch, or capture it as a CUDA graph, where that was asked for."""
    if not (options.compile_policy or options.cudagraph_policy) or policy is None:
        return policy
    if not isinstance(policy, nn.Module) or isinstance(policy, BindsToEnv):
        raise OptionError(
            f"compile_policy and cudagraph_policy are torch's and take a torch.nn.Module, but the policy is of type "
            f"{type(policy).__name__}. Leave them out."
        )
    if options.compile_policy:
        policy = torch.compile(policy, **_keywords(options.compile_policy))  # type: ignore[call-overload]
    if options.cudagraph_policy:
        if not torch.cuda.is_available():
            raise UnsupportedError(
                "cudagraph_policy needs a CUDA device, and there is none here. Leave it out."
            )
        from tensordict.nn import CudaGraphModule

        policy = CudaGraphModule(policy, **_keywords(options.cudagraph_policy))
    return policy


def _keywords(keywords: Any) -> dict[str, Any]:
    return dict(keywords) if isinstance(keywords, Mapping) else {}


def _try_out(env: EnvBase, policy: nn.Module, options: RunnerOptions, runner: EnvRunner) -> None:
    """Call a copy of the policy once, on the first root, so that what does not fit is reported at once."""
    assert runner.root is not None
    try:
        trial = copy.deepcopy(policy)
    except Exception as error:
        raise PolicyError(
            f"the policy, of type {type(policy).__name__}, cannot be copied to be tried out ({error}). Pass "
            "trust_policy=True to do without."
        ) from error
    act = _act_of(env, replace(options, compile_policy=None), trial)
    with (
        torch.no_grad(),
        torch.random.fork_rng(),
        set_exploration_type(options.exploration_type),
    ):
        try:
            acted = act(runner.root.clone())
        except Exception as error:
            _require_inputs(policy, runner.root, error)
            raise
    _require_actions(env, acted)


def _require_inputs(policy: nn.Module, root: TensorDictBase, error: Exception) -> None:
    """Check that a module which has failed finds all that it reads."""
    missing = [key for key in getattr(policy, "in_keys", ()) if root.get(key, None) is None]
    if missing:
        raise MissingKeyError(
            f"the policy reads {missing}, but the env gives {sorted(map(str, root.keys(True, True)))}. Name its inputs so: "
            "TensorDictModule(module, in_keys=[...], out_keys=[...])."
        ) from error


def recorded_leaves(env: EnvBase, options: RunnerOptions) -> dict[Path, torch.Tensor]:
    """Return an example of the entries of a step that the env and its collector record, by path."""
    example = env.fake_tensordict().exclude(*unrecorded(env, options.record_state))
    return {
        path: value
        for path, value in leaves(example)
        if isinstance(value, torch.Tensor) and not path[-1].startswith("_")
    }


def _require_actions(env: EnvBase, acted: TensorDictBase) -> None:
    written = {as_path(key) for key in acted.keys(True)}  # of unlike agents, which do not stack
    missing = [key for key in env.action_keys if as_path(key) not in written]
    if missing:
        raise PolicyError(
            f"the policy wrote {sorted(map(str, acted.keys(True, True)))}, but no {missing}, which the env "
            "takes. Name its output so: TensorDictModule(module, in_keys=[...], out_keys=[...])."
        )
    for key in env.action_keys:
        spec = env.full_action_spec[key]
        if spec.dtype is None or -1 in spec.shape:
            continue
        action = acted.get(key)
        shape = torch.Size((*acted.batch_size, *spec.shape[env.batch_dims :]))
        if action.numel() != shape.numel():
            raise InputError(
                f"the policy wrote {key!r} with shape {tuple(action.shape)}, but the env takes {tuple(shape)}: "
                f"{spec}. {shape_advice(action, spec, shape, 'Write')}"
            )
