"""A gymnasium env on plain NumPy rows: how a worker process steps it without any TensorDict.

`GymCore` is one env with the codecs of its spaces; `GymRows` are several of them bound to their
rows of a pool's memory.

Conventions
    row    what one env owns of a leaf, see `envkit_bridges.gym.codecs`.
    rows   global row numbers; slots and regions as in `envkit.batched.exchange.buffers`.
    done   ``terminated | truncated``; the three flags are bool of shape (1,), as is the reward, in the dtype of its spec.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from envkit.data.paths import Path
from envkit.errors import EncodingError
from envkit_bridges.gym.codecs import Codec, CopyIn, holds_numbers
from envkit_bridges.gym.frames import draw
from envkit_bridges.gym.info import default_info_dict_reader

__all__ = [
    "DONE",
    "GymCore",
    "GymRows",
    "flags_of",
    "require_flags",
    "reward_array",
    "taken_as_they_are",
]

Rows = Mapping[Path, np.ndarray]

_NUMBERS = frozenset((float, int, np.float64, np.float32))
"""Classes of rewards that need no look at what they hold, where the spec says floats."""
DONE: tuple[Path, ...] = (("done",), ("terminated",), ("truncated",))


class GymCore:
    """Step one gymnasium env, writing what comes out into rows.

    Args:
        env: a gymnasium env.
        observation, action: codecs of its spaces; ``observation`` is None when only pixels count.
        frame_skip: inner steps per step; rewards are summed, and a finished episode stops them.
        pixels: also write the rendered frame, uint8 (height, width, 3), to ``("pixels",)``.

    Attributes:
        episode: the entry "episode" in the info of the step that ended an episode last, or None.
        infos: complete readers of what is recorded of infos.
    """

    episode: Any = None
    infos: Sequence[default_info_dict_reader] = ()

    def __init__(
        self,
        env: Any,
        observation: Codec | None,
        action: Codec,
        *,
        frame_skip: int = 1,
        pixels: bool = False,
    ):
        self.observation = observation
        self.action = action
        self.frame_skip = frame_skip
        self.pixels = pixels
        self.take(env)

    def take(self, env: Any) -> None:
        """Reset and step ``env`` from now on: the env, or what writes its episodes down."""
        self.env = env
        self.step = env.step if self.frame_skip == 1 else self._repeated_step

    def is_like(self, other: GymCore) -> bool:
        """Say whether another core takes its actions in the same form."""
        return isinstance(other, GymCore) and self.action.space == other.action.space

    def bind(
        self, cores: list[GymCore], rows: range, arrays: Mapping[str, Rows], slot: np.ndarray
    ) -> GymRows:
        """Fix the rows of some cores that are alike; see `envkit.batched.host_rows.bind_rows`."""
        return GymRows(cores, rows, arrays, slot)

    def writer(self, rows: Rows) -> Callable[[Any, Any], None]:
        """Give the function that writes an observation, and the frame and infos if asked for, into rows."""
        write = None if self.observation is None else self.observation.writer(rows)
        write_frame = CopyIn("pixels").into(rows[("pixels",)]) if self.pixels else None
        infos = [reader.writer(rows) for reader in self.infos]

        def write_all(observation: Any, info: Any) -> None:
            if write is not None:
                write(observation)
            if write_frame is not None:
                write_frame(draw(self.env))
            for write_info in infos:
                write_info(info)

        return write_all

    def _repeated_step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the env ``frame_skip`` times, or until the episode ends."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        for _ in range(self.frame_skip - 1):
            if terminated or truncated:
                break
            observation, extra, terminated, truncated, info = self.env.step(action)
            reward = reward + extra
        return observation, reward, terminated, truncated, info


class GymRows:
    """Cores that are alike, bound to their rows: all lookups are done, scalars go out together.

    The flags of a root are never set, and shared memory starts as zeros, so nobody writes them.
    """

    def __init__(
        self, cores: list[GymCore], rows: range, arrays: Mapping[str, Rows], slot: np.ndarray
    ):
        self._cores = cores
        self._first, self._slot = rows.start, memoryview(slot)
        own = slice(rows.start, rows.stop)
        inputs, self._roots, self._nexts = (
            {path: array[:, own] for path, array in arrays[region].items()}
            for region in ("in", "root", "next")
        )
        slots = range(len(next(iter(inputs.values()))))
        self._inputs = [{path: array[slot] for path, array in inputs.items()} for slot in slots]
        self._read = cores[0].action.read
        self._resets = [core.env.reset for core in cores]
        self._steps = [core.step for core in cores]
        self._root_writers = _WritersBySlot(cores, self._roots)
        self._next_writers = _WritersBySlot(cores, self._nexts)
        self._indices = range(len(cores))
        self._rewards = list(self._nexts[("reward",)][..., 0])
        self._taken = taken_as_they_are(self._rewards[0].dtype)
        flags = [map(_bytes_of, self._nexts[path]) for path in DONE]
        self._flags = list(zip(*flags, strict=True))
        carried = [(path, root) for path, root in self._roots.items() if path not in DONE]
        self._carried = [
            [(self._nexts[path][slot], root[slot + 1]) for path, root in carried] for slot in slots
        ]

    def replace(self, row: int, env: Any) -> None:
        """Put another env, made by the same function, in the place of a row's env."""
        index, core = row - self._first, env.row_core()
        self._cores[index] = core
        self._resets[index], self._steps[index] = core.env.reset, core.step
        for made in (self._root_writers, self._next_writers):
            made.clear()  # those of pixels hold on to the env that renders them

    def reset(self, row: int, given: Collection[Path] = (), /, **kwargs: Any) -> None:
        """Start an episode and write the root row; a simulator takes no ``given`` inputs for that."""
        index, slot = row - self._first, self._slot[row] + 1
        self._root_writers[slot][index](*self._resets[index](**kwargs))

    def step(self, rows: Sequence[int], *, advance: bool) -> None:
        """Step some rows and write their next rows; with ``advance`` also their next roots."""
        slot, indices, steps = self._slot[self._first], self._indices, self._steps
        inputs = self._inputs[slot]
        puts, rewards, taken = self._next_writers[slot], self._rewards[slot], self._taken
        chosen: slice | Sequence[int] = slice(None)
        if len(rows) != len(steps):
            chosen = indices = [row - self._first for row in rows]
            steps, puts = [steps[i] for i in chosen], [puts[i] for i in chosen]
            inputs = {path: array[chosen] for path, array in inputs.items()}
        actions = self._read(inputs)
        stepped = 0
        ended: list[tuple[int, bool, bool]] = []
        fresh: list[tuple[int, tuple[Any, Any]]] = []
        try:
            for _, index, action, step, put in zip(
                rows, indices, actions, steps, puts, strict=True
            ):
                observation, reward, terminated, truncated, info = step(action)
                put(observation, info)
                if reward.__class__ not in taken:
                    reward = reward_array(reward, (), rewards.dtype)
                try:
                    rewards[index] = reward
                except OverflowError:
                    reward_array(reward, (), rewards.dtype)  # raises, and says what is too large
                    raise
                if terminated is not False or truncated is not False:
                    terminated, truncated = flags_of(terminated, truncated)
                stepped += 1
                if terminated or truncated:
                    ended.append((index, terminated, truncated))
                    self._cores[index].episode = info.get("episode")
                    if advance:
                        fresh.append((index, self._resets[index]()))
        finally:  # what was stepped before an error is not lost
            if stepped < len(rows):
                chosen = list(indices[:stepped])
            self._write_flags(slot, chosen, ended)
            if advance:
                self._write_following(slot, chosen, fresh)

    def _write_flags(
        self, slot: int, chosen: slice | Sequence[int], ended: list[tuple[int, bool, bool]]
    ) -> None:
        done, terminated, truncated = flags = self._flags[slot]
        for flag in flags:
            if isinstance(chosen, slice):
                flag[:] = bytes(len(flag))
            else:
                for index in chosen:
                    flag[index] = False
        for index, failed, cut in ended:
            done[index] = True
            terminated[index] = failed
            truncated[index] = cut

    def _write_following(
        self, slot: int, chosen: slice | Sequence[int], fresh: list[tuple[int, tuple[Any, Any]]]
    ) -> None:
        """Write the roots after a step: what it made, and a fresh episode where one has ended."""
        for made, root in self._carried[slot]:
            root[chosen] = made[chosen]
        if fresh:
            puts = self._root_writers[slot + 1]
            for index, (observation, info) in fresh:
                puts[index](observation, info)


