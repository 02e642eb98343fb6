"""Entries that exist from a reset on, before anybody has computed them.

A recurrent policy needs a hidden state at the first step; an info value needs a root entry. This
module decides what such entries begin with and who may change them: the env or the policy, by
writing ``next``. Otherwise the root value goes on.

A module that keeps a hidden state says so with a method ``make_tensordict_primer()``. `with_policy_transforms`
finds such modules inside a policy and adds what is missing to an env: a marker of first steps, and the
hidden states at the root. It goes by specs alone, so what an env shows already, from however deep
inside, is not added again. Primers of another library (those of TorchRL's recurrent modules)
are read by their attributes; their leaves need a shape, a dtype and a device.

Conventions
    element    one environment of the batch; an element spec has no batch axes.
    default    value of an entry at the start of an episode.
    recurrent  said of a submodule that has ``make_tensordict_primer``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase
from torch import nn

from envkit.arrays import episode_counters
from envkit.arrays.elementwise import dtype_name
from envkit.arrays.integers import as_int
from envkit.arrays.leaves import Changes, Leaves
from envkit.data.arguments import as_batch_size, as_bool
from envkit.data.paths import Key, Path, as_key, as_path
from envkit.data.transition import empty_like, leaves
from envkit.env.base import EnvBase
from envkit.errors import ArgumentError, MissingKeyError, PrimerError
from envkit.specs import Composite, NonTensor, TensorSpec, Unbounded
from envkit.transforms.core.compose import Compose
from envkit.transforms.core.fusable import FusableTransform, LeavesOf, written
from envkit.transforms.core.transform import Transform, editable
from envkit.transforms.episodes import EpisodeTransform, InitTracker

Default = float | Callable[[], Any] | Mapping[Key, Any]


class TensorDictPrimer(FusableTransform, EpisodeTransform):
    """Add entries to what a reset gives, and carry them from step to step.

    ``TensorDictPrimer(mem=Unbounded((2,)))`` adds ``mem``, which begins as zeros. A value that the
    base env's reset has written itself stays. It fuses if its values are numbers. Under the name of an action it
    shows the action that was taken last, until the policy writes the next one.

    Args:
        primers: specs of the entries, a Composite or a dict; or name them as keywords.
        random: draw the values from their specs.
        default_value: a number; a function that returns a tensor; or a dict of these by key, in which
            keys may be left out. The default is 0. A tensor has the shape of one element or of the
            whole batch.
        reset_key: the `_reset` entry the values obey; needed when the env has several.
        expand_specs: what to do with specs whose Composite has another shape than the env's batch.
            True puts the batch axes in front of every leaf. False says that the leaves have them already. None does
            what True does for a Composite of shape ``()``, and is an error for others.
        single_default_value: ``default_value`` is one function that returns a TensorDict of all.
        call_before_env_reset: write the values into the input of the base env's reset as well.
        **specs: specs of the entries by name.

    Raises:
        ArgumentError: (a ValueError) both ``random`` and ``default_value``, or both ``primers`` and
            keywords, are given.
        PrimerError: (a RuntimeError) the specs do not fit the batch size, a value does not fit its
            spec (checked once), or ``reset_key`` is missing.

    Example:
        >>> from envkit import GymEnv, TensorDictPrimer, Unbounded
        >>> primer = TensorDictPrimer(memory=Unbounded((2,)), default_value=1.0)
        >>> env = GymEnv("CartPole-v1").append_transform(primer)
        >>> env.reset()["memory"]
        tensor([1., 1.])
        >>> env.close()
    """

    _twins = (*FusableTransform._twins, ("_fresh", "reset_leaves"), ("_for_reset", "reset_leaves"))

    _changes_with_use = ("_generator",)

    def __init__(
        self,
        primers: Composite | Mapping[Key, TensorSpec] | None = None,
        random: bool | None = None,
        default_value: Default | None = None,
        reset_key: Key | None = None,
        expand_specs: bool | None = None,
        single_default_value: bool = False,
        call_before_env_reset: bool = False,
        **specs: TensorSpec,
    ):
        super().__init__()
        if random and default_value is not None:
            raise ArgumentError("random=True and default_value are both given. Pass one of them.")
        if primers is not None and specs:
            raise ArgumentError(
                f"primers and the keywords {sorted(specs)} are both given. Put all specs into one of them."
            )
        given = specs if primers is None else primers
        self.primers = given.clone() if isinstance(given, Composite) else Composite(given)
        self.random = False if random is None else as_bool("random", random)
        self.default_value = 0.0 if default_value is None else default_value
        self.reset_key = reset_key
        self.expand_specs = None if expand_specs is None else as_bool("expand_specs", expand_specs)
        self.single_default_value = as_bool("single_default_value", single_default_value)
        self.call_before_env_reset = as_bool("call_before_env_reset", call_before_env_reset)
        self._defaults = self._by_path(self.default_value)
        self._generator: torch.Generator | None = None
        self._was_checked = False
        self._written: TensorDictBase | None = None

    def _by_path(self, default: object) -> dict[Path, Any]:
        paths = [as_path(key) for key in self.primers.keys(True, True)]
        if not isinstance(default, Mapping):
            return dict.fromkeys(paths, default)
        defaults = {as_path(key): value for key, value in default.items()}
        unknown = [as_key(path) for path in defaults if path not in paths]
        if unknown:
            raise MissingKeyError(
                f"default_value names {unknown}, but the primers are {list(map(as_key, paths))}. Name some of these."
            )
        return {path: defaults.get(path, 0.0) for path in paths}

    # --------------------------------------------------------------------------------------- specs

    def _sized(self, batch: torch.Size) -> dict[Path, TensorSpec]:
        """Return the spec of each entry for an env of batch size ``batch``."""
        specs = self.primers
        leaf_specs = {as_path(key): leaf for key, leaf in specs.items(True, True)}
        if tuple(specs.shape) == tuple(batch):
            return leaf_specs
        if self.expand_specs or (self.expand_specs is None and not specs.shape):
            return {path: leaf.expand(*batch, *leaf.shape) for path, leaf in leaf_specs.items()}
        shapes = {as_key(path): tuple(leaf.shape) for path, leaf in leaf_specs.items()}
        if self.expand_specs is None:
            raise PrimerError(
                f"the specs of a TensorDictPrimer have batch shape {tuple(specs.shape)}, but the env "
                f"has batch size {tuple(batch)}. Pass expand_specs=True if {shapes} are the shapes of "
                "one element, False if they begin with the batch size already."
            )
        if any(shape[: len(batch)] != tuple(batch) for shape in shapes.values()):
            raise PrimerError(
                f"the specs {shapes} of a TensorDictPrimer do not begin with the batch size "
                f"{tuple(batch)} of the env. Pass expand_specs=True to put it in front."
            )
        return leaf_specs

    def _placed(self, like: Composite) -> dict[Path, TensorSpec]:
        sized = self._sized(like.shape)
        device = None if self.container is None else self.container.device
        if device is None:
            return sized
        return {path: leaf.to(device) for path, leaf in sized.items()}

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        for path, leaf in self._placed(observation_spec).items():
            observation_spec[as_key(path)] = leaf
        return observation_spec

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        input_spec = editable(input_spec)
        names = ("full_action_spec", "full_state_spec")
        actions, states = (input_spec[name].clone() for name in names)
        action_paths = {as_path(key) for key in actions.keys(True, True)}
        for path, leaf in self._placed(states).items():
            side = actions if path in action_paths else states
            side[as_key(path)] = leaf.clone()
        self.primed_actions = frozenset(action_paths.intersection(self._defaults))
        for name, spec in zip(names, (actions, states), strict=True):
            input_spec[name] = spec
        return input_spec

    # -------------------------------------------------------------------------------------- values

    def _element_specs(self) -> dict[Path, TensorSpec]:
        batch = torch.Size(()) if self.container is None else self.container.batch_size
        sized = self._sized(batch)
        return {path: leaf[(0,) * len(batch)] if batch else leaf for path, leaf in sized.items()}

    def _specs_of_one(self, like: TensorDictBase) -> dict[Path, TensorSpec]:
        """Return the spec of each entry for one element of ``like``; without an env, specs may begin with its batch."""
        batch, specs = like.batch_size, self._element_specs()
        if self.container is not None or self.expand_specs or not batch:
            return specs
        begins = all(leaf.shape[: len(batch)] == batch for leaf in specs.values())
        return {p: leaf[(0,) * len(batch)] for p, leaf in specs.items()} if begins else specs

    def _fresh(self, like: TensorDictBase) -> TensorDictBase:
        """Make the values of new episodes, for the batch of ``like``."""
        together = None
        if self.single_default_value and callable(self.default_value):
            together = self.default_value()
        values = empty_like(like)
        for path, spec in self._specs_of_one(like).items():
            if self.random:
                value = spec.rand(like.batch_size, self._generator)
            else:
                value = self._defaults[path] if together is None else together.get(as_key(path))
                value = _batched(value() if callable(value) else value, spec, like, as_key(path))
            if isinstance(value, torch.Tensor) and like.device is not None:
                value = value.to(like.device)
            if not self._was_checked and isinstance(value, torch.Tensor):
                _require_in(value, spec, as_key(path))
            values.set(as_key(path), value)
        self._was_checked = True
        return values

    @property
    def fuses(self) -> bool:
        """Whether all values are numbers: others are drawn or made by torch at every reset."""
        are_numbers = all(
            isinstance(value, bool | int | float) for value in self._defaults.values()
        )
        hides_nothing = all(path[0] != "state" for path in self._defaults)
        return are_numbers and hides_nothing and not self.random and super().fuses

    @property
    def _is_forward(self) -> bool:
        return not (self.call_before_env_reset or self.in_keys_inv or self.out_keys_inv)

    def memory(self) -> list[Path]:
        return list(self._defaults)

    def constants(self) -> dict[str, Any]:
        if not self._was_checked:
            self._fresh(TensorDict())
        return {".".join(path): value for path, value in self._defaults.items()}

    def _set_seed(self, seed: int | None) -> None:
        self._generator = None
        if self.random and seed is not None:
            devices = [leaf.device for leaf in self.primers.values(True, True)]
            self._generator = torch.Generator(devices[0] or "cpu").manual_seed(seed)

    # --------------------------------------------------------------------------------------- calls

    def _reset_env_preprocess(self, td: TensorDictBase) -> TensorDictBase:
        if self.call_before_env_reset:
            self._written = self._for_reset(td, td)
            td.update(self._written)
        return td

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        values, self._written = self._written, None
        if values is None:
            values = self._for_reset(td, td_reset)
        return _filled(td_reset, values)

    def _for_reset(self, td: TensorDictBase, like: TensorDictBase) -> TensorDictBase:
        """Make new values where ``td`` asks for a reset, and keep the ones it has elsewhere."""
        level, values = self._reset_level(), self._fresh(like)
        for path, value in leaves(values):
            if isinstance(value, torch.Tensor):
                values.set(as_key(path), self._kept_elsewhere(td, level, as_key(path), value))
        return values

    def _reset_level(self) -> Path:
        if self.reset_key is not None:
            return as_path(self.reset_key)[:-1]
        keys = self._env().reset_keys
        if len(keys) > 1:
            raise PrimerError(
                f"the env has several reset keys, {keys}: say which one the primed entries obey with "
                "reset_key=."
            )
        return as_path(keys[0])[:-1]

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        changes = self._carried(
            LeavesOf(td), LeavesOf(next_td), lambda: LeavesOf(self._fresh(next_td))
        )
        return written(next_td, changes)

    def step_leaves(self, root: Leaves, following: Leaves, constants: Mapping[str, Any]) -> Changes:
        return self._carried(root, following, lambda: self._begun_with(following, constants))

    def reset_leaves(self, fresh: Leaves, constants: Mapping[str, Any]) -> Changes:
        numbers = self._begun_with(fresh, constants)
        return {path: leaf for path, leaf in numbers.items() if fresh.get(path) is None}

    def _carried(
        self, root: Leaves, following: Leaves, fresh: Callable[[], Mapping[Path, Any]]
    ) -> Changes:
        """Take what is not written at the next moment from the root, or from ``fresh``."""
        missing = [path for path in self._defaults if following.get(path) is None]
        kept = {path: root.get(path) for path in missing}
        if any(value is None for value in kept.values()):
            begun = fresh()
            kept = {path: begun[path] if leaf is None else leaf for path, leaf in kept.items()}
        return kept

    def _begun_with(self, leaves: Leaves, constants: Mapping[str, Any]) -> dict[Path, Any]:
        """Make the values of new episodes of numbers, for the batch of ``leaves``."""
        flags = self._first_flag(leaves)
        return {
            path: episode_counters.begun(
                flags,
                leaves.batch_dims,
                spec.shape,
                dtype_name(spec.dtype),  # type: ignore[arg-type]
                constants[".".join(path)],
            )
            for path, spec in self._element_specs().items()
        }

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the entries, also over what the data has; without an env, specs may have its batch."""
        return tensordict.update(self._fresh(tensordict))

    def extra_repr(self) -> str:
        return f"keys={[as_key(path) for path in self._defaults]}"


