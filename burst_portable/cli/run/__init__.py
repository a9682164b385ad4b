"""What `burst-portable run` runs: a job, the ranks that do it, the same on one device, and the comparison.

::

    run.py -> Job -> launch.py -> worker.py (a process per rank) -> loop.py      losses, gradients, times
                  -> reference.py                              -> loop.py      the same on one device
                  -> outcome.py                                                the verdict and the JSON
"""
