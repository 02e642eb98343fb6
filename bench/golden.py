"""Compare rollouts of two checkouts of this repository bit by bit, or write down those of this one.

What every kind of env gives, under every stop rule, mask and chain of transforms, from fixed seeds: about 300 rollouts.
`tests/test_golden.py` compares with what was written down, on any machine: whole numbers and flags by their bits, floats
within a tolerance, since another CPU rounds otherwise. Two checkouts on one machine must agree on every bit.

Conventions
    unit   one kind of env under one chain; its runs share the env, in the order of `RUNS`, each from a seed of its own.
    data   leaves by path, joined by dots.
    exact  leaf of whole numbers or flags.

Run: ``python -m bench.golden --before PATH`` compares with the checkout there; ``--write`` writes down this one's. Write anew
only with a line in ``docs/decisions.md`` that says which value changed, and why.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, cast

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase

from envkit import (
    Bounded,
    Box,
    BraxEnv,
    Categorical,
    CatFrames,
    Collector,
    Compose,
    Composite,
    Discrete,
    EnvBase,
    GymEnv,
    GymWrapper,
    InitTracker,
    JaxEnv,
    MixedEnv,
    ParallelEnv,
    PettingZooEnv,
    RewardScaling,
    RewardSum,
    SerialEnv,
    StepCounter,
    Timestep,
    TransformedEnv,
    Unbounded,
    VecNorm,
)

Data = dict[str, np.ndarray]
INDEX = Path(__file__).parents[1] / "tests" / "golden.json"
FLOATS = INDEX.with_suffix(".npz")
_STEPS = 8
_SEEN = "observation"


# -------------------------------------------------------------------------------------------- kinds


class Walk(EnvBase):
    """An env written in torch: a place that moves by the action, and a count; batch size [] or more."""

    def __init__(self, batch_size: tuple[int, ...] = ()):
        super().__init__(batch_size=batch_size)
        self.observation_spec = Composite(
            observation=Unbounded((*batch_size, 2)),
            count=Unbounded((*batch_size, 1), dtype=torch.int64),
            shape=batch_size,
        )
        self.action_spec = Bounded(-1.0, 1.0, (*batch_size, 1))
        self.reward_spec = Unbounded((*batch_size, 1))
        self._draws = torch.Generator()
        self.place = torch.zeros(*batch_size, 1)
        self.count = torch.zeros(*batch_size, 1, dtype=torch.int64)

    def _shown(self) -> TensorDict:
        shown = torch.cat([self.place, self.count.float()], -1)
        return TensorDict({_SEEN: shown, "count": self.count.clone()}, self.batch_size)

    def _reset(self, td: TensorDictBase | None, **kwargs: Any) -> TensorDict:
        rows = (
            torch.ones_like(self.count, dtype=torch.bool) if td is None else td.get("_reset", None)
        )
        rows = torch.ones_like(self.count, dtype=torch.bool) if rows is None else rows
        start = torch.rand(self.place.shape, generator=self._draws)
        self.place = torch.where(rows, start, self.place)
        self.count = torch.where(rows, 0, self.count)
        ended = torch.zeros_like(rows)
        return self._shown().update({"done": ended, "terminated": ended.clone()})

    def _step(self, td: TensorDictBase) -> TensorDict:
        self.place, self.count = self.place + td["action"], self.count + 1
        ended = (self.place.abs() > 1.5) | (self.count > 6)
        step = {"reward": self.place.clone(), "done": ended, "terminated": ended.clone()}
        return self._shown().update(step)

    def _set_seed(self, seed: int | None) -> None:
        assert seed is not None
        self._draws.manual_seed(seed)


class Teams(EnvBase):
    """Two groups of agents that end by themselves, below an end of all: three levels of done flags."""

    SIZES: ClassVar = {"red": 2, "blue": 3}

    def __init__(self):
        super().__init__()
        sizes = self.SIZES.items()
        self.observation_spec = Composite(
            {team: Composite(observation=Unbounded((n, 2)), shape=(n,)) for team, n in sizes}
        )
        self.action_spec = Composite(
            {team: Composite(action=Categorical(3, shape=(n,)), shape=(n,)) for team, n in sizes}
        )
        self.reward_spec = Composite(
            {team: Composite(reward=Unbounded((n, 1)), shape=(n,)) for team, n in sizes}
        )
        flag = partial(Categorical, 2, dtype=torch.bool)
        levels: dict[str, Any] = {
            team: Composite(done=flag(shape=(n, 1)), terminated=flag(shape=(n, 1)), shape=(n,))
            for team, n in sizes
        }
        self.done_spec = Composite(done=flag(shape=(1,)), terminated=flag(shape=(1,)), **levels)
        self.count = 0

    def _of(self, team: str, shown: dict[str, Any]) -> TensorDict:
        n = self.SIZES[team]
        ended = (self.count >= torch.arange(n) + 3)[:, None]
        seen = torch.stack([torch.arange(n) * 1.0, torch.full((n,), self.count * 1.0)], -1)
        flags = {"done": ended, "terminated": ended.clone()}
        return TensorDict({_SEEN: seen, **flags, **shown}, [n])

    def _shown(self, **rewards: torch.Tensor) -> TensorDict:
        teams = {
            team: self._of(team, {"reward": rewards[team]} if rewards else {})
            for team in self.SIZES
        }
        ended = torch.tensor([self.count >= 5])
        return TensorDict({"done": ended, "terminated": ended.clone(), **teams}, [])

    def _reset(self, td: TensorDictBase | None, **kwargs: Any) -> TensorDict:
        self.count = 0
        return self._shown()

    def _step(self, td: TensorDictBase) -> TensorDict:
        self.count += 1
        return self._shown(
            **{team: td[team, "action"].float()[:, None] + self.count for team in self.SIZES}
        )

    def _set_seed(self, seed: int | None) -> None:
        assert seed is not None
        torch.manual_seed(seed)


class Drift:
    """A place that moves by the action, in JAX."""

    action_space = Box(-1.0, 1.0, (1,))

    def reset(self, key: jax.Array) -> Any:
        place = jax.random.uniform(key, (2,))
        return place, Timestep(place)

    def step(self, state: jax.Array, action: jax.Array) -> Any:
        place = state + action
        return place, Timestep(place, place[0], jnp.abs(place[0]) > 1.5)


class Corridor:
    """Choices and whole numbers in JAX, with a state of two entries."""

    action_space = Discrete(3)

    def reset(self, key: jax.Array) -> Any:
        state = {"at": jax.random.randint(key, (), 0, 4), "moves": jnp.int32(0)}
        return state, Timestep(self._seen(state))

    def step(self, state: dict[str, jax.Array], action: jax.Array) -> Any:
        state = {"at": state["at"] + action - 1, "moves": state["moves"] + 1}
        return state, Timestep(self._seen(state), state["at"] * 1.0, state["at"] > 5)

    def _seen(self, state: dict[str, jax.Array]) -> jax.Array:
        return jnp.stack([state["at"], state["moves"]]).astype(jnp.float32)


class Dial(gymnasium.Env):
    """A simulator of Gymnasium that draws its start and shows whole numbers too."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at, self.moves = float(self.np_random.integers(0, 8)) / 8, 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self.at, self.moves = self.at + (int(action) - 1) / 4, self.moves + 1
        return self._seen(), self.at, abs(self.at) > 1.0, self.moves > 6, {}

    def _seen(self) -> np.ndarray:
        return np.array([self.at, self.moves], np.float32)


