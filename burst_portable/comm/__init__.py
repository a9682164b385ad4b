"""Transports, which move buffers between ranks.

===================================  ===========================================================================
`base`                               `Transport`, the contract; messages, parts, strips and exchanges.
`local`                              ranks that are threads of a process.
`torch_dist`                         ranks that are processes, by torch.distributed; the store of their group.
`two_levels`                         separate connections for messages between nodes.
`peer_copy`                          messages that a sender writes into the memory of its receiver.
`agreement`                          checks that all ranks make the same call, and shares errors.
`faults`                             reports transfers that never end.
===================================  ===========================================================================
"""
