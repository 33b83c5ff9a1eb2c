"""All conversations of an endpoint share one context."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from structlog.typing import FilteringBoundLogger

from sparring.pipeline.monitoring.metrics import Registry
from sparring.pipeline.settings.model import BehaviorSettings
from sparring.pipeline.stepping.settings import SteppingSettings


@dataclass(frozen=True, kw_only=True)
class DefaultBehaviors:
    """DefaultBehaviors describe the behaviors that the configuration does not name.

    Attributes:
        settings: of each.
        scripts: scripts that every simulator must be able to play.
        added: names of those registered so far; the run prepares their learners.
    """

    settings: BehaviorSettings
    scripts: frozenset[str]
    added: set[str] = field(default_factory=set)


@dataclass(frozen=True, kw_only=True)
class ServerContext:
    """A ServerContext holds what all conversations share.

    Attributes:
        settings: of stepping.
        behaviors: settings by name; gets those that simulators add.
        scripts: by behavior name, scripts that every simulator must be able to play.
        seed: of the run; each simulator gets its own seed from it.
        clock: seconds, monotonic.
        registry: metrics of the service.
        log: log of the service.
        arrived: called when a frame arrived or a simulator disconnected.
        known: called when behaviors were registered.
        unnamed: defaults of behaviors that are not among `behaviors`; None where these are rejected.
    """

    settings: SteppingSettings
    behaviors: dict[str, BehaviorSettings]
    scripts: Mapping[str, frozenset[str]]
    seed: int
    clock: Callable[[], float]
    registry: Registry
    log: FilteringBoundLogger
    arrived: Callable[[], None]
    known: Callable[[], None]
    unnamed: DefaultBehaviors | None = None
