"""Whole runs of a stateless env: one program, or a few of one kind, and their results as TensorDicts.

This module decides what a program is given to start from, how a run is cut into programs, and how what
they recorded is named. The computation is in `programs`, how policies enter in
`policy.inputs`.

Conventions
    data     transitions of batch size (*batch, time). They lie time-major in memory, and are seen
             with time last.
    carried  entries of the root that the policy reads and the env does not show: they go through the
             programs, and those that the policy writes begin again with an episode. Other entries that
             the env does not know are repeated at every root.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envkit.data.paths import Path, as_key, as_path, tensordict_of
from envkit.env.base import EnvBase
from envkit.env.rollout import unrecorded
from envkit.env.runs import Begun, Draws, Run
from envkit.errors import PolicyError
from envkit_bridges.dlpack import adopted, number_to_jit, to_jit, to_torch
from envkit_bridges.jax.codecs import actions_by_path, encoded
from envkit_bridges.jax.engine import ProgramEngine
from envkit_bridges.jax.policy.inputs import PolicySpecs, actor_for

if TYPE_CHECKING:
    from envkit.env.policy import PolicyLike

# Most steps of a program that may stop early: what it records is laid out before it runs.
_CHUNK = 64


class Unrolling:
    """A run of one policy from a root on.

    Args:
        env: what is run; its specs say what a policy reads and writes.
        engine: its programs.
        root: where to start; what is done begins again.
        policy: None, a `JaxPolicy`, or what `compile_policy` gave.
        next_key: draws the key of the run, once the policy was accepted.

    Raises:
        PolicyError, MissingKeyError, TranslationError: the policy cannot be part of a program; see `actor_for`.
    """

    def __init__(
        self,
        env: EnvBase,
        engine: ProgramEngine,
        root: TensorDictBase,
        policy: PolicyLike,
        next_key: Callable[[], np.ndarray],
    ):
        self._env, self._engine, self._root = env, engine, root
        self._specs = PolicySpecs.of(env, engine)
        self._free = self._specs.free_entries(root)
        self._actor = actor_for(env, engine, policy, root, self._free)
        self._next_key = next_key

    def begin(self, steps: int, *, record_state: bool, draws: Draws) -> Begun:
        """Begin what `JaxEnv.unroll` documents: the program runs when this returns, and what it gives waits for it."""
        engine, actor = self._engine, self._actor
        self._refuse_leaks()
        begin = self._start()
        drawn = engine.key(draws.take(steps, self._next_key))
        lent: Any = begin, actor.params, drawn, engine.constants(self._root.batch_size)
        run, last, _ = engine.programs.unroll(steps, actor.function, record_state, *lent)

        def finish() -> tuple[TensorDict, TensorDict]:
            nonlocal lent
            engine.without_shared(last)
            data = self._recorded(run, steps)
            self._require_right(data)
            lent = None  # until torch has what was made of it
            return data, self._following(last, run)

        return finish

    def until(self, wanted: Run) -> TensorDict:
        """Take steps until any row or all rows are done, as `rollout` does; gives those that were taken.

        The program records the state in any case, some steps at a time.
        """
        engine, actor, steps = self._engine, self._actor, wanted.steps
        hidden = unrecorded(self._env, wanted.record_state)
        key, capacity = engine.key(self._next_key()), min(_CHUNK, 1 << (steps - 1).bit_length())
        rows, device = self._root.numel(), self._root.device
        counted = torch.arange(engine.size(rows), device="cpu") < rows
        pieces: list[TensorDict] = []
        taken = 0
        while True:
            # Lent memory is kept until the host has read how many steps were made.
            begin, constants = self._start(), engine.constants(self._root.batch_size)
            stepped = to_jit(counted.to(device))
            run, last, stopped = engine.programs.until(
                capacity,
                actor.function,
                wanted.stop,
                wanted.check_every,
                begin,
                actor.params,
                key,
                number_to_jit(taken, device),
                constants,
                stepped,
                number_to_jit(min(capacity, steps - taken), device),
            )
            engine.without_shared(last)
            count = int(stopped.made)
            piece = self._recorded(run, capacity).exclude(*hidden)[..., :count]
            if pieces:
                self._repeat_ended(pieces[-1], piece)
            pieces.append(piece)
            taken += count
            if taken == steps or bool(stopped.ended):
                data = pieces[0] if len(pieces) == 1 else TensorDict.cat(pieces, self._root.ndim)
                self._require_right(data)
                return data
            self._root = self._following(last, run)
            self._free = self._specs.free_entries(self._root)

    def _require_right(self, data: TensorDict) -> None:
        """Check what was chosen in a program, which went on with it."""
        if self._actor.function is None:
            self._engine.require_options(data)
        else:
            self._engine.require_actions(data)
        self._engine.require_legal(data, data.get("next"))

    def _refuse_leaks(self) -> None:
        """Refuse memory at the root that is not reset where an episode begins."""
        if keys := [as_key(path) for path in self._actor.carries if path in self._actor.writes]:
            raise PolicyError(
                f"the policy reads {keys} and writes them at the root. A reset does not change entries there that the env "
                "does not declare, so a new episode would begin with the memory of the last one. Write them under "
                "'next', or append a TensorDictPrimer, which says what an episode begins with."
            )

    def _repeat_ended(self, before: TensorDict, piece: TensorDict) -> None:
        """Replace the transitions of rows that were done before a piece by their last one, with reward 0."""
        done = self._root["done"].squeeze(-1)
        if bool(done.any()):
            last: Any = before[done][:, -1:]
            for key in self._env.reward_keys:
                last["next", *as_path(key)].zero_()
            piece[done] = last.expand(last.shape[0], piece.shape[-1])

    def _start(self) -> tuple[Any, Any, Any, Any]:
        """Read what a program starts from."""
        td, engine, actor = self._root, self._engine, self._actor
        batch = td.batch_size
        carried = {path: engine.own_rows(batch, td.get(as_key(path))) for path in actor.carries}
        remembered = {path: carried.pop(path) for path in actor.remembers}
        begin = engine.state(td), engine.root(td) | carried, engine.flags(td), remembered
        return adopted(to_jit(begin, copy=False, detach=True))

    def _following(self, last: dict[str, Any], run: dict[str, Any]) -> TensorDict:
        """Return by name the root after the last step."""
        td = self._root
        following = self._engine.named(td.batch_size, to_torch(last))
        for path in self._actor.carries:
            key = as_key(path)
            following.set(key, following.get(key).to(td.get(key).dtype))
        for path, value in self._others(run).items():
            following.set(as_key(path), value)
        return following

    def _others(self, run: dict[str, Any]) -> Mapping[Path, torch.Tensor]:
        """List the tensors of the root that are neither read nor written."""
        if not self._free:
            return self._free
        used = {*self._actor.carries, *_acted(run)}
        return {path: leaf for path, leaf in self._free.items() if path not in used}

    def _recorded(self, run: dict[str, Any], steps: int) -> TensorDict:
        """Return time-major arrays by name and put time last: views, no copies."""
        td, engine, actor, run = self._root, self._engine, self._actor, to_torch(run)
        shape = td.batch_size
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
            {path: placed(leaf) for path, leaf in engine.by_path(run[side]).items()}
            for side in ("root", "next")
        )
        for path in actor.carries:
            root[path] = root[path].to(td.get(as_key(path)).dtype)
            if ("next", *path) in actor.writes:
                following[path] = following[path].to(actor.writes["next", *path])
            else:
                del following[path]
        for path, value in self._others(run).items():
            event = value.shape[len(shape) :]
            root[path] = value.unsqueeze(len(shape)).expand(*shape, steps, *event).clone()
        for path, leaf in _acted(run).items():
            value = placed(leaf)
            if path in actor.writes:
                value = value.to(actor.writes[path])
            elif path in self._specs.action_specs:
                value = encoded(value, self._specs.action_specs[path])
            side, name = (following, path[1:]) if path[0] == "next" else (root, path)
            side[name] = value
        entries = root | {("next", *path): leaf for path, leaf in following.items()}
        data = engine.grouped(tensordict_of(entries, torch.Size((*shape, steps)), engine.device))
        engine.grouped(data.get("next"))
        data.names = [*[None] * len(shape), "time"]
        return data


def until_spread(env: EnvBase, wanted: Run) -> TensorDictBase:
    """Take steps until any row or all rows are done, over several devices, none of which waits for another.

    Runs that reset what is done draw the same for each row, and show the same until it is done. So such runs are made, and
    what comes after is left out.
    """
    capacity, draws, root = min(_CHUNK, 1 << (wanted.steps - 1).bit_length()), Draws(), wanted.root
    pieces: list[TensorDictBase] = []
    while True:
        piece = replace(wanted, root=root, steps=capacity, draws=draws)
        data, root = env._runs().begin(piece)()
        pieces.append(data)
        whole = cast(TensorDictBase, TensorDict.cat(pieces, root.ndim))
        made = min(whole.batch_size[-1], wanted.steps)
        ended = env._rows_done(whole.get("next")).flatten(0, -2)[:, :made].cummax(-1).values
        over = ended.any(0) if wanted.stop == "any" else ended.all(0)
        if bool(over[-1]) or made == wanted.steps:
            break
    count = int((~over).sum()) + bool(over[-1])
    whole = cast(TensorDictBase, whole[..., :count])
    if wanted.stop == "any":
        return whole
    # a row that was done before repeats its last transition, unpaid
    last = (~ended[:, :count]).sum(-1, keepdim=True).clamp(max=count - 1)
    steps = torch.arange(count, device=last.device)
    places = torch.minimum(steps, last).reshape(whole.batch_size)
    repeated = cast(TensorDictBase, whole.gather(root.ndim, places))
    for key in env.reward_keys:
        reward = repeated.get(("next", *as_path(key)))
        waits = (steps > last).reshape(*whole.batch_size, *(1,) * (reward.ndim - whole.ndim))
        repeated.set(("next", *as_path(key)), reward.masked_fill(waits, 0))
    return repeated


def _acted(run: dict[str, Any]) -> Mapping[Path, torch.Tensor]:
    """List what a policy gave: all that it wrote, or else the action in the env's own encoding."""
    return run["written"] if run["action"] is None else actions_by_path(run["action"])
