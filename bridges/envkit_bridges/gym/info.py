"""The entries kept from the info dictionaries of gym-style simulators, and their specs.

A reader is any callable ``reader(info, td)`` that writes into ``td``, called after each reset and step.
`default_info_dict_reader` is the standard one; `InfoReading` holds the readers of an env and makes specs and data agree.

Conventions
    info       dict of a simulator's own making; nothing about it is promised.
    info_spec  Composite of what a reader writes, shape of the env's batch size.
    private    names that begin with an underscore. Vector envs keep masks under such names.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envkit.data.paths import Path, as_path, leaf_paths
from envkit.data.transition import leaves
from envkit.env.base import EnvBase
from envkit.env.declared import require_names
from envkit.env.facts import Facts
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    EncodingError,
    InfoReaderError,
    KeyCollisionError,
)
from envkit.process_wide import warn
from envkit.rules import RESET, STEP
from envkit.specs import Composite, TensorSpec, Unbounded, make_composite_from_td
from envkit.specs.annotations import Value

if TYPE_CHECKING:
    from envkit_bridges.gym.backend import SpaceValue
    from envkit_bridges.libraries import Simulator

_SCALARS: dict[str, tuple[type, ...]] = {
    "bool": (bool, np.bool_),
    "float32": (np.float32,),
    "float64": (float, np.float64),
    "int64": (int, np.int64),
}
"""Classes of numbers that an array of a dtype holds as they are."""


class default_info_dict_reader:
    """Copy entries of the info dictionary into the TensorDict.

    Args:
        keys: names to copy; None takes all that the info of a first step holds.
        spec: what describes them: a Composite, a dict, or one spec for each of ``keys``. Given keys
            without one are described by ``Unbounded(())``, or by what an env shows in a first step where
            that is no single number; found ones by what was found.
        ignore_private: leave out names that begin with an underscore, given ones included.

    Entries that an info lacks, most often that of a reset, are written as zeros. Of the infos that
    are found, nested dicts become nested entries; what is neither number nor array is left out.

    Raises:
        ArgumentError: the specs do not belong to the keys.

    Example:
        >>> from envkit import GymEnv, default_info_dict_reader
        >>> env = GymEnv("FrozenLake-v1")
        >>> env = env.set_info_dict_reader(default_info_dict_reader(["prob"]))
        >>> env.reset()["prob"]
        tensor(1.)
        >>> env.close()
    """

    def __init__(
        self,
        keys: Iterable[str] | None = None,
        spec: Composite | Mapping[str, TensorSpec] | Sequence[TensorSpec] | None = None,
        ignore_private: bool = True,
    ):
        self.ignore_private = ignore_private
        names = None if keys is None else [keys] if isinstance(keys, str) else list(keys)
        specs_passed = _given_specs(names, spec)
        public = [name for name in names or () if self._is_public(name)]
        self._assumed = {name for name in public if name not in specs_passed.keys()}
        self._spec: Composite | None = specs_passed if spec is not None else None
        if names is not None:
            number = Unbounded(tuple(specs_passed.shape))
            found = {
                name: number if name in self._assumed else specs_passed[name] for name in public
            }
            self._spec = Composite(found, shape=specs_passed.shape)

    def _is_public(self, name: str) -> bool:
        return not (self.ignore_private and name.startswith("_"))

    @property
    def info_spec(self) -> Composite:
        """Specs of the entries; empty until they are known."""
        return Composite() if self._spec is None else self._spec

    @property
    def is_complete(self) -> bool:
        """Whether it is known what will be copied."""
        return self._spec is not None and not self._assumed

    @property
    def finds_names(self) -> bool:
        """Whether the names of the entries are still to be found, in the info of a step."""
        return self._spec is None

    def leave_out(self, names: Collection[str]) -> None:
        """Read no infos of these names."""
        left = {name: leaf for name, leaf in self.info_spec.items() if name not in names}
        self._spec = Composite(left, shape=self.info_spec.shape)

    def complete(self, info: Mapping[str, Any], batch_size: Sequence[int] = ()) -> None:
        """Find out from the info of one step, if need be, what to copy.

        Args:
            info: of a step of the env that is read.
            batch_size: of that env; specs that were given for one env are expanded to it.
        """
        batch = torch.Size(batch_size)
        described = self._described(info, batch)
        if self._spec is None:
            self._spec = described
            return
        if self._spec.shape != batch:
            self._spec = self._spec.expand(batch)
        for name in self._assumed & set(described.keys()):
            if described[name].shape != batch:
                self._spec[name] = described[name]
        self._assumed = set()

    def _described(self, info: Mapping[str, Any], batch: torch.Size) -> Composite:
        specs = Composite(shape=batch)
        for name, value in info.items():
            if not isinstance(name, str) or not self._is_public(name):
                continue
            if isinstance(value, Mapping):
                below = self._described(value, batch)
                if len(below):
                    specs[name] = below
            elif (array := _as_array(value)) is not None and array.shape[: len(batch)] == batch:
                specs[name] = Unbounded(array.shape, dtype=torch.from_numpy(array).dtype)
        return specs

    def __call__(self, info: Mapping[str, Any], tensordict: TensorDictBase) -> TensorDictBase:
        """Write the entries of ``info`` into ``tensordict``, which is returned.

        A reader without given keys finds them at the first info that holds anything.

        Raises:
            EncodingError: a value does not fit its spec.
        """
        if self._spec is None:
            if not info:
                return tensordict
            self.complete(info, tensordict.batch_size)
        return tensordict.update(_read(info, self.info_spec, ()))

    def writer(self, rows: Mapping[Path, np.ndarray]) -> Callable[[Mapping[str, Any]], None]:
        """Return the function that writes the entries of an info into the rows of one env.

        It writes what a call of the reader gives, and raises what that raises. The reader is complete.
        """
        puts = [
            (as_path(key), _put_into(rows[as_path(key)], leaf, as_path(key)))
            for key, leaf in self.info_spec.items(True, True)
        ]

        def write(info: Mapping[str, Any]) -> None:
            for path, put in puts:
                value: Any = info
                for name in path:
                    value = value.get(name) if isinstance(value, Mapping) else None
                put(value)

        return write


def _put_into(row: np.ndarray, leaf: TensorSpec, path: Path) -> Callable[[Any], None]:
    """Return the function that writes one value; None is written as zeros."""
    zero = leaf.zero().numpy()
    is_any = isinstance(leaf, Unbounded)
    numbers = _SCALARS.get(row.dtype.name, ()) if is_any and not row.shape else ()

    def put(value: object) -> None:
        if value is None:
            row[...] = zero
            return
        if value.__class__ in numbers:
            try:
                row[...] = value
                return
            except OverflowError:  # an int of more than 64 bits, which is reported below
                row[...] = zero
        row[...] = _encoded(value, leaf, path).numpy()

    return put


def _read(info: Mapping[str, Any], spec: Composite, path: tuple[str, ...]) -> dict[str, Any]:
    entries = {}
    for name, leaf in spec.items():
        value = info.get(name)
        if isinstance(leaf, Composite):
            below = value if isinstance(value, Mapping) else {}
            entries[name] = _read(below, leaf, (*path, name))
        elif value is None:
            entries[name] = leaf.zero()
        else:
            entries[name] = _encoded(value, leaf, (*path, name))
    return entries


def _encoded(value: object, leaf: TensorSpec, path: tuple[str, ...]) -> Any:
    try:
        return leaf.encode(value)
    except (EncodingError, TypeError, ValueError) as error:
        raise EncodingError(
            f"the info {'.'.join(path)!r} is {value!r}, which does not fit its spec {leaf}: {error} "
            "Name only keys whose values keep their shape, or declare another spec."
        ) from error


def _as_array(value: object) -> np.ndarray | None:
    """Return numbers, arrays and tensors as an array that torch can hold; None for the rest."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy()
    if isinstance(value, bool | int | float | np.generic) or hasattr(value, "__array__"):
        array = np.asarray(value)
        return array.copy() if array.dtype.kind in "biufc" else None
    return None


