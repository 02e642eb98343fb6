"""How a policy enters the programs of a stateless env.

This module decides what a policy is given of a root, and how what it gives becomes an action of the env.
It does not know how a module is translated, nor what a program does with the result.

Conventions
    root   what a policy may read, by path: what the env and its transforms show, done flags (which are
           never set at a root), and entries of the data that the env does not know.
    rows   the flattened batch, in front of every array.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import torch
from tensordict import TensorDictBase

from envkit.data.paths import Path, as_key, as_path
from envkit.data.transition import leaves
from envkit.env.base import EnvBase
from envkit.env.policy import observation_inputs
from envkit.errors import (
    ArgumentError,
    BatchSizeError,
    InputError,
    MissingKeyError,
    PolicyError,
    TranslationError,
)
from envkit.rules import DONE_LEAVES
from envkit.specs import TensorSpec
from envkit_bridges.jax.codecs import action_tree, integers_in_jax, is_choice
from envkit_bridges.jax.engine import ProgramEngine
from envkit_bridges.jax.fused_transforms import Acted
from envkit_bridges.jax.policy.jax_policy import JaxPolicy, Places, act
from envkit_bridges.jax.policy.translated import WIDE, Translation, has_64_bits, in_jax, narrowed
from envkit_bridges.policy.compiled import CompiledPolicy
from envkit_bridges.policy.errors import STEPWISE
from envkit_bridges.policy.exporting import signature_for
from envkit_bridges.policy.stacked import StackedPolicies

if TYPE_CHECKING:
    import numpy as np

_FLAGS: tuple[Path, ...] = tuple((name,) for name in DONE_LEAVES)


@dataclass(frozen=True)
class Actor:
    """A policy as a program takes it.

    Attributes:
        function: what acts (see `functional.Policy`), hashable; None draws random actions.
        params: its first argument.
        carries: entries of the root that it reads and the env does not show.
        remembers: those of them that it writes under ``next``.
        writes: what it writes, with torch's dtypes; empty for one in JAX, whose arrays say it.
    """

    function: Callable[..., Any] | None = None
    params: object = None
    carries: tuple[Path, ...] = ()
    remembers: tuple[Path, ...] = ()
    writes: Mapping[Path, torch.dtype] = field(default_factory=dict)


def is_compilable(policy: object) -> bool:
    """Check whether a policy can be part of a program: random, in JAX, or translated."""
    return policy is None or isinstance(policy, JaxPolicy | CompiledPolicy)


def actor_for(
    env: EnvBase,
    engine: ProgramEngine,
    policy: object,
    td: TensorDictBase,
    free: Mapping[Path, torch.Tensor],
) -> Actor:
    """Convert a policy into the form that programs take.

    Args:
        env: its specs say what the policy is given and what actions are.
        engine: its programs.
        policy: None, a `JaxPolicy`, or what `compile_policy` gave.
        td: root to start from.
        free: its entries that are free, see `PolicySpecs`.

    Raises:
        PolicyError: (a TypeError) any other policy.
        MissingKeyError: the policy reads what the root does not have, or writes no action.
        TranslationError: a module cannot be translated.
    """
    if policy is None:
        return Actor()
    if isinstance(policy, JaxPolicy):
        specs = PolicySpecs.of(env, engine)
        acting = _InJax(policy.function, specs.reads, specs.actions, specs.places)
        return Actor(acting, policy.params)
    if isinstance(policy, CompiledPolicy):
        return _translated(env, engine, policy, td, free)
    hint = "compile_policy(module)" if isinstance(policy, torch.nn.Module) else "a JaxPolicy"
    raise PolicyError(
        f"unroll compiles the policy into its program, but got {type(policy).__name__}. Pass {hint}, or "
        "use rollout(steps, policy), which steps from Python."
    )


def _translated(
    env: EnvBase,
    engine: ProgramEngine,
    policy: CompiledPolicy,
    td: TensorDictBase,
    free: Mapping[Path, torch.Tensor],
) -> Actor:
    if isinstance(policy.module, StackedPolicies):
        _require_whole_groups(policy.module, engine, td)
    specs = PolicySpecs.of(env, engine)
    shown, actions = specs.shown, specs.actions
    free_shapes = {path: (value.shape[td.ndim :], value.dtype) for path, value in free.items()}
    root = {**shown, **free_shapes}
    signature = signature_for(env, policy.module, root, sees_root=policy.sees_root)
    translation = policy.translation(signature, engine.size(td.numel()), in_jax)
    missing = [as_key(leaf.path) for leaf in actions if leaf.path not in translation.writes]
    if missing:
        raise MissingKeyError(
            f"the policy writes {list(map(as_key, translation.writes))}, but not {missing}. Name its "
            "output as the env names its action."
        )
    carries = tuple(path for path in translation.reads if path in free)
    remembers = tuple(path for path in carries if ("next", *path) in translation.writes)
    lasting = frozenset(shown) - set(_FLAGS) | set(carries)
    _refuse_wide_memory(translation.writes, lasting)
    function = _Translated(translation, actions, lasting)
    tensors = translation.tensors(policy, env.device or torch.device("cpu"))
    return Actor(function, tensors, carries, remembers, translation.writes)


def _require_whole_groups(
    population: StackedPolicies, engine: ProgramEngine, td: TensorDictBase
) -> None:
    """Check that the rows of a program are those of the data, all of them, so that each policy acts on its own.

    Raises:
        BatchSizeError: (a RuntimeError) they are no multiple of the policies, or are padded.
        PolicyError: (a TypeError) they are spread over devices.
    """
    population.require_groups(td.batch_size[0] if td.batch_dims else 1)
    shards = engine.programs.shards
    if shards is not None and len(shards.devices) > 1:
        raise PolicyError(
            f"a population of {population.num_policies} policies does not act in an env over {len(shards.devices)} devices, "
            "each of which sees its own rows alone. Build the env on one device."
        )
    if engine.size(td.numel()) != td.numel():
        raise BatchSizeError(
            f"the data has batch size {tuple(td.batch_size)} and the env {tuple(engine.settings.batch_size)}; a population "
            f"acts on the batch of its env alone. Build the env with batch_size={list(td.batch_size)}."
        )


def _refuse_wide_memory(writes: Mapping[Path, torch.dtype], lasting: Collection[Path]) -> None:
    """Check that what goes on into the next root has the 32 bits in which programs carry it.

    Raises:
        TranslationError: it has 64, and JAX is set to 32.
    """
    for path, dtype in writes.items():
        kept = path[1:] if path[0] == "next" else path
        if kept in lasting and dtype in WIDE and not has_64_bits():
            raise TranslationError(
                f"the module writes {as_key(path)!r} as {dtype}, but a program carries 32 bits to the next step. "
                f"Cast it to torch.float32 or torch.int32, or {STEPWISE}."
            )


# --------------------------------------------------------------------------------- what it is given


@dataclass(frozen=True)
class PolicySpecs:
    """Facts of the specs of an env about its policies.

    Attributes:
        shown: what a root shows: event shape and dtype, by path.
        reads: what a plain policy is called with.
        actions: how each action is written.
        action_specs: their specs, by path.
        places: what a policy may write.
        taken: entries that are shown or are actions.
    """

    shown: Mapping[Path, tuple[torch.Size, torch.dtype]]
    reads: tuple[Path, ...]
    actions: tuple[_ActionLeaf, ...]
    action_specs: Mapping[Path, TensorSpec]
    places: Places
    taken: frozenset[Path]

    @classmethod
    def of(cls, env: EnvBase, engine: ProgramEngine) -> PolicySpecs:
        """Read the specs of an env: once where they are locked."""
        return env._declared.cached("policy_specs", lambda: cls._read(env, engine))

    @classmethod
    def _read(cls, env: EnvBase, engine: ProgramEngine) -> PolicySpecs:
        shown, actions = _shown(env), env.full_action_spec
        of_path = {as_path(key): actions[key] for key in env.action_keys}
        return cls(
            shown,
            tuple(map(as_path, observation_inputs(env))),
            _action_leaves(env, engine),
            of_path,
            Places.of(env),
            frozenset((*shown, *of_path)),
        )

    def free_entries(self, td: TensorDictBase) -> dict[Path, torch.Tensor]:
        """List the tensors of a root that are neither the env's, nor actions, masks or `next`."""
        return {
            path: value
            for path, value in leaves(td)
            if path not in self.taken
            and isinstance(value, torch.Tensor)
            and path[0] not in ("state", "next")
            and not path[-1].startswith("_")
        }


