"""Adapt layers that depend on tokens of other ranks otherwise than by attention.

====================  =================================================================================
`recurrent_states`    states of recurrent layers, from rank to rank.
`selective_scans`     the same for the scans of Mamba 1.
`global_positions`    RoPE by the longest position, and scales of queries by their row.
`token_dropout`       scales of embeddings by the masked tokens of a document.
`entry_modules`       convolutions, pooling and group norms, which may work token by token.
`dropout_streams`     random numbers of dropout.
`disabled_flag`       a flag of modules that is disabled while the model is sharded.
====================  =================================================================================
"""
