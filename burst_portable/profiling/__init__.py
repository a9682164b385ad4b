"""Profile distributed attention; see docs/profiling.md.

===================================  ===========================================================================
`session`                            `profile`: a context in which calls of this process are recorded.
`recording_observer`                 records kernels, copies and messages of one call, with the clocks of `clocks`.
`recording_transport`                records exchanges between all ranks, and the check that their calls agree.
`recorder`, `plan_facts`             hold what a rank recorded, and facts of the plans that it ran.
`event_tables`                       `RankRecords`: the records of a rank as tables, which are sent to rank 0.
`tracing`, `trace_files`             level "kernels": trace this process; read traces, also of other programs.
`ablation`                           repeats a step without communication, without computing, without both.
`analysis/`                          from the records of all ranks to the data of a report (`intervals`).
`report/`                            `Report`: the data as text, Markdown, HTML, JSON and a trace.
===================================  ===========================================================================
"""
