"""Divide the rows of a batch into the arguments of each rank.

=================  ====================================================================================
`divider`          `BatchDivider`: labels, documents and padding of a batch, then this rank's tokens.
`packed_rows`      documents within rows, and rows joined to one because their documents differ.
`padding`          padding at the end of rows.
`left_padding`     padding at the beginning of rows, which is moved to the end.
=================  ====================================================================================
"""
