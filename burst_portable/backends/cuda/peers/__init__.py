"""Peer copies: copy engines write messages straight into another GPU's memory.

The protocol is `comm.peer_copy`; here is what NVIDIA's GPUs do for it. `connection` settles, with all ranks of a
group, whether they can have them; `memory` is the memory that other ranks write into, and its flags; `push` writes
messages to all ranks in one launch; `watch` is the thread that notices when messages stop coming.
"""
