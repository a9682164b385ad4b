"""Define `burst-portable run`: a job, its ranks, the same job on one device, and the comparison.

::

    command.py -> setup.py -> Job -> spawn.py -> worker.py (a process per rank) -> train.py    losses, gradients, times
                                  -> worker.py (a launcher's rank)
                                  -> train.run_reference                                       the same on one device
                                  -> outcome.py                                                status and JSON
"""
