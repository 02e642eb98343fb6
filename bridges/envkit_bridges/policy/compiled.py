"""Torch policies that are translated: `compile_policy` and what it remembers.

This module decides when a translation still holds. How a module is exported and its graph read is in
`exporting`; the caller says what it is translated to.

A translation holds while the entries it reads, the interaction type, the submodules and their
attributes (`cache_key`), and the names, shapes and dtypes of parameters and buffers are the same. The
values of these belong to the live module.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase

from envkit.env.policy import exploration_type, takes_tensordict
from envkit.env.stepping import Stepping
from envkit.errors import PolicyError, TranslationError
from envkit_bridges.policy.cache_key import key_of
from envkit_bridges.policy.exporting import Exported, Signature, export
from envkit_bridges.policy.numpy_policy import Stepwise
from envkit_bridges.policy.side_effects import tensors_by_name
from envkit_bridges.policy.stacked import StackedPolicies, State, on_state, stacked

_T = TypeVar("_T")

Make = Callable[[Exported, Signature, torch.nn.Module], _T]
"""Makes a translation of what was exported."""


def compile_policy(
    module: torch.nn.Module | Sequence[torch.nn.Module], state: State | None = None
) -> CompiledPolicy:
    """Translate a torch policy to JAX, so that `unroll` and `rollout` run it inside their program.

    Nothing is translated yet: that happens when an env first asks, since its specs say what the module
    is called with.

    A list of modules of one architecture makes a population: one policy, in which each module acts on its own rows. With 8
    modules in an env of batch size ``[8, n]``, or in a pool of ``8 * n`` envs, the first ``n`` rows belong to the first
    module. ``policy.parameters()`` are those of one module, with the modules as a new first axis. An optimiser trains all of
    them at once, and ``policy.module.unstacked(i)`` returns one of them as a plain module.

    Args:
        module: a TensorDictModule, or a module that is called as ``module(observation)`` and returns the action. One
            whose argument is named ``td`` or ``tensordict``, or is annotated as a TensorDict, is called with that. Or a list
            of modules, which are copied.
        state: parameters and buffers of a population, as `torch.func.stack_module_state` returns them. ``module`` is one of
            the population then. The policy uses the memory of these tensors.

    Raises:
        PolicyError: (a TypeError) ``module`` is no `torch.nn.Module` and no list of these, or a list with ``state``.
        ArgumentError: (a ValueError) modules of a population differ in more than the values of parameters and buffers, or
            ``state`` is not that of ``module``.

    Example:
        >>> import torch
        >>> from envkit import GymEnv, compile_policy
        >>> env = GymEnv("Pendulum-v1")
        >>> policy = compile_policy(torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Tanh()))
        >>> env.rollout(3, policy)["action"].shape
        torch.Size([3, 1])
        >>> env.close()
        >>> from envkit import SerialEnv
        >>> population = compile_policy([torch.nn.Linear(3, 1) for _ in range(2)])
        >>> pool = SerialEnv(6, lambda: GymEnv("Pendulum-v1"))
        >>> pool.rollout(5, population)["action"].shape
        torch.Size([6, 5, 1])
        >>> pool.close()
    """
    if state is not None and isinstance(module, CompiledPolicy | list | tuple):
        raise PolicyError(
            f"module is of type {type(module).__name__} and state is given; expected one of the modules whose state was stacked. "
            "Pass compile_policy(modules[0], state), or compile_policy(modules)."
        )
    if isinstance(module, CompiledPolicy):
        return module
    if isinstance(module, list | tuple):
        return CompiledPolicy(stacked(module))
    if not isinstance(module, torch.nn.Module):
        raise PolicyError(
            f"module is {module!r}, of type {type(module).__name__}, but must be a torch.nn.Module, whose parameters have "
            "names. Pass the module itself, a list of modules, or JaxPolicy(function) for a function in JAX."
        )
    return CompiledPolicy(module if state is None else on_state(module, state))


class CompiledPolicy(torch.nn.Module):
    """A torch module that stateless envs run inside their programs; see `compile_policy`.

    In other envs, and where a rollout cannot be compiled, it acts step by step: in NumPy where that is the
    same and faster, see `numpy_policy`, and otherwise as the module.

    Attributes:
        module: the live module.
        translations: how often it was translated.
    """

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module = module
        self.translations = 0
        self._translations: dict[Any, Any] = {}
        self._refused: dict[Any, str] = {}
        self._asked: tuple[Any, Any, bool] = (None, None, False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module itself.

        A module that takes observation leaves is called with them, or with a TensorDict: it then reads
        "observation" and writes "action". For other keys use `bound_to`.

        Raises:
            PolicyError: (a TypeError) there is no "observation" in the TensorDict.
        """
        root = args[0] if len(args) == 1 and not kwargs else None
        if isinstance(root, TensorDictBase) and isinstance(self.module, StackedPolicies):
            self.module.require_all_rows(root)
        if not isinstance(root, TensorDictBase) or self.sees_root:
            return self.module(*args, **kwargs)
        observation = root.get("observation", None)
        if observation is None:
            raise PolicyError(
                f"{type(self.module).__name__} takes observation leaves, and cannot know which of "
                f"{sorted(root.keys())} they are. Bind it to the env: policy.bound_to(env)(td), or wrap the "
                "module: TensorDictModule(module, in_keys=[...], out_keys=[...])."
            )
        return root.set("action", self.module(observation))

    def bound_to(self, env: Stepping) -> Stepwise:
        """Return what acts step by step in ``env``, in NumPy or as the module."""
        return Stepwise(env, self)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or one in another process, translates for itself."""
        asked = None, None, False
        return {**super().__getstate__(), "_translations": {}, "_refused": {}, "_asked": asked}

    def translation(self, signature: Signature, rows: int, make: Make[_T]) -> _T:
        """Translate the module for entries of some shapes, or find that this was done.

        Args:
            signature: what it is called with.
            rows: how many; one translation serves all numbers above 1 where the module allows.
            make: makes the translation of what was exported; the same function each time.

        Raises:
            TranslationError: it cannot be translated; the message says which line.
        """
        return self._translated(self._now(make, signature), signature, rows, make)

    def attempt(self, signature: Signature, rows: int, make: Make[_T]) -> _T | str:
        """Translate as `translation` does, or return why that failed; what has failed is not tried again."""
        now = self._now(make, signature)
        if (now, rows) not in self._refused:
            try:
                return self._translated(now, signature, rows, make)
            except TranslationError as error:
                self._refused[now, rows] = str(error)
        return self._refused[now, rows]

    def _translated(self, now: Hashable, signature: Signature, rows: int, make: Make[_T]) -> _T:
        for number in (None, rows) if rows > 1 else (rows,):
            if (earlier := self._translations.get((now, number))) is not None:
                return earlier
        exported = export(self.module, signature, rows=rows)
        translation = make(exported, signature, self.module)
        self.translations += 1
        self._translations[now, exported.rows] = translation
        return translation

    def _now(self, make: Make[Any], signature: Signature) -> Hashable:
        named = tensors_by_name(self.module)
        layout = tuple((name, value.shape, value.dtype) for name, value in named.items())
        seen = key_of(self.module, named.values())
        return make, signature, exploration_type(), seen, layout

    @property
    def sees_root(self) -> bool:
        """Whether the module takes a TensorDict: asked again where its forward is another function."""
        forward = getattr(self.module.forward, "__func__", None)
        if forward is None or self._asked[:2] != (type(self.module), forward):
            self._asked = type(self.module), forward, takes_tensordict(self.module)
        return self._asked[2]