def _given_specs(names: list[str] | None, spec: Any) -> Composite:
    """Return the specs that were passed, by name.

    Raises:
        ArgumentError: they do not belong to the names.
    """
    if spec is None:
        specs_by_name = Composite()
    elif isinstance(spec, Composite):
        specs_by_name = spec
    elif isinstance(spec, Mapping):
        specs_by_name = Composite(dict(spec))
    else:
        specs = list(spec)
        if names is None or len(names) != len(specs):
            raise ArgumentError(
                f"{len(specs)} info specs were given for the keys {names}. Pass one for each key, "
                "or a dict of specs by key."
            )
        specs_by_name = Composite(dict(zip(names, specs, strict=True)))
    if names is not None and len(specs_by_name) and not set(names) & set(specs_by_name.keys()):
        raise ArgumentError(
            f"the info specs are for {sorted(specs_by_name.keys())}, but the keys are {names}. Give specs of these "
            "keys, or leave them out."
        )
    return specs_by_name


Reader = Callable[[dict[str, Any], TensorDictBase], Any]
Outcome = tuple[Any, Any, Any, Any, Any, dict[str, Any]]
"""Observation, reward, terminated, truncated, done and info; flags that are not reported are None."""


class _Readers(tuple[Reader, ...]):
    """Readers of an env, which are replaced all at once."""

    __slots__ = ()

    def __setitem__(self, index: object, reader: object) -> None:
        raise ArgumentTypeError(
            f"info_dict_reader[{index!r}] was assigned, but the readers of an env are a tuple. Assign all of them: "
            "env.info_dict_reader = [reader]; or add one: env.set_info_dict_reader(reader)."
        )


