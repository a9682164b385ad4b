"""Measure kernels, memory and links of this machine, for predictions and `auto`: see `planning.hardware`.

::

    timing.py         clocks, timed kernel calls, timed messages
    measurement.py    all measurements, as the contents of a hardware spec file
"""
