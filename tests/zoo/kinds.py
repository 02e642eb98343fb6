"""Every kind of env, playing the game of `tests.zoo.trail`, and what each needs to be told apart.

Conventions
    world   how the episodes of a row begin: "seeded" from the row's seed, which the env keeps; "keyed" from
            a JAX key and "carried" from a seed and a number, both of which travel in the data.
    seeds   function of the env's seed to the seed of each seeded row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import gymnasium
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDictBase

from envkit import Compose, MixedEnv, ParallelEnv, RewardSum, SerialEnv, StepCounter, TransformedEnv
from envkit.env.base import EnvBase
from envkit.env.seeding import next_seed, seed_chain
from envkit.specs import Categorical, Composite, OneHot, TensorSpec, Unbounded
from envkit_bridges.gym.gym_env import GymEnv
from envkit_bridges.gym.gym_wrapper import GymWrapper
from envkit_bridges.jax.jax_env import JaxEnv
from tests.zoo.jax_trail import JaxTrail, jax_trail
from tests.zoo.model import PLAIN, Around
from tests.zoo.ray_cluster import on_ray
from tests.zoo.trail import CHOICES, TrailBatch, TrailData, TrailEnv, TrailGym, next_choice

World = Literal["seeded", "keyed", "carried"]
Seeds = Callable[[int], Sequence[int | None]]


@dataclass(frozen=True)
class Kind:
    """One kind of env.

    Args:
        make: builds it.
        worlds: that of each row.
        seeds: see the module; None where the env seeds one game, or none.
        around: what stands around the game.
        lenient: the first so many rows leave it to the simulator to refuse actions.
        parts: resets may select any rows, not those alone that are done.
        recalls: a reset mask needs no data beside it, since the env knows the newest.
        lives_on: it may be closed, and starts again (which takes processes long).
        is_jax: a `JaxEnv`, or one with transforms, whose runs may be one program.
        own_choice: random actions are always this one, since a subclass says so.
    """

    make: Callable[[], EnvBase]
    worlds: tuple[World, ...] = ("seeded",)
    seeds: Seeds | None = None
    around: Around = PLAIN
    lenient: int = 0
    parts: bool = True
    recalls: bool = False
    lives_on: bool = False
    is_jax: bool = False
    own_choice: int | None = None

    @property
    def rows(self) -> int:
        return len(self.worlds)

    def row_seeds(self, seed: int) -> Sequence[int | None]:
        """Give the seed of each row; None where its world has none."""
        if self.seeds is not None:
            return self.seeds(seed)
        return [seed if world == "seeded" else None for world in self.worlds]

    @property
    def keeps_all_in_data(self) -> bool:
        """Whether any data may be stepped, not the newest alone."""
        return "seeded" not in self.worlds


# ------------------------------------------------------------------------------------------ actions


def encoded(spec: TensorSpec, choices: Sequence[int], dtype: torch.dtype | None = None) -> Any:
    """Give the action that makes these choices, one for each row; of ``dtype``, or that of the spec.

    One-hot actions of a float type are as a policy gives them that takes the largest of its logits.
    """
    numbers = torch.tensor(choices)
    dtype = dtype or spec.dtype
    if isinstance(spec, OneHot):
        hot = torch.nn.functional.one_hot(numbers, CHOICES).reshape(spec.shape)
        return hot * 0.99999994 if dtype.is_floating_point else hot.to(dtype)
    return numbers.reshape(spec.shape).to(dtype)


def decoded(spec: TensorSpec, action: torch.Tensor) -> list[int]:
    """Say which choices an action makes."""
    if isinstance(spec, OneHot):
        action = action.double().argmax(-1)
    return action.flatten().long().tolist()


def bad_action(spec: TensorSpec, rows: int, row: int) -> torch.Tensor:
    """Give an action which is, in one row, none that the spec has."""
    if isinstance(spec, Categorical):
        choices = [0] * rows
        choices[row] = CHOICES + 3
        return encoded(spec, choices)
    action = encoded(spec, [0] * rows, torch.float32)
    action.reshape(rows, -1)[row] = float("nan")
    return action


def dtypes_of(spec: TensorSpec) -> list[torch.dtype]:
    """List the types in which the actions of a spec may come."""
    if isinstance(spec, OneHot):
        return [torch.bool, torch.int8, torch.int64, torch.float32, torch.float64]
    if isinstance(spec, Categorical):
        return [torch.uint8, torch.int8, torch.int32, torch.int64, torch.float32, torch.float64]
    return [torch.float16, torch.float32, torch.float64]


class Follow:
    """The policy of `trail.next_choice` for data of one env."""

    def __init__(self, env: EnvBase):
        self.spec = env.single_action_spec

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        _, steps, trail = tensordict["observation"].long().unbind(-1)
        choice = next_choice(steps, trail)
        if isinstance(self.spec, OneHot):
            action = torch.nn.functional.one_hot(choice, CHOICES)
        else:
            action = choice.reshape((*choice.shape, *self.spec.shape))
        return tensordict.set("action", action.to(self.spec.dtype))


# ------------------------------------------------------------------------------- subclasses of envs


class Doubling:
    """Twice the reward, and random actions that are always the same choice."""

    CHOICE = 2

    def step(self, tensordict):
        made = super().step(tensordict)
        made["next", "reward"] = made["next", "reward"] * 2
        return made

    def rand_action(self, tensordict=None):
        acted = super().rand_action(tensordict)
        rows = acted.batch_size.numel()
        return acted.set("action", encoded(self.action_spec, [self.CHOICE] * rows))


class DoublingGym(Doubling, GymWrapper):
    pass


class DoublingSerial(Doubling, SerialEnv):
    pass


class DoublingJax(Doubling, JaxEnv):
    pass


class DoublingTransformed(Doubling, TransformedEnv):
    pass


class DoublingMixed(Doubling, MixedEnv):
    pass


class TrailBank(TrailEnv):
    """Adds each reward to the one that it is given, so that the reward is a state as well."""

    def __init__(self):
        super().__init__()
        self.state_spec = Composite(reward=Unbounded((1,)))

    def _step(self, td):
        made = super()._step(td)
        return made.set("reward", made["reward"] + td["reward"])


# ------------------------------------------------------------------------------------------- makers

gymnasium.register("Trail-v0", TrailGym)

LIMIT = 4


def make_gym(box: bool = False) -> GymWrapper:
    return GymWrapper(TrailGym(box))


def make_vector(mode: AutoresetMode = AutoresetMode.DISABLED) -> GymEnv:
    return GymEnv("Trail-v0", num_envs=3, vector_kwargs={"autoreset_mode": mode})


def counting(env: EnvBase) -> TransformedEnv:
    return TransformedEnv(env, Compose(StepCounter(LIMIT), RewardSum()))


def counting_gym() -> TransformedEnv:
    return counting(make_gym())


def mixed(first: EnvBase, kind: type[MixedEnv] = MixedEnv) -> MixedEnv:
    """Two rows of one world beside two of gymnasium."""
    box = isinstance(first, TrailData)
    return kind([first, SerialEnv(2, partial(make_gym, box))])


# -------------------------------------------------------------------------------------------- kinds


def chain(count: int) -> Seeds:
    return lambda seed: seed_chain(seed, count)[0]


def in_batch(seed: int) -> list[int]:
    return [seed + 100 * row for row in range(3)]


def in_batches(seed: int) -> list[int]:
    """Give the seeds of two `TrailBatch` of two rows each."""
    return [own + 100 * row for own in seed_chain(seed, 2)[0] for row in range(2)]


def behind_a_member(seed: int) -> list[int | None]:
    return [None, None, *seed_chain(next_seed(seed), 2)[0]]


VECTOR: dict[str, Any] = {"worlds": ("seeded",) * 3, "seeds": chain(3)}
BATCH: dict[str, Any] = {"worlds": ("seeded",) * 3, "seeds": in_batch}
SERIAL: dict[str, Any] = {**VECTOR, "recalls": True, "lives_on": True}
IN_TWO: dict[str, Any] = {"worlds": ("seeded",) * 4, "seeds": in_batches}
BATCHES: dict[str, Any] = {**IN_TWO, "recalls": True, "lives_on": True}
DATA: dict[str, Any] = {"worlds": ("carried",) * 3}
DATA_IN_TWO: dict[str, Any] = {"worlds": ("carried",) * 4, "lives_on": True}
JAX: dict[str, Any] = {"worlds": ("keyed",) * 3, "is_jax": True}
MIXED: dict[str, Any] = {"seeds": behind_a_member, "recalls": True}
WITH_JAX = ("keyed", "keyed", "seeded", "seeded")
WITH_DATA = ("carried", "carried", "seeded", "seeded")
COUNTED = Around(limit=LIMIT, summed=True)
TWICE: dict[str, Any] = {"around": Around(factor=2), "own_choice": Doubling.CHOICE}
BANKED = Around(banked=True)

two_data = partial(TrailData, batch_size=[2])

KINDS: dict[str, Kind] = {
    # one env of each world
    "gymnasium": Kind(make_gym),
    "gymnasium, a box of actions": Kind(partial(make_gym, box=True)),
    "gymnasium vector": Kind(make_vector, **VECTOR),
    "gymnasium vector that resets itself": Kind(
        partial(make_vector, AutoresetMode.NEXT_STEP), **VECTOR, parts=False
    ),
    "gymnasium vector that resets itself at once": Kind(
        partial(make_vector, AutoresetMode.SAME_STEP), **VECTOR, parts=False
    ),
    "custom": Kind(TrailEnv, lenient=1),
    "custom batch": Kind(TrailBatch, **BATCH, lenient=3),
    "custom stateless": Kind(partial(TrailData, batch_size=[3]), **DATA, lenient=3),
    "custom stateless, alone": Kind(TrailData, ("carried",), lenient=1),
    "jax": Kind(jax_trail, **JAX),
    "jax nested": Kind(partial(jax_trail, state_layout="nested"), **JAX),
    # many as one
    "serial": Kind(partial(SerialEnv, 3, make_gym), **SERIAL),
    "serial, tensordicts": Kind(partial(SerialEnv, 3, make_gym, use_buffers=False), **SERIAL),
    "serial custom": Kind(partial(SerialEnv, 3, TrailEnv), **SERIAL),
    "serial custom, rows": Kind(partial(SerialEnv, 3, TrailEnv, use_buffers=True), **SERIAL),
    "serial custom, lazy": Kind(
        partial(SerialEnv, 3, TrailEnv, share_individual_td=True), **SERIAL
    ),
    "serial batches": Kind(partial(SerialEnv, 2, partial(TrailBatch, 2)), **BATCHES),
    "serial batches, rows": Kind(
        partial(SerialEnv, 2, partial(TrailBatch, 2), use_buffers=True), **BATCHES
    ),
    "serial stateless": Kind(partial(SerialEnv, 2, two_data), **DATA_IN_TWO),
    "serial stateless, rows": Kind(
        partial(SerialEnv, 2, two_data, use_buffers=True), **DATA_IN_TWO
    ),
    "serial jax, rows": Kind(
        partial(SerialEnv, 2, partial(jax_trail, None), use_buffers=True), ("keyed",) * 2
    ),
    "parallel": Kind(partial(ParallelEnv, 3, make_gym, num_processes=2), **VECTOR, recalls=True),
    "parallel stateless": Kind(
        partial(ParallelEnv, 2, two_data, num_processes=1), ("carried",) * 4
    ),
    "ray": Kind(partial(on_ray, 3, make_gym, num_processes=2), **VECTOR, recalls=True),
    "ray stateless": Kind(partial(on_ray, 2, two_data, num_processes=2), ("carried",) * 4),
    "mixed with jax": Kind(lambda: mixed(jax_trail(2)), WITH_JAX, **MIXED),
    "mixed with stateless": Kind(lambda: mixed(two_data()), WITH_DATA, **MIXED, lenient=2),
    "mixed of stateless": Kind(
        lambda: MixedEnv([two_data(), TrailData(batch_size=[1])]), **DATA, lenient=3
    ),
    # under transforms
    "transformed": Kind(lambda: counting(make_gym()), around=COUNTED),
    "transformed serial": Kind(
        lambda: counting(SerialEnv(3, make_gym)), **VECTOR, lives_on=True, around=COUNTED
    ),
    "transformed batch": Kind(lambda: counting(TrailBatch()), **BATCH, around=COUNTED, lenient=3),
    "transformed stateless": Kind(
        lambda: counting(TrailData(batch_size=[3])), **DATA, around=COUNTED, lenient=3
    ),
    "transformed jax": Kind(lambda: counting(jax_trail()), **JAX, around=COUNTED),
    "transformed mixed": Kind(
        lambda: counting(mixed(two_data())), WITH_DATA, behind_a_member, around=COUNTED, lenient=2
    ),
    "serial transformed": Kind(partial(SerialEnv, 3, counting_gym), **SERIAL, around=COUNTED),
    # with a say of their own
    "reward as state": Kind(
        partial(SerialEnv, 3, TrailBank), **VECTOR, lives_on=True, around=BANKED
    ),
    "reward as state, rows": Kind(
        partial(SerialEnv, 3, TrailBank, use_buffers=True), **VECTOR, lives_on=True, around=BANKED
    ),
    "subclass of GymWrapper": Kind(lambda: DoublingGym(TrailGym()), **TWICE),
    "subclass of SerialEnv": Kind(partial(DoublingSerial, 3, make_gym), **SERIAL, **TWICE),
    "subclass of JaxEnv": Kind(
        lambda: DoublingJax(JaxTrail(), batch_size=[3], device="cpu"), ("keyed",) * 3, **TWICE
    ),
    "subclass of TransformedEnv over JAX": Kind(
        lambda: DoublingTransformed(jax_trail(), StepCounter(LIMIT)),
        ("keyed",) * 3,
        around=Around(factor=2, limit=LIMIT),
        own_choice=Doubling.CHOICE,
    ),
    "subclass of MixedEnv": Kind(
        lambda: mixed(two_data(), DoublingMixed), WITH_DATA, **MIXED, **TWICE, lenient=2
    ),
    "serial of a subclass": Kind(
        partial(SerialEnv, 3, lambda: DoublingGym(TrailGym())), **SERIAL, around=Around(factor=2)
    ),
    "transforms on a subclass of JaxEnv": Kind(
        lambda: counting(DoublingJax(JaxTrail(), batch_size=[3], device="cpu")),
        ("keyed",) * 3,
        around=Around(factor=2, limit=LIMIT, summed=True),
    ),
}
