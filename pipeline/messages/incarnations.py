"""Names of incarnations of services: "stepping-0.5f3a-2" is the second one of stepping-0 in the session 5f3a."""


def service_of(incarnation: str) -> str:
    """Returns the service of an incarnation: "stepping-0" of "stepping-0.5f3a-2"."""
    return incarnation.rpartition(".")[0]


def precedes(incarnation: str, other: str) -> bool:
    """Returns whether an incarnation of a service preceded another, in the same session or one that this resumes."""
    session, _, number = incarnation.rpartition(".")[2].rpartition("-")
    its_session, _, its_number = other.rpartition(".")[2].rpartition("-")
    if service_of(incarnation) != service_of(other):
        return False
    return session != its_session or _number(number) < _number(its_number)


def is_restart(incarnation: str) -> bool:
    """Returns whether another incarnation of the service came before it in its session."""
    return _number(incarnation.rpartition("-")[2]) > 1


def is_restart_of(incarnation: str, other: str) -> bool:
    """Returns whether an incarnation of a service came after another in the same session."""
    return precedes(other, incarnation) and incarnation.rpartition("-")[0] == other.rpartition("-")[0]


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
