"""A comparison as a page or as pictures: one self-contained HTML file, and plots for papers.

``figures`` turns a Comparison into data to draw, ``pictures`` and ``overlays`` choose what is drawn, ``svg`` and
``svgcharts`` draw it for the page, ``plots`` for papers; ``sections`` and ``html_report`` put the page together.
"""
