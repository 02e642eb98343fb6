"""What an env returned from `_reset` or `_step`: refused, completed, or put beside rows that stood still.

`OutputHolder` decides what an output must be before anybody else sees it: a new TensorDict of the
right batch size, on the env's device, with every reward and done flag in the shape of its spec. What
flags imply each other is asked of `rules`. It does not know who calls, nor when.

Conventions
    out      what `_reset` or `_step` returned.
    leaf     path, kind ("observation", "reward" or "done") and spec of one output.
    skipped  ``next`` of rows that were not stepped.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from envkit import rules
from envkit.data.paths import Key, as_key, leaf_paths
from envkit.data.transition import OutputLeaf, empty_like, leaves, skipped_next
from envkit.env.key_lists import KeyLists
from envkit.errors import (
    BatchSizeError,
    DoneError,
    OutputShapeError,
    ResetOutputError,
    SpecTypeError,
)

__all__ = ["OutputHolder", "OutputLeaf"]


class OutputHolder(KeyLists):
    """The part of an environment that looks at what the simulator gave."""

    @property
    def _output_leaves(self) -> list[OutputLeaf]:
        def build():
            return [
                (path, kind, spec[as_key(path)])
                for kind in ("observation", "reward", "done")
                for spec in [getattr(self, f"full_{kind}_spec")]
                for path in leaf_paths(spec)
            ]

        return self._cached("output_leaves", build)

    # --------------------------------------------------------------------------- what is returned

    def _checked(self, out: Any, given: TensorDictBase | None, method: str) -> TensorDictBase:
        """Refuse what is no output, and deliver the rest to the env's device.

        Args:
            out: what ``method`` returned for ``given`` (None: it was called without data).

        Raises:
            ResetOutputError: it is no TensorDict, or the input itself.
            BatchSizeError: it has another batch size than the input, or than the env.
        """
        name = f"{type(self).__name__}.{method}"
        if not isinstance(out, TensorDictBase):
            raise ResetOutputError(
                f"{name} returned {type(out).__name__}, but must return a new TensorDict with the "
                "outputs. Build one: TensorDict({...}, batch_size=env.batch_size)."
            )
        if out is given:
            raise ResetOutputError(
                f"{name} returned its input. Build a new TensorDict with the outputs; the input "
                "holds the caller's data."
            )
        table = self._table
        expected = table.batch_size if given is None else given.batch_size
        if out.batch_size != expected:
            raise BatchSizeError(
                f"{name} returned a TensorDict of batch size {tuple(out.batch_size)}, but "
                f"{tuple(expected)} was expected: that of "
                f"{'the env' if given is None else 'its input'}. Pass it to the TensorDict: "
                f"TensorDict({{...}}, batch_size={list(expected)})."
            )
        if table.device is not None and out.device != table.device:
            return out.to(table.device)
        return out

    def _check_dtypes(self, out: TensorDictBase, method: str) -> None:
        for path, _, spec in self._output_leaves:
            value = out.get(as_key(path), None)
            dtype = getattr(value, "dtype", None)
            if value is not None and spec.dtype is not None and dtype != spec.dtype:
                raise SpecTypeError(
                    f"{as_key(path)!r} has dtype {dtype}, but its spec says {spec.dtype}. "
                    f"Cast it in {method}, or declare the dtype it has."
                )

    # -------------------------------------------------------------------------------- completion

    def _complete(self, out: TensorDictBase, *, rewards: bool) -> None:
        """Bring rewards and done flags to their shapes and fill what is missing, in place.

        Raises:
            OutputShapeError: a reward or flag has not one value for each element of its spec.
            DoneError: flags are not boolean, or cannot be inferred from those given.
        """
        batch, lacks_flags, table = out.batch_size, False, self._table
        for key, is_reward, event, spec in table.scalars:
            if is_reward and not rewards:
                continue
            value = out.get(key, None)
            if value is None:
                if is_reward:
                    out.set(key, self._zeros(spec, out))
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
        given = {}
        for name in names:
            value = out.get(as_key((*level, name)), None)
            if value is not None:
                given[name] = value
        if len(given) == len(names):
            return
        for name, value in rules.complete_done(given, names, level).items():
            if value is None:
                value = self._zeros(self.full_done_spec[as_key((*level, name))], out)
            out.set(as_key((*level, name)), value)

    def _zeros(self, spec: Any, td: TensorDictBase) -> Any:
        """Make zeros of one output leaf for the batch of ``td``."""
        return spec[(0,) * len(self.batch_size)].zero(td.batch_size)

    # ------------------------------------------------------------------- rows that are not stepped

    def _skipped_next(self, td: TensorDictBase) -> TensorDictBase:
        """Build ``next`` of rows that are not stepped: their root values where known, else zeros."""
        return self._skipped(td, self._output_leaves, len(self.batch_size))

    def _skipped(
        self, td: TensorDictBase, outputs: list[OutputLeaf], batch_dims: int
    ) -> TensorDict:
        """The same for data whose outputs have specs with ``batch_dims`` batch axes."""
        states = self._table.states
        return skipped_next(td, outputs, batch_dims=batch_dims, state_keys=states)

    def _scatter(
        self, mask: torch.Tensor, stepped: TensorDictBase, skipped: TensorDictBase
    ) -> TensorDictBase:
        """Put the outputs of the rows that ``mask`` selects among those that were skipped."""
        following = empty_like(skipped)
        for path, value in leaves(stepped):
            key = as_key(path)
            kept = skipped.get(key, None)
            if kept is None:
                kept = torch.zeros(
                    *mask.shape, *value.shape[1:], dtype=value.dtype, device=value.device
                )
            full = kept.clone()
            full[mask] = value
            following.set(key, full)
        return following

    def _rows_done(self, following: TensorDictBase) -> torch.Tensor:
        """Say which rows have ended, shape ``(*batch,)``: by the root's flags when it has some."""
        batch_ndim = len(following.batch_size)
        levels = [()] if () in self.done_levels else list(self.done_levels)
        ended = None
        for level in levels:
            flags = self._level_done(following, level)
            flags = flags.flatten(batch_ndim).any(-1) if flags.ndim > batch_ndim else flags
            ended = flags if ended is None else ended & flags
        assert ended is not None  # every env has a done level
        return ended

    def _level_done(self, following: TensorDictBase, level: tuple[str, ...]) -> torch.Tensor:
        """Give the flags of a level: ``done``, or all of them where that has another name."""
        names = self.done_levels[level]
        flags = [
            following.get(as_key((*level, name)))
            for name in (("done",) if "done" in names else names)
        ]
        return flags[0] if len(flags) == 1 else torch.stack(flags).any(0)


def _reshaped(value: torch.Tensor, shape: tuple[int, ...], key: Key) -> torch.Tensor:
    if value.numel() != torch.Size(shape).numel():
        raise OutputShapeError(
            f"{key!r} has shape {tuple(value.shape)}, but its spec asks for {shape}. "
            "Return one value for each environment of the batch."
        )
    return value.reshape(shape)
