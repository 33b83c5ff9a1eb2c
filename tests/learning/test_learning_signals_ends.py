"""The terminal bootstrap fraction of a discriminator."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparring.pipeline.learning.signals.gail import EndCounts


def test_fraction_is_0_if_demonstrations_never_end() -> None:
    absorbing = EndCounts(0, 1000)
    assert absorbing.share(50, 3000) == 0.0


@pytest.mark.parametrize("ends", [0, 1, 299, 300])
def test_fraction_is_1_if_the_policy_ends_no_more_often(ends: int) -> None:
    absorbing = EndCounts(100, 1000)
    assert absorbing.share(ends, 3000) == 1.0


@given(shown=st.integers(1, 500), ends=st.integers(1, 4000))
def test_fraction_follows_from_the_reward_of_the_best_discriminator(shown: int, ends: int) -> None:
    """The slow twin searches for the best output of a discriminator that sees only ends."""
    absorbing = EndCounts(shown, 1000)
    e, p = shown / 1000, ends / 4000
    logits = np.linspace(-12, 12, 24_001)
    losses = e * np.log1p(np.exp(-logits)) + p * np.log1p(np.exp(logits))
    best = 1 / (1 + np.exp(-logits[losses.argmin()]))
    assert absorbing.share(ends, 4000) == pytest.approx(min(1.0, -np.log(1 - best) / np.log(2)), abs=1e-3)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(61, 500)), min_size=1, max_size=40))
def test_small_batches_are_averaged_over_two_thousand_steps(batches: list[tuple[int, int]]) -> None:
    """Earlier batches have lower weights, and all batches together count at most 2,000 steps."""
    absorbing = EndCounts(1, 10)
    for ends, steps in batches:
        absorbing.share(ends, steps)
        assert absorbing._steps <= max(2000, steps) + 1e-6
        assert 0 <= absorbing._ends <= absorbing._steps
    if sum(steps for _, steps in batches) <= 2000:
        assert absorbing._ends == pytest.approx(sum(ends for ends, _ in batches))
