"""Envs of JAX libraries behind the TensorDict interface: found by name, looked into, rebuilt in other processes.

Shared parts of all such libraries. A library adds how one of its envs resets and steps (a `SimulatorCore`), and
how the library makes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack

import jax
import jax.numpy as jnp

from envkit.arrays.integers import as_int
from envkit.data.arguments import as_bool
from envkit.env.wrapper_hints import called_here
from envkit.errors import ArgumentError, ArgumentTypeError
from envkit.functional import Box, Randomizer, Timestep, WithoutInfo, WrapperState
from envkit.specs.annotations import Device
from envkit_bridges.jax.jax_env import JaxEnv
from envkit_bridges.jax.options import LIMIT, JaxOptions
from envkit_bridges.jax.shared_programs import UnlikeError, content_of
from envkit_bridges.libraries import Simulator

if TYPE_CHECKING:
    from envkit.functional.spaces import SpaceTree
    from envkit.functional.structure import PyTree

NO_LIMIT = 2**31 - 1
"""Steps that no episode reaches, for libraries that count in int32."""

_REPEATS = "the steps of the simulator in one step"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DrawingState(WrapperState[Any]):
    """A library's own state, and what the random numbers of its steps come from, where the library takes a key a step.

    ``draws``: raw PRNG key of the episode. ``moves``: steps taken, int32; that of step i is drawn from both. So XLA
    drops the draw where an env ignores it.
    """

    draws: jax.Array
    moves: jax.Array

    @property
    def key(self) -> jax.Array:
        """The key of the next step."""
        return jax.random.fold_in(self.draws, self.moves)

    def after(self, inner: PyTree) -> DrawingState:
        """Return the state one step later."""
        return DrawingState(inner, self.draws, self.moves + 1)


@dataclass(frozen=True)
class SimulatorCore:
    """Base of the `StatelessEnv` around an env object of a library.

    ``make`` makes the object again: most can be built, but not pickled. ``source`` is what cores are compared by in its
    place: the class of the object with its numbers, and the function and arguments that make it; without these, cores
    are unlike.
    """

    env: Any = field(compare=False)
    make: Callable[[], Any] | None = field(default=None, compare=False)
    source: Hashable = field(init=False, repr=False)

    def __post_init__(self) -> None:
        source: Hashable = object()
        if isinstance(self.make, partial):
            # a name may be registered again, for what makes the same class with other numbers
            plain = (bool, int, float, str)
            numbers = {
                name: value
                for name, value in getattr(self.env, "__dict__", {}).items()
                if isinstance(value, plain)
            }
            try:
                source = content_of((type(self.env), self.make, numbers))
            except UnlikeError:
                source = object()
        object.__setattr__(self, "source", source)

    def lasting(self, steps: int | None) -> Self:
        """Return the env with a limit in the library that cuts no episode before so many steps; None: with none.

        Raises:
            ArgumentError: the library lets no such limit be chosen.
        """
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # nothing in it ever changes

    def __reduce__(self) -> tuple[Any, ...]:
        names = [field.name for field in dataclasses.fields(self) if field.init]
        given = {name: getattr(self, name) for name in names}
        if self.make is not None:
            del given["env"]
        return _core_of, (type(self), given)


def _core_of(kind: type[SimulatorCore], fields: dict[str, Any]) -> SimulatorCore:
    """Build what another process pickled."""
    return kind(**fields) if "env" in fields else kind(fields["make"](), **fields)


@dataclass(frozen=True)
class ModelledCore(SimulatorCore):
    """Core of an env object of Brax's interface, which keeps the model it steps with in an attribute.

    ``other``: the model that it is reset and stepped with in place of that one.
    """

    other: Any = None
    attribute: ClassVar[str]

    @property
    def model(self) -> PyTree:
        """The model that it steps with."""
        return getattr(self.env, self.attribute) if self.other is None else self.other

    def with_model(self, model: object) -> Self:
        """Step the same env object with ``model``."""
        return dataclasses.replace(self, other=model)

    @contextlib.contextmanager
    def modelled(self) -> Iterator[Any]:
        """Return the env object with the model in its place, as the libraries' own wrappers put it, and put it back.

        A copy of the object would not do: its own methods, kept in attributes, would read the original.
        """
        if self.other is None:
            yield self.env
            return
        with _PUTTING:
            original = getattr(self.env, self.attribute)
            setattr(self.env, self.attribute, self.other)
            try:
                yield self.env
            finally:
                setattr(self.env, self.attribute, original)

    @property
    def action_space(self) -> Box:
        """Actions between -1 and 1."""
        return Box(-1.0, 1.0, (self.env.action_size,))

    def reset(self, key: jax.Array) -> tuple[Any, Timestep]:
        """Reset the env object; its metrics are the info."""
        with self.modelled() as env:
            state = env.reset(key)
        return state, Timestep(state.obs, info=dict(state.metrics))

    def step(self, state: PyTree, action: jax.Array) -> tuple[Any, Timestep]:
        """Step the env object; ``done`` ends an episode for good."""
        with self.modelled() as env:
            state = env.step(state, action)
        info = dict(state.metrics)
        return state, Timestep(state.obs, state.reward, state.done > 0.5, info=info)


_PUTTING = threading.RLock()


@dataclass(frozen=True)
class ParamsCore(SimulatorCore):
    """Core of an env object that is handed its numbers, the params, at every call: they are its model.

    ``params``: any pytree. ``action_space``: that of the params it was made with. ``form``: structure, shapes and
    dtypes of these, which programs depend on; of their values they do not.
    """

    params: Any = None
    action_space: Any = None
    form: Hashable = None
    model_name: ClassVar[str] = "params"
    limit_name: ClassVar[str] = ""
    """Field of the params that is the library's own limit of steps; "" where there is none."""

    @classmethod
    def of(cls, env: Simulator, params: PyTree, make: Callable[[], Any] | None) -> Self:
        """Wrap an env object, stepped with ``params``; None takes its default.

        Raises:
            ArgumentTypeError: it is no env object of the library, or the params are not of the kind of its default.
            ArgumentError: it is a wrapper of the library that resets by itself.
            SpecTypeError: the action space is none that an env over JAX takes.
        """
        cls.require_bare(env)
        default = cls.default_params(env)
        if params is None:
            params = default
        else:
            _require_kind(params, default)
        core = cls(env, make, params, form=_form_of(params))
        return dataclasses.replace(core, action_space=core.space_of(params))

    @staticmethod
    def require_bare(env: Simulator) -> None:
        """Check that something is an env object of the library, without wrappers that reset.

        Raises:
            ArgumentTypeError, ArgumentError: see `of`.
        """
        raise NotImplementedError

    @staticmethod
    def default_params(env: Simulator) -> PyTree:
        """Return the params that the library has for an env object."""
        return env.default_params

    def lasting(self, steps: int | None) -> Self:
        """Return the env with params of such a limit."""
        current = getattr(self.params, self.limit_name, None)
        if current is None or (steps is not None and steps <= current):
            return self
        limit = NO_LIMIT if steps is None else steps
        if not isinstance(current, int):
            limit = (
                float(limit) if isinstance(current, float) else jnp.asarray(limit, current.dtype)
            )
        params = self.params.replace(**{self.limit_name: limit})
        return dataclasses.replace(self, params=params, form=_form_of(params))

    def space_of(self, params: PyTree) -> SpaceTree:
        """Return the action space that the env has with ``params``, as one of envkit's."""
        raise NotImplementedError

    @property
    def model(self) -> PyTree:
        """The params it is stepped with."""
        return self.params

    @property
    def model_argument(self) -> PyTree:
        """The params: other ones compile nothing again."""
        return self.params

    def with_model(self, model: PyTree) -> Self:
        """Return the same env with other params."""
        return dataclasses.replace(self, params=model)


