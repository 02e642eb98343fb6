"""Which infos of a gym-style simulator become entries of an env, and how they are declared.

`InfoReading` holds the readers and makes specs and data agree. What a reader keeps of an info is its own
business (`info`), and when it is called that of the env.

Conventions
    reader  callable ``reader(info, td)`` that writes into ``td``, see `info`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from tensordict import TensorDict, TensorDictBase

from envkit.data.paths import Path, as_path, leaf_paths
from envkit.data.transition import leaves
from envkit.env.base import EnvBase
from envkit.env.declared import require_names
from envkit.errors import ArgumentTypeError, InfoReaderError, KeyCollisionError
from envkit.specs import Composite, make_composite_from_td
from envkit.specs.annotations import Value
from envkit_bridges.gym.info import default_info_dict_reader

__all__ = ["InfoReading", "Outcome", "Reader"]

Reader = Callable[[dict[str, Any], TensorDictBase], Any]
Outcome = tuple[Any, Any, Any, Any, Any, dict[str, Any]]
"""Observation, reward, terminated, truncated, done and info; flags that are not reported are None."""


class InfoReading(EnvBase):
    """The part of an env on a gym-style simulator that reads infos."""

    info_dict_reader: list[Reader]
    convert_actions_to_numpy: bool
    _read_infos: frozenset[Path] = frozenset()

    # ------------------------------------------------------------------- what it asks of the simulator

    @property
    @abstractmethod
    def _simulator(self) -> Any:
        """What is stepped and reset."""

    @abstractmethod
    def _action_in(self, td: TensorDictBase, rows: list[int] | None = None) -> Any:
        """Take the action out of a root."""

    @abstractmethod
    def read_action(self, action: Value) -> Any:
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
        """
        if info_dict_reader is None:
            info_dict_reader = default_info_dict_reader(ignore_private=ignore_private)
        if not callable(info_dict_reader):
            raise ArgumentTypeError(
                f"the info reader is {info_dict_reader!r}, of type {type(info_dict_reader).__name__}, which "
                "cannot be called. Pass a function reader(info, td), default_info_dict_reader(keys), or nothing."
            )
        if isinstance(info_dict_reader, default_info_dict_reader):
            info = {} if info_dict_reader.is_complete else self._info_of_one_step()
            info_dict_reader.complete(info, self.batch_size)
        self._declare_infos(getattr(info_dict_reader, "info_spec", None))
        self.info_dict_reader.append(info_dict_reader)
        return self

    @property
    def _infos(self) -> frozenset[Path]:
        return self._infos_by_place() | self._read_infos

    def _infos_by_place(self) -> frozenset[Path]:
        """Give the infos that the specs declare without a reader: those below a node "info"."""
        return super()._infos

    def _declare_infos(self, spec: Composite | Mapping[str, Any] | None) -> None:
        if not spec:
            return
        taken = [*self.observation_keys, *self.reward_keys, *self.done_keys, *self.action_keys]
        names = {as_path(key)[0] for key in taken}
        if clashes := sorted(names & set(spec.keys())):
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
        """Take a step of its own; the env must be reset afterwards."""
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
        from envkit.transforms.core.env import TransformedEnv
        from envkit.transforms.primer import TensorDictPrimer

        return TransformedEnv(self, TensorDictPrimer(missing))

    def _written_by(self, reader: Reader) -> Composite:
        td = TensorDict({}, batch_size=self.batch_size)
        reader(self._info_of_one_step(), td)
        return make_composite_from_td(td, unsqueeze_null_shapes=False)
