"""Transforms: the steps between an environment and its user.

`base` says what a transform is, `compose` how several follow each other, `env` how they wrap an
environment; the other modules hold the transforms themselves, one concept each. This package knows
`EnvBase` and TensorDict, and neither JAX, nor processes, nor simulators.
"""

from typing import TYPE_CHECKING

from envkit.lazy_imports import told_elsewhere

if not TYPE_CHECKING:  # a misspelt name would pass
    __getattr__ = told_elsewhere(__name__)
