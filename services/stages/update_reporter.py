"""This module turns the reports of a learner's updates into metrics and log events."""

from __future__ import annotations

from typing import Final

import numpy as np

from sparring.pipeline.learning.report import UpdateReport
from sparring.pipeline.learning.signals.gail import biased
from sparring.services.process.runtime import Context

LEAST_SAMPLE_SIZE: Final = 0.1
"""Effective share of an update's steps below which their correction for staleness counts as weak."""


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
        self._weak_logged = False
        self._groups_logged = False
        self._bias_checked = False

    def note(self, report: UpdateReport) -> None:
        """Counts an update, and logs what its report shows for the first time."""
        registry, name = self._context.registry, self._name
        registry.add(f"updates/{name}")
        registry.add(f"skipped/{name}", report.skipped)
        registry.observe_many(f"lag/{name}", np.repeat(np.arange(len(report.lags)), report.lags))
        for statistic, value in report.statistics.items():
            registry.observe_mean(statistic, value, behavior=name)
        if report.staleness.sample_size < LEAST_SAMPLE_SIZE:
            self._note_weak_correction(report)
        if report.skipped:
            self._context.log.warning("minibatches_skipped", count=report.skipped, cause="loss or gradient not finite")
        if not self._groups_logged:
            self._log_groups(report)
        if report.terminated and not self._bias_checked:
            self._check_survival_bias()

    def _note_weak_correction(self, report: UpdateReport) -> None:
        """Counts an update whose data are too old for the correction; only the first of them is logged."""
        self._context.registry.add(f"correction.weak/{self._name}")
        if not self._weak_logged:
            self._weak_logged = True
            self._context.log.warning(
                "stale_correction_weak",
                effective_sample_size=round(report.staleness.sample_size, 3),
                lag=len(report.lags) - 1,
                cause="the data are so old that few of their steps count; they are trained on all the same; lower "
                "pipeline.max_policy_lag or learning_rate, or raise buffer_size",
                notice=True,
            )

    def _log_groups(self, report: UpdateReport) -> None:
        """Logs once that the algorithm and the simulator's groups do not match."""
        grouped = self._behavior.trainer_type == "poca"
        if report.group_rewards and not grouped and self._behavior.reward_signals.extrinsic is not None:
            self._groups_logged = True
            self._context.log.info(
                "group_rewards_added",
                cause="trainer_type ppo adds the group's reward to each agent's own; poca credits members better, "
                "also with what the group earns after their end",
                notice=True,
            )
        if grouped:
            self._groups_logged = True
            if not report.groups:
                self._context.log.info(
                    "no_groups", cause="every agent is a group of its own, from which poca learns too", notice=True
                )

    def _check_survival_bias(self) -> None:
        """Warns once if GAIL is the only reward: it rewards an agent for long episodes."""
        self._bias_checked = True
        signals = self._behavior.reward_signals
        if signals.gail is not None and biased(signals.extrinsic):
            self._context.log.warning(
                "gail_survival_bias",
                cause="GAIL's reward is above 0 at every step and is the only reward, while episodes can end early: an "
                "agent that ends one earns less, even if the demonstrations do so; add the extrinsic signal or "
                "behavioral_cloning, or let all episodes have one length",
                notice=True,
            )
