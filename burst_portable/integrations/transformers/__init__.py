"""Shard the input sequence of a Transformers causal language model over the ranks of a mesh, without editing the model.

::

    sharded = parallelize(model, mesh)
    inputs = sharded.shard(input_ids)  # this rank's tokens, with shifted labels
    loss = model(**inputs).loss  # this rank's part of the mean over all tokens
    loss.backward()
    all_reduce_gradients(model.parameters(), mesh)  # now every rank has one device's gradients
"""

from burst_portable.gradients import all_reduce, all_reduce_gradients
from burst_portable.integrations.versions import importing

with importing("transformers", "burst-portable[transformers]"):
    from burst_portable.integrations.transformers.checks import check_model
    from burst_portable.integrations.transformers.parallel import parallelize
    from burst_portable.integrations.transformers.sharded_model import ShardedModel

__all__ = ["ShardedModel", "all_reduce", "all_reduce_gradients", "check_model", "parallelize"]
