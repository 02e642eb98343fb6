"""Domain randomisation: rows that step with their own model, drawn at random.

This module decides which leaves of a model are drawn, from which random numbers, and how they are put back. When
a row draws is decided in `autoreset`.

Conventions
    model    pytree of numbers and arrays that an env steps with, see `ModelledEnv`.
    changed  positions, among the leaves of the model, of those that the user's function changes.
    drawn    dict of what a row has drawn, by the names of those leaves, nested.

Decided here: only leaves that the function changes are drawn, stored and batched. It is traced once: an output
that is the very input, also through `jax.jit`, is unchanged. The draws come from a stream beside the key of the
episode, so an env whose function changes nothing begins every episode as it does without.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import Any, Literal, Self, get_args

import jax
import jax.numpy as jnp
import numpy as np

from envkit.arrays.leaves import nest
from envkit.errors import ArgumentError, ArgumentTypeError
from envkit.functional.core import EnvWrapper, ModelledEnv, StatelessEnv
from envkit.functional.structure import PyTree, name_of, strong

Drawn = dict[str, Any]
RandomizeAt = Literal["episode", "construction"]
Randomizer = Callable[[jax.Array, Any], Any]

_STREAM = 0x72616E64  # no env splits its key into so many parts


@dataclass(frozen=True)
class Randomization:
    """How rows of an env draw their own models; made by `of`.

    Args:
        randomize: ``(key, model) -> model``, the same tree with other values.
        at: "episode" draws when an episode begins, "construction" once for each row.
        changed: see the module.
    """

    randomize: Randomizer
    at: RandomizeAt
    changed: tuple[int, ...]

    @classmethod
    def of(cls, env: Any, randomize: Randomizer, at: RandomizeAt = "episode") -> Self:
        """Find out which leaves ``randomize`` changes.

        Raises:
            ArgumentError: unknown ``at``, or ``randomize`` gives a model of another structure or shape, or asks for
                the value of what it is given (``if``, ``float``), where it is traced.
            ArgumentTypeError: (a TypeError) ``env`` has no model, or ``randomize`` cannot be called.
        """
        if at not in get_args(RandomizeAt):
            raise ArgumentError(
                f"randomize_at={at!r} is not one of {get_args(RandomizeAt)}. Pass one of these."
            )
        _require_randomizer(randomize)
        _require_model(env)
        return cls(randomize, at, _changed_by(randomize, env.model))

    def draw(self, env: ModelledEnv, key: jax.Array) -> Drawn:
        """Draw a model for a row whose episode, or whose first one, is drawn from ``key``."""
        paths, treedef = jax.tree_util.tree_flatten_with_path(env.model)
        model = jax.tree.unflatten(treedef, [jnp.asarray(leaf) for _, leaf in paths])
        leaves = jax.tree.leaves(self.randomize(jax.random.fold_in(key, _STREAM), model))
        return nest(
            {
                _name(paths[index][0]): _like(leaves[index], paths[index][1])
                for index in self.changed
            }
        )

    def applied(self, env: Any, drawn: Drawn) -> StatelessEnv:
        """Return ``env`` with what a row has drawn in its model."""
        if not self.changed:
            return env
        paths, treedef = jax.tree_util.tree_flatten_with_path(env.model)
        leaves = [leaf for _, leaf in paths]
        for index in self.changed:
            leaves[index] = reduce(getitem, _name(paths[index][0]), drawn)
        return env.with_model(jax.tree.unflatten(treedef, leaves))

    def drawn_bytes(self, env: ModelledEnv) -> dict[str, int]:
        """Return by how many bytes each leaf that is drawn makes the state of a row larger."""
        paths = jax.tree_util.tree_flatten_with_path(env.model)[0]
        found = {".".join(_name(paths[i][0])): strong(paths[i][1]) for i in self.changed}
        return {
            name: math.prod(leaf.shape) * max(leaf.dtype.itemsize, 4)
            for name, leaf in found.items()
        }


def _name(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the name of a leaf of a model; a model that is one number or array is called "value"."""
    return name_of(path) or ("value",)


