"""Simulators on plain NumPy rows: how each of them is stepped and reset without a TensorDict.

`SimulatorRows` is the one loop over rows, for Gymnasium's envs, DeepMind Control's and PettingZoo's games alike. The
differences between them is a `SimulatorCore`: one simulator with the way from its rows to actions, and from what it
gives to its rows.

Conventions
    row    what one env owns of a leaf, see `envkit_bridges.gym.codecs`.
    rows   global row numbers; slots and regions as in `envkit.batched.exchange.memory`.
    done   ``terminated | truncated``; the three flags are bool of shape (1,), as is the reward, in the dtype of its spec.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

import numpy as np

from envkit.data.paths import Path
from envkit.errors import EncodingError, InfoReaderError
from envkit.rules import RESET
from envkit_bridges.gym.answers import reset_answer, step_answer
from envkit_bridges.gym.codecs import Codec, CopyIn, holds_numbers
from envkit_bridges.gym.frames import draw
from envkit_bridges.gym.info import default_info_dict_reader

if TYPE_CHECKING:
    from envkit_bridges.gym.backend import SpaceValue
    from envkit_bridges.libraries import Simulator

Rows = Mapping[Path, np.ndarray]
Put = Callable[[Any, Any], None]

_NUMBERS = frozenset((float, int, np.float64, np.float32))
"""Classes of rewards that need no look at what they hold, where the spec says floats."""
DONE: tuple[Path, ...] = (("done",), ("terminated",), ("truncated",))


class SimulatorCore(Protocol):
    """Calls of rows to one simulator.

    Attributes:
        step: takes an action, and gives (observation, reward, terminated, truncated, info).
        writes_flags: some roots have set flags, which `writer` writes; else no root has, and they are not written.
    """

    step: Callable[[Any], tuple[Any, Any, Any, Any, Any]]
    writes_flags: bool

    def is_like(self, other: object) -> bool:
        """Check whether another core takes its actions, and writes what comes out, in the same form."""
        ...

    def read(self, inputs: Rows) -> Sequence[Any]:
        """Return one action for each of some rows."""
        ...

    def resetter(self, masks: Rows) -> Callable[..., tuple[Any, Any]]:
        """Return the reset of the simulator, which gives (observation, info).

        Args:
            masks: `_reset` masks of the row by path, which later resets look at.
        """
        ...

    def writer(self, rows: Rows) -> Put:
        """Return the function that writes an observation and an info into the rows of a moment.

        Those of a `next` are without its reward and flags.
        """
        ...

    def end(self, info: Any) -> None:
        """Record the info of a step that has ended an episode."""
        ...


class SimulatorRows:
    """Simulators that are alike, bound to their rows: all lookups are done, scalars go out together.

    Args:
        cores: of each row.
        rows: global numbers of these rows.
        arrays: regions by name, see `envkit.batched.bound_envs.bind_rows`.
        slot: of each row of the pool; all of them are equal.
    """

    def __init__(
        self,
        cores: Sequence[SimulatorCore],
        rows: range,
        arrays: Mapping[str, Rows],
        slot: np.ndarray,
    ):
        self._cores = list(cores)
        self._first, self._slot = rows.start, slot.data
        here = slice(rows.start, rows.stop)
        inputs, roots, nexts = (
            {path: array[:, here] for path, array in arrays[region].items()}
            for region in ("in", "root", "next")
        )
        masks = {path: array[here] for path, array in arrays["mask"].items() if path[-1] == RESET}
        self._masks = [
            {path: array[index] for path, array in masks.items()} for index in range(len(cores))
        ]
        slots = range(len(nexts[DONE[0]]))
        self._inputs = [{path: array[at] for path, array in inputs.items()} for at in slots]
        self._read = cores[0].read
        self.read_cores()
        reward = nexts.get(("reward",))
        if reward is None:  # it is paid to the agents, which write it themselves
            reward = np.zeros((len(slots), len(cores), 1))
        self._rewards = list(reward[..., 0])
        # of other rewards it is looked at what they hold
        self._taken: frozenset[type] = _NUMBERS if reward.dtype.kind == "f" else frozenset()
        self._flags = list(zip(*(map(_bytes_of, nexts[path]) for path in DONE), strict=True))
        self._unset = bytes(len(cores))
        self._root_puts = _PutsBySlot(self._cores, roots)
        written = {path: array for path, array in nexts.items() if path not in _OF_STEPS}
        self._next_puts = _PutsBySlot(self._cores, written)
        carried = [path for path in roots if cores[0].writes_flags or path not in DONE]
        self._carried = [
            [
                (
                    _bytes_of(nexts[path][at]),
                    _bytes_of(roots[path][at + 1]),
                    nexts[path][at, 0].nbytes,
                )
                for path in carried
                if nexts[path].size
            ]
            for at in slots
        ]

    def replace(self, row: int, env: Any) -> None:
        """Put another env, made by the same function, in the place of a row's env."""
        self._cores[row - self._first] = env.row_core()
        self.read_cores()
        self.forget_writers()  # they hold on to the env

    def read_cores(self) -> None:
        """Read the simulators of the cores as they are now."""
        self._steps = [core.step for core in self._cores]
        pairs = zip(self._cores, self._masks, strict=True)
        self._resets = [core.resetter(own) for core, own in pairs]

    def forget_writers(self) -> None:
        """Make the functions that write into rows again at the next use."""
        for puts in (self._root_puts, self._next_puts):
            puts.clear()

    def reset(self, row: int, states: Collection[Path] = (), /, **kwargs: object) -> None:
        """Start an episode and write the root row; a simulator takes no ``states`` inputs for that."""
        index, slot = row - self._first, self._slot[row] + 1
        self._root_puts[slot][index](*self._resets[index](**kwargs))

    def step(self, rows: Sequence[int], *, advance: bool) -> None:
        """Step some rows and write their next rows; with ``advance`` also their next roots."""
        slot, steps, indices = self._slot[self._first], self._steps, range(len(rows))
        inputs, puts, rewards = self._inputs[slot], self._next_puts[slot], self._rewards[slot]
        if len(rows) != len(steps):
            indices = [row - self._first for row in rows]
            steps, puts = [steps[index] for index in indices], [puts[index] for index in indices]
            inputs = {path: array[indices] for path, array in inputs.items()}
        actions, taken = self._read(inputs), self._taken
        stepped = 0
        ended: list[tuple[int, bool, bool]] = []
        try:
            for _, index, action, step, put in zip(rows, indices, actions, steps, puts):  # noqa: B905
                result = step(action)
                try:
                    observation, reward, terminated, truncated, info = result
                except (TypeError, ValueError):
                    step_answer(result)  # raises, and says what is expected
                    raise
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
                    self._cores[index].end(info)
                    if advance:
                        self._root_puts[slot + 1][index](*self._resets[index]())
        finally:  # what was stepped before an error is not lost
            if stepped < len(rows):
                indices = indices[:stepped]
            self._write_flags(slot, indices, ended)
            if advance:
                self._carry(slot, indices, ended)

    def _write_flags(
        self, slot: int, stepped: Sequence[int], ended: list[tuple[int, bool, bool]]
    ) -> None:
        done, terminated, truncated = flags = self._flags[slot]
        for flag in flags:
            if len(stepped) == len(flag):
                flag[:] = self._unset
            else:
                for index in stepped:
                    flag[index] = False
        for index, failed, cut in ended:
            done[index] = True
            terminated[index] = failed
            truncated[index] = cut

    def _carry(
        self, slot: int, stepped: Sequence[int], ended: list[tuple[int, bool, bool]]
    ) -> None:
        """Write the roots that follow a step, but those of fresh episodes."""
        carried = self._carried[slot]
        if not ended and len(stepped) == len(self._steps):  # as of most steps
            for following, root, _ in carried:
                root[:] = following
            return
        over = [index for index, *_ in ended]
        if len(stepped) < len(self._steps):
            parts = [(index, index + 1) for index in stepped if index not in over]
        else:
            begins, ends = [0, *(index + 1 for index in over)], [*over, len(stepped)]
            parts = list(zip(begins, ends, strict=True))
        for following, root, size in carried:
            for begin, end in parts:
                root[begin * size : end * size] = following[begin * size : end * size]


