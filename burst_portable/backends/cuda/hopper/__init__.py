"""Attention for Hopper (sm_90), in Gluon.

=================  ============================================================================================
`kernel`           `HopperKernel`: launches both passes
`flash4`           the same, with flash-attn-4 where that was measured to be faster
`forward`          the forward on the device
`backward`         the backward on the device, all gradients in one launch: heads of up to 128
`split_backward`   the backward on the device, one launch for each gradient: larger heads
`parts`            parts of those: shared memory and TMA, softmax, softcap, masks, layouts
`block_tables`     which blocks each block visits, from a list of tiles
`configs`          the sizes of blocks, by head size; which cut, or cuts, a pass gets
`launch`           launches that cost the host little, by `backends.cuda.driver`; tables kept on their device
=================  ============================================================================================

Shared memory holds a head as two panels of columns, powers of two, of which the second may be empty (`configs.panels`).
So one kernel serves all head sizes: its constants A and B are the columns of the panels of Q and K, VA and VB those of
V and of the result. None of these modules is imported here; the kernels import Triton.
"""
