"""Read the specs once for all steps, and by them check what an env gives, and complete it.

A `SpecTable` says what a step asks of the specs: batch, device, keys, shapes. An env whose specs are locked makes one
at the first use and drops it when they are unlocked or replaced; one whose specs are open makes it again each time.
`OutputChecks` decides what an output must be before it is passed on. It is a new TensorDict of the
right batch size, on the env's device, with every reward and done flag in the shape of its spec. Which flags imply each
other is asked of `rules`. Neither knows an env.

Conventions
    out      what `_reset` or `_step` returned.
    leaf     path, kind ("observation", "reward" or "done") and spec of one output.
    scalar   a reward or a done flag.
    event    shape of a leaf beyond the batch.
    level    a node of the data tree that owns done leaves, named by its path: () is the root.
    skipped  ``next`` of rows that were not stepped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase

from envkit import rules
from envkit.data.paths import Key, Path, as_key, as_path, leaf_paths
from envkit.data.transition import (
    Carrying,
    OutputLeaf,
    drop_private,
    skipped_next,
)
from envkit.errors import (
    BatchSizeError,
    DoneError,
    OutputShapeError,
    ResetOutputError,
    SpecTypeError,
)
from envkit.process_wide import warn
from envkit.specs import Composite, exclusive_paths
from envkit.specs.annotations import reading_waits


class Scalar(NamedTuple):
    """A reward or a done flag that a step gives."""

    key: Key
    is_reward: bool
    event: tuple[int, ...]
    spec: Any


@dataclass(frozen=True)
class SpecTable:
    """The specs of an env as a step reads them.

    Attributes:
        batch_size: of the specs.
        device: where outputs are delivered; None sets no constraint.
        batch_locked: data must have that batch size.
        inputs: leaf keys of actions and states, but for those that a step writes itself.
        outputs: all that a step gives.
        shown: leaf keys of what a root shows: observations and done flags.
        partial: those of them that only some members of a stack have; they are no outputs.
        scalars: rewards and done flags.
        levels: names of the done leaves of each level, by depth.
        flags: level and key of each done leaf, in this order.
        rewards, actions, states: paths of these kinds; actions, too, what a step records of them.
        declared: paths of all kinds.
        recorded: inputs that a step writes itself, into the root.
        carrying: which entries of a step are at the next root.
    """

    batch_size: torch.Size
    device: torch.device | None
    batch_locked: bool
    inputs: tuple[Key, ...]
    outputs: tuple[OutputLeaf, ...]
    shown: tuple[Key, ...]
    partial: tuple[Key, ...]
    scalars: tuple[Scalar, ...]
    levels: dict[Path, list[str]]
    flags: tuple[tuple[Path, Key], ...]
    rewards: frozenset[Path]
    actions: frozenset[Path]
    states: frozenset[Path]
    declared: frozenset[Path]
    recorded: tuple[Key, ...]
    carrying: Carrying

    @classmethod
    def of(cls, env: Any) -> SpecTable:
        """Read the specs of an env."""
        batch_size = env.batch_size
        specs: dict[str, Composite] = {
            kind: getattr(env, f"full_{kind}_spec")
            for kind in ("action", "state", "observation", "reward", "done")
        }
        paths = {kind: leaf_paths(spec) for kind, spec in specs.items()}
        recorded = frozenset(map(as_path, env._facts.recorded_inputs))
        rewards, states = frozenset(paths["reward"]), frozenset(paths["state"])
        actions = frozenset(paths["action"]) | recorded
        outputs = tuple(
            (path, kind, specs[kind][as_key(path)])
            for kind in ("observation", "reward", "done")
            for path in paths[kind]
        )
        partial = sorted(exclusive_paths(specs["observation"]))
        levels = levels_of(paths["done"])
        scalars = (
            Scalar(as_key(path), kind == "reward", tuple(leaf.shape[len(batch_size) :]), leaf)
            for path, kind, leaf in outputs
            if kind != "observation"
        )
        return cls(
            batch_size=batch_size,
            device=env.device,
            batch_locked=env.batch_locked,
            inputs=tuple(
                as_key(path)
                for kind in ("action", "state")
                for path in paths[kind]
                if path not in recorded
            ),
            outputs=outputs,
            shown=tuple(
                as_key(path)
                for path in (*(path for path, kind, _ in outputs if kind != "reward"), *partial)
            ),
            partial=tuple(map(as_key, partial)),
            scalars=tuple(scalars),
            levels=levels,
            flags=tuple(
                (level, as_key((*level, name))) for level, names in levels.items() for name in names
            ),
            rewards=rewards,
            actions=actions,
            states=states,
            declared=frozenset(path for of_kind in paths.values() for path in of_kind),
            recorded=tuple(env._facts.recorded_inputs),
            carrying=Carrying(
                keeps_empty_nodes=True,
                reward_keys=rewards,
                action_keys=actions.difference(paths["observation"]),
                state_keys=states,
            ),
        )


def levels_of(flags: list[Path]) -> dict[Path, list[str]]:
    """List the done leaves of each level, by the level's path, by depth."""
    levels: dict[Path, list[str]] = {}
    for path in flags:
        levels.setdefault(path[:-1], []).append(path[-1])
    return dict(sorted(levels.items(), key=lambda item: (len(item[0]), ".".join(item[0]))))


