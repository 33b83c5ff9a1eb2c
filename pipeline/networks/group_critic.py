# ruff: noqa: N803, N806 (names end in their shape)
"""The group critic computes one value from all members' observations, and each member's baseline from its teammates.

M timesteps (of one group each), N most members in one, J most of these with our own behavior name, which come first; D
decisions with baselines; K rows of members' observations and actions, each embedded once; S reward signals; U units, H
heads, u units of a head, Q sequences, E values of a recurrent memory.
"""

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from sparring.pipeline.networks.actor import VALUE_GAIN
from sparring.pipeline.networks.encoders import Encoder, Inputs
from sparring.pipeline.networks.layers import Layout, Memory, ResidualAttention, heads, mean_of
from sparring.pipeline.networks.perceptron import FUNCTIONS, HIDDEN_GAINS, Perceptron, hidden_layer, linear
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.specs import BehaviorSpec

FEATURES_OF_A_PAIR: Final = 8
"""Features per unit of each member: input, query, key and value, without and with its action."""


class GroupTimesteps(NamedTuple):
    """Describes members at some timesteps, their last observations and actions, and decisions that need baselines.

    Attributes:
        inputs: by behavior name, prepared observations of the rows, our own name first; None without rows.
        actions: by behavior name, [K of the name, features] of the actions; None without rows.
        rows: [tokens] row of each member that is present, timestep by timestep, our own name first.
        places: [tokens] its position in [M * N]; None if all timesteps have N members.
        shape: M, N, J.
        counts: [M] members present.
        decided: [D] timestep * J + member of the decisions whose baselines are wanted.
    """

    inputs: tuple[Inputs | None, ...]
    actions: tuple[Tensor | None, ...]
    rows: Tensor
    places: Tensor | None
    shape: tuple[int, int, int]
    counts: Tensor
    decided: Tensor


