"""Simulators and the trainer exchange these messages (protocol v1; `docs/protocol.md`).

Rows of arrays in one record belong together: `n` decisions, `m` ends.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from typing import Final, Literal

from sparring.pipeline.messages.schema import F32, I32, I64, F32Matrix, Flags, I32Matrix, Masks, Observation, record
from sparring.pipeline.specs import BehaviorSpec

VERSION: Final = 1

Aggregation = Literal["average", "sum", "histogram", "most_recent"]
Distribution = Literal["uniform", "gaussian", "multirangeuniform"]


@record("player")
class Player:
    """A player is a game with a protocol of its own; a simulator that launches one asks the trainer to speak it.

    Attributes:
        protocol: `unity`.
        port: port that the player connects to; 0 for any.
        settings: bytes of its own protocol for its first reset, as hexadecimal digits.
        areas: training areas that it must create.
        connect_s: seconds within which its first message must arrive.
        timeout_s: seconds for any other message.
    """

    protocol: str
    port: int
    settings: str
    areas: int
    connect_s: float
    timeout_s: float


@record("hello")
class Hello:
    """Hello is a simulator's first message.

    Attributes:
        version: of the protocol.
        name: of the simulator program, for logs.
        behaviors: spec of each behavior id that may appear.
        number: number that the supervisor gave this simulator; None where the supervisor did not start it.
        steps: steps (decision and outcome) that this process has reported since it started, by behavior name; allows
            the counts to be compared after a reconnect.
        credential: token, where the endpoint requires one.
        scripts: by behavior name, scripted policies with which the simulator can play any agent, where
            `BehaviorActions` asks for it.
        player: player that the simulator launches and asks the trainer to speak with.
        process: random text that the simulator's process keeps over all its connections: `steps` can be compared with
            what an earlier incarnation of the trainer counted; "" where nothing is compared.
    """

    version: int
    name: str
    behaviors: dict[str, BehaviorSpec]
    number: int | None = None
    steps: dict[str, int] = field(default_factory=dict)
    credential: str = field(default="", repr=False)
    scripts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    player: Player | None = None
    process: str = ""


@record("welcome")
class Welcome:
    """The trainer answers Hello with Welcome.

    Attributes:
        version: of the protocol.
        connection: number of this connection, for logs.
        heartbeat_s: seconds of silence after which the simulator sends Ping.
        timeout_s: seconds of silence after which the trainer closes the connection.
    """

    version: int
    connection: int
    heartbeat_s: float
    timeout_s: float


@record("adopted")
class Adopted:
    """The trainer answers a Hello with a player: it speaks with the player, whose process the simulator supervises.

    Attributes:
        version: of the protocol.
        connection: number of this connection, for logs.
        heartbeat_s: as in Welcome.
        timeout_s: as in Welcome.
        port: port that the player must connect to.
    """

    version: int
    connection: int
    heartbeat_s: float
    timeout_s: float
    port: int


@record("progress")
class Progress:
    """The trainer reports the phase of an adopted player: connected, initialized, first reset or stepping."""

    phase: str


@record("behaviors")
class Behaviors:
    """A simulator adds behaviors that it did not name in Hello, before they appear in a Step."""

    behaviors: dict[str, BehaviorSpec]


@record("sampler")
class Sampler:
    """A simulator samples an environment parameter from this distribution whenever it needs a value.

    Attributes:
        kind: of the distribution.
        values: uniform: minimum and maximum; gaussian: mean and standard deviation; multirangeuniform: minimum and
            maximum of each range; a range is sampled in proportion to its width.
        seed: of the random source of this parameter in this simulator.
    """

    kind: Distribution
    values: tuple[float, ...]
    seed: int = 0

    def samples(self) -> Iterator[float]:
        """Yields samples without end, beginning with the seed: the same numbers on both sides of a connection."""
        source, sample = random.Random(self.seed), _SAMPLE[self.kind]
        while True:
            yield sample(source, self.values)


@record("reset")
class Reset:
    """The trainer asks for new episodes for all agents; the next Step is their first.

    Attributes:
        parameters: every environment parameter by name: its value, or the first sample of its sampler.
        seed: of the simulator's random source; None to continue with its present state.
        samplers: by parameter name, for simulators that can sample by themselves.
    """

    parameters: dict[str, float] = field(default_factory=dict)
    seed: int | None = None
    samplers: dict[str, Sampler] = field(default_factory=dict)


@record("decisions")
class Decisions:
    """These agents need an action now.

    Attributes:
        agents: [n] ids, unique within the behavior and simulator.
        observations: one [n, *shape] per observation of the spec, in its order.
        rewards: [n] reward since the agent's previous decision.
        groups: [n] group ids, 0 for no group; unique within the simulator; None where no agent has one.
        group_rewards: [n] reward of the agent's group since then; None where no group got one.
        masks: [n, choices of all branches] True = forbidden; None allows everything.
        matches: [n] match ids: agents with the same id play one match; None where the simulator reports none.
        did_continuous: [n, continuous actions] actions in [-1, 1] since the previous decision, where a person or script
            in the simulator chose them; None where it executed the trainer's. Rows of agents at their first decision
            are ignored.
        did_discrete: [n, branches] likewise.
    """

    agents: I64
    observations: tuple[Observation, ...]
    rewards: F32
    groups: I64 | None = None
    group_rewards: F32 | None = None
    masks: Masks | None = None
    matches: I64 | None = None
    did_continuous: F32Matrix | None = None
    did_discrete: I32Matrix | None = None


@record("ends")
class Ends:
    """The episodes of these agents have just ended.

    Attributes:
        agents: [m] ids, as in Decisions. The same id may decide again in the same Step: its next episode.
        observations: one [m, *shape] per observation: the last of the episode.
        rewards: [m] reward since the agent's previous decision.
        interrupted: [m] True where a limit or fault truncated the episode, False where the task ended.
        group_rewards: [m] reward of the agent's group since then, the group of its last decision; None for no rewards.
        outcomes: [m] result of the match for the agent's team: 1 won, 0.5 drawn, 0 lost; None where not reported.
        matches: [m] match ids; None where not reported.
        did_continuous: [m, continuous actions] as in Decisions.
        did_discrete: [m, branches] as in Decisions.
    """

    agents: I64
    observations: tuple[Observation, ...]
    rewards: F32
    interrupted: Flags
    group_rewards: F32 | None = None
    outcomes: F32 | None = None
    matches: I64 | None = None
    did_continuous: F32Matrix | None = None
    did_discrete: I32Matrix | None = None


@record("report")
class BehaviorReport:
    """A BehaviorReport holds the decisions and ends of one behavior id in one Step; either may be None for no rows."""

    behavior: str
    decisions: Decisions | None = None
    ends: Ends | None = None


@record("statistic")
class Statistic:
    """A simulator reports a statistic of its own, shown beside the trainer's."""

    name: str
    value: float
    aggregation: Aggregation = "average"


