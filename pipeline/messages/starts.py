"""Names of the starts of services: "stepping-0.5f3a-2" is the second one of stepping-0 in the session 5f3a."""

from __future__ import annotations


def start_name(start: str) -> str:
    """The service of a start: "stepping-0" of "stepping-0.5f3a-2"."""
    return start.rpartition(".")[0]


def comes_before(start: str, other: str) -> bool:
    """Whether a start of a service came before another one of it, in the same session or in one that this resumes."""
    session, _, number = start.rpartition(".")[2].rpartition("-")
    its_session, _, its_number = other.rpartition(".")[2].rpartition("-")
    if start_name(start) != start_name(other):
        return False
    return session != its_session or _number(number) < _number(its_number)


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
