"""Find training that would be wrong: different batches or parameters on ranks, gradients of a wrong scale.

====================  =================================================================================
`batch_check`         checksums of batches and parameters, compared over ranks.
`averaging`           whether DDP or FSDP2 averages gradients over the ranks.
`gradient_checks`     gradients that are clipped, summed or scaled wrongly.
`gradient_parts`      functions of gradients of one rank.
`padding_gradients`   losses that depend on outputs of padding.
====================  =================================================================================
"""
