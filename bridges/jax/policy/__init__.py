"""Policies inside the programs of stateless envs: torch modules translated to JAX, and JAX functions.

`compiled` remembers translations for as long as `cache_key` is the same, `exporting` makes a graph of a module, `graph` runs one, `ops` knows the
operators, `errors` says why a module could not be followed, `inputs` fits policies to an env.
"""
