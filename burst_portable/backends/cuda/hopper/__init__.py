"""Attention for Hopper (sm_90), in Gluon.

===================  ==========================================================================================
`kernel`             `HopperKernel`: the methods of a kernel.
`support`            the calls that it supports.
`prepared_launches`  builds launches without their tensors: tables on the device, and grids.
`backward_launches`  runs the launches of a backward pass.
`compiled_kernels`   the launchers, descriptors and counters that a process keeps.
`launcher`           compiles a kernel, and launches it with little host time (`backends.cuda.driver`).
`descriptors`        TMA descriptors of tensors.
`flash4`             `HopperFlash4Kernel`: calls flash-attn-4 if that was measured to be faster.
`flash4_speeds`      The measured speeds by which it chooses.
`forward`            the forward kernel.
`backward`           the backward kernel that computes all gradients in one launch, for heads of up to 128.
`split_backward`     the backward kernel with one launch per gradient, for larger heads.
`row_terms`          the kernel that computes what a backward reads of each row, and clears dQ.
`parts`              functions that the kernels share: shared memory, TMA, softmax, softcap, masks, layouts.
`outer_blocks`       from a list of tiles to the blocks that each program visits.
`block_tables`       tables of these blocks, and their format.
`ordered_tables`     tables for a deterministic backward.
`head_order`         how many heads a launch computes at the same time.
`configs`            block sizes by head size.
`cuts`               the choice of the launches of a pass.
`saved_kernels`      compiled kernels on disk, which a new process finds without Triton.
===================  ==========================================================================================

Shared memory holds a head as two panels of columns (`configs.panels`). Their sizes are powers of two, and the second
panel may be empty. So one kernel supports all head sizes. Its constants A and B are the columns of the two panels of Q
and K; VA and VB are those of V and of the result.

A function named `build_...` returns a launch without tensors (`PreparedLaunch`), which `HopperKernel` keeps for calls
with equal tiles and sizes. A function named `run_...` runs such launches on tensors.

This file imports none of these modules, because the kernels import Triton.
"""
