"""An environment behind transforms.

`TransformedEnv` decides when each hook of its transforms runs, and which rows they see. What masks
select and what survives is asked of `rules` through `transition`, as in `EnvBase`. It does not know
any transform.

Conventions
    inner    the side of the base env, after the inverse pass; outer: the user's side.
    hidden   outer observations that the base env does not read. A transform may have given them
             another shape or dtype, so they are kept from the base env where it would merge them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from envkit import rules
from envkit.base import EnvBase, OutputLeaf, fake_step
from envkit.env_specs import Key, as_key, as_path, leaf_paths
from envkit.errors import MissingKeyError
from envkit.specs import Composite, StackedComposite
from envkit.transforms.base import Transform
from envkit.transforms.compose import Compose, as_transform
from envkit.transforms.wrapper import Wrapper
from envkit.transition import collect_reset_masks, leaves, merge_reset

__all__ = ["TransformedEnv"]

_OUTPUTS = ("observation", "reward", "done")
_BASE = "base_env."


@dataclass
class _Step:
    """A step on its way: what the user gave, what the base env is given, and which rows move."""

    td: TensorDictBase
    inner: TensorDictBase
    mask: torch.Tensor | None
    resets_too: bool = False


class TransformedEnv(Wrapper):
    """Wrap an environment in transforms.

    Args:
        base_env: any environment, another `TransformedEnv` too.
        transform: a `Transform`, a function ``td -> td``, or None.

    A step runs the inverse pass from the last transform to the first, the base env, and the forward
    pass from the first to the last. Specs are those of the base env seen through the transforms; they
    are read once, and again after the list of transforms has changed. Attributes this class does not
    have are those of the base env. The caller's data is never changed by the inverse pass.

    Raises:
        TransformOwnerError: (an AttributeError) the transform belongs to another env already.
    """

    _transform: Transform
    _sent: _Step

    def __init__(self, base_env: EnvBase, transform: Any = None):
        super().__init__(base_env)
        self._set_transform(Compose() if transform is None else transform)

    def _after_init(self, spec_locked: bool) -> None:
        self._spec_locked = spec_locked

    # ---------------------------------------------------------------------------------- transforms

    @property
    def transform(self) -> Transform:
        """The transform, or a `Compose` of several; assignable. ``transform[i]`` is one of them."""
        return self._transform

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "transform":  # nn.Module would register it and pass the property by
            self._set_transform(value)
        else:
            super().__setattr__(name, value)

    def _set_transform(self, given: Any) -> None:
        transform = as_transform(given)
        transform._belong_to(self)
        previous = self._modules.get("_transform")
        if isinstance(previous, Transform):
            previous.reset_parent()
        self._transform = transform
        self._changed()

    def append_transform(self, transform: Any) -> TransformedEnv:
        """Add a transform (or a function ``td -> td``) at the user's end, in place; returns self."""
        self._composed().append(transform)
        return self

    def insert_transform(self, index: int, transform: Any) -> TransformedEnv:
        """Add a transform before the one at ``index``, in place; returns self."""
        self._composed().insert(index, transform)
        return self

    def _composed(self) -> Compose:
        transform = self._transform
        if not isinstance(transform, Compose):
            transform.reset_parent()
            del self._transform
            self._set_transform(Compose(transform))
        assert isinstance(self._transform, Compose)
        return self._transform

    @property
    def container(self) -> TransformedEnv:
        """This env: where the search of a transform for its env ends."""
        return self

    def _env_before(self, transform: Transform) -> EnvBase:
        """Give the env as ``transform``, one of this env's, sees it."""

        def build() -> EnvBase:
            own, before = transform.flat(), []
            for leaf in self._transform.flat():
                if any(leaf is other for other in own):
                    break
                before.append(leaf)
            if not before:
                return self.base_env
            return TransformedEnv(self.base_env, Compose(*(leaf.clone() for leaf in before)))

        return self._cached(f"env_before_{id(transform)}", build)

    def _changed(self) -> None:
        """Forget what was read from the specs; it is read again at the next use."""
        self._input_spec = self._output_spec = None
        self.empty_cache()

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.pop("_key_cache", None)
        state.pop("_sent", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._transform._belong_to(self)

    # --------------------------------------------------------------------------------------- specs

    @property
    def input_spec(self) -> Composite:
        """State and action specs, seen through the transforms."""
        self._read_specs()
        return super().input_spec

    @property
    def output_spec(self) -> Composite:
        """Reward, observation and done specs, seen through the transforms."""
        self._read_specs()
        return super().output_spec

    def _read_specs(self) -> None:
        if self._output_spec is not None:
            return
        inputs, outputs = self.base_env.input_spec.clone(), self.base_env.output_spec.clone()
        if self.base_env.device is not None:
            self._transform.to(self.base_env.device)
        for transform in self._transform.flat():
            inputs = transform.transform_input_spec(inputs)
            outputs = transform.transform_output_spec(outputs)
            _require_declared(transform, inputs, outputs)
        self._auto_done_twins = self.base_env._auto_done_twins
        self._input_spec, self._output_spec = inputs, outputs
        self.empty_cache()
        self._check_names_differ()
        if self._spec_locked:
            inputs.lock_()
            outputs.lock_()

    def fake_tensordict(self) -> TensorDict | TensorDictBase:  # type: ignore[override]
        """Give zeros in exactly the layout of one rollout step, batch size ``batch_size``."""
        inputs, outputs = self.input_spec, self.output_spec
        if not any(isinstance(spec, StackedComposite) for spec in (inputs, outputs)):
            return super().fake_tensordict()
        rows = range(self.batch_size[0])
        parts = [fake_step(inputs[row], outputs[row]) for row in rows]
        return LazyStackedTensorDict(*parts, stack_dim=0)

    def add_truncated_keys(self) -> TransformedEnv:
        """Declare ``truncated`` beside every ``done`` of the base env; returns self."""
        self.base_env.add_truncated_keys()
        self._changed()
        return self

    @property
    def batch_size(self) -> torch.Size:
        """Batch size of the base env, seen through the transforms; read-only."""
        return self._cached(
            "batch_size", lambda: self._transform.transform_env_batch_size(self.base_env.batch_size)
        )

    @batch_size.setter
    def batch_size(self, value: Any) -> None:
        raise RuntimeError(
            f"the batch size of a TransformedEnv cannot be assigned (it is {tuple(self.batch_size)}): "
            "it is that of the base env. Build the base env with another one."
        )

    @property
    def device(self) -> torch.device | None:
        """Device of the base env, seen through the transforms; moved by `to`."""
        return self._cached(
            "device", lambda: self._transform.transform_env_device(self.base_env.device)
        )

    @device.setter
    def device(self, value: Any) -> None:
        raise RuntimeError(
            f"the device of an env cannot be assigned (it is {self.device}). "
            "Use env.to(device), which moves specs, parameters and future outputs."
        )

    # -------------------------------------------------------------------------------- seed and place

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Seed the base env, the transforms and the random actions; see `EnvBase.set_seed`."""
        self._seed_actions(seed)
        self._transform._set_seed(seed)
        return self.base_env.set_seed(seed, static_seed=static_seed)

    def _set_seed(self, seed: int | None) -> None:
        self.set_seed(seed)

    def to(self, *args: Any, **kwargs: Any) -> TransformedEnv:
        """Move the base env and the transforms; returns self."""
        self.base_env.to(*args, **kwargs)
        self._transform.to(*args, **kwargs)
        self._changed()
        return self

    # --------------------------------------------------------------------------------------- reset

    def _check_batch(self, td: TensorDictBase) -> None:
        if self.base_env.is_closed:
            self.base_env._check_batch(td)  # an env that starts at its first use starts here
        if self.batch_locked and td.batch_size != self.batch_size:
            super()._check_batch(td)

    def _reset(self, td: TensorDictBase | None, **kwargs: Any) -> TensorDictBase:
        given = None if td is None else td.copy()
        if given is None and self._has_preprocess:
            given = TensorDict({}, batch_size=self.batch_size, device=self.device)
        if given is not None:
            given = self._transform._reset_env_preprocess(given)
            given = given.exclude("next", *self._hidden_keys)
        begun = self._transform._already_begun(td)
        if begun is None or given is None:
            root = self.base_env.reset(given, **kwargs)
        else:
            root = self._reset_the_rest(given, *begun, **kwargs)
        return self._shown_root(root.empty() if td is None else td, root)

    def _reset_the_rest(
        self, given: TensorDictBase, rows: torch.Tensor, begun: TensorDictBase, **kwargs: Any
    ) -> TensorDictBase:
        """Reset the base env where a mask asks for it and the episode has not begun by itself."""
        masks = {key: given.get(key, None) for key in self.base_env.reset_keys}
        rest = {
            key: rules.choose(rows, torch.zeros_like(mask), mask)
            for key, mask in masks.items()
            if mask is not None
        }
        if not any(bool(mask.any()) for mask in rest.values()):
            return begun
        given.update(rest)
        root = self.base_env.reset(given, **kwargs)
        for path, value in leaves(begun):
            key = as_key(path)
            root.set(key, rules.choose(rows, value, root.get(key)))
        return root

    def _shown_root(self, td: TensorDictBase, root: TensorDictBase) -> TensorDictBase:
        """Show what the base env says after a reset, which was asked for with ``td``."""
        keys = [*self.base_env.observation_keys, *self.base_env.done_keys]
        return self._transform._reset(td, root.select(*keys, strict=False))

    @property
    def _has_preprocess(self) -> bool:
        return any(
            type(transform)._reset_env_preprocess is not Transform._reset_env_preprocess
            for transform in self._transform.flat()
        )

    @property
    def _hidden_keys(self) -> list[Key]:
        def build() -> list[Key]:
            base = self.base_env
            read = {as_path(key) for key in (*base.state_keys, *base.action_keys)}
            return [key for key in base.observation_keys if as_path(key) not in read]

        return self._cached("hidden_keys", build)

    # ---------------------------------------------------------------------------------------- step

    def _entering(self, td: TensorDictBase) -> _Step:
        """Run the inverse pass on a copy of a step's input and read the mask it leaves."""
        self._check_batch(td)
        inner = self._transform._inv_call(td.exclude("next").copy())
        mask = inner.get(rules.STEP, None)
        if mask is not None:
            mask = rules.step_mask(mask, inner.batch_size)
            inner = inner.exclude(rules.STEP, inplace=True)
            mask = None if bool(mask.all()) else mask
        return _Step(td, inner, mask)

    def _step_send(self, td: TensorDictBase) -> None:
        self._send(self._entering(td))

    def _send(self, step: _Step) -> None:
        base, self._sent = self.base_env, step
        if step.mask is None:
            base._step_send(step.inner)
        elif bool(step.mask.any()):
            base._step_send(step.inner.exclude(*self._hidden_keys).set(rules.STEP, step.mask))

    def _step_recv(self) -> TensorDictBase:
        step = self._sent
        following = self._following(step)
        return self._attach_next(step.td.exclude(rules.STEP, inplace=True), following)

    def _following(self, step: _Step) -> TensorDictBase:
        """Receive what the base env made of a step, and show it."""
        if step.mask is None:
            return self._shown_next(step.inner, self.base_env._step_recv())
        skipped = self._skipped_next(step.td)
        if not bool(step.mask.any()):
            return skipped
        done = self.base_env._step_recv()
        if not self.batch_locked:
            rows = step.mask
            stepped = self._shown_next(step.inner[rows], done[rows])  # type: ignore[arg-type]
            return self._scatter(rows, stepped, skipped)
        stepped = self._shown_next(step.inner.set(rules.STEP, step.mask), done)
        return _kept_where_skipped(step.mask, stepped, skipped)

    def _skipped_next(self, td: TensorDictBase) -> TensorDictBase:
        if not isinstance(td, LazyStackedTensorDict) or td.stack_dim:
            return super()._skipped_next(td)
        rows = [
            self._skipped(part, own, self.batch_dims - 1)
            for part, own in zip(td.unbind(0), self._leaves_by_row(td.shape[0]), strict=True)
        ]
        return LazyStackedTensorDict(*rows, stack_dim=0)

    def _leaves_by_row(self, rows: int) -> list[list[OutputLeaf]]:
        """List the output leaves of each row of a batch, which may differ."""
        if not self.batch_locked:
            return [self._output_leaves] * rows

        def build() -> list[list[OutputLeaf]]:
            specs = {kind: getattr(self, f"full_{kind}_spec") for kind in _OUTPUTS}
            return [
                [
                    (path, kind, spec[row][as_key(path)])
                    for kind, spec in specs.items()
                    for path in leaf_paths(spec[row])
                ]
                for row in range(rows)
            ]

        return self._cached("leaves_by_row", build)

    def _shown_next(self, inner: TensorDictBase, done: TensorDictBase) -> TensorDictBase:
        """Show the ``next`` of a step the base env has done, which was given ``inner``."""
        following = done.get("next")
        if done is inner:
            inner = inner.exclude("next", inplace=True)
        return self._transform._step(inner, following)

    def _step_inverted(self, td: TensorDictBase) -> TensorDictBase:
        """Step with an input that has been through the inverse pass, for a transform of this env."""
        mask = td.get(rules.STEP, None)
        self._send(_Step(td, td.exclude("next", rules.STEP).copy(), mask))
        return self._step_recv()

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        raise NotImplementedError("a TransformedEnv steps through _step_send and _step_recv.")

    # ----------------------------------------------------------------------------- step, then reset

    def _advance_send(self, td: TensorDictBase) -> None:
        step = self._entering(td)
        free = step.mask is None and td.get("next", None) is None
        step.resets_too = free and all(leaf.only_adds_done for leaf in self._transform.flat())
        if step.resets_too:
            self._sent = step
            self.base_env._advance_send(step.inner)
        else:
            self._send(step)

    def _advance_recv(self) -> tuple[TensorDictBase, TensorDictBase]:
        step = self._sent
        if not step.resets_too:
            return super()._advance_recv()
        done, root = self.base_env._advance_recv()
        ended = done.get("next").select(*self.base_env.done_keys)
        data = self._attach_next(step.td, self._shown_next(step.inner, done))
        following = self.step_mdp(data)
        if not self._reset_is_due(following):
            return data, following
        root = self._also_reset(root, following, ended)
        masks = collect_reset_masks(following, self.done_levels, self.full_done_spec)
        fresh = self._shown_root(following, root)
        self._refuse_done(fresh, following, masks)
        return data, merge_reset(following, fresh, masks, keeps_last=self.keeps_last_output)

    def _also_reset(
        self, root: TensorDictBase, asked: TensorDictBase, ended: TensorDictBase
    ) -> TensorDictBase:
        """Reset in the base env what ``asked`` wants reset and the base env has not begun anew."""
        base = self.base_env
        base.any_done(ended)
        late = {}
        for key in base.reset_keys:
            mask, begun = asked.get(key, None), ended.get(key, None)
            if mask is not None:
                late[key] = mask if begun is None else mask & ~begun
        if not any(bool(mask.any()) for mask in late.values()):
            return root
        return base.reset(root.update(late))

    # -------------------------------------------------------------------------------------- states

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Give the state of the transforms, and that of the base env, if any, under ``base_env.``."""
        state = self._transform.state_dict(*args, **kwargs)
        base = self.base_env.state_dict()
        if _holds_anything(base):
            state.update({_BASE + name: value for name, value in base.items()})
        return state

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load what `state_dict` gave; a base env the dict does not mention stays as it is."""
        base = {k.removeprefix(_BASE): v for k, v in state_dict.items() if k.startswith(_BASE)}
        if base:
            self.base_env.load_state_dict(base, *args, **kwargs)
        own = {name: value for name, value in state_dict.items() if not name.startswith(_BASE)}
        return self._transform.load_state_dict(own, *args, **kwargs)

    def __repr__(self) -> str:
        return f"TransformedEnv(\n    env={self.base_env!r},\n    transform={self._transform!r})"


def _kept_where_skipped(
    mask: torch.Tensor, stepped: TensorDictBase, skipped: TensorDictBase
) -> TensorDictBase:
    """Take ``stepped`` where ``mask`` is set and ``skipped`` elsewhere; writes to ``stepped``."""
    if isinstance(stepped, LazyStackedTensorDict):
        parts = zip(mask, stepped.unbind(0), skipped.unbind(0), strict=True)
        return LazyStackedTensorDict(*(_kept_where_skipped(*part) for part in parts), stack_dim=0)
    for path, value in leaves(stepped):
        kept = skipped.get(as_key(path), None)
        if isinstance(value, torch.Tensor) and kept is not None:
            stepped.set(as_key(path), rules.choose(mask, value, kept))
    return stepped


def _holds_anything(state: Any) -> bool:
    return any(_holds_anything(v) if isinstance(v, dict) else True for v in state.values())


def _require_declared(transform: Transform, *specs: Composite) -> None:
    if transform.missing_tolerance:
        return
    declared = {
        as_path(key)[1:] for spec in specs for key in spec.keys(True) if len(as_path(key)) > 1
    }
    for key in transform.out_keys:
        if as_path(key) not in declared:
            raise MissingKeyError(
                f"{type(transform).__name__} writes {key!r}, but no spec declares it. Add it in "
                "transform_observation_spec (or the hook for rewards, done flags, states or "
                "actions); if it is misspelt, the entries known there are "
                f"{sorted('.'.join(path) for path in declared)}."
            )
