"""What this machine's kernels and links do, measured for `auto`: see `planning.hardware.measure`.

::

    clock.py       seconds of a call, the slowest rank's
    kernels.py     the local kernel, forward and backward, at two lengths; passes over memory
    links.py       messages back to back: to the next rank, to all others, between nodes
    arithmetic.py  from seconds to rates
    rates.py       all of it, as a hardware spec file
"""