def _shown(env: EnvBase) -> dict[Path, tuple[torch.Size, torch.dtype]]:
    """List what a root of an env shows: event shape and dtype, by path."""
    batch = len(env.batch_size)
    found = {as_path(key): leaf for key, leaf in env.full_observation_spec.items(True, True)}
    shown = {path: leaf for path, leaf in found.items() if path[0] != "state"}
    shown.update({as_path(key): env.full_done_spec[key] for key in env.done_keys})
    return {path: (leaf.shape[batch:], leaf.dtype) for path, leaf in shown.items()}


# ----------------------------------------------------------------------------------- what it gives


@dataclass(frozen=True)
class _ActionLeaf:
    """How one action of the env is written: where, and in which form."""

    path: Path
    space: Any
    event: tuple[int, ...]  # as a torch policy writes it
    is_one_hot: bool

    @property
    def dtype(self) -> np.dtype:
        return self.space.dtype

    def read(self, value: jax.Array) -> jax.Array:
        """Convert what a torch policy wrote into the encoding of the env; see `specs.inputs`."""
        self._check(value, self.event)
        value = narrowed(value)
        if self.is_one_hot:
            return integers_in_jax(value, self.space).astype(self.dtype)
        self._check_dtype(value)
        return value.astype(self.dtype)

    def checked(self, value: object) -> jax.Array:
        """Check an action that a policy in JAX returned, and return it in the dtype of the env."""
        value = jnp.asarray(value)
        self._check(value, self.space.shape)
        self._check_dtype(value)
        return value.astype(self.dtype)

    def _check_dtype(self, value: jax.Array) -> None:
        if jnp.issubdtype(value.dtype, jnp.floating) != jnp.issubdtype(self.dtype, jnp.floating):
            raise InputError(
                f"the policy gave {as_key(self.path)!r} as {value.dtype}, but the env takes "
                f"{self.dtype}. Have it give that: floats never become integers, nor integers floats."
            )

    def _check(self, value: jax.Array, event: tuple[int, ...]) -> None:
        if value.shape[1:] != event:
            raise ArgumentError(
                f"the policy gave {as_key(self.path)!r} with shape {value.shape}, but the env takes "
                f"(rows, {', '.join(map(str, event))}). Return that shape."
            )