_OF_STEPS = (("reward",), *DONE)


def _bytes_of(rows: np.ndarray) -> memoryview:
    """Show contiguous rows as bytes, which are written faster than an array."""
    return rows.view(np.uint8).data.cast("B")


class _PutsBySlot(dict[int, list[Put]]):
    """The functions that write into each row of a slot, made when a slot is first used.

    Args:
        cores: of each row, in a list that may change; then what was made is cleared.
        arrays: all slots and rows by path.
    """

    def __init__(self, cores: Sequence[SimulatorCore], arrays: Rows):
        super().__init__()
        self._cores, self._arrays = cores, arrays

    def __missing__(self, slot: int) -> list[Put]:
        puts = self[slot] = [
            core.writer({path: array[slot, index, ...] for path, array in self._arrays.items()})
            for index, core in enumerate(self._cores)
        ]
        return puts


class GymCore:
    """Step one gymnasium env, writing what comes out into rows.

    Args:
        env: a gymnasium env.
        observation, action: codecs of its spaces; ``observation`` is None when only pixels count.
        frame_skip: inner steps per step; rewards are summed, and a finished episode stops them.
        pixels: also write the rendered frame, uint8 (height, width, 3), to ``("pixels",)``.

    Attributes:
        episode: the entry "episode" in the info of the step that ended an episode last, or None.
        infos: complete readers of what is recorded of infos; set by `read_infos`.
        listener: notes what the env returns, for adapters; see `envkit_bridges.gym.reports`.
    """

    episode: Any = None
    listener: Any = None
    infos: Sequence[Any] = ()
    writes_flags = False

    def __init__(
        self,
        env: Simulator,
        observation: Codec | None,
        action: Codec,
        *,
        frame_skip: int = 1,
        pixels: bool = False,
    ):
        self.observation = observation
        self.action = action
        self.read = action.read
        self.frame_skip = frame_skip
        self.pixels = pixels
        self._bound: WeakSet[SimulatorRows] = WeakSet()
        self.take(env)

    @staticmethod
    def bind(
        cores: Sequence[Any], rows: range, arrays: Mapping[str, Rows], slot: np.ndarray
    ) -> SimulatorRows:
        """Fix the rows of some cores; see `SimulatorRows`."""
        bound = SimulatorRows(cores, rows, arrays, slot)
        for core in cores:
            core._bound.add(bound)
        return bound

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_bound": WeakSet()}  # a copy steps no rows yet

    def read_infos(self, readers: Sequence[Any]) -> None:
        """Record of infos what these readers write, on rows that are bound already too."""
        self.infos = readers
        for rows in self._bound:
            rows.forget_writers()

    def take(self, env: Simulator) -> None:
        """Reset and step ``env`` from now on, on rows that are bound already too: the env, or what writes its episodes down."""
        self.env = env
        skips = self.frame_skip > 1
        step = partial(repeated, env.step, self.frame_skip) if skips else env.step
        self.step = step if self.listener is None else partial(self.listener.step, step)
        for rows in self._bound:
            rows.read_cores()

    def is_like(self, other: object) -> bool:
        """Check whether another core takes its actions in the same form."""
        return isinstance(other, GymCore) and self.action.space == other.action.space

    def resetter(self, masks: Rows) -> Callable[..., tuple[Any, Any]]:
        """Return the reset of the env: a mask of one row selects all of it."""
        reset = self.env.reset
        if self.listener is not None:
            reset = partial(self.listener.reset, reset)
        return lambda **kwargs: reset_answer(reset(**kwargs))

    def writer(self, rows: Rows) -> Put:
        """Return the function that writes an observation, and the frame and infos if asked for, into rows."""
        method = "reset" if DONE[0] in rows else "step"  # roots have flags
        write = None if self.observation is None else self.observation.writer(rows, method)
        write_frame = CopyIn("pixels").into(rows[("pixels",)]) if self.pixels else None
        if foreign := [one for one in self.infos if type(one) is not default_info_dict_reader]:
            raise InfoReaderError(
                f"the info reader {foreign[0]} was given to an env that is a row of a pool already, where only a "
                "default_info_dict_reader can be replaced. Call set_info_dict_reader in the create function of the pool."
            )
        infos = [reader.writer(rows) for reader in self.infos]
        if write is not None and write_frame is None and not infos:
            return lambda observation, info: write(observation)

        def write_all(observation: SpaceValue, info: Any) -> None:
            if write is not None:
                write(observation)
            if write_frame is not None:
                write_frame(draw(self.env))
            for write_info in infos:
                write_info(info)

        return write_all

    def end(self, info: Any) -> None:
        """Record what wrappers report of an episode that has ended; an info may be None."""
        self.episode = None if info is None else info.get("episode")


