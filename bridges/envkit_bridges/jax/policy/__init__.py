"""Policies inside the programs of stateless envs: torch modules translated to JAX, and JAX functions.

`translated` computes the graph of a module (`envkit_bridges.policy`) under jit, `ops` adds the operators that only JAX has, `inputs` fits policies to an env.
"""
