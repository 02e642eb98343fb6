"""Collectors. The front door offers them: ``from envkit import Collector``."""

from typing import TYPE_CHECKING

from envkit.lazy_imports import told_elsewhere

if not TYPE_CHECKING:  # a misspelt name would pass
    __getattr__ = told_elsewhere(__name__)
