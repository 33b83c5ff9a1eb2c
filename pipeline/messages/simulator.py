"""What simulators and the trainer say to each other (protocol v1; `docs/protocol.md`).

Rows of arrays in one record belong together. `n` decisions, `m` ends.
"""

from __future__ import annotations

from dataclasses import field
from typing import Final, Literal

from sparring.pipeline.messages.schema import (
    F32,
    I32,
    I64,
    F32Matrix,
    Flags,
    FlagsMatrix,
    I32Matrix,
    Observation,
    record,
)
from sparring.pipeline.specs import BehaviorSpec

VERSION: Final = 1

Aggregation = Literal["average", "sum", "histogram", "most_recent"]
Distribution = Literal["uniform", "gaussian", "multirangeuniform"]


@record("player")
class Player:
    """A program that plays and speaks a protocol of its own, which the simulator asks the trainer to speak.

    Attributes:
        protocol: `unity`.
        port: on which it is to call; 0: any.
        settings: what it is told with its first reset: bytes of its own protocol, as hexadecimal digits.
        areas: training areas that it is to make.
        connect_s: seconds in which it has to call first.
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
    """First message of a simulator.

    Attributes:
        version: of the protocol.
        name: of the simulator program, for logs.
        behaviors: spec of each behavior id that may appear.
        number: which of the supervisor's simulators this is; None where it dialled in by itself.
        steps: steps (decision and outcome) that this process has reported since it started, per
            behavior name; lets the books be compared after a reconnect.
        credential: token where the endpoint asks for one.
        scripts: by behavior name, policies of the simulator's own that it can play any agent with, where
            `BehaviorActions` asks for it.
        player: what the simulator launches, where it would have the trainer speak with that by itself.
    """

    version: int
    name: str
    behaviors: dict[str, BehaviorSpec]
    number: int | None = None
    steps: dict[str, int] = field(default_factory=dict)
    credential: str = field(default="", repr=False)
    scripts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    player: Player | None = None


@record("welcome")
class Welcome:
    """The trainer's answer to Hello.

    Attributes:
        version: of the protocol.
        connection: number of this connection, for logs.
        heartbeat_s: the simulator sends Ping when it has been silent for this many seconds.
        timeout_s: silence after which the trainer gives the simulator up.
    """

    version: int
    connection: int
    heartbeat_s: float
    timeout_s: float


@record("adopted")
class Adopted:
    """The trainer's answer to a Hello with a player: it speaks with that, and the simulator only looks after it.

    Attributes:
        version: of the protocol.
        connection: number of this connection, for logs.
        heartbeat_s: as in Welcome.
        timeout_s: as in Welcome.
        port: on which the player is to call.
    """

    version: int
    connection: int
    heartbeat_s: float
    timeout_s: float
    port: int


@record("progress")
class Progress:
    """How far an adopted player has come: connected, initialised, first reset or stepping."""

    phase: str


@record("behaviors")
class Behaviors:
    """A simulator adds behaviors that it did not name in Hello; before they appear in a Step."""

    behaviors: dict[str, BehaviorSpec]


@record("sampler")
class Sampler:
    """Where a simulator draws an environment parameter from, whenever it needs a value.

    Attributes:
        kind: of the distribution.
        values: uniform: least and greatest; gaussian: mean and standard deviation; multirangeuniform: least and
            greatest of each range, which are drawn from in proportion to their widths.
        seed: for the random source of this parameter in this simulator.
    """

    kind: Distribution
    values: tuple[float, ...]
    seed: int = 0


@record("reset")
class Reset:
    """The trainer asks for new episodes for all agents; the next Step is their first.

    Attributes:
        parameters: every environment parameter by name: its value, or of one with a sampler a first draw.
        seed: for the simulator's random source, or None to go on with it.
        samplers: by parameter name, for simulators that can draw by themselves.
    """

    parameters: dict[str, float] = field(default_factory=dict)
    seed: int | None = None
    samplers: dict[str, Sampler] = field(default_factory=dict)


@record("decisions")
class Decisions:
    """Agents that want an action now.

    Attributes:
        agents: [n] ids, unique within the behavior and simulator.
        observations: one [n, *shape] per observation of the spec, in its order.
        rewards: [n] reward since the agent's previous decision.
        groups: [n] group ids, 0 for no group; unique within the simulator; None where nobody has one.
        group_rewards: [n] reward of the agent's group since then; None where nobody got one.
        masks: [n, choices of all branches] True = forbidden; None allows everything.
        matches: [n] which agents form one contest; None where the simulator does not say.
        did_continuous: [n, continuous actions] what the agent did since its previous decision where the simulator
            decided by itself, by a person or a script, in [-1, 1]; None where it did as it was told. The rows of agents
            that decide for the first time mean nothing.
        did_discrete: [n, branches] likewise.
    """

    agents: I64
    observations: tuple[Observation, ...]
    rewards: F32
    groups: I64 | None = None
    group_rewards: F32 | None = None
    masks: FlagsMatrix | None = None
    matches: I64 | None = None
    did_continuous: F32Matrix | None = None
    did_discrete: I32Matrix | None = None


@record("ends")
class Ends:
    """Agents whose episode just ended.

    Attributes:
        agents: [m] ids, as in Decisions. The same id may decide again in the same Step: its next episode.
        observations: one [m, *shape] per observation: the last of the episode.
        rewards: [m] reward since the agent's previous decision.
        interrupted: [m] True where a limit or fault cut the episode, False where the task ended.
        group_rewards: [m] reward of the agent's group since then, the group of its last decision; None for none.
        outcomes: [m] result of the match for the agent's team: 1 won, 0.5 drawn, 0 lost; None unsaid.
        matches: [m] contest ids; None unsaid.
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
    """Decisions and ends of one behavior id in one Step; either may be None for no rows."""

    behavior: str
    decisions: Decisions | None = None
    ends: Ends | None = None


