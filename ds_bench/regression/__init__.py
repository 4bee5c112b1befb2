"""What stands behind ``baselines`` and ``benchmarks``: a result, an entry, how they are held against each other.

``benchresult`` makes a result of runs, ``baselineentry`` and ``baselinefile`` keep one, ``baselinemeasures`` judges
each figure, ``stepclock`` puts measured steps into pytest-benchmark's table.
"""
