"""Which DeepSpeed configuration should this model be trained with, on these machines?

The way in order: ``spec`` says what is asked (Workload, Strategy, Placement, Trial); ``plan`` makes
the trials, with ``strategies``, ``models`` and ``dsconfig``; ``preflight`` readies the machine;
``launch`` runs each trial in a process tree of its own, whose ranks are ``worker``; ``record`` holds
what was seen and ``store`` keeps it; ``run`` is the loop over all that; ``analysis`` makes numbers
and caveats of the records, ``compare`` a Comparison of those, ``recommend`` a choice, ``answer`` and
``render`` text and pictures. ``prediction`` says before a run what it will need; ``load`` reads
results back.
"""

__version__ = "0.1.0"