@dataclass(frozen=True)
class OutputChecks:
    """Requirements on the outputs of one env.

    Args:
        owner: name of its class, for messages.
        table: its specs.
    """

    owner: str
    table: SpecTable

    # --------------------------------------------------------------------------- what is returned

    def delivered(self, out: Any, td: TensorDictBase | None, method: str) -> TensorDictBase:
        """Refuse what is no output, and deliver the rest to the env's device.

        Args:
            out: what ``method`` returned for ``td`` (None: it was called without data).

        Raises:
            ResetOutputError: it is no TensorDict, or the input itself.
            BatchSizeError: it has another batch size than the input, or than the env.
        """
        name = f"{self.owner}.{method}"
        if not isinstance(out, TensorDictBase):
            raise ResetOutputError(
                f"{name} returned {type(out).__name__}, but must return a new TensorDict with the "
                "outputs. Build one: TensorDict({...}, batch_size=env.batch_size)."
            )
        if out is td:
            raise ResetOutputError(
                f"{name} returned its input. Build a new TensorDict with the outputs; the input "
                "holds the caller's data."
            )
        table = self.table
        expected = table.batch_size if td is None else td.batch_size
        if out.batch_size != expected:
            raise BatchSizeError(
                f"{name} returned a TensorDict of batch size {tuple(out.batch_size)}, but "
                f"{tuple(expected)} was expected: that of "
                f"{'the env' if td is None else 'its input'}. Pass it to the TensorDict: "
                f"TensorDict({{...}}, batch_size={list(expected)})."
            )
        if table.device is not None and out.device != table.device:
            return out.to(table.device)
        return out

    def require_dtypes(self, out: TensorDictBase, method: str) -> None:
        """Compare the dtypes of outputs with their specs.

        Raises:
            SpecTypeError: one differs.
        """
        for path, _, spec in self.table.outputs:
            value = out.get(as_key(path), None)
            dtype = getattr(value, "dtype", None)
            if value is not None and spec.dtype is not None and dtype != spec.dtype:
                raise SpecTypeError(
                    f"{as_key(path)!r} has dtype {dtype}, but its spec says {spec.dtype}. "
                    f"Cast it in {method}, or declare the dtype it has."
                )

    # ----------------------------------------------------------------------------------- a reset

    def kept_root(self, td: TensorDictBase) -> TensorDictBase:
        """Complete a root, in place, where nothing is reset: what it lacks becomes zeros, all else stays."""
        held = set(td.keys(True))
        for path, kind, spec in self.table.outputs:
            if kind != "reward" and as_key(path) not in held:
                td.set(as_key(path), self.zeros(spec, td))
        return drop_private(td, rules.RESET)

    def refuse_done(
        self,
        fresh: TensorDictBase,
        td: TensorDictBase | None,
        masks: dict[tuple[str, ...], torch.Tensor],
        env: object,
    ) -> None:
        """Check that no episode begins with its end; a flag of what was not reset stays, in ``td`` too.

        Args:
            fresh: what the reset gave.
            td: what it was given.
            masks: what was reset, by level; none for everything.
            env: whose reset it was, for the message.

        Raises:
            DoneError: a flag is set where something was reset.
        """
        leaves = [fresh.get(key) for _, key in self.table.flags]
        # a GPU is asked once for all flags; elsewhere it costs less to ask for one after the other
        if reading_waits(leaves[0]) and not bool(
            torch.stack([leaf.any() for leaf in leaves]).any()
        ):
            return
        for (level, key), flags in zip(self.table.flags, leaves, strict=True):
            if not bool(flags.any()):
                continue
            governing = rules.governing_level(level, masks)
            if governing is None:
                selected = torch.ones_like(flags)
            else:
                mask = rules.reduce_mask(masks[governing], flags.shape, len(fresh.batch_size))
                selected = mask.reshape((*mask.shape, *(1,) * (flags.ndim - mask.ndim)))
            if bool((flags & selected).any()):
                raise DoneError(
                    f"{key!r} is set right after a reset of {env}. An episode must have at "
                    "least one step: fix _reset, or pass allow_done_after_reset=True."
                )
            if td is not None and td.get(key, None) is None:
                warn(
                    f"{key!r} is set after a partial reset where nothing was reset and the "
                    "input does not hold it; the flag is kept. Pass the current data.",
                )
                td.set(key, flags)

    # -------------------------------------------------------------------------------- completion

    def complete(self, out: TensorDictBase, *, rewards: bool) -> None:
        """Complete outputs in place: reshape rewards and done flags, and fill what is missing.

        Without ``rewards`` it is a root, which holds none but those that are states: others are removed.

        Raises:
            OutputShapeError: a reward or flag has not one value for each element of its spec.
            DoneError: flags are not boolean, or cannot be inferred from those given.
        """
        batch, lacks_flags, table = out.batch_size, False, self.table
        for key, is_reward, event, spec in table.scalars:
            value = out.get(key, None)
            if is_reward and not rewards:
                if value is not None and as_path(key) not in table.states:
                    out.pop(key)
                continue
            if value is None:
                if is_reward:
                    out.set(key, self.zeros(spec, out))
                lacks_flags |= not is_reward
                continue
            if not is_reward and value.dtype != torch.bool:
                raise DoneError(
                    f"{key!r} has dtype {value.dtype}, but done flags are boolean. Return a "
                    "comparison, or value.bool()."
                )
            if value.shape != (shape := (*batch, *event)):
                out.set(key, _reshaped(value, shape, key))
        if lacks_flags:
            for level, names in table.levels.items():
                self._complete_done(out, level, names)

    def _complete_done(self, out: TensorDictBase, level: tuple[str, ...], names: list[str]) -> None:
        returned = {}
        for name in names:
            value = out.get(as_key((*level, name)), None)
            if value is not None:
                returned[name] = value
        for name, value in rules.complete_done(returned, names, level).items():
            if value is None:
                value = self.zeros(self._flag(as_key((*level, name))), out)
            out.set(as_key((*level, name)), value)

    def _flag(self, key: Key) -> Any:
        """Return the spec of a done flag."""
        return next(scalar.spec for scalar in self.table.scalars if scalar.key == key)

    def zeros(self, spec: Any, td: TensorDictBase) -> Any:
        """Make zeros of one output leaf for the batch of ``td``."""
        return spec[(0,) * len(self.table.batch_size)].zero(td.batch_size)

    # ------------------------------------------------------------------- rows that are not stepped

    def skipped_next(
        self,
        td: TensorDictBase,
        outputs: Sequence[OutputLeaf] | None = None,
        batch_dims: int | None = None,
    ) -> TensorDict:
        """Build ``next`` of rows that are not stepped: their root values where known, else zeros.

        Args:
            td: their root.
            outputs: what a step gives, where that is not what the specs say.
            batch_dims: leading axes of these that are batch axes.
        """
        table = self.table
        return skipped_next(
            td,
            table.outputs if outputs is None else outputs,
            batch_dims=len(table.batch_size) if batch_dims is None else batch_dims,
            state_keys=table.states,
            partial_keys=table.partial,
        )

    def rows_done(self, following: TensorDictBase) -> torch.Tensor:
        """Return which rows have ended, shape ``(*batch,)``: by the root's flags when it has some."""
        batch_ndim = len(following.batch_size)
        levels = [()] if () in self.table.levels else list(self.table.levels)
        ended = None
        for level in levels:
            flags = self._level_done(following, level)
            flags = flags.flatten(batch_ndim).any(-1) if flags.ndim > batch_ndim else flags
            ended = flags if ended is None else ended & flags
        assert ended is not None  # every env has a done level
        return ended

    def _level_done(self, following: TensorDictBase, level: tuple[str, ...]) -> torch.Tensor:
        """Return where any flag of a level is set: an env may say why an episode ends, and not that it does."""
        flags = [following.get(as_key((*level, name))) for name in self.table.levels[level]]
        return reduce(torch.logical_or, flags)


def _reshaped(value: torch.Tensor, shape: tuple[int, ...], key: Key) -> torch.Tensor:
    if value.numel() != torch.Size(shape).numel():
        raise OutputShapeError(
            f"{key!r} has shape {tuple(value.shape)}, but its spec asks for {shape}. "
            "Return one value for each environment of the batch."
        )
    return value.reshape(shape)
