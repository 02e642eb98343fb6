"""Torch policies as JAX functions: `compile_policy` and what it remembers.

This module decides when a translation still holds and which values it is called with. How a module is
exported stands in `exporting`, how a graph is computed in `graph`.

A translation holds while the entries it reads, the interaction type, the submodules and their
attributes (`cache_key`), and the names, shapes and dtypes of parameters and buffers are the same. The
values of these are looked up on the live module at every call, and copied: an optimiser may step as soon
as the call has returned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import torch
from tensordict import TensorDictBase

from bridges.dlpack import to_jit
from bridges.jax.policy.cache_key import key_of
from bridges.jax.policy.errors import STEPWISE
from bridges.jax.policy.exporting import Signature, export
from bridges.jax.policy.graph import Graph
from envkit.data.paths import Path
from envkit.env.policy import Policy, as_policy, exploration_type, takes_tensordict
from envkit.errors import PolicyError, TranslationError

if TYPE_CHECKING:
    from envkit.env.base import EnvBase

__all__ = ["CompiledPolicy", "Translation", "compile_policy"]


def compile_policy(module: torch.nn.Module) -> CompiledPolicy:
    """Translate a torch policy to JAX, so that `unroll` and `rollout` run it inside their program.

    Nothing is translated yet: that happens when an env first asks, since its specs say what the module
    is called with.

    Args:
        module: a TensorDictModule, a module that takes a TensorDict, or one that takes observation
            leaves and returns the action; see `envkit.env.policy.as_policy`.

    Raises:
        TypeError: ``module`` is no `torch.nn.Module`.
    """
    if isinstance(module, CompiledPolicy):
        return module
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"compile_policy takes a torch.nn.Module, got {type(module).__name__}. Parameters are looked "
            "up on the module by name: pass the module itself. A function in JAX is a JaxPolicy."
        )
    return CompiledPolicy(module)


@dataclass(frozen=True, eq=False)
class Translation:
    """A module as a pure function of arrays.

    Attributes:
        graph: what it computes.
        reads: entries it takes.
        writes: entries it gives, with the dtypes torch gives them.
    """

    graph: Graph
    reads: tuple[Path, ...]
    writes: dict[Path, torch.dtype]

    def __call__(
        self, tensors: Any, entries: Mapping[Path, jax.Array], key: jax.Array
    ) -> dict[Path, jax.Array]:
        """Compute what the module writes, by path.

        Args:
            tensors: what `CompiledPolicy.tensors` gave.
            entries: at least `reads`, each with the rows in front.
            key: for all that the module draws in this call.
        """
        values = self.graph(tensors, [entries[path] for path in self.reads], key)
        return dict(zip(self.writes, values, strict=True))


class CompiledPolicy(torch.nn.Module):
    """A torch module that stateless envs run inside their programs; see `compile_policy`.

    Other envs, and rollouts that cannot be compiled, call the module step by step.

    Attributes:
        module: the live module.
        translations: how often it was translated.
    """

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module = module
        self.translations = 0
        self._found: dict[Any, Translation] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module itself.

        A module that takes observation leaves is called with them, or with a TensorDict: it then reads
        "observation" and writes "action". For other keys use `bound_to`.

        Raises:
            PolicyError: (a TypeError) there is no "observation" in the TensorDict.
        """
        root = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(root, TensorDictBase) or takes_tensordict(self.module):
            return self.module(*args, **kwargs)
        observation = root.get("observation", None)
        if observation is None:
            raise PolicyError(
                f"{type(self.module).__name__} takes observation leaves, and cannot know which of "
                f"{sorted(root.keys())} they are. Bind it to the env: policy.bound_to(env)(td), or wrap the "
                "module: TensorDictModule(module, in_keys=[...], out_keys=[...])."
            )
        return root.set("action", self.module(observation))

    def bound_to(self, env: EnvBase) -> Policy:
        """Give what acts step by step in ``env``: the module itself."""
        return as_policy(env, self.module)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or one in another process, translates for itself."""
        return {**super().__getstate__(), "_found": {}}

    def translation(self, signature: Signature, rows: int) -> Translation:
        """Translate the module for entries of some shapes, or find that this was done.

        Args:
            signature: what it is called with.
            rows: how many; one translation serves all numbers above 1 where the module allows.

        Raises:
            TranslationError: it cannot be translated; the message says which line.
        """
        now = (signature, exploration_type(), key_of(self.module), self._layout())
        for number in (None, rows) if rows > 1 else (rows,):
            if (now, number) in self._found:
                return self._found[now, number]
        self._refuse_doubles()
        exported = export(self.module, signature, rows=rows)
        reads = tuple(path for path, _, _ in signature.reads)
        graph = Graph(exported.program, [".".join(path) for path in reads])
        self.translations += 1
        found = Translation(graph, reads, dict(exported.writes))
        self._found[now, exported.rows] = found
        return found

    def tensors(self, translation: Translation, device: torch.device) -> list[Any]:
        """Read the parameters and buffers of the live module, as arguments of a jitted call.

        They are copied, so nothing that is written to them later is seen by a program that runs.
        """
        named = self._named()
        values = [named[name] for name in translation.graph.tensors]
        return [to_jit(value.to(device), detach=True) for value in values]

    def _refuse_doubles(self) -> None:
        if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
            return
        for name, value in self._named().items():
            if value.dtype in (torch.float64, torch.complex128):
                raise TranslationError(
                    f"{name!r} is {value.dtype}, which JAX computes in 32 bits unless jax_enable_x64 is "
                    f"set. Call module.float(), set it, or {STEPWISE}."
                )

    def _named(self) -> dict[str, torch.Tensor]:
        named: dict[str, torch.Tensor] = dict(self.module.named_buffers(remove_duplicate=False))
        named.update(self.module.named_parameters(remove_duplicate=False))
        return named

    def _layout(self) -> tuple[Any, ...]:
        return tuple((name, value.shape, value.dtype) for name, value in self._named().items())
