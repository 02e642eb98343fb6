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
import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from tensordict import TensorDictBase, is_tensorclass

from envkit.data.arguments import as_file
from envkit.data.files import file_to_read, require_place, telling, undamaged, whole_file
from envkit.data.plain import from_plain, plain
from envkit.env.own_state import envs_without_episode, loading
from envkit.errors import ArgumentTypeError, MissingKeyError, ResumeError

_VERSION = 1
_MEMBER = re.compile(r"[^/.][^/]*/(data\.pkl|data/\d+|version|byteorder|\.[\w/]+)")
"""Names of the members that ``torch.save`` writes; those of a TorchScript program are others."""


class _State(NamedTuple):
    kind: str
    state: Any


def save(path: str | os.PathLike[str], /, **parts: Any) -> None:
    """Write parts into one file, which is complete or, after a crash, as it was before.

    Args:
        path: of the file; one that is there is replaced.
        **parts: by any names. Objects with ``state_dict`` and ``load_state_dict``: envs, collectors, modules,
            optimisers, schedulers, replay buffers. TensorDicts. Generators: ``torch.Generator``,
            ``numpy.random.Generator``, ``random.Random``; the modules ``torch``, ``numpy.random`` and ``random``
            stand for their global ones, on all devices. Tensors, numbers, strings, and lists and dicts of them.

    Raises:
        ArgumentTypeError, ArgumentError: (a TypeError, a ValueError) ``path`` is no path.
        ResumeError: (a RuntimeError) a part cannot be saved so that it could be restored exactly. No file is
            written then.
        WriteError: (an OSError) the file cannot be written.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from envkit import save
        >>> policy = torch.nn.Linear(4, 2)
        >>> save(tempfile.mkdtemp() + "/training.pt", policy=policy, step=100)
    """
    require_place(as_file("path", path))
    held = {name: _read(name, part)._asdict() for name, part in parts.items()}
    with whole_file(path) as file, telling(path), _with_checksums():
        torch.save({"envkit": _VERSION, "parts": held}, file)


def load(path: str | os.PathLike[str], /, *, strict: bool = True, **parts: Any) -> dict[str, Any]:
    """Put the parts in a file back: all of them, or none where one does not fit.

    All bytes of the file are compared with their checksums before a part changes. The state of the parts is kept
    in memory until all fit.

    Args:
        path: what `save` wrote.
        strict: False: envs begin a new episode where a recorded one does not go on as it did, see
            ``env.load_state_dict``. Where no episode was recorded they always do, with one warning.
        **parts: by the names they were saved under. An object with ``load_state_dict``, a generator, or a module that
            stands for one, is restored in place. For what cannot be, a TensorDict or a number, pass None.

    Returns:
        All parts by name: those that were given, and in place of None what was saved.

    Raises:
        MissingKeyError: (a KeyError) a part is not in the file, or one in the file was not asked for. No part
            has changed then.
        MissingFileError: (a FileNotFoundError) there is no such file.
        ArgumentError: (a ValueError) ``path`` is no path, or that of a folder.
        ResumeError: (a RuntimeError) the file is damaged, or not one that `save` wrote; or a part does not fit, or
            does not get where it was. The message names the part, and those that could not be put back, as envs that
            cannot say where they are.
        ArgumentTypeError: (a TypeError) a part is of another kind than the one that was saved.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from envkit import load, save
        >>> path = tempfile.mkdtemp() + "/training.pt"
        >>> policy = torch.nn.Linear(4, 2)
        >>> save(path, policy=policy, step=100)
        >>> load(path, policy=policy, step=None)["step"]
        100
    """
    held = _contents(path)
    missing, left = sorted(parts.keys() - held.keys()), sorted(held.keys() - parts.keys())
    if missing or left:
        wrong = {"asked for and not there": missing, "there and not asked for": left}
        told = ", ".join(f"{names} are {how}" for how, names in wrong.items() if names)
        raise MissingKeyError(
            f"{path} holds the parts {sorted(held)}: {told}. Pass what was saved, None for what is only to be returned."
        )
    saved = {name: _State(part["kind"], part["state"]) for name, part in held.items()}
    for name, part in parts.items():
        _require_kind(name, part, saved[name].kind)
    restored = dict(parts)
    for name, (kind, state) in saved.items():
        if kind == "value":
            with undamaged(path, f"a file of envkit.save with a part {name!r}", ResumeError):
                restored[name] = from_plain(state)
    with loading(held, strict=strict):
        _restore_all(path, parts, saved, strict=strict)
    return restored


