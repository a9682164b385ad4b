"""Compare the strategies of one call: correctness first, then time, memory and bytes. See `cli.bench`.

========================  ==============================================================================
`benchmark`               `Benchmark`: measures the entries of a row on all ranks.
`task`                    the sizes of a benchmark, and the inputs of a row (`masks`).
`entries`                 strategies of this library.
`peers`, `peer_names`     other libraries, with our kernel (`flash_attn_stand_in`) or theirs (`magi`).
`oracle`                  the right results, in float64.
`verdicts`                whether all ranks can run an entry.
`results`, `chart`        files, tables and pictures of rows.
========================  ==============================================================================
"""
