"""Stepping sends assembly these records through the queue "steps".

A *slot* is the row of a live agent in its stepping process, for one behavior name; it is reused after the agent's end.
Rows of arrays in one record belong together.
"""

from sparring.pipeline.messages.schema import F32, I32, I64, F32Matrix, Flags, I32Matrix, Masks, Observation, record


@record("joined")
class AgentsStarted:
    """Agents got a slot or another group, or assembly restarted and receives all live agents.

    Attributes:
        slots: [n] slot of each agent.
        agents: [n] id of the agent episode, unique within the source.
        groups: [n] group key, unique within the source; 0 for no group.
        teams: [n] team.
        simulators: [n] connection number of the simulator.
        fresh: [n] True where the episode starts now.
        matchups: [n] number of the matchup that its match is played under; None without self-play.
        lessons: [n] serial of the lessons that its simulator had when its episode began; None without curricula.
    """

    slots: I32
    agents: I64
    groups: I64
    teams: I32
    simulators: I32
    fresh: Flags
    matchups: I64 | None = None
    lessons: I64 | None = None


@record("ended")
class AgentsEnded:
    """The episodes of these agents ended.

    Attributes:
        slots: [n] slot, free from here on.
        observations: one [n, *shape] per observation: the last of the episode.
        rewards: [n] reward since the previous decision.
        interrupted: [n] True where the episode was truncated, False where the task ended.
        group_rewards: [n] group reward since the previous decision; None for none.
        outcomes: [n] team's result: 1 won, 0.5 drawn, 0 lost, -1 not reported; None where no simulator reports one.
    """

    slots: I32
    observations: tuple[Observation, ...]
    rewards: F32
    interrupted: Flags
    group_rewards: F32 | None = None
    outcomes: F32 | None = None


@record("reported")
class OutcomesReported:
    """Agents reached their next decision.

    Attributes:
        slots: [n] slot.
        observations: one [n, *shape] per observation, seen at the decision.
        rewards: [n] reward since the previous decision.
        group_rewards: [n] group reward since then; None for none.
        masks: [n, choices of all branches] True = forbidden at the decision; None where all choices are allowed.
    """

    slots: I32
    observations: tuple[Observation, ...]
    rewards: F32
    group_rewards: F32 | None = None
    masks: Masks | None = None


@record("acted")
class ActionsChosen:
    """Policies chose actions for the decisions last reported; in a later tick where these were backpressured.

    Attributes:
        slots: [n] slot; None where the rows are those of `OutcomesReported`, tick by tick.
        log_probs: [n] log-probability of the joint action.
        versions: [n] policy version that chose.
        continuous: [n, continuous actions] raw sample; None where the behavior has none.
        discrete: [n, branches] chosen index; None where the behavior has none.
        carried: [n, numbers carried] recurrent state and previous action at this decision; None where the network needs
            neither.
    """

    slots: I32 | None
    log_probs: F32
    versions: I64
    continuous: F32Matrix | None = None
    discrete: I32Matrix | None = None
    carried: F32Matrix | None = None


@record("behavior_steps")
class BehaviorSteps:
    """BehaviorSteps hold one or several ticks of stepping for one behavior name.

    The rows of all ticks lie one after the other. A reader applies those of one tick in the order of the columns of
    `rows`, then those of the next.

    Attributes:
        behavior: name.
        produced_before: steps that this source completed for the behavior before the first tick.
        ticks: [t] number of each tick; all events of one tick are simultaneous.
        completed: [t] steps completed by rows of `ended` and `reported`: the other rows had no action pending.
        rows: [t, 5] how many rows of lost, ended, joined, reported and acted belong to each.
        lost: slots whose simulator disconnected or was reset; free from here on.
        ended: agents whose episode ended.
        joined: agents that got a slot.
        reported: agents at their next decision.
        acted: actions chosen.
    """

    behavior: str
    produced_before: int
    ticks: I64
    completed: I64
    rows: I32Matrix
    lost: I32 | None = None
    ended: AgentsEnded | None = None
    joined: AgentsStarted | None = None
    reported: OutcomesReported | None = None
    acted: ActionsChosen | None = None


@record("step_batch")
class StepBatch:
    """A source sends one or several of its ticks.

    Attributes:
        source: stepping's incarnation.
        parts: one for each behavior name.
        introduces: the parts list all live agents: an incarnation of assembly that has no such batch of a source skips
            its others, which describe agents that it does not know.
    """

    source: str
    parts: tuple[BehaviorSteps, ...]
    introduces: bool = False
