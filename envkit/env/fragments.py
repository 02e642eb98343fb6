"""Some steps from a root, and the root that follows them: what a collector asks of an env, batch after batch.

A rollout ends; a fragment goes on. Its last step, too, is followed by the reset of what is done, so the next
fragment begins where this one ended. An env that makes many steps at once (one program) offers it through
`Runs.begin`; one that records a rollout by itself through `Runs.record`; else steps are made in a loop.

Conventions
    data       transitions, batch size (*batch, steps); time is the last axis.
    following  root after the last step, batch size (*batch,); it shares no memory with the data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from tensordict import TensorDictBase

from envkit.data.resets import undeclared
from envkit.data.transition import copied
from envkit.env.bound_policy import BoundPolicy
from envkit.env.policy_calls import recorded_calls
from envkit.env.rollout import stack_steps, unrecorded
from envkit.env.runs import Begun, Draws, Run
from envkit.env.stepping import Stepping


@dataclass(frozen=True)
class Fragment:
    """What to do: steps of a policy in an env.

    Attributes:
        env: where.
        policy: what the user passed; None for random actions.
        act: the same as a callable from TensorDict to TensorDict.
        steps: how many.
        resets: begin a new episode where one has ended; else go on stepping it.
        record_state: keep the state of a stateless env at every step.
        draws: see `Run`.
        interrupted: asked after each step; where it says True, that step is the last one.
    """

    env: Stepping
    policy: Any
    act: BoundPolicy
    steps: int
    resets: bool = True
    record_state: bool = False
    draws: Draws | None = None
    interrupted: Callable[[], bool] | None = None


def begin_fragment(wanted: Fragment, root: TensorDictBase) -> Begun:
    """Begin a fragment: with steps that are one program, it runs when this returns.

    Args:
        wanted: what to do.
        root: where to start; nothing in it is done. It is taken over.
    """
    env = wanted.env
    at_once = wanted.resets and wanted.interrupted is None and env._steps_by_itself
    if at_once and (runs := env._runs()).is_program(wanted.policy):
        return runs.begin(_run_of(wanted, root))

    def record() -> tuple[TensorDictBase, TensorDictBase]:
        with recorded_calls():
            return _recorded(wanted, root, at_once)

    return record


def _run_of(wanted: Fragment, root: TensorDictBase) -> Run:
    own = wanted.policy is None and wanted.env._draws_own_actions
    policy = wanted.act if own else wanted.policy
    return Run(
        "never",
        root,
        wanted.steps,
        policy,
        wanted.act,
        wanted.record_state,
        draws=wanted.draws,
    )


def _recorded(
    wanted: Fragment, root: TensorDictBase, at_once: bool
) -> tuple[TensorDictBase, TensorDictBase]:
    env, steps, act = wanted.env, wanted.steps, wanted.act
    if at_once and not env._has_varying_sizes:
        recorded = env._runs().record(_run_of(wanted, root))
        if recorded is not None:
            if isinstance(recorded, list):
                data = _stacked(wanted, recorded)
            else:
                data = recorded.refine_names(..., "time")
            last = cast(TensorDictBase, data[..., -1]).clone()
            return data, env._root_after(last, undeclared(last.get("next"), env._table.declared))
    steps_made = []
    for _ in range(steps):
        if wanted.resets:
            data, root = env.step_and_maybe_reset(act(root))
        else:
            data = env.step(act(root))
            root = env.step_mdp(data)
        steps_made.append(data)
        if wanted.interrupted is not None and wanted.interrupted():
            break
    return _stacked(wanted, steps_made), copied(root)


def _stacked(wanted: Fragment, steps: list[TensorDictBase]) -> TensorDictBase:
    env = wanted.env
    if hidden := unrecorded(env, wanted.record_state):
        steps = [step.exclude(*hidden) for step in steps]
    dense = not env._has_varying_sizes
    data = stack_steps(env, steps, contiguous=dense)
    if dense:
        data.refine_names(..., "time")
    return data
