"""A client handles failures of trainer, link, game or user over real sockets."""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from sparring.pipeline.errors import CodecError, RemoteProtocolError, SettingsError
from sparring.pipeline.messages.codec import to_bytes
from sparring.pipeline.messages.simulator import (
    Act,
    BehaviorActions,
    BehaviorReport,
    Bye,
    Fault,
    Hello,
    Ping,
    Reset,
    Step,
    Welcome,
)
from sparring.pipeline.simulation import LinkLost, run
from tests.simulation.simulation_helpers import Trainer, act_for
from tests.simulation.test_simulation_client import Counting, exchange


def test_a_silent_trainer_is_disconnected(trainer: Trainer) -> None:
    """The link is dead if nothing arrives for `timeout_s` after a Ping."""
    lost = threading.Event()

    def script(trainer: Trainer) -> int:
        peer = trainer.accept()
        peer.greet(heartbeat_s=0.02, timeout_s=0.1)
        peer.receive(Step)
        lost.wait(20)
        pings = 0
        while isinstance(peer.next(), Ping):
            pings += 1
        return pings

    with pytest.raises(LinkLost, match=r"nothing received for 0\.1 s"):
        run(Counting(), trainer.play(script), reconnect=False)
    lost.set()
    assert trainer.result() >= 1


def test_a_message_that_never_ends_does_not_count_as_a_heartbeat(trainer: Trainer) -> None:
    """The trainer answers every Ping amid a message that it never completes."""

    def script(trainer: Trainer) -> None:
        peer = trainer.accept()
        peer.greet(heartbeat_s=0.02, timeout_s=0.2)
        peer.receive(Step)
        peer.socket.sendall(to_bytes(Bye(reason="x" * 10_000))[:100])
        with suppress(ConnectionError):
            while isinstance(peer.next(), Ping):
                peer.socket.sendall(b"x")

    with pytest.raises(LinkLost, match=r"bytes of a message received for 0\.2 s"):
        run(Counting(), trainer.play(script), reconnect=False)
    trainer.result()


def test_after_a_lost_connection_the_client_reconnects_and_continues_its_count(trainer: Trainer) -> None:
    """The second Hello reports its steps, and new episodes begin."""

    def script(trainer: Trainer) -> list[Hello]:
        hellos = []
        for rounds in (2, 1, 3):
            peer = trainer.accept()
            hellos.append(peer.greet())
            exchange(peer, hellos[-1], rounds)
            step = peer.receive(Step)
            assert step.sequence == rounds
            if rounds == 3:
                peer.send(Bye(reason="end"))
            peer.close()
        return hellos

    game = Counting()
    result = run(game, trainer.play(script), sleep=lambda _: None)
    assert [hello.steps for hello in trainer.result()] == [{}, {"One": 6}, {"One": 9}]
    assert (result.steps, result.reason) == ({"One": 18}, "end")
    assert sum(isinstance(call, tuple) for call in game.calls) == 3


def test_a_handshake_that_breaks_is_retried(trainer: Trainer) -> None:
    """A connection without Welcome does not count as a connection."""

    def script(trainer: Trainer) -> None:
        first = trainer.accept()
        first.receive(Hello)
        first.close()
        second = trainer.accept()
        second.receive(Hello)
        second.send(Welcome(version=1, connection=2, heartbeat_s=60, timeout_s=20))
        second.close()
        third = trainer.accept()
        third.greet()
        third.receive(Step)
        third.send(Bye(reason="third"))

    assert run(Counting(), trainer.play(script), sleep=lambda _: None).reason == "third"
    trainer.result()


def test_connection_attempts_back_off_and_fail_with_the_last_cause(trainer: Trainer) -> None:
    """Delays double up to 2 s, their sum is the given time, and the error has the last cause."""
    address = trainer.address
    trainer.close()
    now = [0.0]
    delays: list[float] = []

    def sleep(seconds: float) -> None:
        delays.append(seconds)
        now[0] += seconds

    with pytest.raises(LinkLost, match=r"no trainer at tcp://127.* in 10 s \(last: ConnectionRefused"):
        run(Counting(), address, connect_timeout_s=10, clock=lambda: now[0], sleep=sleep)
    assert delays[:7] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
    assert max(delays) == 2.0
    assert sum(delays) == pytest.approx(10)


def test_a_trainer_that_disconnects_after_each_welcome_is_given_up(trainer: Trainer) -> None:
    """Connections that break before the first request share one deadline, with growing delays."""
    now = [0.0]

    def script(trainer: Trainer) -> None:
        for number in range(8):
            peer = trainer.accept()
            peer.receive(Hello)
            peer.send(Welcome(version=1, connection=number, heartbeat_s=60, timeout_s=20))
            peer.close()

    def sleep(seconds: float) -> None:
        now[0] += seconds

    with pytest.raises(LinkLost, match="no trainer at"):
        run(Counting(), trainer.play(script), connect_timeout_s=4.9, clock=lambda: now[0], sleep=sleep)
    trainer.result()
    assert now[0] == pytest.approx(4.9)


