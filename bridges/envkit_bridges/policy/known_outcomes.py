"""What a trace cannot follow, though what comes of it is known: lines of TorchRL, and `Tensor.data`.

Some modules of TorchRL ask whether any row has a property before they treat the rows that have it, or check
arguments by their values. For each such line the table says what a trace is told there, so that every row
gets what it gets in torch, whatever the values are. A line is known by its text: if TorchRL changes it, the
module is refused until this table knows the new one.

``x.data`` is ``x.detach()`` where nothing has a gradient, and a trace sees what is written to the latter.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["known_outcomes"]

# (function, line): what `bool` of a tensor gives there, or what it is iterated as (for `tolist`).
_ANSWERS: Mapping[tuple[str, str], Any] = {
    # Rows that begin an episode get a hidden state of zeros by torch.where, which changes no other row.
    (
        "GRUModule.forward",
        "if not self.recurrent_mode and is_init.any() and hidden is not None:",
    ): True,
    # Actions out of bounds get the log-probability -inf by masked_fill, which changes no other.
    ("TruncatedNormal.log_prob", "if above_or_below.any():"): True,
    # Checks of arguments, which a compiled policy leaves out: see `exporting`.
    ("TruncatedStandardNormal.__init__", ".tolist()"): (),
    ("TruncatedNormal.__init__", "if not (high > low).all():"): True,
    ("TanhDelta.__init__", "assert (high > low).all()"): True,
}
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_CONTINUOUS = "torchrl.modules.distributions.continuous"


@contextmanager
def known_outcomes() -> Iterator[None]:
    """Tell a trace what comes of all this, while the context is open."""
    with _Answering(), _without_refusal_of_safe_tanh():
        yield


class _Answering(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.Tensor.__bool__, torch.Tensor.unbind):
            place = _place(sys._getframe(1))
            if place in _ANSWERS:
                return _ANSWERS[place]
        if func == _DATA:  # a new object at every look
            return args[0].detach()
        return func(*args, **(kwargs or {}))


def _place(frame: FrameType | None) -> tuple[str, str] | None:
    """Find the line of TorchRL that called, and the function it is in."""
    while frame is not None and "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None or not str(frame.f_globals.get("__name__")).startswith("torchrl."):
        return None
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return frame.f_code.co_qualname, line.strip()


@contextmanager
def _without_refusal_of_safe_tanh() -> Iterator[None]:
    """Let TanhDelta be traced with its default: what it refuses was a fault of torch before 2.6."""
    module = sys.modules.get(_CONTINUOUS)
    refusal = getattr(module, "_err_compile_safetanh", None)
    if module is None or refusal is None:
        yield
        return
    module._err_compile_safetanh = lambda: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module._err_compile_safetanh = refusal  # type: ignore[attr-defined]