@record("step")
class Step:
    """A Step reports everything that happened since the last Act. The simulator then waits for Act or Reset.

    Attributes:
        sequence: counts the Steps of this connection from 0.
        reports: at most one per behavior id.
        statistics: the simulator's own numbers.
    """

    sequence: int
    reports: tuple[BehaviorReport, ...]
    statistics: tuple[Statistic, ...] = ()


@record("actions")
class BehaviorActions:
    """BehaviorActions answer the decisions of one behavior id, row by row in the order of that Step.

    Attributes:
        behavior: the id.
        agents: [n] ids, as in the Step.
        continuous: [n, continuous actions] in [-1, 1].
        discrete: [n, branches] chosen index of each branch.
        scripts: [n] number, from 1, of the script in `Hello.scripts` that decides for the agent, whose actions here are
            then ignored; 0 where these actions apply. None where they apply to all agents.
    """

    behavior: str
    agents: I64
    continuous: F32Matrix
    discrete: I32Matrix
    scripts: I32 | None = None


@record("act")
class Act:
    """The trainer answers a Step with Act.

    Attributes:
        sequence: of the Step.
        actions: one entry for each behavior that had decisions.
        parameters: environment parameters that have changed, as in Reset; the others stay.
        samplers: of these parameters; a parameter without one here is a number from now on.
    """

    sequence: int
    actions: tuple[BehaviorActions, ...]
    parameters: dict[str, float] = field(default_factory=dict)
    samplers: dict[str, Sampler] = field(default_factory=dict)


@record("ping")
class Ping:
    """Ping asks for a Pong with the same number; either side may send it at any time after Hello."""

    number: int = 0


@record("pong")
class Pong:
    """Pong answers a Ping."""

    number: int = 0


@record("bye")
class Bye:
    """Bye ends the conversation in order; nothing follows.

    Attributes:
        reason: for logs.
        steps: from a simulator as in Hello; from the trainer, steps of an adopted player.
    """

    reason: str = ""
    steps: dict[str, int] = field(default_factory=dict)


@record("fault")
class Fault:
    """Fault reports what the other side did wrong; nothing follows."""

    code: str
    got: str
    expected: str
    remedy: str


SimulatorMessage = Hello | Welcome | Adopted | Progress | Behaviors | Reset | Step | Act | Ping | Pong | Bye | Fault


def _uniform(source: random.Random, values: Sequence[float]) -> float:
    low, high = values
    return min(high, max(low, source.uniform(low, high)))  # rounding may exceed the range


def _ranges(source: random.Random, values: Sequence[float]) -> float:
    """Samples a range in proportion to its width, then a value in it; all ranges equally where none has any width."""
    ranges = list(zip(values[::2], values[1::2], strict=True))
    widths = [high - low for low, high in ranges]
    return _uniform(source, source.choices(ranges, widths if sum(widths) > 0 else None)[0])


_SAMPLE: Final[dict[Distribution, Callable[[random.Random, Sequence[float]], float]]] = {
    "uniform": _uniform,
    "gaussian": lambda source, values: source.gauss(*values),
    "multirangeuniform": _ranges,
}
