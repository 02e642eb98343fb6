"""Policies inside the programs of stateless envs: torch modules translated to JAX, and JAX functions.

`translated` computes the graph of a module (`envkit_bridges.policy`) under jit. `operators` adds the operators that
only JAX has to those that every library computes. `jax_library` is JAX as such a library; `inputs` fits policies to an
env.
"""
