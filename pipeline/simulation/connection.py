"""Holds the conversation with the trainer for authors who own their main loop; `run` does it for a game.

    client = Client.connect("tcp://127.0.0.1:5005", name="my game", behaviors={...})
    message = client.begin()
    while not isinstance(message, Bye):
        reports = restart(message) if isinstance(message, Reset) else play(message)
        message = client.exchange(reports)
    client.close()

The client repairs a broken connection by itself: `exchange` returns the Reset that follows the new Welcome in place of
actions, and new episodes begin. `client.parameters` always holds the current environment parameters.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from sparring.pipeline.errors import LocalProtocolError, RemoteProtocolError
from sparring.pipeline.messages.simulator import (
    VERSION,
    Act,
    Adopted,
    BehaviorReport,
    Behaviors,
    Bye,
    Fault,
    Hello,
    Progress,
    Reset,
    Statistic,
    Step,
    Welcome,
)
from sparring.pipeline.simulation.answers import Actions, actions_of, check_samplers, check_welcome
from sparring.pipeline.simulation.counting import StepCounter
from sparring.pipeline.simulation.dialer import Dialer
from sparring.pipeline.simulation.encrypted import credential_of
from sparring.pipeline.simulation.link import Link, LinkLost, StopRequested
from sparring.pipeline.simulation.parameters import Parameters
from sparring.pipeline.specs import BehaviorSpec


class Client:
    """Represents the simulator's end of a conversation. It is made by `connect` and is a context manager.

    Args:
        hello: introduction of the simulator; `steps` is filled in at each connection.
        dialer: makes the connections; the client closes its `stop`.
        reconnect: False raises `LinkLost` when a connection breaks.

    Attributes:
        parameters: environment parameters, updated before `begin` and `exchange` return.
        adopted: the trainer's answer if it talks to the player of Hello itself, else None.
    """

    def __init__(self, hello: Hello, dialer: Dialer, *, reconnect: bool = True) -> None:
        self.parameters = Parameters()
        self.adopted: Adopted | None = None
        self._hello = hello
        self._dialer = dialer
        self._reconnect = reconnect
        self._stop = dialer.stop
        self._counter = StepCounter()
        self._link: Link | None = None
        self._sequence = 0
        self._announced: set[str] = set()
        self._bye: Bye | None = None

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        name: str,
        behaviors: Mapping[str, BehaviorSpec],
        number: int | None = None,
        credential: str = "",
        keys: str | Path | None = None,
        certificate: str = "",
        scripts: Mapping[str, Sequence[str]] | None = None,
        connect_timeout_s: float = 60.0,
        reconnect: bool = True,
    ) -> Self:
        """Returns a client that the trainer has welcomed.

        Args:
            address: `tcp://HOST:PORT` or `unix:///PATH`.
            name: name of the simulator program, for logs.
            behaviors: spec of each behavior id.
            number: number among the supervisor's simulators; None if the supervisor did not launch it.
            credential: token for an endpoint that requires one; "": $SPARRING_CREDENTIAL.
            keys: folder of the keys, for an endpoint that encrypts; None: $SPARRING_KEYS.
            certificate: name of the certificate to present; "": $SPARRING_NAME; without either, the token of the keys
                is sent.
            scripts: names of the scripts with which the simulator can play any agent, by behavior name.
            connect_timeout_s: time to connect, at the start and after a loss.
            reconnect: False raises `LinkLost` when a connection breaks.

        Raises:
            SettingsError: the keys cannot be used.
            LinkLost: no trainer answered in time.
            RemoteProtocolError: the trainer refused.
        """
        tls, credential = credential_of(address, keys, certificate, credential)
        hello = Hello(
            version=VERSION,
            name=name,
            behaviors=dict(behaviors),
            number=number,
            credential=credential,
            scripts={behavior: tuple(own) for behavior, own in (scripts or {}).items()},
        )
        client = cls(hello, Dialer(address, connect_timeout_s, tls), reconnect=reconnect)
        try:
            client.open()
        except BaseException:
            client.close()
            raise
        return client

    @property
    def steps(self) -> dict[str, int]:
        """Returns the steps (decision and outcome) sent since the start, by behavior name."""
        return dict(self._counter.steps)

    @property
    def behaviors(self) -> Mapping[str, BehaviorSpec]:
        """Returns the spec of each behavior id that may appear in a report."""
        return self._hello.behaviors

    def add_behaviors(self, behaviors: Mapping[str, BehaviorSpec]) -> None:
        """Adds behavior ids; they are sent to the trainer with the next report."""
        self._hello = replace(self._hello, behaviors={**self._hello.behaviors, **behaviors})

    def stop(self, reason: str) -> None:
        """Ends a waiting or the next `begin` or `exchange` with a Bye. Any thread or signal handler may call it."""
        self._stop.request(reason)

    def open(self) -> None:
        """Connects and introduces the simulator; tries again until `connect_timeout_s` is over.

        Raises:
            LinkLost: no trainer answered in time.
            RemoteProtocolError: the trainer refused.
        """
        self._dialer.begin()
        while self._stop.reason is None:
            try:
                self._greet()
                return
            except StopRequested:
                break
            except LinkLost as lost:
                self._dialer.pause(lost)
        self._send_bye(self._stop.reason or "")

    def begin(self) -> Reset | Bye:
        """Waits for the trainer's first request: new episodes for all agents.

        Raises:
            LinkLost: the connection broke and could not be restored.
            RemoteProtocolError: the trainer broke the protocol, or reports that this side did.
        """
        while self._bye is None:
            try:
                answer = self._receive()
                assert isinstance(answer, Reset | Bye)
                return answer
            except LinkLost as lost:
                self._reconnect_after(lost)
        return self._bye

    def exchange(
        self, reports: Sequence[BehaviorReport], statistics: Sequence[Statistic] = ()
    ) -> Actions | Reset | Bye:
        """Sends reports and waits for the trainer's answer.

        Args:
            reports: at most one per behavior id; not used after the call.
            statistics: the simulator's own statistics.

        Returns:
            Actions for exactly the decisions of `reports`, row by row; or Reset: start new episodes
            for all agents; or Bye: the conversation is over.

        Raises:
            LinkLost: the connection broke and could not be restored.
            RemoteProtocolError: the trainer broke the protocol, or reports that this side did.
            CodecError: a column has a wrong dtype or number of dimensions.
        """
        if self._bye is not None:
            return self._bye
        if self._stop.reason is not None:
            return self._send_bye(self._stop.reason)
        try:
            answer = self._send(reports, statistics)
        except LinkLost as lost:
            self._reconnect_after(lost)
            return self.begin()
        if isinstance(answer, Act):
            return self._accept_actions(answer, reports)
        self._counter.discard_open()
        return answer

    def follow(self) -> Adopted | Progress | Bye:
        """Waits for news of the player to which the trainer talks itself.

        Returns:
            The player's progress; or Adopted if a restarted trainer waits for a new player; or Bye.

        Raises:
            LinkLost: the connection broke and could not be restored.
            RemoteProtocolError: the trainer broke the protocol, or reports that the player or this side did.
        """
        if self._bye is not None:
            return self._bye
        try:
            message = self._receive()
            assert isinstance(message, Progress | Bye)
            return message
        except LinkLost as lost:
            self._reconnect_after(lost)
        if self._bye is None and self.adopted is None:
            raise RemoteProtocolError(
                "specs",
                got="a trainer that does not talk to players",
                expected="one that does, as at the first connection",
                remedy="restart the trainer and the simulators",
            )
        return self._bye or self.adopted

    def close(self, reason: str = "closed") -> None:
        """Sends Bye with the step counts unless it was sent, and frees the socket."""
        if self._bye is None:
            self._send_bye(reason)
        self._stop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close("closed" if kind is None else f"failed: {kind.__name__}: {error}")

    # ------------------------------------------------------------ one connection

    def _greet(self) -> None:
        self._link = link = self._dialer.dial()
        try:
            link.send(replace(self._hello, steps=self.steps, process=self._counter.process))
            welcome = link.receive()
        except LinkLost:
            self._drop()
            raise
        self._sequence = 0
        self._announced = set(self._hello.behaviors)
        self.adopted = welcome if isinstance(welcome, Adopted) else None
        if isinstance(welcome, Bye | Fault):
            self._over(welcome)
        elif isinstance(welcome, Welcome | Adopted):
            with self._reporting_mistakes():
                check_welcome(welcome)
            link.keep_alive(welcome)

    def _send(self, reports: Sequence[BehaviorReport], statistics: Sequence[Statistic]) -> Act | Reset | Bye:
        self._announce(reports)
        step = Step(sequence=self._sequence, reports=tuple(reports), statistics=tuple(statistics))
        try:
            self._alive().send(step)
        except LinkLost as lost:
            return self._read_final_message(lost)
        self._sequence += 1
        self._counter.count_report(reports)
        answer = self._receive()
        assert isinstance(answer, Act | Reset | Bye)
        return answer

    def _read_final_message(self, lost: LinkLost) -> Bye:
        """Reads the Bye or Fault of a trainer that closed while the game computed."""
        if isinstance(lost.__cause__, ConnectionError):
            answer = self._receive()
            if isinstance(answer, Bye):
                return answer
        raise lost

    def _announce(self, reports: Sequence[BehaviorReport]) -> None:
        if all(report.behavior in self._announced for report in reports):
            return
        known = self._hello.behaviors
        if unknown := sorted({report.behavior for report in reports} - known.keys()):
            raise LocalProtocolError(
                "unknown_behavior",
                got=f"a report of {unknown}",
                expected=f"behavior ids from {sorted(known)}",
                remedy="name every behavior at the start, or add it with add_behaviors before the first report",
            )
        self._alive().send(Behaviors(behaviors={key: known[key] for key in known.keys() - self._announced}))
        self._announced = set(known)

    def _receive(self) -> Act | Reset | Progress | Bye:
        """Returns the trainer's next request, progress or Bye; the state of the conversation says which are allowed."""
        try:
            message = self._alive().receive()
        except StopRequested:
            return self._send_bye(self._stop.reason or "")
        self._dialer.end()
        if isinstance(message, Bye | Fault):
            return self._over(message)
        if isinstance(message, Reset):
            with self._reporting_mistakes():
                check_samplers(message)
            self.parameters.replace(message.parameters, message.samplers)
        assert isinstance(message, Act | Reset | Progress)
        return message

    def _accept_actions(self, act: Act, reports: Sequence[BehaviorReport]) -> Actions:
        with self._reporting_mistakes():
            actions = actions_of(act, self._sequence - 1, reports, self._hello)
            check_samplers(act)
        for behavior, entry in actions.items():
            self._counter.add_open(behavior, entry.agents)
        self.parameters.update(act.parameters, act.samplers)
        return actions

    @contextmanager
    def _reporting_mistakes(self) -> Iterator[None]:
        """Reports a mistake of the trainer to it."""
        try:
            yield
        except RemoteProtocolError as error:
            raise self._alive().refuse(error) from error

    # ------------------------------------------------------------ end of the conversation

    def _over(self, message: Bye | Fault) -> Bye:
        """Closes the connection after the trainer has ended the conversation."""
        if isinstance(message, Fault):
            self._drop()
            self._bye = Bye(reason=f"fault: {message.code}")
            raise RemoteProtocolError(message.code, got=message.got, expected=message.expected, remedy=message.remedy)
        self._drop(Bye(reason=message.reason, steps=self.steps))
        self._bye = message
        return message

    def _send_bye(self, reason: str) -> Bye:
        self._bye = Bye(reason=reason, steps=self.steps)
        self._drop(self._bye)
        return self._bye

    def _drop(self, bye: Bye | None = None) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close(bye)

    def _reconnect_after(self, lost: LinkLost) -> None:
        self._drop()
        self._counter.discard_open()
        if not self._reconnect:
            raise lost
        if self._dialer.is_dialing:  # it broke before the trainer's first request: the same attempt continues
            self._dialer.pause(lost)
        self.open()

    def _alive(self) -> Link:
        if self._link is None:
            raise LocalProtocolError(
                "closed", got="a call on a closed client", expected="an open one", remedy="call connect first"
            )
        return self._link