class InfoReading(EnvBase):
    """The part of an env on a gym-style simulator that reads infos."""

    convert_actions_to_numpy: bool
    _readers = _Readers()
    _read_infos: frozenset[Path] = frozenset()

    @property
    def info_dict_reader(self) -> tuple[Reader, ...]:
        """The readers of infos; assign a list to replace them all. The specs stay as they are."""
        return self._readers

    @info_dict_reader.setter
    def info_dict_reader(self, readers: Iterable[Reader]) -> None:
        self._readers = _Readers(readers)
        self._readers_changed()

    def _readers_changed(self) -> None:
        """Drop what was built from the readers; it is built again when it is needed."""

    # ------------------------------------------------------------------- what it asks of the simulator

    @property
    @abstractmethod
    def _simulator(self) -> Simulator:
        """The simulator that is stepped and reset."""

    @abstractmethod
    def _action_in(self, td: TensorDictBase, rows: list[int] | None = None) -> SpaceValue:
        """Return the action in a root."""

    @abstractmethod
    def read_action(self, action: Value) -> SpaceValue:
        """Turn an action into what the simulator takes."""

    @abstractmethod
    def _output_transform(self, result: Any) -> Outcome:
        """Turn a step of the simulator into an outcome."""

    @abstractmethod
    def _reset_output_transform(self, result: Any) -> tuple[Any, dict[str, Any]]:
        """Turn a reset of the simulator into (obs, info)."""

    # ----------------------------------------------------------------------------------------- readers

    def set_info_dict_reader(
        self, info_dict_reader: Reader | None = None, ignore_private: bool = True
    ) -> Self:
        """Add a reader of info dictionaries, called as ``info_dict_reader(info, td)``; returns self.

        Args:
            info_dict_reader: writes into ``td`` after each reset and step; its ``info_spec``, if it has one,
                is added to the observation spec. None makes a `default_info_dict_reader`.
            ignore_private: for the default reader, leave out names that begin with an underscore.

        A default reader without keys, or with keys that have no spec, looks at one step to see what there
        is: the simulator is reset and stepped.

        Raises:
            ArgumentTypeError: ``info_dict_reader`` cannot be called.
            KeyCollisionError: an entry of that name exists already.

        Example:
            >>> from envkit import GymEnv
            >>> env = GymEnv("FrozenLake-v1").set_info_dict_reader()
            >>> env.reset()["prob"]
            tensor(1., dtype=torch.float64)
            >>> env.close()
        """
        if info_dict_reader is None:
            info_dict_reader = default_info_dict_reader(ignore_private=ignore_private)
        if not callable(info_dict_reader):
            raise ArgumentTypeError(
                f"the info reader is {info_dict_reader!r}, of type {type(info_dict_reader).__name__}, which "
                "cannot be called. Pass a function reader(info, td), default_info_dict_reader(keys), or nothing."
            )
        if isinstance(info_dict_reader, default_info_dict_reader):
            finds_names = info_dict_reader.finds_names
            info = {} if info_dict_reader.is_complete else self._info_of_one_step()
            info_dict_reader.complete(info, self.batch_size)
            if finds_names:
                self._leave_out_taken(info_dict_reader)
        self._declare_infos(getattr(info_dict_reader, "info_spec", None))
        self.info_dict_reader = (*self.info_dict_reader, info_dict_reader)
        return self

    def _find_facts(self) -> Facts:
        facts = super()._find_facts()
        return replace(facts, infos=facts.infos | self._read_infos)

    def _entries_among(self, names: Iterable[str]) -> list[str]:
        """List the names that entries of the env have."""
        keys = [*self.observation_keys, *self.reward_keys, *self.done_keys, *self.action_keys]
        return sorted({as_path(key)[0] for key in keys} & {*names})

    def _leave_out_taken(self, reader: default_info_dict_reader) -> None:
        """Remove from a reader, with a warning, infos under names of other entries."""
        found = reader.info_spec.keys()
        taken = [
            *self._entries_among(found),
            *(name for name in ("next", STEP, RESET) if name in found),
        ]
        if not taken:
            return
        reader.leave_out(taken)
        warn(
            f"the infos {taken} of {self} are named like other entries of the data, so they are not recorded; "
            "all others are. Record them with a reader of your own, which writes them under another name: "
            "env.set_info_dict_reader(reader).",
        )

    def _declare_infos(self, spec: Composite | Mapping[str, Any] | None) -> None:
        if not spec:
            return
        if clashes := self._entries_among(spec.keys()):
            raise KeyCollisionError(
                f"the infos {clashes} are named like entries that the env has already. Read others: "
                "set_info_dict_reader(default_info_dict_reader(keys=[...]))."
            )
        require_names({"info": Composite(dict(spec))})
        declared = self.full_observation_spec.clone()
        declared.update(spec if self.device is None else Composite(dict(spec)).to(self.device))
        self.full_observation_spec = declared
        self._read_infos |= set(leaf_paths(Composite(dict(spec))))

    def _info_of_one_step(self) -> dict[str, Any]:
        """Return the info of a step; the env must be reset afterwards."""
        generator = torch.Generator(self.device or "cpu").manual_seed(0)
        self._simulator.reset()
        action = self._action_in(self.full_action_spec.rand((), generator))
        if self.convert_actions_to_numpy:
            action = self.read_action(action)
        info = self._output_transform(self._simulator.step(action))[-1]
        self._simulator.reset()
        return info

    def auto_register_info_dict(
        self, ignore_private: bool = True, *, info_dict_reader: Reader | None = None
    ) -> EnvBase:
        """Read infos in a way that specs and data agree, whatever the reader leaves out.

        Args:
            ignore_private, info_dict_reader: see `set_info_dict_reader`. A reader without an
                ``info_spec`` is described by what it writes after one step.

        Returns:
            This env, or a `TransformedEnv` of it that adds zeros to the resets where the reader
            writes nothing. It passes `check_env_specs`.

        Raises:
            InfoReaderError: the env has a reader already.

        Example:
            >>> from envkit import GymEnv
            >>> env = GymEnv("FrozenLake-v1").auto_register_info_dict()
            >>> env.rollout(2)["next", "prob"].shape
            torch.Size([2])
            >>> env.close()
        """
        if self.info_dict_reader:
            raise InfoReaderError(
                f"{type(self).__name__} has an info reader already, {self.info_dict_reader[0]}. "
                "Register infos on an env without one."
            )
        self.set_info_dict_reader(info_dict_reader, ignore_private)
        reader = self.info_dict_reader[0]
        spec = getattr(reader, "info_spec", None)
        if not spec:
            spec = self._written_by(reader)
            self._declare_infos(spec)
        at_reset = TensorDict({}, batch_size=self.batch_size)
        _, info = self._reset_output_transform(self._simulator.reset())
        reader(info, at_reset)
        written = {path for path, _ in leaves(at_reset)}
        missing = Composite(shape=self.batch_size)
        for key, leaf in Composite(dict(spec), shape=self.batch_size).items(True, True):
            if as_path(key) not in written:
                missing[key] = leaf
        if missing.is_empty():
            return self
        from envkit.transforms.core.transformed_env import TransformedEnv
        from envkit.transforms.primer import TensorDictPrimer

        return TransformedEnv(self, TensorDictPrimer(missing))

    def _written_by(self, reader: Reader) -> Composite:
        td = TensorDict({}, batch_size=self.batch_size)
        reader(self._info_of_one_step(), td)
        return make_composite_from_td(td, unsqueeze_null_shapes=False)
