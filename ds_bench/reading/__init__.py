"""What stands behind ``load``: files somebody may have edited or torn, read strictly and told of in one line.

``strictjson`` reads JSON, ``shapes`` makes dataclasses of it, ``records`` a run folder's files, ``flatrow`` and
``flatcells`` a flat JSON's rows, ``sameness`` tells equal trials cheaply.
"""
