"""Torch modules as graphs of operators, without JAX: exported, read, and evaluated on NumPy rows.

`compiled` remembers translations for as long as `cache_key` is the same, `exporting` makes a graph of a module, `graph` reads one, `ops` is the table
of operators for every array library, `library` is NumPy as one of them, `errors` says why a module could not be followed. `straight` writes a graph as
a NumPy function, `evaluation` knows the memory it reads, `acting` puts it in the place of the module. How a graph becomes a part of XLA programs
stands in `envkit_bridges.jax.policy`.
"""