class GroupCritic(nn.Module):
    """Combines embeddings for every behavior name, attention over the members that are present, and two heads.

    A member is embedded twice: by its observation, and by observation and action. The second embedding adds a learned
    term to the first, so both train the observation's part. The value attends to all members without their actions. The
    baseline of a member attends to itself without its action and to its teammates with theirs (Cohen et al. 2021, arXiv
    2111.05992): embeddings, queries, keys and values are computed once for each member, and shared by the baselines of
    all its teammates.

    Args:
        own: our behavior name.
        specs: specs of the behavior names in the groups, including our own.
        settings: the network's settings.
        signals: names of the reward signals, in the order of the heads.
        generator: random source of the initial weights.

    Attributes:
        names: behavior names with embeddings, our own first.
        largest: most members of any group so far.

    Raises:
        Unsupported: no network can be built for the spec or the settings.
    """

    largest: Tensor

    def __init__(
        self,
        own: str,
        specs: Mapping[str, BehaviorSpec],
        settings: NetworkSettings,
        signals: tuple[str, ...],
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        units, kind = settings.hidden_units, settings.initialization
        self._settings = settings
        self._activate = FUNCTIONS[settings.activation].forward
        self.names: list[str] = []
        self.encoders = nn.ModuleList()
        self.observed = nn.ModuleList()
        self.acted = nn.ModuleList()
        for name in (own, *(name for name in specs if name != own)):
            self.add(name, specs[name], generator)
        self.attention = ResidualAttention(units, generator)
        hidden, gains = [units] * (settings.num_layers - 1), [HIDDEN_GAINS[kind]] * units
        self.trunk = Perceptron(units, hidden, gains, settings, generator)
        self.memory = None if settings.memory is None else Memory(units, settings.memory.memory_size, generator)
        encoding = units if settings.memory is None else settings.memory.memory_size // 2
        self.value = linear(encoding + 1, len(signals), VALUE_GAIN, generator, kind)
        self.baseline = linear(encoding + 1, len(signals), VALUE_GAIN, generator, kind)
        self.register_buffer("largest", torch.ones((), dtype=torch.int64))

    def add(self, name: str, spec: BehaviorSpec, generator: torch.Generator) -> Encoder:
        """Adds embeddings for a behavior name, and returns the encoder that prepares its observations.

        Those of our own name, the first, are prepared by the actor's encoder, which has the statistics.
        """
        changes = {"previous_action": False} if self.encoders else {"normalize": False}
        encoder = Encoder(spec, self._settings.model_copy(update=changes), generator)
        units, done = self._settings.hidden_units, spec.actions.continuous + spec.actions.mask_size
        self.encoders.append(encoder)
        self.observed.append(hidden_layer(encoder.size, units, self._settings, generator))
        self.acted.append(hidden_layer(done, units, self._settings, generator))
        self.names.append(name)
        return encoder

    def forward(self, timesteps: GroupTimesteps) -> tuple[Tensor, Tensor]:
        """Returns values [M, S] and baselines [D, S] of a critic without memory."""
        return self.remember(timesteps, None)[:2]

    def remember(self, timesteps: GroupTimesteps, state: tuple[Layout, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns values [M, S], baselines [D, S], and the memory after each sequence [Q, E], empty without memory.

        Args:
            timesteps: the members present.
            state: of a critic with memory: the sequences of the timesteps, then of the decisions, and the memory [Q, E]
                before each.
        """
        encoded, counts = self.encode(timesteps)
        hidden, after = self._activate(self.trunk(encoded)), counts.new_zeros(0)
        if self.memory is not None and state is not None:
            hidden, after = self.memory.through(hidden, *state)
        encoding = torch.cat([hidden, (counts * (2 / self.largest) - 1).unsqueeze(1)], 1)
        groups = len(timesteps.counts)
        return self.value(encoding[:groups]), self.baseline(encoding[groups:]), after

    def encode(self, timesteps: GroupTimesteps) -> tuple[Tensor, Tensor]:
        """Returns means over the members of timesteps, then of decisions, [M + D, U]; and their numbers of members."""
        group, here_MN = self._gather(timesteps)
        units = group.shape[2] // FEATURES_OF_A_PAIR
        inputs_MNU, projected_MNX, acted_MNU, acted_MNX = torch.split(group, [units, 3 * units, units, 3 * units], 2)
        value_MU = mean_of(self.attention.continued(inputs_MNU, projected_MNX, here_MN), here_MN)
        if not len(timesteps.decided):
            return value_MU, timesteps.counts
        if timesteps.shape[1] == 1:  # groups of one: the baseline has no teammates' actions to attend to
            alone_DU = value_MU.index_select(0, timesteps.decided)
            return torch.cat([value_MU, alone_DU]), timesteps.counts.new_ones(len(value_MU) + len(alone_DU))
        baseline_MJU = self._baselines((inputs_MNU, acted_MNU), (projected_MNX, acted_MNX), here_MN, timesteps.shape[2])
        counts_D = timesteps.counts.index_select(0, timesteps.decided // timesteps.shape[2])
        baseline_DU = baseline_MJU.flatten(0, 1).index_select(0, timesteps.decided)
        return torch.cat([value_MU, baseline_DU]), torch.cat([timesteps.counts, counts_D])

    # ---------------------------------------------------------------- inside

    def _gather(self, timesteps: GroupTimesteps) -> tuple[Tensor, Tensor | None]:
        """Returns every member's eight features per unit, [M, N, 8 U], and which are present; None for all."""
        embedded = []
        for encoder, observed, acted, rows, done in zip(
            self.encoders, self.observed, self.acted, timesteps.inputs, timesteps.actions, strict=True
        ):
            if rows is not None and done is not None:
                sums = observed(encoder(rows))
                embedded.append((self._activate(sums), self._activate(sums + acted(done))))
        m, n, _ = timesteps.shape
        if not embedded:  # no member is present
            nothing = timesteps.counts.new_zeros(m, n, FEATURES_OF_A_PAIR * self._settings.hidden_units)
            return nothing, timesteps.counts.new_zeros(m, n, dtype=torch.bool)
        pairs = [torch.cat(column) if len(column) > 1 else column[0] for column in zip(*embedded, strict=True)]
        inputs = [self.attention.before(column) for column in pairs]
        features = torch.cat([part for column in inputs for part in (column, self.attention.project(column))], 1)
        tokens = features.index_select(0, timesteps.rows)
        if timesteps.places is None:
            return tokens.view(m, n, -1), None
        padded = tokens.new_zeros(m * n, tokens.shape[1]).index_copy(0, timesteps.places, tokens)
        here = tokens.new_zeros(m * n, dtype=torch.bool)
        here[timesteps.places] = True
        return padded.view(m, n, -1), here.view(m, n)

    def _baselines(
        self, inputs: tuple[Tensor, Tensor], projected: tuple[Tensor, Tensor], here_MN: Tensor | None, own: int
    ) -> Tensor:
        """Returns [M, J, U] means over members, without the action of each of the first J in turn.

        Member j's own action is left out, not subtracted, so that no trace of it is left, not even by rounding: its
        action's key and value are masked, and those without the action take their place.
        """
        n = inputs[0].shape[1]
        (queries, keys, values), (acted_queries, acted_keys, acted_values) = map(heads, projected)
        scale = 1 / math.sqrt(queries.shape[3])
        itself_JN = torch.eye(n, dtype=torch.bool, device=queries.device)[:own]
        # Logits [M, H, J, query, key] are four cases: whether the query, and whether the key, is member j.
        acted_MHNN = acted_queries @ acted_keys.transpose(2, 3) * scale
        to_own_MHNJ = acted_queries @ keys[:, :, :own].transpose(2, 3) * scale
        from_own_MHJN = queries[:, :, :own] @ acted_keys.transpose(2, 3) * scale
        own_MHJ = (queries[:, :, :own] * keys[:, :, :own]).sum(3) * scale
        as_key_J1N, as_query_JN1 = itself_JN[:, None], itself_JN[:, :, None]
        from_own = torch.where(itself_JN, own_MHJ.unsqueeze(3), from_own_MHJN).unsqueeze(3)
        to_own = to_own_MHNJ.transpose(2, 3).unsqueeze(4)
        logits = torch.where(as_query_JN1, from_own, torch.where(as_key_J1N, to_own, acted_MHNN.unsqueeze(2)))
        if here_MN is not None:
            seen_MN = here_MN | ~here_MN.any(1, keepdim=True)  # a softmax over nothing is not a number
            logits = logits.masked_fill(~seen_MN[:, None, None, None], -torch.inf)
        weights = logits.softmax(4)
        of_teammates = weights.masked_fill(as_key_J1N, 0.0)
        of_own = (weights * as_key_J1N).sum(4)
        attended = (of_teammates.flatten(2, 3) @ acted_values).view(*of_teammates.shape[:4], -1)
        attended = attended + of_own.unsqueeze(4) * values[:, :, :own].unsqueeze(3)
        merged_MJNU = self.attention.merge(attended.permute(0, 2, 3, 1, 4).flatten(3))
        residual = torch.where(as_query_JN1, inputs[0][:, :own].unsqueeze(2), inputs[1].unsqueeze(1))
        result: Tensor = self.attention.after(merged_MJNU + residual)
        if here_MN is None:
            return result.mean(2)
        share_MN = here_MN / here_MN.sum(1, keepdim=True).clamp(min=1)
        return torch.einsum("mjnu,mn->mju", result, share_MN)