def _form_of(params: PyTree) -> Hashable:
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(params)]
    return str(jax.tree.structure(params)), tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def _require_kind(params: PyTree, like: PyTree) -> None:
    """Check that params are of the class of others, with the same leaves; what is no leaf may differ.

    Raises:
        ArgumentTypeError: they are not.
    """
    names, wanted = (
        [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(one)]
        for one in (params, like)
    )
    if type(params) is not type(like) or names != wanted:
        raise ArgumentTypeError(
            f"params are {jax.tree.structure(params)}, but this env has {jax.tree.structure(like)}. Pass "
            "env.params.replace(...)."
        )


def _require_like(params: PyTree, like: PyTree) -> None:
    """Check that params are those of an env, in their shapes too.

    Raises:
        ArgumentTypeError: they are not.
    """
    given, wanted = jax.tree.structure(params), jax.tree.structure(like)
    if given != wanted:
        raise ArgumentTypeError(
            f"params are {given}, but this env has {wanted}. Pass env.params.replace(...) with other numbers, or "
            "make another env."
        )
    for (path, leaf), other in zip(
        jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(like), strict=True
    ):
        one, two = jnp.asarray(leaf), jnp.asarray(other)
        if one.shape != two.shape or one.dtype != two.dtype:
            raise ArgumentTypeError(
                f"params{jax.tree_util.keystr(path)} is {one.dtype}{list(one.shape)}, but was {two.dtype}"
                f"{list(two.shape)}. Pass one of the same shape and dtype, or make another env."
            )