@record("statistic")
class Statistic:
    """A number of the simulator's own, shown beside the trainer's."""

    name: str
    value: float
    aggregation: Aggregation = "average"


@record("step")
class Step:
    """Everything that happened since the last Act. The simulator then waits for Act or Reset.

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
    """Actions for the decisions of one behavior id, row by row in the order of that Step.

    Attributes:
        behavior: the id.
        agents: [n] ids, as in the Step.
        continuous: [n, continuous actions] in [-1, 1].
        discrete: [n, branches] chosen index of each branch.
        scripts: [n] which of `Hello.scripts` decides for the agent, from 1: its actions here mean nothing then; 0 where
            they hold. None where they hold for all.
    """

    behavior: str
    agents: I64
    continuous: F32Matrix
    discrete: I32Matrix
    scripts: I32 | None = None


@record("act")
class Act:
    """The trainer's answer to a Step: one entry per behavior that had decisions.

    Attributes:
        sequence: of the Step.
        actions: for its decisions.
        parameters: environment parameters that have changed, as in Reset; the others stay.
        samplers: of these; one without a sampler here is a number from now on.
    """

    sequence: int
    actions: tuple[BehaviorActions, ...]
    parameters: dict[str, float] = field(default_factory=dict)
    samplers: dict[str, Sampler] = field(default_factory=dict)


@record("ping")
class Ping:
    """Asks for a Pong with the same number; both sides may, at any time after Hello."""

    number: int = 0


@record("pong")
class Pong:
    """Answers a Ping."""

    number: int = 0


@record("bye")
class Bye:
    """Ends the conversation in order; nothing follows.

    Attributes:
        reason: for logs.
        steps: as in Hello, when a simulator says it; when the trainer does, those of an adopted player.
    """

    reason: str = ""
    steps: dict[str, int] = field(default_factory=dict)


@record("fault")
class Fault:
    """Says what the other side did wrong; nothing follows."""

    code: str
    got: str
    expected: str
    remedy: str


SimulatorMessage = Hello | Welcome | Adopted | Progress | Behaviors | Reset | Step | Act | Ping | Pong | Bye | Fault
