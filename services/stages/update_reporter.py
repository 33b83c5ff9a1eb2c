"""This module turns the reports of a learner's updates into metrics and log events."""

from collections.abc import Callable
from typing import Final

import numpy as np

from sparring.pipeline.learning.losses import UpdateReport
from sparring.pipeline.learning.signals.gail import biased
from sparring.services.process.runtime import Context

LEAST_SAMPLE_SIZE: Final = 0.1
"""Effective share of an update's steps below which their correction for staleness counts as weak."""


_CAUSES: Final = {
    "stale_correction_weak": "the data are so old that few of their steps count; they are trained on all the same; "
    "lower pipeline.max_policy_lag or learning_rate, or raise buffer_size",
    "gail_survival_bias": "GAIL's reward is above 0 at every step and is the only reward, while episodes can end "
    "early: an agent that ends one earns less, even if the demonstrations do so; add the extrinsic signal or "
    "behavioral_cloning, or let all episodes have one length",
    "group_rewards_added": "trainer_type ppo adds the group's reward to each agent's own; poca credits members better, "
    "also with what the group earns after their end",
    "no_groups": "every agent is a group of its own, from which poca learns too",
}
"""What a user should know, by log event."""


class UpdateReporter:
    """Publishes each update's statistics, and logs once what a user should change.

    Args:
        context: of the learning service.
        behavior: name of the behavior.
    """

    def __init__(self, context: Context, behavior: str) -> None:
        self._context = context
        self._name = behavior
        self._behavior = context.run.settings.behaviors[behavior]
        self._logged: set[str] = set()
        self._has_updated = False

    def note(self, report: UpdateReport) -> None:
        """Counts an update, and logs what its report shows for the first time."""
        registry, name, log = self._context.registry, self._name, self._context.log
        registry.add(f"updates/{name}")
        registry.add(f"skipped/{name}", report.skipped)
        registry.observe_many(f"lag/{name}", np.repeat(np.arange(len(report.lags)), report.lags))
        for statistic, value in report.statistics.items():
            registry.observe_moments(statistic, [value], name)
        if report.skipped:
            log.warning("minibatches_skipped", count=report.skipped, cause="loss or gradient not finite")
        sample_size, lag = report.staleness.sample_size, len(report.lags) - 1
        if sample_size < LEAST_SAMPLE_SIZE:
            registry.add(f"correction.weak/{name}")
            size = round(sample_size, 3)
            self._log_once("stale_correction_weak", log.warning, effective_sample_size=size, lag=lag)
        signals, grouped = self._behavior.reward_signals, self._behavior.trainer_type == "poca"
        if report.group_rewards and not grouped and signals.extrinsic is not None:
            self._log_once("group_rewards_added", log.info)
        if grouped and not report.groups and not self._has_updated:
            self._log_once("no_groups", log.info)
        if report.terminated and signals.gail is not None and biased(signals.extrinsic):
            self._log_once("gail_survival_bias", log.warning)
        self._has_updated = True

    def _log_once(self, event: str, log: Callable[..., object], **more: float) -> None:
        if event not in self._logged:
            self._logged.add(event)
            log(event, cause=_CAUSES[event], notice=True, **more)
