"""Whole runs of a stateless env: one program, or a few of one kind, and their results as TensorDicts.

This module decides what a program is given to start from, how a run is cut into programs, and how what
they recorded is named. What is computed stands in `programs`, how policies enter in
`policy.inputs`.

Conventions
    data     transitions of batch size (*batch, time). They lie time-major in memory, and are seen
             with time last.
    carried  entries of the root that the policy reads and the env does not show: they go through the
             programs, and those that the policy writes begin anew with an episode. Other entries that
             the env does not know are repeated at every root.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase

from envkit.data.paths import Key, Path, as_key, as_path, tensordict_of
from envkit.env.fragments import Begun
from envkit.env.recorded import unrecorded
from envkit.env.runs import Run
from envkit.errors import PolicyError
from envkit_bridges.dlpack import adopted, number_to_jit, to_jit, to_torch
from envkit_bridges.jax.codecs import encoded
from envkit_bridges.jax.handoff import RowEnv
from envkit_bridges.jax.policy.inputs import Actor, PolicySpecs, actor_for, free_entries

__all__ = ["begin_unroll", "unroll_until"]


# Most steps of a program that may stop early: what it records is laid out before it runs.
_CHUNK = 64


def begin_unroll(
    env: RowEnv, td: TensorDictBase, steps: int, policy: Any, *, record_state: bool
) -> Begun:
    """Begin what `JaxEnv.unroll` documents: the program runs when this returns, and what it gives waits for it."""
    free = free_entries(env, td)
    actor = actor_for(env, policy, td, free)
    _refuse_leaks(actor)
    begin, key = _begin(env, td, actor), env._next_key_in()
    lent: Any = begin, actor.params, key, env._constants(td.batch_size)
    run, last, _ = env._programs.unroll(steps, actor.function, record_state, *lent)

    def finish() -> tuple[TensorDict, TensorDict]:
        nonlocal lent
        reached = env._kept(last)
        others = _others(free, actor, run)
        data = _recorded(env, td, steps, run, actor, others)
        env._require_choices(data)
        lent = None  # until torch has what was made of it
        return data, _following(env, td, reached, actor, others)

    return finish


def _refuse_leaks(actor: Actor) -> None:
    """Refuse memory at the root that nobody begins anew where an episode begins."""
    if keys := [as_key(path) for path in actor.carries if path in actor.writes]:
        raise PolicyError(
            f"the policy reads {keys} and writes them at the root, where a reset leaves alone what the env "
            "does not show: an episode would go on with what the one before it remembered. Write them "
            "under 'next', or append a TensorDictPrimer, which says what an episode begins with."
        )


def unroll_until(env: RowEnv, wanted: Run) -> TensorDict:
    """Take steps until any row or all rows are done, as `rollout` does; gives those that were taken.

    The program records the state in any case, some steps at a time.
    """
    td, steps = wanted.root, wanted.steps
    free = free_entries(env, td)
    actor, hidden = actor_for(env, wanted.policy, td, free), unrecorded(env, wanted.record_state)
    key, capacity = env._next_key_in(), min(_CHUNK, 1 << (steps - 1).bit_length())
    counted = torch.arange(env._size(td.numel()), device="cpu") < td.numel()
    pieces: list[TensorDict] = []
    made = 0
    while True:
        # What is lent is kept until the host has read how many steps were made.
        begin, constants = _begin(env, td, actor), env._constants(td.batch_size)
        rows = to_jit(counted.to(td.device))
        run, last, stopped = env._programs.until(
            capacity,
            actor.function,
            wanted.stop,
            wanted.check_every,
            begin,
            actor.params,
            key,
            number_to_jit(made, td.device),
            constants,
            rows,
            number_to_jit(min(capacity, steps - made), td.device),
        )
        last, count = env._kept(last), int(stopped.made)
        others = _others(free_entries(env, td), actor, run)
        piece = _recorded(env, td, capacity, run, actor, others).exclude(*hidden)[..., :count]
        env._require_choices(piece)
        if pieces:
            _repeat(td["done"].squeeze(-1), pieces[-1], piece, env.reward_keys)
        pieces.append(piece)
        made += count
        if made == steps or bool(stopped.ended):
            return pieces[0] if len(pieces) == 1 else cast(TensorDict, torch.cat(pieces, td.ndim))
        td = _following(env, td, last, actor, others)


def _repeat(done: torch.Tensor, before: TensorDict, piece: TensorDict, paid: list[Key]) -> None:
    """Let rows that were done before a piece repeat the last transition that they made, unpaid."""
    if bool(done.any()):
        last = before[done][:, -1:]
        for key in paid:
            last["next", *as_path(key)].zero_()
        piece[done] = last.expand(last.shape[0], piece.shape[-1])


def _begin(env: RowEnv, td: TensorDictBase, actor: Actor) -> tuple[Any, Any, Any, Any]:
    """Read what a program starts from."""
    carried = {path: env._rows_in(td, td.get(as_key(path)), copy=True) for path in actor.carries}
    remembered = {path: carried.pop(path) for path in actor.remembers}
    begin = env._state_in(td), env._root_in(td) | carried, env._flags_in(td), remembered
    return adopted(to_jit(begin, copy=False, detach=True))


def _following(
    env: RowEnv,
    td: TensorDictBase,
    last: dict[str, Any],
    actor: Actor,
    others: Mapping[Path, torch.Tensor],
) -> TensorDict:
    """Name the root after the last step of a run that began at ``td``."""
    following = env._out(td.batch_size, to_torch(last))
    for path in actor.carries:
        key = as_key(path)
        following.set(key, following.get(key).to(td.get(key).dtype))
    for path, value in others.items():
        following.set(as_key(path), value)
    return following


def _others(
    free: Mapping[Path, torch.Tensor], actor: Actor, run: dict[str, Any]
) -> Mapping[Path, torch.Tensor]:
    """List the tensors of a root that nobody reads or writes."""
    if not free:
        return free
    used = {*actor.carries, *_acted(run)}
    return {path: leaf for path, leaf in free.items() if path not in used}


def _recorded(
    env: RowEnv,
    td: TensorDictBase,
    steps: int,
    run: dict[str, Any],
    actor: Actor,
    others: Mapping[Path, torch.Tensor],
) -> TensorDict:
    """Name time-major arrays and put time last: views, no copies."""
    shape, run = td.batch_size, to_torch(run)
    rows, is_flat = shape.numel(), len(shape) == 1
    for side in ("root", "next"):
        run[side]["flags"] = run[side]["flags"].unsqueeze(-1)

    def placed(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.shape[1] != rows:
            leaf = leaf[:, :rows]
        if is_flat:
            return leaf.transpose(0, 1)
        return leaf.reshape(steps, *shape, *leaf.shape[2:]).movedim(0, len(shape))

    root, following = (
        {path: placed(leaf) for path, leaf in env._by_path(run[side]).items()}
        for side in ("root", "next")
    )
    for path in actor.carries:
        root[path] = root[path].to(td.get(as_key(path)).dtype)
        if ("next", *path) in actor.writes:
            following[path] = following[path].to(actor.writes["next", *path])
        else:
            del following[path]
    for path, value in others.items():
        event = value.shape[len(shape) :]
        root[path] = value.unsqueeze(len(shape)).expand(*shape, steps, *event).clone()
    action_specs = PolicySpecs.of(env).action_specs
    for path, leaf in _acted(run).items():
        value = placed(leaf)
        if path in actor.writes:
            value = value.to(actor.writes[path])
        elif path in action_specs:
            value = encoded(value, action_specs[path])
        side, name = (following, path[1:]) if path[0] == "next" else (root, path)
        side[name] = value
    entries = root | {("next", *path): leaf for path, leaf in following.items()}
    data = tensordict_of(entries, torch.Size((*shape, steps)), env.device)
    data.names = [*[None] * len(shape), "time"]
    return data


def _acted(run: dict[str, Any]) -> Mapping[Path, torch.Tensor]:
    """List what a policy gave: all that it wrote, or else the action in the env's own encoding."""
    action = run["action"]
    if action is None:
        return run["written"]
    if not isinstance(action, dict):
        return {("action",): action}
    return {("action", name): leaf for name, leaf in action.items()}
