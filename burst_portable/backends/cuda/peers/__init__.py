"""Define peer copies of NVIDIA GPUs: copy engines write messages directly into another GPU's memory.

The protocol is `comm.peer_copy`. `connection` connects the ranks of a group if all of them support peer copies;
`memory` allocates the memory that other ranks write to, and its flags; `push` writes messages to all ranks in one
launch; `watch` is the thread that detects missing messages.
"""
