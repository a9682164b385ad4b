"""Strategies: which tensors are communicated, and between which ranks. One file each.

===================================  ===========================================================================
`base`, `options`                    `Strategy`, and functions that strategies share; their options.
`registry`                           strategies by name, also those of other packages.
`planner`                            from the arguments of a call to its plan.
`checked_plans`                      checks what a strategy returns.
`auto`                               chooses the strategy with the least predicted time.
`ring`, `burst`, `double_ring`       blocks circulate in one ring, or in rings of two levels.
`all_gather`, `dispatch`             all needed blocks come at once; only the needed rows.
`distflash`                          ranks with little work compute for others.
`ulysses`, `usp`                     heads are divided among ranks; among those of a node, with a ring between.
`ring_self_attention`                K circulates, then V. For comparison only.
===================================  ===========================================================================
"""