class gSDENoise(TensorDictPrimer):
    """Add the noise matrix of state-dependent exploration, ``_eps_gSDE``, drawn again for each episode.

    Args:
        state_dim, action_dim: sizes of what the policy reads and of its action: the matrix is
            ``(*shape, action_dim, state_dim)``, drawn from a normal distribution. Without either it is zeros of
            shape ``(*shape, 1)``, which an exploration module fills.
        shape: leading axes, most often the batch size of the env; none by default, and then that of the env
            is put in front.
        **kwargs: further keywords of `TensorDictPrimer`.

    Example:
        >>> from envkit import GymEnv, gSDENoise
        >>> noise = gSDENoise(state_dim=3, action_dim=1)
        >>> env = GymEnv("Pendulum-v1").append_transform(noise)
        >>> env.reset()["_eps_gSDE"].shape
        torch.Size([1, 3])
        >>> env.close()
    """

    def __init__(
        self,
        state_dim: int | None = None,
        action_dim: int | None = None,
        shape: Sequence[int] | None = None,
        **kwargs: Any,
    ):
        for name, size in (("state_dim", state_dim), ("action_dim", action_dim)):
            if size is not None:
                as_int(name, size, least=1, meaning="the length of the last axis of the entry")
        lead = () if shape is None else as_batch_size(shape)
        is_drawn = state_dim is not None and action_dim is not None
        event: Any = (action_dim, state_dim) if is_drawn else (1,)
        spec = Composite({"_eps_gSDE": Unbounded((*lead, *event))}, shape=lead)
        kwargs.setdefault("expand_specs", not lead)
        kwargs.setdefault("random", is_drawn)
        super().__init__(spec, **kwargs)


