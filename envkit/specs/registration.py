"""Have TorchRL's own code take these specs, whichever of the two libraries is imported first.

TorchRL asks whether a spec is an instance of its classes, which are abstract base classes, and looks the
class of an action spec up in a table. Once TorchRL is imported, by whomever, each class here is registered
as a virtual subclass of its namesake there, and in that table. This module does not import TorchRL.
"""

from __future__ import annotations

import sys
from abc import ABCMeta
from collections.abc import Iterable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MODULE = "torchrl.data"  # where its specs are


def register_when_imported(classes: Iterable[type]) -> None:
    """Register classes of specs with TorchRL: now if it is imported, else as soon as it is."""
    finder = _Watch(tuple(classes))
    module = sys.modules.get(_MODULE)
    if module is not None:
        finder.register(module)
    else:
        sys.meta_path.insert(0, finder)


class _Watch(MetaPathFinder):
    """Leave the search for modules to the other finders, and follow up when one of them is imported."""

    def __init__(self, classes: tuple[type, ...]):
        self._classes = classes

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        others = (f for f in sys.meta_path if f is not self and hasattr(f, "find_spec"))
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Registering(spec.loader, self)
        return spec

    def register(self, theirs: ModuleType) -> None:
        """Make each class a virtual subclass of its namesake, and give it the namesake's action space."""
        spaces = getattr(getattr(theirs, "utils", None), "ACTION_SPACE_MAP", {})
        for ours in self._classes:
            namesake = getattr(theirs, ours.__name__, None)
            if isinstance(namesake, ABCMeta):
                namesake.register(ours)
                if namesake in spaces:
                    spaces[ours] = spaces[namesake]


class _Registering(Loader):
    """Load a module as its own loader does, then register."""

    def __init__(self, loader: Loader, watch: _Watch):
        self._loader, self._watch = loader, watch

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._watch.register(module)
