"""The command line: ``envkit``, or ``python -m envkit``."""