def repeated(
    step: Callable[[Any], tuple[Any, Any, Any, Any, Any]], count: int, action: SpaceValue
) -> tuple[Any, Any, Any, Any, Any]:
    """Step ``count`` times with one action, or until the episode ends, and sum the rewards."""
    observation, reward, terminated, truncated, info = step_answer(step(action))
    for _ in range(count - 1):
        if terminated or truncated:
            break
        observation, extra, terminated, truncated, info = step_answer(step(action))
        reward = reward + extra
    return observation, reward, terminated, truncated, info


def reward_array(reward: object, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Convert a reward, which may be a number or an array, to the shape of its spec.

    Raises:
        EncodingError: it is no number, has another number of elements, or ``dtype`` cannot hold it.
    """
    array = np.asarray(reward)
    if not holds_numbers(array, dtype):
        raise EncodingError(
            f"step of the simulator returned the reward {reward!r}, of type {type(reward).__name__}, but must return a number. "
            "Correct the env's step, or wrap it in one that does."
        )
    try:
        with np.errstate(invalid="ignore"):  # NaN among integers, which is reported below
            read = array.astype(dtype, copy=False).reshape(shape)
    except OverflowError as error:
        raise EncodingError(
            f"step of the simulator returned a whole number as reward that is too large for {dtype}, the dtype of its "
            "spec. Correct the env's step, or scale the reward in a wrapper."
        ) from error
    except ValueError as error:
        raise EncodingError(
            f"the simulator gave a reward of shape {array.shape}, but its spec says {shape or (1,)}. "
            "Return a number from step, or publish a reward_space."
        ) from error
    if dtype.kind != "f" and not np.array_equal(read, array.reshape(shape)):
        raise EncodingError(
            f"step of the simulator returned the reward {reward!r}, but its spec says {dtype}, which would change it. "
            "Correct the env's step, or its reward_space."
        )
    return read


def flags_of(terminated: object, truncated: object) -> tuple[bool, bool]:
    """Read the two flags of a step: bools of any library, or 0 and 1.

    Raises:
        EncodingError: one is neither; ``"no"`` would be true, and None would be false.
    """
    if not (terminated.__class__ is truncated.__class__ is bool):
        require_flags(terminated, truncated, one_each=True)
    return bool(terminated), bool(truncated)


def require_flags(terminated: object, truncated: object, *, one_each: bool = False) -> None:
    """Refuse flags, or arrays of them, that are neither bools nor 0 and 1; see `flags_of`.

    With ``one_each`` an array of more or fewer flags than one is refused too.
    """
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        array = np.asarray(flag)
        kind = array.dtype.kind
        is_flag = kind == "b" or (kind in "iuf" and bool(np.isin(array, (0, 1)).all()))
        if not is_flag or (one_each and array.size != 1):
            raise EncodingError(
                f"step of the simulator returned {name}={flag!r}, of type {type(flag).__name__}, but must return a bool. "
                "Correct the env's step, or wrap it in one that does."
            )
