"""One environment interface, TensorDict in and TensorDict out, over JAX and Gymnasium envs.

This module is the front door: it imports the place where a public name lives when the name is first used. The one list
of these names is the stub beside it, ``__init__.pyi``, which type checkers read too. Importing it loads neither torch
nor JAX.
"""

import re as _re
import sys as _sys
from importlib import import_module as _import_module
from os import path as _path


def _read_homes() -> dict[str, str]:
    """Read in the stub where each public name lives."""
    with open(_path.join(_path.dirname(__file__), "__init__.pyi"), encoding="utf-8") as stub:
        imports = _re.findall(r"^from (\S+) import ([^(\n]+|\([^)]+\))", stub.read(), _re.MULTILINE)
    return {name: home for home, names in imports for name in _re.findall(r"(\w+) as", names)}


_HOME_OF = _read_homes()

__version__ = "0.2.0"

filter_warnings_subprocess = True
"""Worker processes hide Python warnings; set to False (before they start) to see them."""


_OTHER_NAMES = {
    "_apply_to_composite": "apply_to_composite",
    "_apply_to_composite_inv": "apply_to_composite_inv",
    "aSyncDataCollector": "AsyncCollector",
    "BinaryDiscreteTensorSpec": "Binary",
    "BoundedTensorSpec": "Bounded",
    "CompositeSpec": "Composite",
    "DataCollectorBase": "BaseCollector",
    "DiscreteTensorSpec": "Categorical",
    "LazyStackedCompositeSpec": "StackedComposite",
    "LazyStackedTensorSpec": "Stacked",
    "MultiDiscreteTensorSpec": "MultiCategorical",
    "MultiOneHotDiscreteTensorSpec": "MultiOneHot",
    "NonTensorSpec": "NonTensor",
    "OneHotDiscreteTensorSpec": "OneHot",
    "UnboundedContinuousTensorSpec": "UnboundedContinuous",
    "UnboundedDiscreteTensorSpec": "UnboundedDiscrete",
}
"""Names that programs written for TorchRL import, private ones of today and public ones of before, and ours."""


class _NameOfBefore:
    """Explain the error of whoever loads a pickle of version 0.1.0: `envkit_bridges` was called `bridges`, and modules have moved.

    Python asks here last, so the modules of another project's `bridges` are found first.
    """

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in ("bridges", "envkit"):
            raise ModuleNotFoundError(
                f"there is no module {name!r}. If a pickle names it: envkit 0.1.0 wrote that, and modules have moved and "
                "been renamed since (`bridges` is `envkit_bridges`). Load the pickle with envkit 0.1.0, or make what it "
                "holds again; this version still reads files of envkit.save.",
                name=name,
            )


_sys.meta_path.append(_NameOfBefore)


def __getattr__(name: str):
    if name == "__all__":
        return _importable()
    name = _OTHER_NAMES.get(name, name)
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'envkit' has no attribute {name!r}.{_nearest(name)}")
    try:
        value = getattr(_import_module(home), name)
    except ModuleNotFoundError as error:
        raise _import_module("envkit_bridges.libraries").explained(error) from None
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *_HOME_OF})


def _importable() -> list[str]:
    """List what a star import brings: the public names whose libraries are installed."""
    installed = set()
    for home in set(_HOME_OF.values()):
        try:
            _import_module(home)
        except ModuleNotFoundError as error:
            told = _import_module("envkit_bridges.libraries").explained(error)
            if told is error:  # not a library that may be missing
                raise
        else:
            installed.add(home)
    return sorted(name for name, home in _HOME_OF.items() if home in installed)


def _nearest(name: str) -> str:
    close = _import_module("difflib").get_close_matches(name, _HOME_OF, 1)
    return f" Did you mean {close[0]!r}?" if close else ""
