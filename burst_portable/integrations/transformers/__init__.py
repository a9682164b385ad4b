"""Shard the input sequence of a Transformers causal language model over the ranks of a mesh, without editing the model.

::

    sharded = parallelize(model, mesh)
    inputs = sharded.shard(input_ids)  # this rank's tokens, with shifted labels
    loss = model(**inputs).loss  # this rank's part of the mean over all tokens
    loss.backward()
    all_reduce_gradients(model.parameters(), mesh)  # now every rank has one device's gradients

The modules, in the order in which these lines reach them. The map of a folder is its first lines.

===================================  ===========================================================================
`parallel`                           `parallelize`: checks the model and returns a `ShardedModel`.
`models/`                            models that can be sharded (`models.checks`), and facts about them.
`sharded_model`                      `ShardedModel`: installs hooks, removes them, and divides batches.
`layouts`                            the layout of each sequence.
`batches/`                           from rows of the batch to this rank's arguments (`batches.divider`).
`shard_mark`                         the error of other models that get these arguments.
`model_calls`                        hooks around each call of the model. They use the next eight rows:
`call_arguments`                     arguments and position ids that are not supported.
`shard_arguments`, `call_sequence`   arguments that `shard` added; the unsharded sequence of a call.
`model_facts`, `running_call`        facts about the model, and what the end of a call needs from its beginning.
`full_batches/`                      the same for calls that take full batches, and their gathered outputs.
`rank_agreement`, `model_settings`   comparisons of ranks: their calls, and settings that weights do not show.
`training/`                          errors for training that would be wrong.
`loss`, `masked_loss`                losses over the tokens of all ranks.
`call_errors`, `attention_check`     errors of calls; of layers whose attention is not that of the next row.
`attention`                          the attention function of each layer, which calls `burst_portable.attention`.
`deferred_mask`, `bands`             its masks, from the mask functions of Transformers.
`layers/`                            layers that depend on other ranks otherwise than by attention.
===================================  ===========================================================================
"""

from burst_portable.gradients import all_reduce, all_reduce_gradients
from burst_portable.integrations.versions import importing

with importing("transformers", "burst-portable[transformers]"):
    from burst_portable.integrations.transformers.models.checks import check_model
    from burst_portable.integrations.transformers.parallel import parallelize
    from burst_portable.integrations.transformers.sharded_model import ShardedModel

__all__ = ["ShardedModel", "all_reduce", "all_reduce_gradients", "check_model", "parallelize"]
