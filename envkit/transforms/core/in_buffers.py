"""Have TorchRL's replay buffers run both passes of a transform that they are given as it is.

A buffer of TorchRL runs the inverse pass of its own transforms on what is written. Any other module it wraps as a
function, to be called on samples alone, so that an inverse pass would be left out without a word. Here the wrapper
is told the inverse pass when the transform is assigned to it. Nothing here imports TorchRL.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

__all__ = ["give_buffers_both_passes"]


def give_buffers_both_passes(kind: type[nn.Module]) -> None:
    """Have TorchRL's wrapper of a function run the method ``inv`` of instances of ``kind`` on what is written."""

    def on_assignment(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if isinstance(submodule, kind) and _is_wrapper(type(module)):
            module._inv_call = submodule.inv

    register_module_module_registration_hook(on_assignment)


def _is_wrapper(kind: type) -> bool:
    return kind.__name__ == "_CallableTransform" and kind.__module__.startswith("torchrl.")