def _filled(td: TensorDictBase, values: TensorDictBase) -> TensorDictBase:
    """Write the values of entries that ``td`` does not have."""
    for path, value in leaves(values):
        if td.get(as_key(path), None) is None:
            td.set(as_key(path), value)
    return td


def _batched(value: object, spec: TensorSpec, like: TensorDictBase, key: Key) -> Any:
    """Bring a default to the batch of ``like``."""
    if isinstance(spec, NonTensor):
        return spec.zero(like.batch_size) if value == 0 else NonTensorData(value, like.batch_size)
    shape = torch.Size((*like.batch_size, *spec.shape))
    if not isinstance(value, torch.Tensor):
        value = torch.as_tensor(value, dtype=spec.dtype)
    try:
        return value.expand(shape).clone()
    except RuntimeError as error:
        raise PrimerError(
            f"the default of {key!r} has shape {tuple(value.shape)}, but one element has shape "
            f"{tuple(spec.shape)} and the batch {tuple(like.batch_size)}. Return one of these."
        ) from error


def _require_in(value: torch.Tensor, spec: TensorSpec, key: Key) -> None:
    if not spec.expand(value.shape).is_in(value.to(spec.device)):
        raise PrimerError(
            f"the value of {key!r}, of dtype {value.dtype} and shape {tuple(value.shape)}, is not in "
            f"its spec {spec}. Give another default_value, or another spec."
        )


