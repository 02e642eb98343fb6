"""One file for all that a training loop goes on from: envs, data, policies, optimisers, generators.

`save` writes a file that is complete or not there, `load` puts back what is in it. Each part says for itself what
it holds, by ``state_dict()``; what has none is read and restored here. The file holds tensors, numbers, strings,
lists and dicts, so ``torch.load(path, weights_only=True)`` reads it and no code in it runs.

Conventions
    part      what the caller gives a name to. Parts are restored in place, or returned, see `load`.
    contents  of a file: the version of its form, and for each part its kind and its state.
"""

from __future__ import annotations

import inspect
import os
import pickle
import random
from collections import OrderedDict
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from tensordict import TensorDictBase, is_tensorclass

from envkit.data.arguments import as_file
from envkit.data.files import file_to_read, require_place, telling, whole_file
from envkit.data.plain import from_plain, plain
from envkit.errors import ArgumentTypeError, MissingKeyError, ResumeError

__all__ = ["load", "save"]

_VERSION = 1


class _State(NamedTuple):
    kind: str
    state: Any


def save(path: str | os.PathLike[str], /, **parts: Any) -> None:
    """Write parts into one file, which is complete or, after a crash, as it was before.

    Args:
        path: of the file; one that is there is replaced.
        **parts: by any names. What has ``state_dict`` and ``load_state_dict``: envs, collectors, modules,
            optimisers, schedulers, replay buffers. TensorDicts. Generators: ``torch.Generator``,
            ``numpy.random.Generator``, ``random.Random``; the modules ``torch``, ``numpy.random`` and ``random``
            stand for their global ones, on all devices. Tensors, numbers, strings, and lists and dicts of them.

    Raises:
        ArgumentTypeError, ArgumentError: (a TypeError, a ValueError) ``path`` is no path.
        ResumeError: (a RuntimeError) a part cannot be saved so that it could be restored exactly. Nothing is
            written then.
        WriteError: (an OSError) the file cannot be written.
    """
    require_place(as_file("path", path))
    held = {name: _read(name, part)._asdict() for name, part in parts.items()}
    with whole_file(path) as file, telling(path):
        torch.save({"envkit": _VERSION, "parts": held}, file)


def load(path: str | os.PathLike[str], /, *, strict: bool = True, **parts: Any) -> dict[str, Any]:
    """Put the parts in a file back, all of them.

    Args:
        path: what `save` wrote.
        strict: False: envs begin a new episode where the old one does not go on as it did, see
            ``env.load_state_dict``.
        **parts: by the names they were saved under. What has ``load_state_dict``, a generator, or a module that
            stands for one, is restored in place. For what cannot be, a TensorDict or a number, pass None.

    Returns:
        All parts by name: those that were given, and in place of None what was saved.

    Raises:
        MissingKeyError: (a KeyError) a part is not in the file, or one in the file was not asked for. Nothing
            has changed then.
        MissingFileError: (a FileNotFoundError) there is no such file.
        ArgumentError: (a ValueError) ``path`` is no path, or that of a folder.
        ResumeError: (a RuntimeError) the file is not one that `save` wrote, or a part does not get where it was.
        ArgumentTypeError: (a TypeError) a part is of another kind than the one that was saved.
    """
    held = _contents(path)
    missing, left = sorted(parts.keys() - held.keys()), sorted(held.keys() - parts.keys())
    if missing or left:
        wrong = {"asked for and not there": missing, "there and not asked for": left}
        told = ", ".join(f"{names} are {how}" for how, names in wrong.items() if names)
        raise MissingKeyError(
            f"{path} holds the parts {sorted(held)}: {told}. Pass what was saved, None for what is only to be returned."
        )
    for name, part in parts.items():
        _require_kind(name, part, held[name]["kind"])
    restored = dict(parts)
    in_order = sorted(held, key=lambda name: held[name]["kind"] in _GENERATORS)  # loading may draw
    for name in in_order:
        kind, state = held[name]["kind"], held[name]["state"]
        if kind == "value":
            restored[name] = from_plain(state)
        elif kind == "state_dict":
            _load_state_dict(parts[name], state, strict=strict)
        else:
            _GENERATORS[kind].write(parts[name], state)
    return restored


# ----------------------------------------------------------------------------------------- the file


def _contents(path: str | os.PathLike[str]) -> dict[str, Any]:
    path = file_to_read(path)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        raise ResumeError(
            f"{path} is no whole file of envkit.save: torch.load(path, weights_only=True) fails with "
            f"{type(error).__name__}. Load it by what wrote it; if envkit did, it was damaged since: take another one."
        ) from error
    if not isinstance(found, dict) or found.get("envkit") != _VERSION:
        told = found.get("envkit") if isinstance(found, dict) else None
        raise ResumeError(
            f"{path} was not written by envkit.save in the form this version reads, {_VERSION} (it says {told!r}). "
            "Load it by what wrote it."
        )
    return found["parts"]


