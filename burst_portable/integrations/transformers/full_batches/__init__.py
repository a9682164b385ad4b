"""Divide full batches in the forward pass of a model, and return one device's loss and outputs.

=================  ====================================================================================
`division`         the arguments of this rank, from those of a call with a full batch.
`text_model`       the part of them that the text model within a vision-language model divides.
`embeddings`       the gradients of embeddings that a program computes.
`outputs`          the outputs that a call returns, gathered from all ranks.
`ungathered`       the error for outputs that it does not return.
=================  ====================================================================================
"""