_OF_A_PRIMER = ("primers", "default_value", "random", "expand_specs", "single_default_value")
"""The attributes read from a primer of another library, e.g. TorchRL's."""


def get_env_transforms_from_module(module: nn.Module, init_key: str = "is_init") -> Compose:
    """Return the transforms an env needs for a policy, for wiring by hand.

    Args:
        module: a policy; all its submodules are searched.
        init_key: name of the marker of first steps.

    Returns:
        An `InitTracker` and one `TensorDictPrimer` for each recurrent submodule; nothing when there
        is none, or when ``module`` is no module (e.g. a function that makes one).

    Raises:
        ArgumentError: ``make_tensordict_primer`` returned something else than a primer.

    Example:
        >>> import torch
        >>> from envkit import TensorDictPrimer, Unbounded, get_env_transforms_from_module
        >>> class Memory(torch.nn.Module):
        ...     def make_tensordict_primer(self):
        ...         return TensorDictPrimer(hidden=Unbounded((8,)))
        >>> found = get_env_transforms_from_module(Memory())
        >>> [type(transform).__name__ for transform in found]
        ['InitTracker', 'TensorDictPrimer']
    """
    primers = _primers_of(module)
    return Compose(InitTracker(init_key), *primers) if primers else Compose()


def with_policy_transforms(env: EnvBase, policy: nn.Module, init_key: str = "is_init") -> EnvBase:
    """Append to an env the transforms a policy needs and the env does not have.

    A policy without recurrent submodules stays as it is, and a second call adds nothing.

    Returns:
        ``env`` itself when nothing is missing or when it is a `TransformedEnv`, which is extended in
        place; otherwise a `TransformedEnv` of it.
    """
    primers = _primers_of(policy)
    if not primers:
        return env
    missing: list[Transform] = []
    shown = {as_path(key) for key in (*env.observation_keys, *env.state_keys)}
    if all(path[-1] != init_key for path in map(as_path, env.observation_keys)):
        missing.append(InitTracker(init_key))
    for primer in primers:
        keys = {as_path(key) for key in primer.primers.keys(True, True)}
        if not keys <= shown:
            missing.append(primer)
    for transform in missing:
        env = env.append_transform(transform)
    return env


