"""A client talks to a scripted trainer over real sockets, to an orderly end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from sparring.pipeline.errors import LocalProtocolError
from sparring.pipeline.games.goal import Goal
from sparring.pipeline.messages.simulator import (
    Act,
    BehaviorActions,
    BehaviorReport,
    Behaviors,
    Bye,
    Hello,
    Ping,
    Pong,
    Reset,
    Statistic,
    Step,
    Welcome,
)
from sparring.pipeline.simulation import Client, run
from sparring.pipeline.simulation.game import decisions, ends
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from tests.simulation.simulation_helpers import Peer, Trainer, act_for

SPEC = BehaviorSpec(observations=(ObservationSpec(name="one", shape=(1,)),), actions=ActionSpec(continuous=1))


class Counting:
    """A game of three agents that always decide, which records its calls and runs `in_step` in each step."""

    name = "counting"

    def __init__(self, in_step: Any = None) -> None:
        self.calls: list[Any] = []
        self.in_step = in_step
        self.closed = 0

    def behaviors(self) -> Mapping[str, BehaviorSpec]:
        return {"One?team=0": SPEC}

    def reset(self, parameters: Mapping[str, float], seed: int | None) -> Sequence[BehaviorReport]:
        self.calls.append((dict(parameters), seed))
        return self.report()

    def step(self, actions: Mapping[str, BehaviorActions]) -> Sequence[BehaviorReport]:
        self.calls.append(actions["One?team=0"].continuous.tolist())
        if self.in_step is not None:
            self.in_step()
        return self.report()

    def statistics(self) -> Sequence[Statistic]:
        return (Statistic(name="calls", value=float(len(self.calls))),)

    def close(self) -> None:
        self.closed += 1

    @staticmethod
    def report() -> Sequence[BehaviorReport]:
        return (BehaviorReport(behavior="One?team=0", decisions=decisions([5, 3, 9], np.ones((3, 1)))),)


def exchange(peer: Peer, hello: Hello, rounds: int) -> None:
    for _ in range(rounds):
        peer.send(act_for(peer.receive(Step), hello))


def test_hello_welcome_reset_then_steps_and_acts_until_bye(trainer: Trainer) -> None:
    """The conversation follows the order of the table, and the trainer's Bye ends it."""

    def script(trainer: Trainer) -> list[Any]:
        peer = trainer.accept()
        hello = peer.greet(Reset(parameters={"size": 2.0}, seed=3))
        steps = []
        for _ in range(3):
            steps.append(peer.receive(Step))
            peer.send(act_for(steps[-1], hello))
        steps.append(peer.receive(Step))
        peer.send(Bye(reason="enough"))
        assert peer.receive(Bye).steps == {"One": 9}
        assert peer.next() is None
        return [hello, *steps]

    game = Counting()
    result = run(game, trainer.play(script), number=4, credential="key")
    hello, *steps = trainer.result()
    assert (hello.version, hello.name, hello.number, hello.credential) == (1, "counting", 4, "key")
    assert (hello.behaviors, hello.steps) == ({"One?team=0": SPEC}, {})
    assert [step.sequence for step in steps] == [0, 1, 2, 3]
    assert [step.statistics[0].value for step in steps] == [1, 2, 3, 4]
    assert game.calls == [({"size": 2.0}, 3)] + [[[0.0]] * 3] * 3
    assert (result.steps, result.reason, game.closed) == ({"One": 9}, "enough", 1)


def test_the_conversation_works_over_a_unix_socket(unix_trainer: Trainer) -> None:
    """A Unix socket works like TCP."""

    def script(trainer: Trainer) -> None:
        peer = trainer.accept()
        exchange(peer, peer.greet(), 2)
        peer.receive(Step)
        peer.send(Bye(reason="done"))

    assert run(Goal(areas=2), unix_trainer.play(script)).steps == {"Goal": 4}
    unix_trainer.result()


