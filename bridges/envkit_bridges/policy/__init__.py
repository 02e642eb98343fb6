"""Torch modules as graphs of operators, without JAX: exported, read, and evaluated on NumPy rows.

`compiled` remembers translations for as long as `cache_key` is the same, `exporting` makes a graph of a module, `errors`
says why one could not be followed. `stacked` makes one module of many. `core_aten` is the table of operators for
every array library, `numpy_library` is NumPy as such a library. `numpy_codegen` writes a graph as a NumPy
function, and `numpy_policy` puts that in the place of the module. How a graph becomes a part of XLA programs is known to
`envkit_bridges.jax.policy`.
"""
