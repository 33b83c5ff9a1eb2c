"""The conversation with the trainer, for authors who own their main loop; `run` does it for a game.

    client = Client.connect("tcp://127.0.0.1:5005", name="my game", behaviors={...})
    message = client.begin()
    while not isinstance(message, Bye):
        reports = restart(message) if isinstance(message, Reset) else play(message)
        message = client.exchange(reports)
    client.close()

A broken connection is mended inside: the trainer's Reset after the new Welcome comes back in place
of actions, and new episodes begin. `client.parameters` holds the environment parameters as they are now.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

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
from sparring.pipeline.simulation.encrypted import credential_of
from sparring.pipeline.simulation.link import Link, LinkLost, Stop, StopRequested, dial, parse_address
from sparring.pipeline.simulation.parameters import Parameters
from sparring.pipeline.specs import BehaviorSpec

if TYPE_CHECKING:
    import ssl

FIRST_DELAY_S: Final = 0.05
LONGEST_DELAY_S: Final = 2.0
"""Between attempts to connect: the delay doubles from the first to the longest."""
LONGEST_ATTEMPT_S: Final = 5.0
"""A host that drops packets answers nothing: better to try again, and a stop request waits for this."""


class Client:
    """A simulator's end of the conversation. Made by `connect`; a context manager.

    Args:
        hello: what to introduce the simulator with; `steps` is filled in at each connection.
        address: `tcp://HOST:PORT` or `unix:///PATH`.
        connect_timeout_s: how long to try, at the start and after a loss.
        reconnect: False raises `LinkLost` where a connection breaks.
        clock: seconds, monotonic.
        sleep: waits between attempts; None waits in a way that `stop` ends.
        tls: encrypts TCP; None for none.

    Attributes:
        parameters: environment parameters; brought up to date before `begin` and `exchange` return.
        adopted: what the trainer has said, where it speaks with the player of Hello by itself.
    """

    def __init__(
        self,
        hello: Hello,
        address: str,
        *,
        connect_timeout_s: float = 60.0,
        reconnect: bool = True,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._tls = tls
        self._hello = hello
        self._text = address
        self._address = parse_address(address)
        self._connect_timeout_s = connect_timeout_s
        self._reconnect = reconnect
        self._clock = clock
        self._stop = Stop()
        self._sleep = sleep or self._stop.wait
        self._counter = StepCounter()
        self.parameters = Parameters()
        self._link: Link | None = None
        self._deadline: float | None = None  # of the attempt to connect, until the trainer's first request
        self._delay_s = FIRST_DELAY_S
        self._sequence = 0
        self._announced: set[str] = set()
        self.adopted: Adopted | None = None
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
        """A client that has been welcomed.

        Args:
            address: `tcp://HOST:PORT` or `unix:///PATH`.
            name: of the simulator program, for logs.
            behaviors: spec of each behavior id.
            number: which of the supervisor's simulators this is; None where it dials in by itself.
            credential: token where the endpoint asks for one; "": $SPARRING_CREDENTIAL.
            keys: folder of the keys, where the endpoint encrypts; None: $SPARRING_KEYS.
            certificate: name of that to show; "": $SPARRING_NAME; without one, the token of the keys.
            scripts: by behavior name, what the simulator can play any agent with itself.
            connect_timeout_s: how long to try, at the start and after a loss.
            reconnect: False raises where a connection breaks.

        Raises:
            SettingsError: keys that cannot be used.
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
        client = cls(hello, address, connect_timeout_s=connect_timeout_s, reconnect=reconnect, tls=tls)
        try:
            client.open()
        except BaseException:
            client.close()
            raise
        return client

    @property
    def steps(self) -> dict[str, int]:
        """Steps (decision and outcome) sent since the start, per behavior name."""
        return dict(self._counter.steps)

    @property
    def behaviors(self) -> Mapping[str, BehaviorSpec]:
        """Spec of each behavior id that may appear in a report."""
        return self._hello.behaviors

    def add_behaviors(self, behaviors: Mapping[str, BehaviorSpec]) -> None:
        """Makes more behavior ids known; the trainer is told with the next report."""
        self._hello = replace(self._hello, behaviors={**self._hello.behaviors, **behaviors})

    def stop(self, reason: str) -> None:
        """Ends a waiting or the next `begin` or `exchange` with a Bye. For any thread or signal handler."""
        self._stop.request(reason)

    def open(self) -> None:
        """Connects and introduces the simulator, trying again until `connect_timeout_s` is over.

        Raises:
            LinkLost: no trainer answered in time.
            RemoteProtocolError: the trainer refused.
        """
        if self._deadline is None:
            self._deadline = self._clock() + self._connect_timeout_s
            self._delay_s = FIRST_DELAY_S
        while self._stop.reason is None:
            try:
                return self._greet(self._deadline)
            except StopRequested:
                break
            except LinkLost as lost:
                self._pause(lost, self._deadline)
        return self._say_bye(self._stop.reason or "")

    def begin(self) -> Reset | Bye:
        """Waits for the trainer's first request: new episodes for all agents.

        Raises:
            LinkLost: the connection broke and could not be mended.
            RemoteProtocolError: the trainer broke the protocol, or says that this side did.
        """
        while self._bye is None:
            try:
                answer: Reset | Bye = self._receive()
            except LinkLost as lost:
                self._mend(lost)
            else:
                return answer
        return self._bye

    def exchange(
        self, reports: Sequence[BehaviorReport], statistics: Sequence[Statistic] = ()
    ) -> Actions | Reset | Bye:
        """Sends what happened and waits for what to do.

        Args:
            reports: at most one per behavior id; not used after the call.
            statistics: the simulator's own numbers.

        Returns:
            Actions for exactly the decisions of `reports`, row by row; or Reset: start new episodes
            for all agents; or Bye: the conversation is over.

        Raises:
            LinkLost: the connection broke and could not be mended.
            RemoteProtocolError: the trainer broke the protocol, or says that this side did.
            CodecError: a column has a wrong dtype or number of dimensions.
        """
        if self._bye is not None:
            return self._bye
        if self._stop.reason is not None:
            self._say_bye(self._stop.reason)
            return self.begin()
        try:
            answer = self._send(reports, statistics)
        except LinkLost as lost:
            self._mend(lost)
            return self.begin()
        if isinstance(answer, Act):
            return self._acted(answer, reports)
        self._counter.forget()
        return answer

    def follow(self) -> Adopted | Progress | Bye:
        """Waits for news of the player with which the trainer speaks by itself.

        Returns:
            How far it has come; or Adopted where a trainer that had gone is back and waits for a player that starts
            anew; or Bye.

        Raises:
            LinkLost: the connection broke and could not be mended.
            RemoteProtocolError: the trainer broke the protocol, or says that the player or this side did.
        """
        if self._bye is not None:
            return self._bye
        try:
            told: Progress | Bye = self._receive()
        except LinkLost as lost:
            self._mend(lost)
            return self._bye or self._adopted_again()
        return told

    def _adopted_again(self) -> Adopted:
        if self.adopted is None:
            raise RemoteProtocolError(
                "specs",
                got="a trainer that does not speak with players",
                expected="one that does, as before",
                remedy="start trainer and simulators again",
            )
        return self.adopted

    def close(self, reason: str = "closed") -> None:
        """Says Bye with the step counts, if that was not done, and frees the socket."""
        if self._bye is None:
            self._say_bye(reason)
        self._stop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close("closed" if kind is None else f"failed: {kind.__name__}: {error}")

    # ------------------------------------------------------------ one connection

    def _greet(self, deadline: float) -> None:
        left_s = max(0.001, deadline - self._clock())
        try:
            connected = dial(self._address, min(left_s, LONGEST_ATTEMPT_S), self._tls)
        except OSError as error:
            raise LinkLost(
                got=f"{type(error).__name__}: {error}", expected="a connection", remedy="start the trainer"
            ) from error
        self._link = link = Link(connected, stop=self._stop, timeout_s=left_s, clock=self._clock)
        try:
            link.send(replace(self._hello, steps=self.steps))
            welcome = link.receive()
        except LinkLost:
            self._drop()
            raise
        self._sequence = 0
        self._announced = set(self._hello.behaviors)
        self.adopted = welcome if isinstance(welcome, Adopted) else None
        if not isinstance(welcome, Welcome | Adopted):
            return self._over(welcome)
        try:
            check_welcome(welcome)
        except RemoteProtocolError as error:
            raise link.refuse(error) from error
        return link.keep_alive(welcome)

    def _send(self, reports: Sequence[BehaviorReport], statistics: Sequence[Statistic]) -> Act | Reset | Bye:
        self._announce(reports)
        step = Step(sequence=self._sequence, reports=tuple(reports), statistics=tuple(statistics))
        try:
            self._alive().send(step)
        except LinkLost as lost:
            return self._last_words(lost)
        self._sequence += 1
        self._counter.sent(reports)
        answer: Act | Reset | Bye = self._receive()
        return answer

    def _last_words(self, lost: LinkLost) -> Act | Reset | Bye:
        """A trainer may close while the game computes: its Bye or Fault still waits to be read."""
        if not isinstance(lost.__cause__, ConnectionError):
            raise lost
        answer: Act | Reset | Bye = self._receive()
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
                remedy="name every behavior at the start, or with add_behaviors before it is reported",
            )
        self._alive().send(Behaviors(behaviors={key: known[key] for key in known.keys() - self._announced}))
        self._announced = set(known)

    def _receive(self) -> Any:
        """The next Act, Reset or Bye."""
        try:
            message = self._alive().receive()
        except StopRequested:
            self._say_bye(self._stop.reason or "")
            return self._bye
        self._deadline = None
        if isinstance(message, Bye | Fault):
            self._over(message)
        elif isinstance(message, Reset):
            self._check_samplers(message)
            self.parameters.replace(message.parameters, message.samplers)
        return message

    def _check_samplers(self, message: Act | Reset) -> None:
        try:
            check_samplers(message)
        except RemoteProtocolError as error:
            raise self._alive().refuse(error) from error

    def _acted(self, act: Act, reports: Sequence[BehaviorReport]) -> Actions:
        try:
            actions = actions_of(act, self._sequence - 1, reports, self._hello)
        except RemoteProtocolError as error:
            raise self._alive().refuse(error) from error
        for behavior, entry in actions.items():
            self._counter.acted(behavior, entry.agents)
        if act.parameters or act.samplers:
            self._check_samplers(act)
            self.parameters.update(act.parameters, act.samplers)
        return actions

    # ------------------------------------------------------------ its end

    def _over(self, message: Bye | Fault) -> None:
        """The trainer has ended the conversation."""
        if isinstance(message, Bye):
            self._drop(Bye(reason=message.reason, steps=self.steps))
            self._bye = message
            return
        self._drop()
        self._bye = Bye(reason=f"fault: {message.code}")
        raise RemoteProtocolError(message.code, got=message.got, expected=message.expected, remedy=message.remedy)

    def _say_bye(self, reason: str) -> None:
        self._bye = Bye(reason=reason, steps=self.steps)
        self._drop(self._bye)

    def _drop(self, bye: Bye | None = None) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close(bye)

    def _mend(self, lost: LinkLost) -> None:
        self._drop()
        self._counter.forget()
        if not self._reconnect:
            raise lost
        if self._deadline is not None:  # it broke before the trainer asked for anything: the same attempt goes on
            self._pause(lost, self._deadline)
        self.open()

    def _pause(self, lost: LinkLost, deadline: float) -> None:
        left_s = deadline - self._clock()
        if left_s <= 0:
            raise self._nobody(lost) from lost
        self._sleep(min(self._delay_s, left_s))
        self._delay_s = min(2 * self._delay_s, LONGEST_DELAY_S)

    def _alive(self) -> Link:
        if self._link is None:
            raise LocalProtocolError(
                "closed", got="a call on a closed client", expected="an open one", remedy="call connect first"
            )
        return self._link

    def _nobody(self, lost: LinkLost) -> LinkLost:
        return LinkLost(
            got=f"no trainer at {self._text} in {self._connect_timeout_s:g} s (last: {lost.got})",
            expected="one that listens there and stays",
            remedy="start the run first, or correct the address"
            + ("" if self._tls else "; where the run has keys, name theirs (SPARRING_KEYS, --keys)"),
        )