def test_a_reset_in_place_of_an_act_starts_new_episodes_and_counts_nothing(trainer: Trainer) -> None:
    """Decisions without an action are not steps."""

    def script(trainer: Trainer) -> None:
        peer = trainer.accept()
        hello = peer.greet()
        exchange(peer, hello, 1)
        peer.receive(Step)
        peer.send(Reset(parameters={"wind": 1.0}))
        exchange(peer, hello, 2)
        peer.receive(Step)
        peer.send(Bye())

    game = Counting()
    assert run(game, trainer.play(script)).steps == {"One": 9}
    trainer.result()
    assert [call for call in game.calls if isinstance(call, tuple)] == [({}, 7), ({"wind": 1.0}, None)]


def test_messages_may_arrive_one_byte_at_a_time(trainer: Trainer) -> None:
    """Frames may arrive in any pieces, and a trainer may give longer times than the system waits for."""

    def script(trainer: Trainer) -> None:
        peer = trainer.accept()
        hello = peer.receive(Hello)
        peer.send(Welcome(version=1, connection=1, heartbeat_s=1e299, timeout_s=1e300), piece=1)
        peer.send(Reset(), piece=1)
        for _ in range(3):
            peer.send(act_for(peer.receive(Step), hello), piece=1)
        peer.receive(Step)
        peer.send(Bye(reason="end"), piece=1)

    assert run(Counting(), trainer.play(script)).steps == {"One": 9}
    trainer.result()


def test_pings_are_answered_while_waiting(trainer: Trainer) -> None:
    """A Ping gets the Pong with its number, and the wait continues."""

    def script(trainer: Trainer) -> None:
        peer = trainer.accept()
        hello = peer.greet()
        step = peer.receive(Step)
        for number in (4, 5):
            peer.send(Ping(number=number))
            assert peer.receive(Pong).number == number
        peer.send(act_for(step, hello))
        peer.receive(Step)
        peer.send(Bye())

    assert run(Counting(), trainer.play(script)).steps == {"One": 3}
    trainer.result()


def test_pings_are_sent_during_a_long_step(trainer: Trainer) -> None:
    """The heartbeat continues while the game computes."""
    received = threading.Event()

    def script(trainer: Trainer) -> None:
        peer = trainer.accept()
        hello = peer.greet(heartbeat_s=0.01)
        peer.send(act_for(peer.receive(Step), hello))
        for _ in range(3):
            assert isinstance(peer.next(), Ping)
        received.set()
        peer.receive(Step)
        peer.send(Bye())

    game = Counting(in_step=lambda: received.wait(20))
    assert run(game, trainer.play(script)).steps == {"One": 3}
    trainer.result()


def test_a_long_wait_for_an_act_is_allowed_while_pings_are_answered(trainer: Trainer) -> None:
    """A simulator may be backpressured; only silence after a Ping ends a connection."""

    def script(trainer: Trainer) -> int:
        peer = trainer.accept()
        hello = peer.greet(heartbeat_s=0.02, timeout_s=0.5)
        step = peer.receive(Step)
        for _ in range(40):  # longer than the timeout: a Ping is sent every 0.02 s
            ping = peer.next()
            peer.send(Pong(number=ping.number))
        peer.send(act_for(step, hello))
        peer.receive(Step)
        peer.send(Bye())
        return hello.steps == {}

    assert run(Counting(), trainer.play(script), reconnect=False).steps == {"One": 3}
    assert trainer.result()


def test_a_bye_sent_while_the_game_computes_is_read_before_the_loss(trainer: Trainer) -> None:
    """A trainer that ends the run and closes does not count as a lost connection."""
    closed = threading.Event()

    def script(trainer: Trainer) -> None:
        peer = trainer.accept()
        hello = peer.greet()
        peer.send(act_for(peer.receive(Step), hello))
        peer.send(Bye(reason="run completed"))
        peer.close()
        closed.set()

    result = run(Counting(in_step=lambda: closed.wait(20)), trainer.play(script))
    trainer.result()
    assert result.reason == "run completed"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_a_step_ends_with_a_bye_that_has_the_count(trainer: Trainer, number: signal.Signals) -> None:
    """The first signal lets the step end, sends Bye with the steps, and restores the signal handlers."""

    def script(trainer: Trainer) -> Bye:
        peer = trainer.accept()
        hello = peer.greet()
        exchange(peer, hello, 1)
        bye: Bye = peer.receive(Bye)
        assert peer.next() is None
        return bye

    before = signal.getsignal(number)
    result = run(Counting(in_step=lambda: signal.raise_signal(number)), trainer.play(script))
    bye = trainer.result()
    assert result.reason == bye.reason == f"stopped by {number.name}"
    assert bye.steps == result.steps == {}
    assert signal.getsignal(number) is before


