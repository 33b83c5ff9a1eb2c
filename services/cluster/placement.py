"""Plans which parts of a run share a node of a cluster, and says what does not fit; arithmetic without Ray."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sparring.pipeline.settings import Settings

Amounts = Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Parts of a run that run on one node.

    Attributes:
        parts: resources of each by its name; the first gives the unit its name.
        apart: no two such units are on one node.
    """

    parts: Mapping[str, Amounts]
    apart: bool = False

    @property
    def name(self) -> str:
        """Returns the name of its first part."""
        return next(iter(self.parts))

    @property
    def bundle(self) -> Amounts:
        """Returns the resources of all its parts."""
        return total(self.parts.values())


def units_of(settings: Settings, stepping: int) -> list[Unit]:
    """Returns the units of a run: each stepping process with its simulators (and assembly), assembly, and each learner.

    Args:
        settings: of the run.
        stepping: number of stepping processes.
    """
    placement, count = settings.pipeline.placement, sum(one.count for one in settings.launched)
    several, units = settings.pipeline.assembly == "per stepping" and stepping > 1, []
    for index in range(stepping):  # in turn, as `simulator_plans` shares them out
        simulators = {f"simulator-{number}": placement.simulators.bundle for number in range(index, count, stepping)}
        parts = {f"stepping-{index}": placement.stepping.bundle, **simulators}
        if several:
            parts[f"assembly-{index}"] = placement.assembly.bundle
        units.append(Unit(parts=parts, apart=placement.stepping.per == "node"))
    if not several:
        units.append(Unit(parts={"assembly": placement.assembly.bundle}))
    return units + [Unit(parts={f"learning-{name}": placement.learning.bundle}) for name in settings.behaviors]


def stepping_processes(settings: Settings, nodes: Sequence[Amounts]) -> int:
    """Returns the number of stepping processes: the configured one, or that of the nodes with room for one each."""
    if settings.pipeline.placement.stepping.per is None:
        return settings.pipeline.stepping_processes
    for count in range(len(nodes), 1, -1):
        if not lacking(units_of(settings, count)[:count], nodes):
            return count
    return 1


def lacking(units: Sequence[Unit], nodes: Sequence[Amounts]) -> list[Unit]:
    """Returns the units for which there is no room, when the largest are placed first.

    Args:
        units: to be placed.
        nodes: free resources of each node.
    """
    free = [dict(node) for node in nodes]
    taken: set[int] = set()  # nodes with a unit that is apart from others of its kind
    left = []
    for unit in sorted(units, key=lambda one: -math.fsum(one.bundle.values())):
        bundle = unit.bundle
        fits = (
            index
            for index, room in enumerate(free)
            if all(room.get(name, 0.0) >= amount for name, amount in bundle.items())
            and not (unit.apart and index in taken)
        )
        if (index := next(fits, None)) is None:
            left.append(unit)
            continue
        free[index] |= {name: free[index][name] - amount for name, amount in bundle.items()}
        if unit.apart:
            taken.add(index)
    return sorted(left, key=units.index)


def total(bundles: Iterable[Amounts]) -> dict[str, float]:
    """Returns the sum of amounts of resources."""
    found: dict[str, float] = {}
    for bundle in bundles:
        found |= {name: found.get(name, 0.0) + amount for name, amount in bundle.items()}
    return found


def described(amounts: Amounts) -> str:
    """Returns amounts of resources as text: "2 CPU, 1 GPU", without those that Ray adds by itself."""
    own = {name: amount for name, amount in amounts.items() if ":" not in name and "memory" not in name}
    return ", ".join(f"{amount:g} {name}" for name, amount in own.items()) or "nothing"
