"""The way of one call: request, plan, execution, gradients, compiled graphs.

The modules, in the order in which a call of `attention` reaches them:

===================================  ===========================================================================
`request`, `validation`              `Request`: the arguments as they were written; the checks of arguments.
`prepare`                            from a request to a `PreparedCall`, which a mesh caches.
`prepared_call`                      `PreparedCall`: what runs. `Executor` and `Observer` are its interfaces.
`signature`                          the facts of a call that ranks compare before its passes.
`equal_shards`                       the checksum of V, by which ranks find full tensors in place of shards.
`ahead`                              compiles the kernels of a new call side by side.
`autograd`                           begins and ends the passes, and saves tensors between them.
`executor`                           the steps of a pass. It uses the next four rows:
`blocks`                             blocks that are local, that have arrived, or that are in flight.
`message_views`                      the tensors of a message in its buffer.
`local_result`, `helper_results`     forward: results of this rank's queries, and of those that helpers compute.
`block_gradients`                    backward: gradients of blocks, while ranks add to them.
`head_groups`                        runs the steps for one group of heads at a time.
`head_parallel`, `reshard`           exchanges tokens for heads before the steps, and back after them, with
                                     `exchange_parts` and `row_orders`.
`score_rows`                         runs the steps with K, and again with V (`ring_self_attention`).
`graph_ops`                          the same way in graphs of torch.compile.
`explanation`, `mesh_plans`          `explain` and `plan_for_mesh`, which stop after the plan.
===================================  ===========================================================================
"""
