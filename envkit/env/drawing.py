"""Zeros in the layout of a step, and which options of an action may be drawn."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tensordict import TensorDict, TensorDictBase

from envkit.data.paths import Key
from envkit.env.bound_policy import bind_policy
from envkit.env.policy import PolicyLike
from envkit.env.stepping import Stepping
from envkit.specs import Composite, Stacked
from envkit.specs.leaves.choices import as_option_mask


def fake_step(inputs: Composite, outputs: Composite) -> TensorDict:
    """Make zeros in the layout of one step of an env with these input and output specs."""
    root, following = (outputs["full_observation_spec"].zero() for _ in range(2))
    for spec in (inputs["full_state_spec"], inputs["full_action_spec"], outputs["full_done_spec"]):
        root.update(spec.zero())
    for spec in (outputs["full_reward_spec"], outputs["full_done_spec"]):
        following.update(spec.zero())
    return root.set("next", following)


def make_tensordict(env: Stepping, policy: PolicyLike = None) -> TensorDict:
    """Make zeros in the layout of one step of an env, and of what a policy writes beside the action.

    Args:
        env: not stepped.
        policy: called once with zeros, without gradients; see `envkit.env.bound_policy.bind_policy`.

    Returns:
        Root and ``next``, batch size that of the env.

    Example:
        >>> from envkit import GymEnv, make_tensordict
        >>> env = GymEnv("CartPole-v1")
        >>> td = make_tensordict(env)
        >>> td["observation"], td["next", "reward"]
        (tensor([0., 0., 0., 0.]), tensor([0.]))
        >>> env.close()
    """
    td = fake_step(env.input_spec, env.output_spec)
    with torch.no_grad():
        acted = bind_policy(env, policy)(td.exclude("next"))
    return td.update(acted).apply(torch.zeros_like)


def allow_options(actions: Composite, td: TensorDictBase, masks: Iterable[tuple[Key, Key]]) -> None:
    """Restrict specs of actions, in place, to the options that the data allows.

    Args:
        actions: full action spec of the env.
        td: root; a mask that is not there, or holds other values than 0 and 1, allows what was allowed before. Rows that are done
            and are left no option may draw any, since they take none.
        masks: actions, each with the entry of ``td`` that says which of its options are allowed.
    """
    for action, mask in masks:
        leaf = actions.get(action, None)
        is_stacked = isinstance(leaf, Stacked)  # rows of unlike options
        allowed = [_options(row, mask) for row in (td.unbind(0) if is_stacked else [td])]
        if leaf is None or any(part is None for part in allowed):
            continue
        leaf.update_mask(allowed if is_stacked else allowed[0])


def _options(td: TensorDictBase, key: Key) -> torch.Tensor | None:
    """Return the mask under ``key``, with all options in rows that are done and have none."""
    mask, done = td.get(key, None), td.get("done", None)
    mask = None if mask is None else as_option_mask(mask)
    if mask is None or done is None or mask.ndim <= td.batch_dims:
        return mask
    done = done.reshape(*td.batch_size, -1).any(-1)
    done = done.reshape((*td.batch_size, *(1,) * (mask.ndim - td.batch_dims)))
    return mask | (done & ~mask.any(-1, keepdim=True))