class ParamsOptions(JaxOptions, total=False):
    """Keywords of envs that are stepped with params, those of every env over JAX (`envkit_bridges.jax.options.JaxOptions`) included.

    Args:
        params_per_row: put the params into the state of each row, as ("state", "params") where it is nested or
            unpacked. Each row is stepped with its own, and keeps them from episode to episode.
    """

    params_per_row: bool


class SimulatorEnv(JaxEnv):
    """An env object of a library as a `JaxEnv`; unknown public attributes are looked up on the object.

    Args:
        core: how it resets and steps.
        device, **options: of `JaxEnv`.

    Attributes:
        env_name: what it was made by, if by name; with the keywords that were given to the library.
    """

    libname: ClassVar[str]
    env_name: str | None = None
    _made_with: Mapping[str, Any] = {}
    _maker: Callable[[], Simulator] | None = None
    """Makes the env object again: what makes envs by name sets this before it calls the constructor of the wrapper."""

    def __init__(
        self, core: SimulatorCore, *, device: Device | None = None, **options: Unpack[JaxOptions]
    ):
        if (steps := options.get("episode_length")) is not None:
            repeat = as_int(
                "action_repeat", options.get("action_repeat", 1), least=1, meaning=_REPEATS
            )
            steps = as_int("episode_length", steps, least=-1, meaning=LIMIT)
            core = core.lasting(None if steps == -1 else steps * repeat)
        self._core = core
        env: Any = core if options.get("metrics") else WithoutInfo(core)
        super().__init__(env, device=device, **options)

    @property
    def _env(self) -> Simulator:
        return self._core.env

    def _repr_arguments(self) -> list[str]:
        if self.env_name is None:
            return super()._repr_arguments()
        return [
            repr(self.env_name),
            *(f"{key}={value!r}" for key, value in self._made_with.items()),
        ]

    if not TYPE_CHECKING:  # a misspelt name would pass

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                core = vars(self).get("_core")
                if name.startswith("_") or core is None:
                    raise
            try:
                return getattr(core.env, name)
            except AttributeError as error:  # names a class that the user has never heard of
                raise AttributeError(  # without a full stop: Python puts the nearest name behind
                    f"neither {type(self).__name__} nor its simulator {type(core.env).__name__} has an "
                    f"attribute {name!r}{called_here(name)}"
                ) from error


class ParamsEnv(SimulatorEnv):
    """An env object that is handed params at every call, see `ParamsCore`.

    Args:
        env: the env object.
        env_params: what it is stepped with; None takes its default.
        device, **options: of `JaxEnv`; ``params_per_row`` of `ParamsOptions`.
    """

    core_type: ClassVar[type[ParamsCore]]
    """How an env object of the library resets and steps."""
    _core: ParamsCore

    def __init__(
        self,
        env: Simulator,
        env_params: PyTree = None,
        *,
        device: Device | None = None,
        **options: Unpack[ParamsOptions],
    ):
        core = self.core_type.of(env, env_params, self._maker)
        keywords: dict[str, Any] = dict(options)
        if as_bool("params_per_row", keywords.pop("params_per_row", False)):
            keywords["randomize_at"] = keywords.get("randomize_at") or "construction"
            keywords["randomize"] = _EveryLeaf(keywords.get("randomize"))
        super().__init__(core, device=device, **keywords)
        self._params = self._core.params
        self._engine.settings.model = jax.tree.map(jnp.asarray, self._params)

    @property
    def params(self) -> PyTree:
        """Parameters that the env is stepped with.

        Others can be assigned, of the same structure; nothing is compiled again. Rows with their own params
        (``params_per_row``) keep them: assigned ones are for rows that begin without state.
        """
        return self._params

    @params.setter
    def params(self, params: object) -> None:
        _require_like(params, self._params)
        space = self._core.space_of(params)
        if space != self._core.action_space:
            raise ArgumentError(
                f"the params would change the action space from {self._core.action_space} to {space}, which this "
                f"env has declared. Make another env: {type(self).__name__}(..., env_params=params)."
            )
        self._params = params
        self._engine.settings.model = jax.tree.map(jnp.asarray, params)


@dataclass(frozen=True)
class _EveryLeaf:
    """Has rows keep every leaf of the params, also those that ``randomize`` does not draw."""

    randomize: Randomizer | None

    def __call__(self, key: jax.Array, params: PyTree) -> PyTree:
        drawn = params if self.randomize is None else self.randomize(key, params)
        return jax.tree.map(jnp.copy, drawn)