def _require_randomizer(randomize: object) -> None:
    message = f"randomize is {randomize!r}, but must be a function (key, model) -> model."
    if not callable(randomize):
        raise ArgumentTypeError(message)
    try:
        signature = inspect.signature(randomize)
    except ValueError:  # builtins tell none
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise ArgumentTypeError(
            f"{message} It takes {signature}. Give it two arguments, the key of the row and the model."
        ) from error


def _require_model(env: Any) -> None:
    while isinstance(env, EnvWrapper):
        env = env.env
    if not (hasattr(env, "with_model") and hasattr(env, "model")):
        while hasattr(env, "env"):
            env = env.env
        raise ArgumentTypeError(
            f"{type(env).__name__} has no model to randomise. Give it a property `model`, a pytree of arrays, "
            "and a method `with_model(model)` that gives the env with another one (see ModelledEnv), or leave "
            "randomize out."
        )


def _changed_by(randomize: Randomizer, model: PyTree) -> tuple[int, ...]:
    paths, treedef = jax.tree_util.tree_flatten_with_path(model)
    leaves = [leaf for _, leaf in paths]
    after = []

    def flat(key: jax.Array, leaves: list[Any]) -> list[Any]:
        made = randomize(key, jax.tree.unflatten(treedef, leaves))
        after.append(jax.tree.structure(made))
        return jax.tree.leaves(made)

    with _tracing_explained(randomize):
        program = jax.make_jaxpr(flat)(jax.random.PRNGKey(0), leaves).jaxpr
    if after[0].num_leaves != treedef.num_leaves or after[0] != treedef:
        raise ArgumentError(
            f"randomize was given a model of {treedef.num_leaves} leaves and gave back another structure, of "
            f"{after[0].num_leaves}: {str(after[0])[:200]}. Return the model that it is given with other values, "
            "e.g. model.replace(...), and leave everything that is no array as it is."
        )
    inputs = program.invars[len(program.invars) - len(leaves) :]
    changed = []
    for index, (given, out) in enumerate(zip(inputs, program.outvars, strict=True)):
        if _source(program, out) is not given:
            _require_like(".".join(_name(paths[index][0])), given.aval, out.aval)
            changed.append(index)
    return tuple(changed)


@contextlib.contextmanager
def _tracing_explained(randomize: Randomizer) -> Iterator[None]:
    """Return what a function may do that is traced, where it asked for the value of something it was given."""
    try:
        yield
    except _ASKS_FOR_VALUES as error:
        name = getattr(randomize, "__qualname__", repr(randomize))
        said = str(error).splitlines()[0]
        raise ArgumentError(
            f"randomize={name} asks for the value of what it is given: {type(error).__name__}: {said} It is traced, "
            "once for all rows and before anything is drawn. Choose with jnp.where(condition, a, b) in place of "
            "if, compute with jax.numpy in place of float(), int() and NumPy, and draw with jax.random."
        ) from error


_ASKS_FOR_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def _source(program: Any, variable: Any) -> Any:
    """Find the variable that ``variable`` is a mere copy of, by functions that are jitted in themselves."""
    made_by = {out: equation for equation in program.eqns for out in equation.outvars}
    while not hasattr(variable, "val") and (equation := made_by.get(variable)) is not None:
        inner = equation.params.get("jaxpr") if equation.primitive.name in ("jit", "pjit") else None
        if inner is None:
            break
        inside = _source(inner.jaxpr, inner.jaxpr.outvars[equation.outvars.index(variable)])
        if inside not in inner.jaxpr.invars:
            break
        variable = equation.invars[inner.jaxpr.invars.index(inside)]
    return variable


def _require_like(name: str, original: Any, changed: Any) -> None:
    if changed.shape != original.shape or not np.can_cast(
        changed.dtype, original.dtype, "same_kind"
    ):
        raise ArgumentError(
            f"randomize gave {name} as {changed.dtype}{list(changed.shape)}, but it is {original.dtype}{list(original.shape)} "
            "in the model. Return it in the same shape and kind: one model, envkit adds the rows."
        )


def _like(leaf: Any, original: Any) -> jax.Array:
    return jnp.asarray(leaf).astype(strong(original).dtype)
