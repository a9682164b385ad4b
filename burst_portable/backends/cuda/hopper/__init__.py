"""Attention for Hopper (sm_90), in Gluon.

=======================  ======================================================================================
`kernel`                 `HopperKernel`: launches both passes
`flash4`                 the same, with flash-attn-4 where that was measured to be faster
`forward`, `backward`    what runs on the device
`shared`                 shared memory and TMA by names that all versions of Gluon understand
`mask`, `softmax`,       parts of those two: hiding what a mask does not show, the softmax, scaling the running
`fade`, `turned`         output down, rows of shared memory in another order
`tables`                 which blocks each block visits, from a list of tiles
`configs`                the sizes of blocks, by head size; which cut, or cuts, a pass gets
`launch_tables`          those tables on their device, kept
`launch`                 launches that cost the host little, by `backends.cuda.driver`
`aot`                    compiling ahead of time, on any machine, and what the compiler says of it
=======================  ======================================================================================

None of them is imported here. `forward` and `backward` import Triton.
"""
