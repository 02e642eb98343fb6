"""Create functions that carry what is known of their envs, and state that all copies share.

An `EnvCreator` builds one env when it is made, to learn its metadata. The memory that this env holds in
parameters and buffers is kept; every env it builds later has those very tensors, in whatever process.

Conventions
    state    parameters and buffers of an env by name, as `torch.nn.Module` names them.
    shared   several envs, in several processes, hold the same bytes: an update in place
             (``buffer.add_(1)``) shows everywhere, an assignment of a new tensor nowhere. Only
             state on the CPU is shared; what lives on another device begins as a copy.
    lock     a module with an attribute ``shared_lock`` gets one lock for all copies; it holds that
             where it reads a buffer and writes it back.
    clones   a module with an attribute ``shared_by_clones`` (see `TrajCounter`) has one state with all its clones,
             whichever creators build the envs they are in.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from envkit.batched.makers import equal
from envkit.batched.metadata import EnvMetaData
from envkit.batched.shared_state import OwnState, SharedState
from envkit.data.arguments import as_bool, as_keywords, require_callable
from envkit.env.base import EnvBase
from envkit.env.wrapper_hints import require_env
from envkit.errors import MissingKeyError
from envkit.transport import by_value

_RETURN_ONE = "Return one, e.g. GymEnv('CartPole-v1')."


class EnvCreator:
    """Make envs that look alike and share their running statistics; picklable.

    Args:
        create_env_fn: callable that makes an env. It travels by value.
        create_env_kwargs: keywords for it.
        share_memory: all envs it makes share one state. False: each begins with a copy of it.
        **kwargs: more keywords for ``create_env_fn``.

    Raises:
        ArgumentTypeError: (a TypeError) ``create_env_fn`` cannot be called or makes no env, or its keywords are no dict.

    Example:
        >>> from envkit import EnvCreator, GymEnv, VecNormV2
        >>> def make():
        ...     return GymEnv("Pendulum-v1").append_transform(VecNormV2(["observation"]))
        >>> creator = EnvCreator(make)
        >>> one, other = creator(), creator()
        >>> data = one.rollout(20)
        >>> bool((one.transform.loc == other.transform.loc).all())
        True
        >>> one.close()
        >>> other.close()
    """

    def __init__(
        self,
        create_env_fn: Callable[..., EnvBase],
        create_env_kwargs: dict[str, Any] | None = None,
        share_memory: bool = True,
        **kwargs: Any,
    ):
        require_callable("create_env_fn", create_env_fn)
        given = as_keywords("create_env_kwargs", create_env_kwargs, "{'size': 3}")
        self.create_env_fn = create_env_fn
        self.create_env_kwargs = {**given, **kwargs}
        self.share_memory = as_bool("share_memory", share_memory)
        env = create_env_fn(**self.create_env_kwargs)
        require_env("the result of create_env_fn", env, _RETURN_ONE)
        try:
            _ = env.output_spec  # what follows the shapes of entries is made when specs are read
            before = {name: tensor.detach().clone() for name, tensor in _state_of(env).items()}
            env.rand_step(env.reset())
            self._meta_data = EnvMetaData.metadata_from_env(env)
            # The step has made what is made at the first use; it counts for no statistic.
            state = {**_state_of(env), **before}
            self._of_clones = _states_of_clones(env, state) if share_memory else {}
            taken = set(_by_name(self._of_clones))
            own = {name: tensor for name, tensor in state.items() if name not in taken}
            self._state = SharedState(own) if share_memory else OwnState(own)
        finally:
            env.close(raise_if_closed=False)

    @property
    def meta_data(self) -> EnvMetaData:
        """Metadata of the env that was built when this creator was."""
        return self._meta_data

    def __call__(self, **kwargs: Any) -> EnvBase:
        """Build an env with ``kwargs`` and the stored keywords, which win, and give it the state."""
        env = self.create_env_fn(**{**kwargs, **self.create_env_kwargs})
        own = _state_of(env)
        for name, tensor in self._tensors().items():
            device = own[name].device if name in own else tensor.device
            _give(env, name, tensor.to(device, copy=not self.share_memory))
        if isinstance(self._state, SharedState):
            module: Any
            for place, module in env.named_modules():
                if "shared_lock" in vars(module):
                    module.shared_lock = self._of_clones.get(place, self._state).lock
        return env

    def make_variant(self, **kwargs: Any) -> EnvCreator:
        """Return a creator with other keywords, over those stored; metadata and state are the same.

        Example:
            >>> from envkit import EnvCreator, GymEnv
            >>> creator = EnvCreator(GymEnv, {"env_name": "CartPole-v1"})
            >>> env = creator.make_variant(max_episode_steps=5)()
            >>> len(env.rollout(10)) <= 5
            True
            >>> env.close()
        """
        variant = object.__new__(type(self))
        vars(variant).update(vars(self))
        variant.create_env_kwargs = {**self.create_env_kwargs, **kwargs}
        return variant

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the state."""
        return {name: tensor.clone() for name, tensor in self._tensors().items()}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Overwrite the state in place, also that of envs which share it.

        Raises:
            MissingKeyError: an entry is missing, or is not one of the state.
        """
        tensors = self._tensors()
        if tensors.keys() != state_dict.keys():
            raise MissingKeyError(
                f"the state dict has entries {sorted(state_dict)}, but the state has "
                f"{sorted(tensors)}. Pass what state_dict() of an equal creator gave."
            )
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(state_dict[name])

    def _tensors(self) -> dict[str, Tensor]:
        return {**self._state.tensors, **_by_name(self._of_clones)}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "create_env_fn": by_value.dumps(self.create_env_fn)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.create_env_fn = pickle.loads(state["create_env_fn"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._meta_data.env_str})"


def get_env_metadata(
    env_or_creator: EnvBase | Callable[..., EnvBase],
    kwargs: Mapping[str, Any] | None = None,
    *,
    env_validator: Callable[[EnvBase], object] | None = None,
) -> EnvMetaData:
    """Read the metadata of an env, or of one that is built for that and closed.

    Args:
        env_or_creator: an `EnvCreator` has read it before, where no ``kwargs`` are given.
        kwargs: of what builds it.
        env_validator: called on the env before; what it raises is raised here.

    Raises:
        ArgumentTypeError: (a TypeError) ``env_or_creator`` is no env and cannot be called, or makes none.

    Example:
        >>> from envkit import GymEnv, get_env_metadata
        >>> metadata = get_env_metadata(lambda: GymEnv("CartPole-v1"))
        >>> metadata.tensordict["observation"]
        tensor([0., 0., 0., 0.])
        >>> metadata.batch_size, metadata.batch_locked
        (torch.Size([]), True)
    """
    if isinstance(env_or_creator, EnvBase):
        if env_validator is not None:
            env_validator(env_or_creator)
        return EnvMetaData.metadata_from_env(env_or_creator)
    if isinstance(env_or_creator, EnvCreator) and not kwargs and env_validator is None:
        return env_or_creator.meta_data.clone()
    require_callable("env_or_creator", env_or_creator)
    made = env_or_creator(**(kwargs or {}))
    require_env("the result of env_or_creator", made, _RETURN_ONE)
    with made as env:
        if env_validator is not None:
            env_validator(env)
        return EnvMetaData.metadata_from_env(env)


def env_creator(create_env_fn: Callable[..., EnvBase]) -> EnvCreator:
    """Make an `EnvCreator` of a create function without keywords; also serves as a decorator.

    Args:
        create_env_fn: callable that makes an env and takes no keywords.

    Example:
        >>> from envkit import GymEnv, env_creator
        >>> @env_creator
        ... def make():
        ...     return GymEnv("CartPole-v1")
        >>> make.meta_data.batch_size
        torch.Size([])
        >>> env = make()
        >>> env.rollout(3).batch_size
        torch.Size([3])
        >>> env.close()
    """
    return EnvCreator(create_env_fn)


def with_kwargs(makers: Sequence[Any], kwargs: Sequence[dict[str, Any]]) -> list[Any]:
    """Put variants with the keywords of each row in the place of those makers that are creators.

    Rows of one creator that are given equal keywords share a variant.
    """
    variants: list[tuple[Any, dict[str, Any], EnvCreator]] = []
    new_makers = []
    for maker, keywords in zip(makers, kwargs, strict=True):
        if not isinstance(maker, EnvCreator) or not keywords:
            new_makers.append(maker)
            continue
        alike = (
            one for first, others, one in variants if first is maker and equal(others, keywords)
        )
        variant = next(alike, None)
        if variant is None:
            variant = maker.make_variant(**keywords)
            variants.append((maker, keywords, variant))
        new_makers.append(variant)
    return new_makers


def _state_of(env: EnvBase) -> dict[str, Tensor]:
    return {**dict(env.named_parameters()), **dict(env.named_buffers())}


def _states_of_clones(env: nn.Module, state: Mapping[str, Tensor]) -> dict[str, SharedState]:
    """Return the states that modules of an env share with their clones, by module; ``state`` is where one begins."""
    states = {}
    for place, module in env.named_modules():
        if "shared_by_clones" in vars(module):
            shared = vars(module)["shared_by_clones"]
            if shared.state is None:
                begins = {name: state[f"{place}.{name}"] for name, _ in module.named_buffers()}
                shared.state = SharedState(begins)
            states[place] = shared.state
    return states


def _by_name(states: Mapping[str, SharedState]) -> dict[str, Tensor]:
    return {
        f"{place}.{name}": tensor
        for place, state in states.items()
        for name, tensor in state.tensors.items()
    }


def _give(env: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a tensor in the place of a parameter's data, or of a buffer."""
    owner, _, leaf = name.rpartition(".")
    module = env.get_submodule(owner)
    parameter = module._parameters.get(leaf)
    if parameter is not None:
        parameter.data = tensor
    else:
        module._buffers[leaf] = tensor


def known_metadata(makers: Sequence[Any], rows: Sequence[int]) -> dict[int, EnvMetaData]:
    """Return the metadata of those rows that an `EnvCreator` makes: it has read it."""
    return {row: makers[row].meta_data for row in rows if isinstance(makers[row], EnvCreator)}