def _primers_of(module: object) -> list[TensorDictPrimer]:
    if not isinstance(module, nn.Module):
        return []
    makers = [
        submodule for submodule in module.modules() if hasattr(submodule, "make_tensordict_primer")
    ]
    return [_primer_of(maker) for maker in makers]


def _primer_of(maker: Any) -> TensorDictPrimer:
    primer = maker.make_tensordict_primer()
    if isinstance(primer, TensorDictPrimer):
        return primer
    if all(hasattr(primer, name) for name in _OF_A_PRIMER):
        return _translated(primer)
    raise ArgumentError(
        f"make_tensordict_primer of {type(maker).__name__} returned {type(primer).__module__}.{type(primer).__name__}, "
        f"but must return a primer. Return an envkit.TensorDictPrimer, or one of another library with the attributes {_OF_A_PRIMER}."
    )


def _translated(primer: Any) -> TensorDictPrimer:
    """Make our primer of another library's, which adds the same entries with the same values."""
    leaves = {as_key(as_path(key)): leaf for key, leaf in primer.primers.items(True, True)}
    specs = {key: Unbounded(leaf.shape, leaf.device, leaf.dtype) for key, leaf in leaves.items()}
    default = primer.default_value
    if primer.random:
        default = {key: leaf.rand for key, leaf in leaves.items()}
    elif isinstance(default, Mapping):
        default = {as_key(as_path(key)): value for key, value in default.items()}
    return TensorDictPrimer(
        Composite(specs, shape=primer.primers.shape),
        default_value=default,
        expand_specs=primer.expand_specs,
        single_default_value=bool(primer.single_default_value) and not primer.random,
    )
