"""Queues that are broken on purpose, to test that the simulation detects them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from sparring.pipeline.queues.receiving import ReceiverState
from sparring.pipeline.queues.sending import SenderState
from sparring.pipeline.queues.wire import Data, Grant


def _forgets_to_resend(patch: pytest.MonkeyPatch) -> None:
    """Breaks resending of lost messages to a receiver that stays alive."""
    rewind = SenderState._rewind

    def only_for_a_new_receiver(state: SenderState, sequence: int) -> None:
        if sequence == 0:
            rewind(state, sequence)

    patch.setattr(SenderState, "_rewind", only_for_a_new_receiver)


def _counts_credit_twice(patch: pytest.MonkeyPatch) -> None:
    """Gives a sender twice the credit that it was granted."""
    on_grant = SenderState.on_grant

    def doubled(state: SenderState, now: float, grant: Grant) -> None:
        on_grant(state, now, grant)
        if state.receiver == grant.receiver:
            state.counts.share_messages, state.counts.share_steps = 2 * grant.messages, 2 * grant.steps

    patch.setattr(SenderState, "on_grant", doubled)


def _delivers_twice(patch: pytest.MonkeyPatch) -> None:
    """Delivers a repeated message twice."""
    on_data = ReceiverState.on_data

    def forgetful(state: ReceiverState, now: float, data: Data, route: Any) -> bool:
        peer = state._peers.get(data.sender)
        if peer is not None and peer.present and data.sequence == peer.expected - 1 and state._granted(peer)[0]:
            peer.expected -= 1
            return on_data(state, now, data, route)
        return on_data(state, now, data, route)

    patch.setattr(ReceiverState, "on_data", forgetful)


KINDS = {"resend": _forgets_to_resend, "credit": _counts_credit_twice, "twice": _delivers_twice}


@contextlib.contextmanager
def queue(kind: str | None) -> Iterator[None]:
    """Breaks all queues in one way, or in none."""
    with pytest.MonkeyPatch.context() as patch:
        if kind is not None:
            KINDS[kind](patch)
        yield
