"""An environment behind transforms.

`TransformedEnv` holds the transforms and decides what they make of the base env's specs, device, seed
and state. How resets and steps go through them is in `stepping`. It does not know any transform.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, Unpack

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from envkit.data.arguments import as_bool, require_state_dict
from envkit.data.keywords import known_to, refuse_unknown
from envkit.data.paths import Path
from envkit.env.base import EnvBase
from envkit.env.declared import OUTPUTS, require_names
from envkit.env.drawing import fake_step
from envkit.env.facts import Facts
from envkit.env.html import EnvReport
from envkit.env.input_checks import in_functorch
from envkit.env.learning import ALL
from envkit.env.on_row import OnRow, Row
from envkit.env.options import CallOptions
from envkit.env.own_state import OWN, loading, put_back_on_failure
from envkit.env.wrapper_hints import require_env
from envkit.errors import ResumeError, SpecError
from envkit.specs import Composite, StackedComposite
from envkit.specs.annotations import Destination, EnvData
from envkit.specs.lasting import lasting
from envkit.transforms.core.compose import Compose, as_transform
from envkit.transforms.core.kept_memory import KeptMemory, kept_before
from envkit.transforms.core.spec_hooks import books_of, infos_behind, require_declared
from envkit.transforms.core.transform import Transform, TransformLike
from envkit.transforms.core.transform_stepping import TransformStepping
from envkit.transforms.core.transformed_rows import (
    TransformedCore,
    core_around_rows,
    transformed_core,
)
from envkit.transforms.core.wrapper import TransformHolder

_BASE = "base_env."
_OWN_OF_ENV = f"env.{OWN}"


class TransformedEnv(OnRow, TransformStepping):
    """Wrap an environment in transforms.

    Args:
        base_env: any environment, another `TransformedEnv` too.
        transform: a `Transform`, a function ``td -> td``, or None.
        auto_unwrap: where ``base_env`` is a plain `TransformedEnv`, take its base env, and clones of its
            transforms before ``transform``, instead of standing around it.
        device: move ``base_env`` there.
        cache_specs: False: read the specs at every use.
        **options: see `EnvBase`.

    A step runs the inverse pass from the last transform to the first, the base env, and the forward
    pass from the first to the last. Specs are those of the base env seen through the transforms; they
    are read once, and again after the list of transforms has changed. Attributes this class does not
    have are those of the base env. The caller's data is never changed by the inverse pass.

    Raises:
        TransformOwnerError: (an AttributeError) the transform belongs to another env already.
        ArgumentTypeError: ``base_env`` is no environment.
        OptionError: (a TypeError) a keyword is unknown.

    Example:
        >>> from envkit import GymEnv, RewardSum, TransformedEnv
        >>> env = TransformedEnv(GymEnv("CartPole-v1"), RewardSum())
        >>> env.rollout(3)["next", "episode_reward"].flatten()
        tensor([1., 2., 3.])
        >>> env.close()
    """

    _fast_path_bypasses = EnvBase._fast_path_bypasses | {"_reset"}
    _transform: Transform
    _stages: list[tuple[Composite, Composite]]
    """Input and output specs as each transform saw them when they were read."""
    _kept: dict[int, KeptMemory]
    """Transforms that come before others that change what is shown of memory, by their numbers; see `kept_memory`."""

    def __init__(
        self,
        base_env: EnvBase,
        transform: TransformLike | None = None,
        *,
        auto_unwrap: bool = False,
        device: Destination | None = None,
        cache_specs: bool = True,
        **options: Unpack[CallOptions],
    ):
        refuse_unknown("TransformedEnv", options, known_to(TransformedEnv) or ())
        fix = "Pass one that is built, e.g. TransformedEnv(GymEnv('Pendulum-v1'), ...)."
        require_env("base_env", base_env, fix)
        inner = []
        as_bool("auto_unwrap", auto_unwrap)
        if auto_unwrap and type(base_env) is TransformedEnv and base_env.is_spec_locked:
            inner = [leaf.clone() for leaf in base_env.transform]
            base_env = base_env.base_env
        super().__init__(base_env if device is None else base_env.to(device))
        self._hear_of_base_env()
        self.cache_specs = as_bool("cache_specs", cache_specs)
        self._declared.is_reread = not cache_specs
        self._set_transform(Compose(*inner) if inner or transform is None else transform)
        if inner and transform is not None:
            self.append_transform(transform)

    def _after_init(self, spec_locked: bool) -> None:
        self._declared.is_locked = spec_locked

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

    def _set_transform(self, transform: Any) -> None:
        transform = as_transform(transform)
        transform._belong_to(self)
        transform.eval()  # in an env dropout and the like rest, as in TorchRL; train() brings them back
        previous = self._modules.get("_transform")
        if isinstance(previous, Transform):
            previous.reset_parent()
        self._transform = transform
        self._changed()

    def append_transform(self, transform: TransformLike) -> Self:
        """Add a transform (or a function ``td -> td``) at the user's end, in place; returns self.

        Args:
            transform: a transform without an env, or a function ``td -> td``.

        Example:
            >>> from envkit import GymEnv, RewardSum, StepCounter, TransformedEnv
            >>> env = TransformedEnv(GymEnv("CartPole-v1"), RewardSum())
            >>> len(env.append_transform(StepCounter()).transform)
            2
            >>> env.close()
        """
        self._composed().append(transform)
        return self

    def insert_transform(self, index: int, transform: TransformLike) -> Self:
        """Add a transform before the one at ``index``, in place; returns self.

        Args:
            index: 0 is next to the base env.
            transform: a transform without an env, or a function ``td -> td``.

        Example:
            >>> from envkit import GymEnv, RewardSum, StepCounter, TransformedEnv
            >>> env = TransformedEnv(GymEnv("CartPole-v1"), RewardSum())
            >>> env = env.insert_transform(0, StepCounter())
            >>> [type(transform).__name__ for transform in env.transform]
            ['StepCounter', 'RewardSum']
            >>> env.close()
        """
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

    def steps_first(self, transform: Transform) -> bool:
        """Check whether ``transform``, one of this env's, comes right after the base env."""
        return self._transform.flat()[0] is transform

    def _env_before(self, transform: Transform) -> TransformHolder:
        """Return the env as ``transform``, one of this env's, sees it; the same one until transforms or specs change."""
        if not self._declared.remembers:
            return self._made_before(transform)
        if id(transform) not in self._parents:
            self._parents[id(transform)] = self._made_before(transform)
        return self._parents[id(transform)]

    def _made_before(self, transform: Transform) -> TransformedEnv:
        own, before = transform.flat(), []
        for leaf in self._transform.flat():
            if any(leaf is other for other in own):
                break
            before.append(leaf)
        env = TransformedEnv(
            self.base_env, Compose(*(leaf.clone() for leaf in before)), cache_specs=self.cache_specs
        )
        if not all(leaf.is_pure for leaf in before):
            env._instead_of_copies = before  # which would remember, draw and learn by themselves
        if len(before) < len(self._stages):
            env._stages = self._stages[: len(before)]
            kept = {n: one.pairs for n, one in self._kept.items() if n <= len(before)}
            env._kept = {n: env._owned(KeptMemory(pairs)) for n, pairs in kept.items()}
            env._hold_specs(*(spec.clone() for spec in self._stages[len(before)]))
        return env

    def _changed(self) -> None:
        """Forget what was read from the specs; it is read again at the next use."""
        self._declared.put({})
        self._stages = []
        self._kept = {}
        self._forget_what_was_made()
        self._declared.report_change()

    def _hear_of_base_env(self) -> None:
        for part in self.base_env.modules():  # of what is inside other wrappers, too
            if isinstance(part, EnvBase):
                part._declared.around.add(self)

    def _owned(self, kept: KeptMemory) -> KeptMemory:
        kept._belong_to(self)
        return kept

    @property
    def _chain(self) -> list[Transform]:
        """All that runs between the base env and the user: the transforms, and what keeps memory from them."""
        self._read_specs()
        own = self._instead_of_copies
        leaves = self._transform.flat() if own is None else own
        places = [[self._kept[n]] if n in self._kept else [] for n in range(len(leaves) + 1)]
        return [one for n, leaf in enumerate(leaves) for one in (*places[n], leaf)] + [*places[-1]]

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.pop("_found_route", None)
        state["_parents"] = {}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._hear_of_base_env()
        self._transform._belong_to(self)
        for kept in self._kept.values():
            kept._belong_to(self)

    def row_core(self) -> TransformedCore | None:
        """Return the core that steps this env on NumPy rows, transforms included; None where it has none."""
        return transformed_core(self)

    def core_around_rows(self) -> TransformedCore | None:
        """Return what shows the rows of a pool inside through the transforms; None where rows cannot be stacked for them."""
        return core_around_rows(self)

    @property
    def _is_plain(self) -> bool:
        base: Any = self._modules["base_env"]  # as an attribute it would be looked for long
        is_inside = super()._is_plain and base._is_plain
        return is_inside and base._unshown is None and not in_functorch()

    def _find_plain(self) -> bool:
        is_whole = self._instead_of_copies is None and self._steps_by_itself
        return is_whole and isinstance(self.base_env, OnRow)

    def _row_on(self, core: Any, env: EnvBase) -> Row:
        assert isinstance(self.base_env, OnRow)
        return self.base_env._row_on(core, env)

    def _begin_on_row(self) -> None:
        assert isinstance(self.base_env, OnRow)
        self.base_env._begin_on_row()
        self._has_begun = True

    # --------------------------------------------------------------------------------------- specs

    if not TYPE_CHECKING:  # mypy knows no getter of another class

        @EnvBase.input_spec.getter
        def input_spec(self) -> Composite:
            """State and action specs, seen through the transforms."""
            self._read_specs()
            return super().input_spec

        @EnvBase.output_spec.getter
        def output_spec(self) -> Composite:
            """Reward, observation and done specs, seen through the transforms."""
            self._read_specs()
            return super().output_spec

    def _read_specs(self) -> None:
        if OUTPUTS in self._declared and self.cache_specs:
            return
        self._reads_specs = True
        try:
            self._see_through()
        finally:
            self._reads_specs = False

    @lasting()  # transforms keep numbers that they find in specs
    def _see_through(self) -> None:
        inputs, outputs = self.base_env.input_spec.clone(), self.base_env.output_spec.clone()
        if self.base_env.device is not None:
            self._transform.to(self.base_env.device)
        self._stages, self._kept = [], {}
        for number, transform in enumerate(self._transform.flat()):
            self._stages.append((inputs.clone(), outputs.clone()))
            inputs, outputs = _seen_through(transform, inputs, outputs)
            kept = kept_before(transform, self._stages[-1], (inputs, outputs))
            if kept is not None:
                self._kept[number] = self._owned(kept)
                self._stages[-1] = _seen_through(kept, *self._stages[-1])
                self._forget_what_was_made()
                inputs, outputs = (spec.clone() for spec in self._stages[-1])
                inputs, outputs = _seen_through(transform, inputs, outputs)
            require_declared(transform, inputs, outputs)
        self._hold_specs(inputs, outputs)
        primed = [transform.primed_actions for transform in self._transform.flat()]
        require_names(self._declared.full(), frozenset().union(*primed))

    def _hold_specs(self, inputs: Composite, outputs: Composite) -> None:
        self._declared.hold(inputs, outputs)
        self._declared.added_flags = self.base_env._declared.added_flags
        if self._declared.is_locked:
            inputs.lock_()
            outputs.lock_()

    def _find_facts(self) -> Facts:
        self._read_specs()
        inside, leaves = self.base_env._facts, self._transform.flat()
        infos: Set[Path] = inside.infos
        bookkeeping = inside.bookkeeping.union(
            place for kept in self._kept.values() for _, place in kept.pairs
        )
        shown = [*(outputs for _, outputs in self._stages), self.output_spec]
        for before, after in itertools.pairwise(shown):
            infos = infos_behind(infos, before, after)
        for leaf, before, after in zip(leaves, shown, shown[1:], strict=False):
            bookkeeping |= books_of(leaf, before, after)
        masks = [*inside.action_masks, *(pair for leaf in leaves for pair in leaf.action_masks)]
        recorded = [key for leaf in leaves for key in leaf.recorded_inputs]
        impure = next((type(leaf).__name__ for leaf in leaves if not leaf.is_pure), None)
        return replace(
            inside,
            infos=frozenset(infos),
            bookkeeping=bookkeeping,
            action_masks=tuple(dict.fromkeys(masks)),
            recorded_inputs=(*inside.recorded_inputs, *recorded),
            gives_nan=inside.gives_nan or any(leaf.gives_nan for leaf in leaves),
            steps_have_effects=inside.steps_have_effects or impure,
        )

    def fake_tensordict(self) -> TensorDict | TensorDictBase:  # type: ignore[override]
        """Return zeros in exactly the layout of one rollout step, batch size ``batch_size``."""
        inputs, outputs = self.input_spec, self.output_spec
        if not any(isinstance(spec, StackedComposite) for spec in (inputs, outputs)):
            return super().fake_tensordict()
        rows = range(self.batch_size[0])
        parts = [fake_step(inputs[row], outputs[row]) for row in rows]
        return LazyStackedTensorDict(*parts, stack_dim=0)

    def rand_action(self, tensordict: TensorDictBase | None = None) -> EnvData:
        """Sample every action; see `EnvBase.rand_action`.

        A base env that overrides `rand_action` draws them.

        Raises:
            SpecError: it does, and the transforms give the actions another form.
        """
        base = self.base_env
        if not base._draws_own_actions:
            return super().rand_action(tensordict)
        if self.full_action_spec != base.full_action_spec:
            raise SpecError(
                f"{type(base).__name__} draws its own random actions, for {base.full_action_spec}, but "
                f"behind its transforms they are {self.full_action_spec}. Override rand_action in a "
                "subclass of TransformedEnv too, or pass a policy that draws them."
            )
        return base.rand_action(tensordict)

    def add_truncated_keys(self) -> Self:
        """Declare ``truncated`` beside every ``done`` of the base env; returns self."""
        self.base_env.add_truncated_keys()
        self._changed()
        return self

    if not TYPE_CHECKING:  # mypy knows no getter of another class

        @EnvBase.batch_size.getter
        def batch_size(self) -> torch.Size:
            """Batch size of the base env, seen through the transforms; read-only."""
            return self._declared.cached(
                "batch_size",
                lambda: self._transform.transform_env_batch_size(self.base_env.batch_size),
            )

        @EnvBase.device.getter
        def device(self) -> torch.device | None:
            """Device of the base env, seen through the transforms; moved by `to`."""
            return self._declared.cached(
                "device", lambda: self._transform.transform_env_device(self.base_env.device)
            )

    def _visit_transforms(self, visit: Any, earlier: Any) -> Any:
        own, inner = (ALL, ALL) if earlier == ALL else earlier
        return visit(self._transform, own), self.base_env._visit_transforms(visit, inner)

    # -------------------------------------------------------------------------------- seed and place

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Seed the base env, the transforms and the random actions; see `EnvBase.set_seed`.

        Args:
            seed, static_seed: as for `EnvBase.set_seed`.

        Example:
            >>> from envkit import GymEnv, RewardSum, TransformedEnv
            >>> env = TransformedEnv(GymEnv("CartPole-v1"), RewardSum())
            >>> following = env.set_seed(0)
            >>> first = env.reset()["observation"]
            >>> following = env.set_seed(0)
            >>> bool((env.reset()["observation"] == first).all())
            True
            >>> env.close()
        """
        following = self.base_env.set_seed(seed, static_seed=static_seed)
        self._seed_actions(seed)
        self._transform._set_seed(seed)
        return following

    def _set_seed(self, seed: int | None) -> None:
        self.set_seed(seed)

    def to(self, *args: Destination, **kwargs: Destination) -> Self:
        """Move the base env and the transforms; returns self."""
        self.base_env.to(*args, **kwargs)
        self._transform.to(*args, **kwargs)  # type: ignore[call-overload]
        self._changed()
        return self

    def close(self, *, raise_if_closed: bool = False) -> None:
        """Close the base env, and then the transforms."""
        super().close(raise_if_closed=raise_if_closed)
        self._transform.close()

    # -------------------------------------------------------------------------------------- states

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> dict[str, Any]:
        """Return the state of the transforms, that of this env, and that of the base env under ``base_env.``.

        With a ``prefix``, which a module passes that holds this env, the names are those of its submodules, since that
        module is loaded by them.

        Raises:
            ResumeError: the base env records its episodes, and this one cannot be restored exactly;
                ``env.transform.state_dict()`` gives the state of the transforms alone.
        """
        if prefix:
            return super().state_dict(*args, prefix=prefix, **kwargs)
        state = self._transform.state_dict(*args, **kwargs)
        if own := self._own_state():
            state[_OWN_OF_ENV] = own
        try:
            base = self.base_env.state_dict()
        except ResumeError as error:
            if not hasattr(error, "__notes__"):  # of an env behind transforms that is inside
                error.add_note("To save the transforms alone, call env.transform.state_dict().")
            raise
        if _holds_anything(base):
            state.update({_BASE + name: value for name, value in base.items()})
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load what `state_dict` gave; a base env the dict does not mention stays as it is.

        Args:
            state_dict: of an env that was built alike.
            strict: False: a recorded episode that does not go on as it did is given up: the next step reports it
                truncated, and the reset that follows begins a new one.
            assign: of ``torch.nn.Module.load_state_dict``.

        Raises:
            ArgumentTypeError: (a TypeError) it is no dict.
            RuntimeError: it does not fit the transforms; nothing was loaded then.
            ResumeError: (a RuntimeError) the base env did not get where it was, or the dict does not mention
                it though its simulator keeps its own state.
        """
        require_state_dict(state_dict)
        own = {name: value for name, value in state_dict.items() if not name.startswith(_BASE)}
        base = {k.removeprefix(_BASE): v for k, v in state_dict.items() if k.startswith(_BASE)}
        mine = own.pop(_OWN_OF_ENV, {})
        if not base and strict and (kind := self._facts.keeps_state):
            raise ResumeError(
                f"the state dict does not hold the state of the simulator of {kind}. Load that of the transforms "
                "alone by env.transform.load_state_dict(...), and begin new episodes: env.reset()."
            )
        # transforms come first: a simulator is not put back
        with loading(state_dict, strict=strict), put_back_on_failure(self._transform):
            if base:
                self._transform._set_seed(None)  # a seed that was not set is not passed on
            loaded = self._transform.load_state_dict(own, strict, assign)
            if base:
                self.base_env.load_state_dict(base, strict, assign)
            if base or mine:
                self._resume(mine, strict=strict)
        return loaded

    def __repr__(self) -> str:
        return f"TransformedEnv(\n    env={self.base_env!r},\n    transform={self._transform!r})"

    def _report(self) -> EnvReport:
        if not self.base_env._report().specs:  # a pool that is not started; to ask would start it
            return EnvReport({"transform": repr(self._transform)}, {}, {"base env": self.base_env})
        facts, specs, _ = super()._report()
        return EnvReport(
            {**facts, "transform": repr(self._transform)}, specs, {"base env": self.base_env}
        )


def _seen_through(
    transform: Transform, inputs: Composite, outputs: Composite
) -> tuple[Composite, Composite]:
    inputs = transform.transform_input_spec(inputs)
    return inputs, transform.transform_output_spec(outputs)


def _holds_anything(state: Any) -> bool:
    return any(_holds_anything(v) if isinstance(v, dict) else True for v in state.values())
