"""A verdict on each row as JUnit XML, which CI systems read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree

from .table_layout import escape_unprintable


@dataclass(frozen=True, slots=True, kw_only=True)
class TestCase:
    """The verdict on one row."""

    __test__ = False  # pytest takes classes of this name for tests

    name: str
    outcome: Literal["passed", "failure", "skipped"]
    message: str


def junit_text(suite: str, cases: Sequence[TestCase]) -> str:
    """An XML document with one test suite, whose tests are the rows."""
    counts = Counter(case.outcome for case in cases)
    totals = {"tests": len(cases), "failures": counts["failure"], "errors": 0, "skipped": counts["skipped"]}
    root = ElementTree.Element("testsuites")
    facts = {"name": suite, **{name: str(count) for name, count in totals.items()}}
    parent = ElementTree.SubElement(root, "testsuite", facts)
    for case in cases:
        # XML 1.0 forbids most control characters, but ElementTree would write them.
        name, message = escape_unprintable(case.name), escape_unprintable(case.message)
        element = ElementTree.SubElement(parent, "testcase", {"classname": suite, "name": name})
        if case.outcome == "passed":
            ElementTree.SubElement(element, "system-out").text = message
        else:
            ElementTree.SubElement(element, case.outcome, {"message": message})
    ElementTree.indent(root, " ")
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"