@pytest.mark.parametrize("when", ["hello", "step"])
def test_a_fault_is_raised_with_its_text_and_not_retried(trainer: Trainer, when: str) -> None:
    """The user reads what this side did wrong."""
    fault = Fault(code="bad_credential", got="none", expected="a token", remedy="give it")

    def script(trainer: Trainer) -> Any:
        peer = trainer.accept()
        if when == "hello":
            peer.receive(Hello)
        else:
            peer.greet()
            peer.receive(Step)
        peer.send(fault)
        return peer.next()

    game = Counting()
    with pytest.raises(RemoteProtocolError, match="got none; expected a token; give it") as raised:
        run(game, trainer.play(script))
    assert raised.value.code == "bad_credential"
    assert trainer.result() is None
    assert game.closed == 1


def wrong_acts(act: Act) -> list[Act]:
    entry = act.actions[0]
    fields = {"behavior": entry.behavior, "agents": entry.agents, "continuous": entry.continuous}
    none = np.zeros((3, 0), np.int32)

    def other(**changes: Any) -> Act:
        changed = BehaviorActions(**{**fields, "discrete": none, **changes})
        return Act(sequence=act.sequence, actions=(changed,))

    return [
        Act(sequence=9, actions=act.actions),
        Act(sequence=act.sequence, actions=()),
        other(agents=entry.agents[::-1].copy()),
        other(continuous=np.zeros((2, 1), np.float32)),
        other(continuous=np.zeros((3, 2), np.float32)),
        other(discrete=np.zeros((3, 1), np.int32)),
        other(behavior="Other"),
    ]


@pytest.mark.parametrize("index", range(7))
def test_an_act_that_does_not_fit_is_answered_with_a_fault(trainer: Trainer, index: int) -> None:
    """An Act for other agents, shapes, behaviors or steps never reaches the game."""

    def script(trainer: Trainer) -> Fault:
        peer = trainer.accept()
        hello = peer.greet()
        peer.send(wrong_acts(act_for(peer.receive(Step), hello))[index])
        fault: Fault = peer.receive(Fault)
        return fault

    game = Counting()
    with pytest.raises(RemoteProtocolError) as raised:
        run(game, trainer.play(script))
    assert trainer.result().code == raised.value.code
    assert game.calls == [({}, 7)]


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (b"\xff\xff\xff\xff\x01\x00\x00\x00", "malformed"),
        (Welcome(version=2, connection=1, heartbeat_s=1, timeout_s=2), "version"),
        (Welcome(version=1, connection=1, heartbeat_s=0, timeout_s=2), "internal"),
        (Welcome(version=1, connection=1, heartbeat_s=1e-300, timeout_s=2), "internal"),
        (Reset(), "unexpected_message"),
    ],
)
def test_an_invalid_handshake_is_answered_with_a_fault(trainer: Trainer, answer: Any, code: str) -> None:
    """Malformed bytes, another version, invalid times and messages out of turn end the conversation."""

    def script(trainer: Trainer) -> Fault:
        peer = trainer.accept()
        peer.receive(Hello)
        if isinstance(answer, bytes):
            peer.socket.sendall(answer)
        else:
            peer.send(answer)
        fault: Fault = peer.receive(Fault)
        return fault

    with pytest.raises(RemoteProtocolError) as raised:
        run(Counting(), trainer.play(script))
    assert (raised.value.code, trainer.result().code) == (code, code)


def test_a_signal_ends_a_client_without_trainer_at_once(trainer: Trainer) -> None:
    address = trainer.address
    trainer.close()
    result = run(Counting(), address, sleep=lambda _: signal.raise_signal(signal.SIGTERM))
    assert result.reason == "stopped by SIGTERM"


def test_a_game_that_fails_is_closed_and_reported_in_the_bye(trainer: Trainer) -> None:
    """The game's own exception is raised."""

    def script(trainer: Trainer) -> Bye:
        peer = trainer.accept()
        exchange(peer, peer.greet(), 1)
        bye: Bye = peer.receive(Bye)
        return bye

    def fail() -> None:
        raise ZeroDivisionError("the world ended")

    game = Counting(in_step=fail)
    with pytest.raises(ZeroDivisionError):
        run(game, trainer.play(script))
    assert trainer.result().reason == "failed: ZeroDivisionError: the world ended"
    assert game.closed == 1


def test_a_column_of_wrong_dtype_is_refused_before_it_is_sent(trainer: Trainer) -> None:
    """A mistake of the author is a local error, not a broken connection."""

    class Wrong(Counting):
        def reset(self, parameters: Mapping[str, float], seed: int | None) -> Sequence[BehaviorReport]:
            (report,) = super().report()
            return (BehaviorReport(behavior=report.behavior, ends=None, decisions=_with_double_rewards(report)),)

    def script(trainer: Trainer) -> None:
        peer = trainer.accept()
        peer.greet()
        peer.receive(Bye)

    with pytest.raises(CodecError, match="convert the array"):
        run(Wrong(), trainer.play(script))
    trainer.result()


def _with_double_rewards(report: BehaviorReport) -> Any:
    assert report.decisions is not None
    return dataclasses.replace(report.decisions, rewards=np.zeros(3))


def test_an_address_that_no_host_can_have_is_refused_at_once() -> None:
    with pytest.raises(SettingsError, match=r"got host 'a\.\.b'"):
        run(Counting(), "tcp://a..b:5005")


@pytest.mark.parametrize(
    "text", ["", "localhost:1", "tcp://host", "tcp://host:x", "tcp://h:99999", "unix://", "udp://h:1"]
)
def test_an_invalid_address_is_refused_at_once(text: str) -> None:
    """A typing mistake is not retried for a minute."""
    with pytest.raises(SettingsError, match="tcp://HOST:PORT or unix:///PATH"):
        run(Counting(), text)
