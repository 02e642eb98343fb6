"""Steps of a stateless env as values: a program that runs from the begin of a step until it is received.

Which program a step is, and from what it starts, is decided in `envkit_bridges.jax.stepping`. This module calls it,
and puts what it gives into the data.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import torch
from tensordict import TensorDictBase

from envkit.data.carrying import carry
from envkit.env.pending import Pending
from envkit.rules import STEP
from envkit.specs.devices import reading_waits
from envkit_bridges.dlpack import number_to_jit, to_torch
from envkit_bridges.jax.gradients import Running
from envkit_bridges.jax.programs import RESTART

__all__ = ["ProgramAdvance", "ProgramStep"]


@dataclass(slots=True, eq=False)
class ProgramStep(Pending):
    """A step as a program; a reset follows apart. Its inputs are checked when they are read.

    Attributes:
        inputs: what the program is given.
        mask: parts of the batch that are stepped; None: all.
        running: the program, once it was begun.
    """

    inputs: tuple[Any, ...]
    mask: torch.Tensor | None
    running: Running = field(init=False)

    def begin(self) -> Self:
        env = self.env
        env._count_steps(1)
        constants = env._constants(self.td.batch_size, self.mask)
        self.running = env._start(env._programs.step, self.inputs, (constants,))
        env._kept(self.running.outputs)
        return self

    def stepped(self) -> TensorDictBase:
        env, td = self.env, self.td
        following = env._accepted(env._out(td.batch_size, self.running.result()), td)
        if self.mask is not None:
            following = env._kept_where_skipped(td, self.mask, following)
            td = td.exclude(STEP, inplace=True)
        return env._attach_next(td, following)


@dataclass(slots=True, eq=False)
class ProgramAdvance(Pending):
    """A step and the reset of what is done as one program.

    Attributes:
        inputs: what the program is given.
        mask: parts of the batch that are stepped; None: all. The others are not done.
        follows: what follows the step, see `Programs.advance`; after `NOTHING` the root is of no use.
        lent: what it was given, kept until torch has what it gives.
        outputs: what it gives.
    """

    inputs: tuple[Any, ...]
    mask: torch.Tensor | None = None
    follows: int = RESTART
    lent: Any = field(init=False, repr=False)
    outputs: Any = field(init=False)

    def begin(self) -> Self:
        env = self.env
        env._count_steps(1)
        given = env._lent(self.inputs)
        constants = env._constants(self.td.batch_size, self.mask)
        self.lent = given, constants
        follows = number_to_jit(self.follows, env._device)
        following, fresh, flags = env._programs.advance(*given, constants, follows)
        self.outputs = following, env._kept(fresh), flags
        return self

    def stepped(self) -> TensorDictBase:
        return self.with_root()[0]

    def with_root(self) -> tuple[TensorDictBase, TensorDictBase]:
        env, shape = self.env, self.td.batch_size
        outcome, begun, both = to_torch(self.outputs)
        flags = both.unbind(0)
        outcome["flags"], begun["flags"] = flags[:3], flags[3:]
        following, fresh = env._out(shape, outcome), env._out(shape, begun)
        if reading_waits(both):
            env._keep_arrays(fresh, self.outputs[1]["state"])
        if self.mask is None:
            # There is no preset outcome to merge: `_resets_in_program` refuses those.
            self.td.set("next", following)
            return self.td, carry(self.td, env._table.carrying, fresh)
        following = env._kept_where_skipped(self.td, self.mask, following)
        data = env._attach_next(self.td.exclude(STEP, inplace=True), following)
        root = env.step_mdp(data)
        return data, root.update(env._kept_where_skipped(root, self.mask, fresh))
