"""Which DeepSpeed configuration should this model be trained with, on these machines?

The packages in the order in which data passes them: ``cli`` reads the flags; ``config`` holds what they ask for, with
``models`` and the facts of the machine from ``system``; ``planner`` makes the trials; ``doctor`` checks the machine;
``prediction`` gives each trial the memory that it will need; ``launch`` runs each one in processes of its own, whose
ranks are ``worker``; ``records`` keeps what was observed; ``analysis`` computes numbers, caveats and a comparison from
it; ``recommend`` chooses a row; ``report`` shows all of it. ``runner`` is the main path through these, ``batch_search``
finds the largest micro-batch, and ``baselines`` compares later results with stored ones.
"""

__version__ = "0.1.0"
