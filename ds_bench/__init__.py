"""Which DeepSpeed configuration should this model be trained with, on these machines?

The way in order: ``spec`` says what is asked (Workload, Strategy, Placement, Trial); ``plan`` makes
the trials, with ``strategies``, ``models`` and ``dsconfig``; ``preflight`` readies the machine;
``launch`` runs each trial in a process tree of its own, whose ranks are ``worker``; ``record`` holds
what was seen and ``store`` keeps it; ``runner`` is the loop over all that; ``analysis`` makes rows
and caveats of the records, ``tables`` text of the rows.
"""

__version__ = "0.1.0"