def test_a_signal_while_waiting_ends_with_a_bye(trainer: Trainer) -> None:
    """A wait for an Act ends at once."""

    def script(trainer: Trainer) -> Bye:
        peer = trainer.accept()
        hello = peer.greet()
        exchange(peer, hello, 2)
        peer.receive(Step)
        os.kill(os.getpid(), signal.SIGTERM)
        bye: Bye = peer.receive(Bye)
        return bye

    result = run(Counting(), trainer.play(script))
    assert trainer.result().steps == result.steps == {"One": 6}


def test_the_clients_own_seed_is_used_for_the_first_episodes_only(trainer: Trainer) -> None:
    """A Reset without seed uses the given seed once; later ones continue with the random source."""

    def script(trainer: Trainer) -> None:
        peer = trainer.accept()
        peer.greet(Reset())
        peer.receive(Step)
        peer.send(Reset())
        peer.receive(Step)
        peer.send(Bye())

    game = Counting()
    run(game, trainer.play(script), seed=11)
    trainer.result()
    assert game.calls == [({}, 11), ({}, None)]


def test_a_client_in_an_own_loop_adds_behaviors_and_rejects_unknown_ones(trainer: Trainer) -> None:
    """`Client` passes actions, resets and the Bye to the loop of an author, and announces new behaviors in time."""

    def script(trainer: Trainer) -> Behaviors:
        peer = trainer.accept()
        hello = peer.greet()
        exchange(peer, hello, 1)
        news: Behaviors = peer.receive(Behaviors)
        step = peer.receive(Step)
        assert [report.behavior for report in step.reports] == ["One?team=0", "New?team=1"]
        peer.send(Act(sequence=1, actions=()))
        assert peer.receive(Bye).steps == {"One": 3}
        return news

    with Client.connect(trainer.play(script), name="own", behaviors={"One?team=0": SPEC}) as client:
        assert isinstance(client.begin(), Reset)
        actions = client.exchange(Counting.report())
        assert not isinstance(actions, Reset | Bye)
        assert actions["One?team=0"].agents.tolist() == [5, 3, 9]
        last = BehaviorReport(behavior="One?team=0", ends=ends([9, 3, 5], np.ones((3, 1))))
        new = BehaviorReport(behavior="New?team=1")
        with pytest.raises(LocalProtocolError, match="New"):
            client.exchange([last, new])
        client.add_behaviors({"New?team=1": SPEC})
        assert client.exchange([last, new]) == {}
        assert client.steps == {"One": 3}
    assert trainer.result().behaviors == {"New?team=1": SPEC}


def test_stop_from_another_thread_ends_a_wait(trainer: Trainer) -> None:
    """`stop` wakes a waiting client, which sends Bye; later calls return the same Bye."""
    client_of: list[Client] = []

    def script(trainer: Trainer) -> Bye:
        peer = trainer.accept()
        peer.greet()
        peer.receive(Step)
        client_of[0].stop("lunch")
        bye: Bye = peer.receive(Bye)
        return bye

    address = trainer.play(script)
    with Client.connect(address, name="own", behaviors={"One?team=0": SPEC}) as client:
        client_of.append(client)
        client.begin()
        first = client.exchange(Counting.report())
        again = client.exchange(Counting.report())
        assert isinstance(first, Bye)
        assert again is first
        assert client.begin() is first
    assert trainer.result().reason == "lunch"
    client.stop("too late to matter")
