"""Check which models can be sharded, and read facts about them.

====================  =================================================================================
`checks`              whether a model is supported.
`model_parts`         the head, the base model and the text model of a model.
`recurrent_layers`    the recurrent layers that can continue, and the sizes of their states.
`position_limits`     how a model uses positions, and the longest sequence that they allow.
`token_mixing`        modules of torch that mix tokens outside attention.
`padding_positions`   positions that count from the id of the padding token.
`signatures`          arguments of the forward of a module; where a function is defined.
`adapters`            adapters of PEFT.
`outer_model`         the model that calls a parallelized base model.
====================  =================================================================================
"""