_UNREADABLE = (EOFError, LookupError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError)
"""What torch.load raises of files that are no files of torch, or damaged."""


# --------------------------------------------------------------------------------------- kinds of parts


class _Reader(Protocol):
    """How the state of a kind of generators is read and written."""

    def fits(self, part: Any) -> bool: ...
    def read(self, part: Any) -> Any: ...
    def write(self, part: Any, state: Any) -> None: ...


class _Torch:
    """The global generators of torch: of the CPU, and of all CUDA devices that are in use."""

    def fits(self, part: Any) -> bool:
        return part is torch

    def read(self, part: Any) -> Any:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return {"cpu": torch.get_rng_state(), "cuda": cuda}

    def write(self, part: Any, state: Any) -> None:
        torch.set_rng_state(state["cpu"])
        if state["cuda"]:
            torch.cuda.set_rng_state_all(state["cuda"])


class _TorchGenerator:
    def fits(self, part: Any) -> bool:
        return isinstance(part, torch.Generator)

    def read(self, part: torch.Generator) -> Any:
        return part.get_state()

    def write(self, part: torch.Generator, state: Any) -> None:
        part.set_state(state)


class _Numpy:
    """NumPy's global generator, and those of the older kind."""

    def fits(self, part: Any) -> bool:
        return part is np.random or isinstance(part, np.random.RandomState)

    def read(self, part: Any) -> Any:
        return plain(part.get_state(legacy=False))

    def write(self, part: Any, state: Any) -> None:
        part.set_state(from_plain(state))


class _NumpyGenerator:
    def fits(self, part: Any) -> bool:
        return isinstance(part, np.random.Generator)

    def read(self, part: np.random.Generator) -> Any:
        return plain(part.bit_generator.state)

    def write(self, part: np.random.Generator, state: Any) -> None:
        part.bit_generator.state = from_plain(state)


class _Python:
    """Python's global generator, and others of its kind."""

    def fits(self, part: Any) -> bool:
        return part is random or isinstance(part, random.Random)

    def read(self, part: Any) -> Any:
        return plain(part.getstate())

    def write(self, part: Any, state: Any) -> None:
        part.setstate(from_plain(state))


_GENERATORS: dict[str, _Reader] = {
    "torch": _Torch(),
    "torch generator": _TorchGenerator(),
    "numpy": _Numpy(),
    "numpy generator": _NumpyGenerator(),
    "python": _Python(),
}


def _kind_of(part: Any) -> str:
    """Say how a part is saved: by its kind of generator, its ``state_dict``, or as a value."""
    for kind, reader in _GENERATORS.items():
        if reader.fits(part):
            return kind
    is_data = isinstance(part, TensorDictBase) or is_tensorclass(part)
    has_state = hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
    return "state_dict" if has_state and not is_data else "value"


def _read(name: str, part: Any) -> _State:
    kind = _kind_of(part)
    if kind == "value":
        return _State(kind, plain(part, f"the part {name!r}"))
    if kind == "state_dict":
        state = part.state_dict()
        _require_readable(state, f"the state dict of the part {name!r}")
        return _State(kind, state)
    return _State(kind, _GENERATORS[kind].read(part))


def _require_kind(name: str, part: Any, kind: str) -> None:
    given = _kind_of(part)
    if kind == "value" and part is not None:
        raise ArgumentTypeError(
            f"the part {name!r} was given {type(part).__name__}, but what was saved cannot be put into it. Pass "
            f"{name}=None, and take what load returns."
        )
    if kind != "value" and given != kind:
        raise ArgumentTypeError(
            f"the part {name!r} was saved as {kind}, but what is given, {type(part).__name__}, is "
            f"{given}. Pass what was saved under that name."
        )


def _load_state_dict(part: Any, state: Any, *, strict: bool) -> None:
    """Load as an env or a module does; optimisers know no ``strict``."""
    knows = "strict" in inspect.signature(part.load_state_dict).parameters
    part.load_state_dict(state, **({"strict": strict} if knows else {}))


_READABLE = (torch.Tensor, torch.Size, torch.dtype, torch.device, bytes, complex)


def _require_readable(state: Any, name: str) -> None:
    """Check that ``torch.load(weights_only=True)`` reads a state dict.

    Raises:
        ResumeError: it holds something else than tensors, numbers, strings, lists, tuples and dicts.
    """
    if state is None or type(state) in (bool, int, float, str) or isinstance(state, _READABLE):
        return
    if type(state) in (dict, OrderedDict):
        for key, part in state.items():
            _require_readable(key, f"a key of {name}")
            _require_readable(part, f"{name}[{key!r}]")
    elif type(state) in (list, tuple):
        for number, part in enumerate(state):
            _require_readable(part, f"{name}[{number}]")
    else:
        raise ResumeError(
            f"{name} is of type {type(state).__name__}, which torch.load(weights_only=True) does not read. Have "
            "state_dict() give tensors, numbers, strings, lists and dicts."
        )
