"""The plan of a distributed attention as pure data, made before any communication. Imports no torch.

===================================  ===========================================================================
`call`                               `AttentionCall`: what is computed. `KernelTraits`: what a kernel declares.
`plans`                              `Plan` and `PassPlan`: all steps of all ranks. They use the next four rows:
`tiles`                              visible pairs of two blocks, made from masks and layouts only here.
`routes`                             from which rank each block comes, and where its results go.
`schedule`                           `Step`: what a rank receives, computes and sends at one step.
`head_division`, `rank_order`        heads of each rank, and the order of its rows, if heads are divided.
`messages`                           the contents of messages, their bytes, and their offsets in inboxes.
`verify`                             `verify`: what is wrong with a plan (`verify_rows`, `verify_steps`).
`hardware`, `kernel_times`           speeds of a machine; measured times of kernels.
`work`                               FLOPs and bytes of a pass.
`memory_traffic`, `predicted_time`   bytes that are read and written between kernels; simulated seconds of a pass.
`memory`                             peak memory of a rank.
`cost`                               `PlanCost`: all of these numbers for a plan.
===================================  ===========================================================================
"""
