"""What stands behind a recommendation: the rule, its reasons in words, and what a row that failed would need.

``fitting`` says how much a failed row was short of, ``changes`` what each change of the set-up would free by formula,
``remedies`` what to try, ``headroom`` whether a larger micro-batch has room.
"""