def _restore_all(
    path: str | os.PathLike[str],
    parts: Mapping[str, Any],
    saved: Mapping[str, _State],
    *,
    strict: bool,
) -> None:
    """Restore the parts that are restored in place; those that were, are put back if one does not fit.

    Raises:
        ResumeError: a part does not fit. The message says which parts could not be put back, if there are any.
    """
    before: dict[str, _State | None] = {
        name: _now(name, parts[name]) for name, (kind, _) in saved.items() if kind != "value"
    }
    # Parts that cannot be put back come first: if one of them does not fit, the others were not touched.
    # Generators come last, because loading may draw.
    in_order = sorted(
        before, key=lambda name: (before[name] is not None, saved[name].kind in _GENERATORS)
    )
    begun: list[str] = []
    try:
        for name in in_order:
            begun.append(name)
            _restore(parts[name], saved[name], strict=strict)
    except BaseException as error:
        left = [name for name in reversed(begun) if not _put_back(parts[name], before[name])]
        if not isinstance(error, Exception):
            raise
        outcome = (
            f"The parts {left} could not be put back: build them again before you use them."
            if left
            else "All parts are as they were."
        )
        told = str(error).strip() or type(error).__name__
        raise ResumeError(
            f"the part {begun[-1]!r} of {path} does not fit what was passed, {type(parts[begun[-1]]).__name__}. "
            f"Pass what was built like the one that was saved. {outcome} What was raised: {told}"
        ) from error


def _now(name: str, part: Any) -> _State | None:
    """Return the state of a part before it is loaded; None where it could not be brought back to it."""
    try:
        state = deepcopy(_read(name, part))
    except Exception:  # of any class, by what the part is; the part is then loaded first
        return None
    return None if envs_without_episode(state.state) else state


def _put_back(part: Any, state: _State | None) -> bool:
    """Load what a part held before; gives whether it does again."""
    if state is None:
        return False
    try:
        _restore(part, state, strict=True)
    except Exception:  # the caller names the part
        return False
    return True


def _restore(part: Any, state: _State, *, strict: bool) -> None:
    if state.kind == "state_dict":
        _load_state_dict(part, state.state, strict=strict)
    else:
        _GENERATORS[state.kind].write(part, state.state)


# ----------------------------------------------------------------------------------------- the file


def _contents(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the parts of a file, all bytes of which were compared with their checksums.

    Raises:
        ResumeError: the file is damaged, or `save` did not write it.
    """
    path = file_to_read(path)
    _require_undamaged(path)
    with undamaged(path, "a file of envkit.save", ResumeError):
        try:
            contents = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            # torch's own text says how to run the file all the same
            named = re.search(r"GLOBAL ([\w.]+)", str(error))
            what = f"names {named[1]}, which is code" if named else "was not made by envkit.save"
            raise ResumeError(
                f"{path} {what}; expected tensors, numbers, strings, lists and dicts. Code in it was not run. Pass a "
                "file of envkit.save, and do not load this one by other means unless you know who wrote it."
            ) from error
    if not isinstance(contents, dict) or contents.get("envkit") != _VERSION:
        version = contents.get("envkit") if isinstance(contents, dict) else None
        raise ResumeError(
            f"{path} was not written by envkit.save in the form this version reads, {_VERSION} (it says {version!r}). "
            "Load it with the program that wrote it."
        )
    parts = contents.get("parts")
    if not isinstance(parts, dict) or not all(_is_part(part) for part in parts.values()):
        raise ResumeError(
            f"{path} is damaged, or another program wrote it: it has no dict of parts with a kind and a state each. "
            "Load an older file of envkit.save."
        )
    return parts


def _require_undamaged(path: Path) -> None:
    """Compare all bytes of a file that ``torch.save`` wrote with the checksums in it.

    ``torch.load`` does not: it reads what a flipped bit has made of a number.

    Raises:
        ResumeError: they differ, the file has no end or no beginning, or a member that `save` does not write.
    """
    with undamaged(path, "a file of envkit.save", ResumeError), zipfile.ZipFile(path) as archive:
        odd = [name for name in archive.namelist() if not _MEMBER.fullmatch(name)]
        member = archive.testzip()
    if odd:
        raise ResumeError(
            f"{path} has the member {odd[0]!r}, which envkit.save does not write; expected tensors and one list of "
            "them. Its content was not read. Pass a file of envkit.save."
        )
    if member is not None:
        raise ResumeError(
            f"{path} is damaged: its part {member!r} is not what was written, by the checksum beside it. Load an "
            "older file of envkit.save, or a copy of this one."
        )


@contextmanager
def _with_checksums() -> Iterator[None]:
    """Make ``torch.save`` write checksums, which a program may have turned off for its own files."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _is_part(part: Any) -> bool:
    kinds = {"value", "state_dict", *_GENERATORS}
    return isinstance(part, dict) and "state" in part and part.get("kind") in kinds


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
    """Return how a part is saved: by its kind of generator, its ``state_dict``, or as a value."""
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
    kind_given = _kind_of(part)
    if kind == "value" and part is not None:
        raise ArgumentTypeError(
            f"the part {name!r} was given {type(part).__name__}, but what was saved cannot be put into it. Pass "
            f"{name}=None, and take what load returns."
        )
    if kind != "value" and kind_given != kind:
        raise ArgumentTypeError(
            f"the part {name!r} was saved as {kind}, but what is given, {type(part).__name__}, is "
            f"{kind_given}. Pass what was saved under that name."
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