def _action_leaves(env: EnvBase, engine: ProgramEngine) -> tuple[_ActionLeaf, ...]:
    batch = len(env.batch_size)
    return tuple(
        _ActionLeaf(
            path,
            member,
            tuple(env.full_action_spec[as_key(path)].shape[batch:]),
            is_choice(member) and not engine.settings.categorical,
        )
        for path, member in engine.action_spaces.items()
    )


def _acted(
    written: Mapping[Path, jax.Array],
    actions: Mapping[Path, jax.Array],
    lasting: Collection[Path],
) -> Acted:
    """Sort what a policy wrote: actions for the env, what goes on into the next root, what is recorded."""
    following = {
        path[1:]: leaf
        for path, leaf in written.items()
        if path[0] == "next" and path[1:] in lasting
    }
    recorded = {
        path: leaf
        for path, leaf in written.items()
        if path[0] != "next" or path[1:] not in following
    }
    return Acted(action_tree(actions), recorded, following)


@dataclass(frozen=True)
class _Translated:
    """A translated module as the policy of a program."""

    translation: Translation
    actions: tuple[_ActionLeaf, ...]
    lasting: frozenset[Path]  # entries of a root that it may write into the next one

    def __call__(
        self, params: Sequence[jax.Array], observation: Mapping[Path, jax.Array], key: jax.Array
    ) -> Acted:
        rows = next(iter(observation.values())).shape[0]
        never = dict.fromkeys(_FLAGS, jnp.zeros((rows, 1), bool))
        written = self.translation(params, {**never, **observation}, key)
        read = {leaf.path: leaf.read(written[leaf.path]) for leaf in self.actions}
        return _acted(written, read, self.lasting)


@dataclass(frozen=True)
class _InJax:
    """A `JaxPolicy` as the policy of a program."""

    function: Callable[..., Any]
    reads: tuple[Path, ...]
    actions: tuple[_ActionLeaf, ...]
    places: Places

    def __call__(
        self, params: object, observation: Mapping[Path, jax.Array], key: jax.Array
    ) -> Acted:
        seen = {path: observation[path] for path in self.reads}
        written = act(self.function, self.places, params, seen, key)
        written |= {leaf.path: leaf.checked(written[leaf.path]) for leaf in self.actions}
        actions = {leaf.path: written[leaf.path] for leaf in self.actions}
        return _acted(written, actions, self.places.lasting)
