"""Torch modules as graphs of operators, without JAX.

`compiled` remembers translations for as long as `cache_key` is the same, `exporting` makes a graph of a module, `graph` reads one, `ops` is the table
of operators for every array library, `library` is NumPy as one of them, `errors` says why a module could not be followed. How a graph becomes a part
of XLA programs stands in `bridges.jax.policy`.
"""