class Glide(gymnasium.Env):
    """`Drift` for Gymnasium, with a start of its own."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place = self.np_random.random(2, np.float32)
        return self.place, {}

    def step(self, action: Any) -> Any:
        self.place = self.place + action
        return self.place, float(self.place[0]), bool(abs(self.place[0]) > 1.5), False, {}


def _cartpole() -> EnvBase:
    return GymEnv("CartPole-v1", max_episode_steps=6)


def _dial() -> EnvBase:
    return GymWrapper(Dial())


def _drift(count: int | None) -> EnvBase:
    size = () if count is None else (count,)
    return JaxEnv(Drift(), batch_size=size, device="cpu", episode_length=6)


def _corridor() -> EnvBase:
    return JaxEnv(Corridor(), batch_size=[3], device="cpu", episode_length=5)


def _mixed() -> EnvBase:
    return MixedEnv([_drift(2), SerialEnv(2, lambda: GymWrapper(Glide()))])


KINDS: dict[str, Callable[[], EnvBase]] = {
    "gym": _cartpole,
    "gym, moves": partial(GymEnv, "Pendulum-v1", max_episode_steps=5),
    "gym, own": _dial,
    "gym, vector": partial(GymEnv, "CartPole-v1", num_envs=3, max_episode_steps=6),
    "torch": Walk,
    "torch, rows": partial(Walk, (3,)),
    "torch, two axes": partial(Walk, (2, 2)),
    "teams": Teams,
    "serial": partial(SerialEnv, 3, _cartpole),
    "serial, own": partial(SerialEnv, 3, _dial),
    "serial, torch": partial(SerialEnv, 3, Walk),
    "serial, rows": partial(SerialEnv, 2, partial(Walk, (2,))),
    "serial, teams": partial(SerialEnv, 2, Teams),
    "serial, without buffers": partial(SerialEnv, 3, Walk, use_buffers=False),
    "serial, jax": partial(SerialEnv, 2, partial(_drift, None)),
    "parallel": partial(ParallelEnv, 3, _dial, num_processes=2),
    "parallel, torch": partial(ParallelEnv, 3, Walk, num_processes=2),
    "jax": partial(_drift, 3),
    "jax, one": partial(_drift, None),
    "jax, choices": _corridor,
    "brax": partial(BraxEnv, "fast", batch_size=[3], device="cpu", episode_length=5),
    "mixed": _mixed,
    "games": partial(PettingZooEnv, "mpe/simple_spread_v3", N=2, max_cycles=5),
}


# ------------------------------------------------------------------------------------------- chains


def _counts(env: EnvBase) -> Compose:
    return Compose(StepCounter(5), RewardSum(), InitTracker())


def _values(env: EnvBase) -> Compose:
    return Compose(RewardScaling(0.5, 2.0), CatFrames(2, -1, in_keys=[_SEEN], out_keys=["frames"]))


def _learns(env: EnvBase) -> Compose:
    return Compose(VecNorm([_SEEN]), StepCounter(4))


CHAINS: dict[str, Callable[[EnvBase], Compose] | None] = {
    "bare": None,
    "counts": _counts,
    "values": _values,
    "learns": _learns,
}
FEW = ("gym", "torch, rows", "serial", "serial, torch", "parallel", "jax", "brax")
"""Kinds that are played under every chain, the others under the first two."""
UNITS = [
    (kind, chain)
    for kind in KINDS
    for chain in CHAINS
    if chain in ("bare", "counts") or kind in FEW
]
COMPILED = ("jax", "jax, one", "jax, choices", "brax", "mixed")
"""Kinds whose units compile programs, seconds each."""


# --------------------------------------------------------------------------------------------- runs


def _to_first_end(env: EnvBase) -> TensorDictBase:
    return env.rollout(_STEPS)


def _on_and_on(env: EnvBase) -> TensorDictBase:
    return env.rollout(_STEPS, break_when_any_done=False)


def _until_all_ended(env: EnvBase) -> TensorDictBase:
    return env.rollout(_STEPS, break_when_all_done=True, break_when_any_done=False)


def _joined(steps: list[TensorDictBase], env: EnvBase) -> TensorDictBase:
    return cast(TensorDictBase, torch.stack(cast(Any, steps), env.batch_dims))


def _by_hand(env: EnvBase) -> TensorDictBase:
    steps, root = [], env.reset()
    for _ in range(_STEPS):
        step, root = env.step_and_maybe_reset(env.rand_action(root))
        steps.append(step.clone())
    return _joined(steps, env)


def _pattern(env: EnvBase, at: int) -> torch.Tensor:
    """Draw which rows take part, from the number of the step alone; at least one does."""
    draws = torch.Generator().manual_seed(at)
    mask = torch.rand(env.batch_size, generator=draws) < 0.6
    mask.view(-1)[at % mask.numel()] = True
    return mask


def _masked_steps(env: EnvBase) -> TensorDictBase:
    steps, root = [], env.reset()
    for at in range(_STEPS):
        step = env.step(env.rand_action(root).set("_step", _pattern(env, at)))
        steps.append(step.exclude("_step").clone())
        root = env.maybe_reset(env.step_mdp(step.exclude("_step")))
    return _joined(steps, env)


def _partial_resets(env: EnvBase) -> TensorDictBase:
    steps, root = [], env.reset()
    for at in range(_STEPS):
        step = env.step(env.rand_action(root))
        steps.append(step.clone())
        root = env.maybe_reset(env.step_mdp(step))
        if at % 3 == 2:
            root = env.reset(root.set("_reset", _pattern(env, at)[..., None]))
    return _joined(steps, env)


def _collected(env: EnvBase) -> TensorDictBase:
    rows = env.numel()
    collector = Collector(env, None, frames_per_batch=4 * rows, total_frames=_STEPS * rows)
    batches = [batch.clone() for batch in collector]
    return cast(TensorDictBase, torch.cat(cast(Any, batches), -1))


RUNS: dict[str, Callable[[EnvBase], TensorDictBase]] = {
    "to the first end": _to_first_end,
    "on and on": _on_and_on,
    "until all have ended": _until_all_ended,
    "by hand": _by_hand,
    "masked steps": _masked_steps,
    "partial resets": _partial_resets,
    "collected": _collected,
}
_NEED_ROWS = ("masked steps", "partial resets")


def _leaves(td: TensorDictBase) -> Iterator[tuple[str, np.ndarray]]:
    for key in td.keys(True, True):
        value = td.get(key)
        if isinstance(value, torch.Tensor):
            name = key if isinstance(key, str) else ".".join(key)
            yield name, value.detach().cpu().numpy()


def played(kind: str, chain: str) -> dict[str, Data]:
    """Play the runs of a unit on a new env; what each gives, by its name."""
    made = KINDS[kind]()
    around = CHAINS[chain]
    env = made if around is None else TransformedEnv(made, around(made))
    by_run = {}
    try:
        for place, (name, run) in enumerate(RUNS.items()):
            if name in _NEED_ROWS and not env.batch_size:
                continue
            torch.manual_seed(place)
            env.set_seed(100 + place)
            by_run[name] = dict(sorted(_leaves(run(env))))
    finally:
        env.close(raise_if_closed=False)
    return by_run


# -------------------------------------------------------------------------------------- what is kept


def summary(data: Data) -> tuple[dict[str, str], Data]:
    """Give a hash of each exact leaf, its shape and dtype included, and the other leaves as they are."""
    exact, floats = {}, {}
    for name, value in data.items():
        if value.dtype.kind == "f":
            floats[name] = value
        else:
            bits = f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes()
            exact[name] = hashlib.sha256(bits).hexdigest()[:12]
    return exact, floats


def written() -> None:
    """Write down what this checkout gives."""
    lines, values = {}, []
    for kind, chain in UNITS:
        for run, data in played(kind, chain).items():
            exact, floats = summary(data)
            forms = {name: [value.dtype.name, *value.shape] for name, value in floats.items()}
            lines[f"{kind} | {chain} | {run}"] = {"exact": exact, "floats": forms}
            values += [value.astype(np.float64).ravel() for value in floats.values()]
    text = ",\n".join(f"{json.dumps(name)}: {json.dumps(line)}" for name, line in lines.items())
    INDEX.write_text(f"{{\n{text}\n}}\n")
    np.savez_compressed(FLOATS, values=np.concatenate(values))
    print(f"{len(lines)} rollouts")


@cache
def _kept() -> dict[str, tuple[dict[str, str], Data]]:
    with np.load(FLOATS) as held:
        values = held["values"]
    kept, start = {}, 0
    for name, line in json.loads(INDEX.read_text()).items():
        floats = {}
        for leaf, (dtype, *shape) in line["floats"].items():
            end = start + math.prod(shape)
            floats[leaf] = values[start:end].astype(dtype).reshape(shape)
            start = end
        kept[name] = (line["exact"], floats)
    return kept


def read(kind: str, chain: str) -> dict[str, tuple[dict[str, str], Data]]:
    """Give what was written down of a unit: by run, what `summary` gave."""
    begin = f"{kind} | {chain} | "
    kept = _kept().items()
    return {name.removeprefix(begin): data for name, data in kept if name.startswith(begin)}


# ------------------------------------------------------------------------------------ two checkouts


def _serve() -> None:
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what simulators print is not for who reads
    for line in sys.stdin:
        try:
            answer: Any = played(*line.strip().split(" | "))
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        pickle.dump(answer, out)
        out.flush()


def _started(checkout: Path) -> subprocess.Popen[bytes]:
    from bench.harness import python_path  # not in the process of a checkout that may lack it

    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, __file__, "--serve"],
        stdin=pipe,
        stdout=pipe,
        env={**os.environ, "PYTHONPATH": python_path(checkout)},
    )


def _differences(before: Any, after: Any) -> Iterator[str]:
    if isinstance(before, str) or isinstance(after, str):
        if before != after:
            yield f"before {before if isinstance(before, str) else 'ran'}; now {after if isinstance(after, str) else 'runs'}"
        return
    for run in before | after:
        old, new = before.get(run, {}), after.get(run, {})
        for leaf in old | new:
            a, b = old.get(leaf), new.get(leaf)
            if a is None or b is None:
                yield f"{run}: {leaf} is {'new' if a is None else 'gone'}"
            elif a.dtype != b.dtype or a.shape != b.shape or a.tobytes() != b.tobytes():
                yield f"{run}: {leaf} differs"


def main() -> None:
    """Compare with another checkout, or write down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--serve", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.serve:
        _serve()
    elif options.write:
        written()
    elif options.before:
        sides = [_started(options.before.resolve()), _started(Path(__file__).parents[1])]
        count = 0
        for kind, chain in UNITS:
            for side in sides:
                assert side.stdin is not None
                side.stdin.write(f"{kind} | {chain}\n".encode())
                side.stdin.flush()
            before, after = (pickle.load(side.stdout) for side in sides)  # type: ignore[arg-type]
            for told_of in _differences(before, after):
                count += 1
                print(f"{kind} | {chain} | {told_of}", flush=True)
        print(f"{len(UNITS)} units, {count} differences")
        sys.exit(bool(count))


if __name__ == "__main__":
    main()
