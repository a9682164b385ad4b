"""Compute the numbers of a profile from recorded tables.

===================================  ===========================================================================
`analyze`                            `analyze`: the data of a report, by all modules below.
`matching`                           the two ends of every message, on one clock.
`causes`                             why ranks waited: the rank or link that delayed them.
`efficiency`                         measured against planned FLOP/s and bytes.
`train_steps`                        the marked training steps.
`trace_summary`                      the kernels of a vendor's trace.
`bottlenecks`, `recommendations`     how much time each bottleneck costs, and what to change.
`summary`                            the one bottleneck that is significant, or that there is none.
`events`, `evidence`                 events for timelines; how each number is known.
===================================  ===========================================================================
"""