def _bytes_of(flags: np.ndarray) -> memoryview:
    """Show flags of shape (rows, 1) as bytes, which are written faster than an array."""
    return memoryview(flags[:, 0].view(np.uint8))


class _WritersBySlot(dict[int, list[Callable[[Any, Any], None]]]):
    """The functions that write an observation and an info into each row of a slot, made when a slot is first used.

    Args:
        cores: of each row, in a list that may change; then what was made is cleared.
        arrays: all slots and rows by path.
    """

    def __init__(self, cores: Sequence[GymCore], arrays: Rows):
        super().__init__()
        self._cores, self._arrays = cores, arrays

    def __missing__(self, slot: int) -> list[Callable[[Any, Any], None]]:
        made = self[slot] = [
            core.writer({path: array[slot, index, ...] for path, array in self._arrays.items()})
            for index, core in enumerate(self._cores)
        ]
        return made


def taken_as_they_are(dtype: np.dtype) -> frozenset[type]:
    """Name the classes of rewards that an array of ``dtype`` takes, or raises OverflowError for."""
    return _NUMBERS if dtype.kind == "f" else frozenset()


def reward_array(reward: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Bring a reward, which may be a number or an array, into the shape of its spec.

    Raises:
        EncodingError: it is no number, has another number of elements, or ``dtype`` cannot hold it.
    """
    found = np.asarray(reward)
    if not holds_numbers(found, dtype):
        raise EncodingError(
            f"step of the simulator returned the reward {reward!r}, a {type(reward).__name__}, but must return a number. "
            "Correct the env's step, or wrap it in one that does."
        )
    try:
        with np.errstate(invalid="ignore"):  # NaN among integers, which is told below
            read = found.astype(dtype, copy=False).reshape(shape)
    except OverflowError as error:
        raise EncodingError(
            f"step of the simulator returned a whole number as reward that is too large for {dtype}, the dtype of its "
            "spec. Correct the env's step, or scale the reward in a wrapper."
        ) from error
    except ValueError as error:
        raise EncodingError(
            f"the simulator gave a reward of shape {found.shape}, but its spec says {shape or (1,)}. "
            "Return a number from step, or publish a reward_space."
        ) from error
    if dtype.kind != "f" and not np.array_equal(read, found.reshape(shape)):
        raise EncodingError(
            f"step of the simulator returned the reward {reward!r}, but its spec says {dtype}, which would change it. "
            "Correct the env's step, or its reward_space."
        )
    return read


def flags_of(terminated: Any, truncated: Any) -> tuple[bool, bool]:
    """Read the two flags of a step: bools of any library, or 0 and 1.

    Raises:
        EncodingError: one is neither; ``"no"`` would be true, and None would be false.
    """
    if not (terminated.__class__ is truncated.__class__ is bool):
        require_flags(terminated, truncated, one_each=True)
    return bool(terminated), bool(truncated)


def require_flags(terminated: Any, truncated: Any, *, one_each: bool = False) -> None:
    """Refuse flags, or arrays of them, that are neither bools nor 0 and 1; see `flags_of`.

    With ``one_each`` an array of more or fewer flags than one is refused too.
    """
    for name, given in (("terminated", terminated), ("truncated", truncated)):
        found = np.asarray(given)
        is_flag = found.dtype.kind in "biuf" and bool(np.isin(found, (0, 1)).all())
        if not is_flag or (one_each and found.size != 1):
            raise EncodingError(
                f"step of the simulator returned {name}={given!r}, a {type(given).__name__}, but must return a bool. "
                "Correct the env's step, or wrap it in one that does."
            )
