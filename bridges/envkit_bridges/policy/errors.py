"""Why torch could not follow a module, said so that its author finds the line.

This module decides what is said of an exception that a module raised while it was exported, and which
line it is said of. It knows tracebacks; it does not know graphs.

Conventions
    own      code that belongs to no library that policies are written with: the author's.
    reads    entries that the module is called with, by name, with the shape of one row.
"""

from __future__ import annotations

import linecache
import os
import sysconfig
import traceback
from collections.abc import Mapping
from types import FrameType

import torch
from tensordict.nn import TensorDictModuleBase
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributions import Distribution
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from envkit.env.policy import HOW_CALLED, WRONG_FORM
from envkit.errors import TranslationError

STEPWISE = "step the module from Python instead: env.rollout(steps, module)"

_MACHINERY = ("/torch/", "/tensordict/", os.path.dirname(__file__))
_LIBRARIES = (*_MACHINERY, "/torchrl/")
_STANDARD = sysconfig.get_paths()["stdlib"]
_VALUES_WANTED = (
    GuardOnDataDependentSymNode,
    DataDependentOutputException,
    DynamicOutputShapeException,
)


def is_own(file: str) -> bool:
    """Check whether a file is the author's, and not of a library."""
    is_standard = file.startswith((_STANDARD, "<frozen")) and "-packages" not in file
    return not is_standard and not any(part in file for part in _LIBRARIES)


def refusal(
    error: Exception, module: torch.nn.Module, reads: Mapping[str, torch.Size], *, sees_root: bool
) -> TranslationError:
    """Return what a module did that torch cannot follow, where, and what to do about it.

    Args:
        error: what its forward raised; the traceback begins at its caller.
        module: the policy.
        reads: what it was called with.
        sees_root: in a TensorDict.
    """
    name, frames = type(module).__name__, list(traceback.walk_tb(error.__traceback__))
    where = _where(frames, module)
    if isinstance(error, _VALUES_WANTED) or ".numpy()" in str(error):
        return TranslationError(
            f"what a compiled policy does may not depend on the values of tensors, but {name} looks at "
            f"them {where}. Choose with torch.where and compute with torch, or {STEPWISE}."
        )
    inputs = ", ".join(f"{key!r} of shape {_of_rows(shape)}" for key, shape in reads.items())
    inputs = f"a TensorDict of {inputs}" if sees_root else inputs
    if isinstance(error, WRONG_FORM) and not isinstance(module, TensorDictModuleBase):
        inputs = f"{inputs}. {HOW_CALLED.rstrip('.')}"
    said = f"{type(error).__name__}: {_first_line(error)}"
    if frames and is_own(frames[-1][0].f_code.co_filename):
        return TranslationError(
            f"{name} raised {said}, {where}. It was called with {inputs}. Correct it, or, if it works on "
            f"tensors with values only, {STEPWISE}."
        )
    return TranslationError(
        f"torch refuses what {name} does {where}: {said}. It was called with {inputs}. Make it fit these "
        f"shapes, or, if it works on tensors with values only, {STEPWISE}."
    )


def _where(frames: list[tuple[FrameType, int]], module: torch.nn.Module) -> str:
    """Return the name of the part of a policy that was at work, and the last line: its author's, if there is one."""
    said = []
    doers = [frame.f_locals.get("self") for frame, _ in frames]
    names = {part: name for name, part in module.named_modules() if name}
    parts = [doer for doer in doers if isinstance(doer, torch.nn.Module) and doer in names]
    if parts:
        said.append(f"in submodule {names[parts[-1]]!r} ({type(parts[-1]).__name__})")
    drawn = [type(doer).__name__ for doer in doers if isinstance(doer, Distribution)]
    if drawn:
        said.append(f"in the distribution {drawn[0]}")
    places = [(frame.f_code.co_filename, line) for frame, line in frames]
    own = [place for place in places if is_own(place[0])]
    near = [place for place in places if not any(part in place[0] for part in _MACHINERY)]
    for file, line in (own or near)[-1:]:
        code = linecache.getline(file, line).strip()
        said.append(f"at {file}:{line}: `{code}`" if code else f"at {file}:{line}")
    return " ".join(said) or "on a line that torch does not tell"


def _of_rows(shape: torch.Size) -> str:
    return f"({', '.join(['rows', *map(str, shape)])})"


def _first_line(error: Exception) -> str:
    text = str(error).strip() or "no message"
    return text.splitlines()[0].rstrip(".")
