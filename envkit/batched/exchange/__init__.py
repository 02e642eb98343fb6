"""How data gets from a batched env to its sub-envs and back, and how rollouts are recorded on the way.

`memory`             arrays that envs are stepped on, and the moments that lie in them.
`shared_memory`      steps and resets of a pool through such arrays: entries of fixed, equal shapes.
`tensordicts`        the same as whole TensorDicts: everything else.
`jobs`               what both add for asynchronous pools: steps and resets of single sub-envs.
`checks`             what both refuse.
`recording`          rollouts over the arrays of a pool, or of one of these:
`one_env`            one env of this process,
`behind_transforms`  a pool seen through the transforms around it,
`mixed_pools`        several pools side by side.
"""
