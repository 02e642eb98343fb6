"""What a transform is: the hooks, what each does unless it is written, and who owns a transform.

A transform changes what an environment shows (forward pass) and what it is given (inverse pass),
and declares both in the specs. This module does not know environments: `env` calls the hooks.

Conventions
    td        input of a step or reset, as the base env sees it (after the inverse pass).
    next_td   what a step produced; td_reset what a reset produced. A transform may write to both.
    inner     the side of the base env; outer: the side of the user. ``in_keys_inv`` are inner
              names, ``out_keys_inv`` the outer names of the same entries.
    masks     A partial reset keeps what the user's data had where nothing was reset, whatever
              `_reset` gives there (`EnvBase.reset` sees to it), so a fresh value may be written
              everywhere. A partial step likewise: a batch-unlocked env shows the transform the
              stepped rows alone, a batch-locked one shows all rows and ``td["_step"]``.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from tensordict import TensorDictBase
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from envkit.arrays.leaves import Leaves
from envkit.data.keywords import ChecksKeywords
from envkit.data.paths import Key, Path, as_key, as_path
from envkit.env.own_state import OwnState, put_back_on_failure
from envkit.errors import (
    ArgumentError,
    MissingKeyError,
    SpecTypeError,
    TransformIndexError,
    TransformOwnerError,
)
from envkit.specs import Composite
from envkit.transforms.core.wrapper import TransformHolder

OWNERSHIP = ("_owner_ref", "_owner_is_env")
"""Attributes that say whom a transform belongs to, and not what it does."""

Keys = Key | Sequence[Key] | None

_KEYS = frozenset(("in_keys", "out_keys", "in_keys_inv", "out_keys_inv"))
_EDITS = itertools.count(1)


def as_keys(keys: Keys) -> list[Key]:
    """Write one key, a list of keys or None as a list of keys.

    A tuple of strings is one nested key; an empty one is no key.
    """
    if keys is None or keys == ():
        return []
    is_nested = isinstance(keys, tuple) and all(isinstance(part, str) for part in keys)
    if is_nested or isinstance(keys, str) or not isinstance(keys, Iterable):
        return [as_key(as_path(cast(Key, keys)))]
    return [as_key(as_path(key)) for key in keys]


def _is_same(before: Any, value: Any) -> bool:
    """Check whether a setting stays what it is: plain values and tensors that are equal, or the same object."""
    if before is value or type(before) is not type(value):
        return before is value
    if isinstance(value, torch.Tensor):
        return before.dtype == value.dtype and torch.equal(before, value)
    if isinstance(value, list | tuple):
        return len(before) == len(value) and all(map(_is_same, before, value))
    return isinstance(value, bool | int | float | str | frozenset) and before == value


def editable(spec: Composite) -> Composite:
    """Return a spec that may be written to: itself, or a copy where it is locked, as those of an env are."""
    return spec.clone() if spec.is_locked else spec


class Transform(OwnState, ChecksKeywords):
    """Base of all transforms.

    Args:
        in_keys: entries read from what the env produces; one key, or a list.
        out_keys: where their values go, parallel to ``in_keys``; None writes them back in place.
        in_keys_inv: entries of the base env's input that the inverse pass writes.
        out_keys_inv: the entries of the user's input they are made from; None means the same.

    A value-wise transform writes `_apply_transform` (and `_inv_apply_transform`) and the spec hooks.
    Others write `_call`, `_step` and `_reset`. Every entry a transform adds must be declared by one of
    the spec hooks: an out_key in no spec is a KeyError when the specs of the env are read.

    Attributes:
        missing_tolerance: absent in_keys are skipped instead of being an error.

    Example:
        >>> from envkit import GymEnv, Transform
        >>> class Halved(Transform):
        ...     def _apply_transform(self, value):
        ...         return value / 2
        >>> env = GymEnv("CartPole-v1").append_transform(Halved(in_keys=["reward"]))
        >>> env.rollout(3)["next", "reward"].flatten()
        tensor([0.5000, 0.5000, 0.5000])
        >>> env.close()
    """

    only_adds_done = False
    """A promise: done flags that the env before has set stay set, and nothing must happen before a
    reset. Then one call of the env may step and reset the rows that are done."""

    learns = False
    """Whether the data that it sees changes what it does to later data, as running averages do. It then leaves itself
    as it is while ``frozen`` is True, which `evaluate` and the like set."""

    frozen = False
    """Whether learning is switched off."""

    computes_only = False
    """A promise of this very class, not of those that derive from it: its hooks look at nothing but data and
    settings, and change nothing but data; they draw, count and remember nothing. See `is_pure`."""

    gives_nan = False
    """NaN stands for values that it cannot know."""
    primed_actions: frozenset[Path] = frozenset()
    """Actions that it shows as observations too: what was done last, before the policy writes the next one."""

    keeps_books = False
    """The observations it adds describe the run, not the environment (a count of steps, a sum of rewards): a
    policy that is a plain function is not given them."""

    keeps_memory = False
    """The observations it adds under names that begin with an underscore are its memory of the episode: a policy
    that is a plain function is not given them."""

    remembers_rows = False
    """It holds a value for each row outside of the data: a step of some rows shows it all rows, and a `_step` mask."""

    action_masks: tuple[tuple[Key, Key], ...] = ()
    """Actions, each with the entry that says which of its options random actions are drawn from."""

    _default_in_keys: Keys = None
    """Default of ``in_keys``."""

    _pairs_keys = False
    """Each in_key has one out_key: lists of two lengths are refused."""

    _in_repr: tuple[str, ...] = ()
    """Settings that `repr` shows."""

    _edits = 0
    """Changes when a setting does that programs are traced with; no two transforms have the same one twice."""

    if TYPE_CHECKING:  # nn.Module's would give every misspelt name a type
        __getattr__: None  # type: ignore[assignment, misc]

    def __init__(
        self,
        in_keys: Keys = None,
        out_keys: Keys = None,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
    ):
        super().__init__()
        self.in_keys = as_keys(self._default_in_keys if in_keys is None else in_keys)
        self.out_keys = as_keys(self.in_keys if out_keys is None else out_keys)
        self.in_keys_inv = as_keys(in_keys_inv)
        self.out_keys_inv = as_keys(self.in_keys_inv if out_keys_inv is None else out_keys_inv)
        self.missing_tolerance = False
        for end in ("", "_inv") if self._pairs_keys else ():
            sources, targets = getattr(self, f"in_keys{end}"), getattr(self, f"out_keys{end}")
            if len(sources) != len(targets):
                raise ArgumentError(
                    f"{type(self).__name__} has {len(sources)} in_keys{end} {sources}, but "
                    f"{len(targets)} out_keys{end} {targets}. Pass one for each."
                )

    @property
    def is_pure(self) -> bool:
        """Whether the hooks may be called for nothing: where no row is reset, and for steps that are dropped."""
        return bool(vars(type(self)).get("computes_only", False))

    @property
    def recorded_inputs(self) -> Sequence[Key]:
        """Entries that the way in makes, and that each step writes into the user's data: states of the env."""
        return ()

    @property
    def _declared_keys(self) -> list[Key]:
        """Entries it writes in an env, one of whose specs must declare each."""
        return self.out_keys

    # -------------------------------------------------------------------------------- forward pass

    def _apply_transform(self, value: Any) -> Any:
        """Turn the value of an in_key into that of its out_key."""
        raise NotImplementedError(
            f"{type(self).__name__} writes neither _apply_transform nor _call. Write the first to "
            "change values one by one, the second to change the whole TensorDict."
        )

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        """Transform what a step produced.

        Raises:
            MissingKeyError: an in_key is absent and ``missing_tolerance`` is not set.
        """
        return self._convert(next_td, self.in_keys, self.out_keys, self._apply_transform)

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        """Transform what a step produced, seeing also what it was given."""
        return self._call(next_td)

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        """Transform what a reset produced.

        Args:
            td: what was passed to `reset`, masks inside; empty when nothing was.
            td_reset: observations and done flags of the env before, all rows.
        """
        if type(self)._apply_transform is Transform._apply_transform:
            return td_reset
        own, tolerated = vars(self), self.missing_tolerance
        own["missing_tolerance"] = True  # rewards, for instance
        try:
            return self._call(td_reset)
        finally:
            own["missing_tolerance"] = tolerated

    def _reset_like_step(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        """Transform what a reset produced as what a step produced: ``_reset`` of those that tell no difference."""
        return self._call(td_reset)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Transform data as a module, or in a replay buffer.

        Args:
            tensordict: recorded data, any batch size.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from envkit import RewardScaling
            >>> double = RewardScaling(loc=0.0, scale=2.0)
            >>> double(TensorDict(reward=torch.tensor([3.0])))["reward"]
            tensor([6.])
        """
        return self._call(tensordict)

    def _convert(
        self, td: TensorDictBase, sources: list[Key], targets: list[Key], change: Callable
    ) -> TensorDictBase:
        for source, target in zip(sources, targets, strict=True):
            value = td.get(source, None)
            if value is not None:
                td.set(target, change(value))
            elif not self.missing_tolerance:
                fix = "Name an entry that is there, or set missing_tolerance on the transform."
                raise self._missing(source, td, fix)
        return td

    def _missing(
        self, key: Key | list[Key], data: TensorDictBase | Leaves, fix: str
    ) -> MissingKeyError:
        keys = data if isinstance(data, Leaves) else data.keys(True, True)
        there = sorted(".".join(as_path(key)) for key in keys)
        return MissingKeyError(
            f"{type(self).__name__} reads {key!r}, but the data has {there}. {fix}"
        )

    # -------------------------------------------------------------------------------- inverse pass

    def _inv_apply_transform(self, value: Any) -> Any:
        """Turn the value of an entry of out_keys_inv into that of its in_key_inv."""
        return value

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase:
        """Transform the input of a step, a copy, on its way to the base env."""
        if not (self.in_keys_inv or self.out_keys_inv):
            return td
        return self._convert(td, self.out_keys_inv, self.in_keys_inv, self._inv_apply_transform)

    def inv(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Apply the inverse pass to a copy of some data.

        Args:
            tensordict: entries as the user gives them; it is not written to.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from envkit import ActionScaling
            >>> scaling = ActionScaling(loc=1.0, scale=2.0)
            >>> scaling.inv(TensorDict(action=torch.tensor([2.0])))["action"]
            tensor([5.])
        """
        return self._inv_call(tensordict.copy())

    def _reset_env_preprocess(self, td: TensorDictBase) -> TensorDictBase:
        """Transform the input of a reset, a copy, on its way to the base env.

        Rows that it takes out of a mask are not reset by the base env; `_reset` writes what they show.
        """
        return td

    def _set_seed(self, seed: int | None) -> None:
        """Seed what this transform draws; most draw nothing."""

    def dump(self, **kwargs: object) -> Any:
        """Hand over what was recorded; most record nothing. Keywords are those of the recorder."""
        return None

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load what `state_dict` gave, all of it or nothing; see ``torch.nn.Module.load_state_dict``.

        Args:
            state_dict: of a transform that was built alike.
            strict: all that is there must be in it, and the other way round.
            assign: take tensors as they are, instead of copying their values.

        Returns:
            The keys that are missing and those that were not expected.

        Raises:
            ArgumentTypeError: (a TypeError) it is no dict.
            RuntimeError: a key is missing or not expected, and ``strict`` is set; or a tensor has another shape. The
                transform is as it was then.
        """
        with put_back_on_failure(self):
            return super().load_state_dict(state_dict, strict, assign)

    def close(self) -> None:
        """Let go of what this transform holds open, when its env is closed; most hold nothing."""

    # --------------------------------------------------------------------------------------- specs

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Declare what happens to the observations.

        Args:
            observation_spec: a copy of those before this transform, which may be changed.
        """
        return self._spec_after(observation_spec)

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Declare what happens to the rewards.

        Args:
            reward_spec: a copy of those before this transform, which may be changed.
        """
        return self._spec_after(reward_spec)

    def transform_done_spec(self, done_spec: Composite) -> Composite:
        """Declare what happens to the done flags.

        Args:
            done_spec: a copy of those before this transform, which may be changed.
        """
        return self._spec_after(done_spec)

    def transform_action_spec(self, action_spec: Composite) -> Composite:
        """Declare which actions the user gives.

        Args:
            action_spec: a copy of what the env before this transform takes, which may be changed.
        """
        return self._spec_before(action_spec)

    def transform_state_spec(self, state_spec: Composite) -> Composite:
        """Declare which other inputs the user gives.

        Args:
            state_spec: a copy of what the env before this transform takes, which may be changed.
        """
        return self._spec_before(state_spec)

    def _spec_after(self, spec: Composite) -> Composite:
        """Declare what happens to the outputs of any one kind whose own hook is not written."""
        return spec

    def _spec_before(self, spec: Composite) -> Composite:
        """Declare what the user gives of any one kind of inputs whose own hook is not written."""
        return spec

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        """Declare all inputs: by default through the hooks for states and actions; a locked spec is copied.

        Args:
            input_spec: Composite of ``full_action_spec`` and ``full_state_spec``.
        """
        input_spec = editable(input_spec)
        for kind in ("state", "action"):
            self._redeclare(input_spec, kind)
        return input_spec

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """Declare all outputs: by default through the hooks for observations, rewards and flags; a locked spec is copied.

        Args:
            output_spec: Composite of ``full_observation_spec``, ``full_reward_spec`` and ``full_done_spec``.
        """
        output_spec = editable(output_spec)
        for kind in ("reward", "observation", "done"):
            self._redeclare(output_spec, kind)
        return output_spec

    def _redeclare(self, specs: Composite, kind: str) -> None:
        name, hook = f"full_{kind}_spec", f"transform_{kind}_spec"
        if specs.get(name, None) is None:  # not declared
            return
        spec = getattr(self, hook)(specs[name].clone())
        if not isinstance(spec, Composite):
            raise SpecTypeError(
                f"{hook} of {type(self).__name__} returned {type(spec).__name__}, but must return the "
                "Composite it was given, changed: spec[key] = leaf, then return spec. A hook that is "
                "written for one leaf is decorated with envkit.apply_to_composite, one for inputs with "
                "envkit.apply_to_composite_inv."
            )
        specs[name] = spec

    def transform_env_device(self, device: torch.device | None) -> torch.device | None:
        """Return which device the env delivers to, given that of the env before.

        Args:
            device: of the env before this transform; None where it has none.
        """
        return device

    def transform_env_batch_size(self, batch_size: torch.Size) -> torch.Size:
        """Return which batch size the env has, given that of the env before.

        Args:
            batch_size: of the env before this transform.
        """
        return batch_size

    # ------------------------------------------------------------------------------------ settings

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a setting or method that is changed in an env has all that was derived of it made again."""
        is_method = callable(getattr(type(self), name, None))
        container = self.container if is_method or not name.startswith("_") else None
        is_derived = (
            container is not None
            and not container._reads_specs
            and not _is_same(getattr(self, name, None), value)
            and (is_method or self._is_derived_from(name, value))
        )
        super().__setattr__(name, value)
        if is_derived:
            vars(self)["_edits"] = next(_EDITS)
            self.empty_cache()

    def _is_derived_from(self, name: str, value: Any) -> bool:
        """Check whether specs, rows or programs are made of what a public attribute is when they are made."""
        return name in _KEYS

    # --------------------------------------------------------------------------------------- owner

    @property
    def _owner(self) -> Any:
        """What holds this transform: a `Compose`, a `TransformedEnv`, or None."""
        reference = self.__dict__.get("_owner_ref")
        return None if reference is None else reference()

    def _require_unowned(self) -> None:
        """Check that this was given to no env; a Compose that was given to none lets go of it."""
        holder: Any = self
        while isinstance(holder, Transform):
            if holder.__dict__.get("_owner_is_env", False):
                raise TransformOwnerError(
                    f"this {type(self).__name__} belongs to an environment already, and can have one parent "
                    "only. Pass transform.clone(), or call reset_parent() first."
                )
            holder = holder._owner

    def _refuse_env(self) -> None:
        """Raise where this transform cannot be in an env, when it is given to one; most can."""

    def _belong_to(self, owner: Any) -> None:
        self._require_unowned()
        if not isinstance(owner, Transform) or owner.container is not None:
            for leaf in self.flat():
                leaf._refuse_env()
        self.__dict__["_owner_ref"] = weakref.ref(owner)
        self.__dict__["_owner_is_env"] = not isinstance(owner, Transform)

    @property
    def container(self) -> TransformHolder | None:
        """The `TransformedEnv` this transform works for."""
        owner: Any = self
        while isinstance(owner, Transform):
            reference = owner.__dict__.get("_owner_ref")
            owner = None if reference is None else reference()
        return owner

    @property
    def parent(self) -> TransformHolder | None:
        """The env as seen just before this transform, always a `TransformedEnv`; None without a container.

        The same object until the list of transforms changes.
        """
        container = self.container
        return None if container is None else container._env_before(self)

    def empty_cache(self) -> None:
        """Drop the cached specs, after what this transform declares has changed."""
        container = self.container
        if container is not None:
            container._changed()

    def set_missing_tolerance(self, mode: bool = False) -> None:
        """Set ``missing_tolerance``: True skips in_keys that are absent.

        Args:
            mode: the new value.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from envkit import SignTransform
            >>> sign = SignTransform(in_keys=["reward", "cost"])
            >>> sign.set_missing_tolerance(True)
            >>> sign(TensorDict(reward=torch.tensor([-3.0])))["reward"]
            tensor([-1.])
        """
        self.missing_tolerance = mode

    def reset_parent(self) -> None:
        """Forget the owner, so that the transform can be given to another one."""
        for name in OWNERSHIP:
            self.__dict__.pop(name, None)

    def clone(self) -> Transform:
        """Copy the transform; buffers and submodules are shared, the parent is not.

        Example:
            >>> from envkit import GymEnv, RewardSum
            >>> env = GymEnv("CartPole-v1").append_transform(RewardSum())
            >>> other = GymEnv("CartPole-v1").append_transform(env.transform.clone())
            >>> other.rollout(2)["next", "episode_reward"].flatten()
            tensor([1., 2.])
            >>> env.close()
            >>> other.close()
        """
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__getstate__())
        for store in ("_parameters", "_buffers", "_modules"):
            twin.__dict__[store] = dict(self.__dict__[store])
        return twin

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in OWNERSHIP:  # a copy has no parent
            state.pop(name, None)
        return state

    # ------------------------------------------------------------- one transform is a list of itself

    def flat(self) -> list[Transform]:
        """List the transforms this one is made of, first to last; itself when it is one.

        Example:
            >>> from envkit import Compose, RewardSum, StepCounter
            >>> len(Compose(RewardSum(), Compose(StepCounter())).flat())
            2
        """
        return [self]

    @property
    def is_flat(self) -> bool:
        """Whether the transforms of `flat`, one after the other, do all that this one does."""
        return True

    def __len__(self) -> int:
        return len(self.flat())

    def __iter__(self) -> Iterator[Transform]:
        return iter([self])

    def __getitem__(self, index: int) -> Transform:
        if index not in (0, -1):
            raise TransformIndexError(
                f"index is {index}, but this is a single {type(self).__name__}. Use 0."
            )
        return self

    def extra_repr(self) -> str:
        """Show the settings, then the keys."""
        keys = ("in_keys", "out_keys", "in_keys_inv", "out_keys_inv")
        names = (*self._in_repr, *(name for name in keys if getattr(self, name, None)))
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


TransformLike = Transform | Callable[[TensorDictBase], TensorDictBase]
"""What a user passes as a transform: one, or a function that is run on what resets and steps produced."""


def _give_buffers_both_passes(kind: type[nn.Module]) -> None:
    """Make TorchRL's wrapper of a function call the method ``inv`` of instances of ``kind`` on what is written.

    A buffer of TorchRL runs the inverse pass of TorchRL's transforms on what is written. Any other module it wraps as a
    function, to be called on samples alone, so that an inverse pass would be left out silently. No transform here
    imports TorchRL.
    """

    def on_assignment(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if isinstance(submodule, kind) and _is_wrapper(type(module)):
            module._inv_call = submodule.inv

    register_module_module_registration_hook(on_assignment)


def _is_wrapper(kind: type) -> bool:
    return kind.__name__ == "_CallableTransform" and kind.__module__.startswith("torchrl.")


_give_buffers_both_passes(Transform)
