"""The configurations that we ship, and configurations of ML-Agents, are valid."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sparring.pipeline.games.registry import make
from sparring.pipeline.messages.simulator import Sampler
from sparring.pipeline.settings import read, without_effect
from sparring.pipeline.settings.parameters import curricula, in_lessons
from tests.settings.settings_texts import loaded

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_configuration_is_valid_and_can_be_trained(path: Path) -> None:
    result = read(path)
    assert result.notices == ()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_configuration_names_the_behaviors_of_its_simulators(path: Path) -> None:
    if path.stem.startswith("minigrid"):
        pytest.importorskip("minigrid")
    settings = read(path).settings
    for simulator in settings.simulators:
        assert simulator.name is not None
        game = make(simulator.name, simulator.areas, **simulator.options)
        assert {behavior.partition("?")[0] for behavior in game.behaviors()} == set(settings.behaviors)
        game.close()


def test_each_demo_and_benchmark_has_a_configuration() -> None:
    assert {path.stem for path in CONFIGS} == {
        *("balance", "cartpole", "connect-four", "crowd", "goal", "goals-mixed", "minigrid-empty", "minigrid-memory"),
        "balance-curriculum",
        *("rooms", "scramble", "soccer-scripted", "soccer", "spread-groups", "spread", "tag"),
        *("balance-gail", "goal-gail", "key-door-curiosity", "key-door-demonstrations", "key-door-rnd"),
        *("cartpole-sac", "key-door-sac"),
    }


TRAINER = """
    {name}:
      trainer_type: poca
      hyperparameters: {{batch_size: 512, buffer_size: 4096, learning_rate: 0.0003, learning_rate_schedule: constant}}
      network_settings: {{normalize: false, hidden_units: 64, num_layers: 2, vis_encode_type: simple}}
      reward_signals: {{extrinsic: {{gamma: 0.99, strength: 1.0}}}}
      keep_checkpoints: 5
      max_steps: 30000000
      time_horizon: 1000
      summary_freq: 10000
      self_play: {{save_steps: 50000, team_change: 200000, swap_steps: {swap}, window: 10,
                  play_against_latest_model_ratio: 0.5, initial_elo: 1200.0}}
"""


def test_an_asymmetric_self_play_file_of_ml_agents_is_valid() -> None:
    text = "behaviors:" + TRAINER.format(name="Keeper", swap=1000) + TRAINER.format(name="Attacker", swap=4000)
    settings = loaded(text).settings
    ghosts = [behavior.self_play for behavior in settings.behaviors.values()]
    assert [ghost.swap_steps for ghost in ghosts if ghost] == [1000, 4000]
    assert settings.overlap == 1


def test_a_symmetric_self_play_file_of_ml_agents_that_is_not_threaded_is_lockstep() -> None:
    text = "behaviors:" + TRAINER.format(name="Player", swap=2000) + "      threaded: false\n"
    assert loaded(text).settings.overlap == 0


def test_a_file_of_ml_agents_for_sac_is_valid() -> None:
    text = """
        behaviors:
          Hall:
            trainer_type: sac
            hyperparameters: {learning_rate: 0.0003, learning_rate_schedule: constant, batch_size: 512,
                              buffer_size: 200000, buffer_init_steps: 0, tau: 0.005, steps_per_update: 10.0,
                              save_replay_buffer: false, init_entcoef: 0.1, reward_signal_steps_per_update: 10.0}
            network_settings: {normalize: false, hidden_units: 128, num_layers: 2, vis_encode_type: simple,
                               memory: {sequence_length: 64, memory_size: 128}}
            reward_signals: {extrinsic: {gamma: 0.99, strength: 1.0}}
            keep_checkpoints: 5
            max_steps: 4000000
            time_horizon: 64
            summary_freq: 10000
        """
    found = loaded(text)
    assert found.notices == ()
    assert found.settings.behaviors["Hall"].hyperparameters.model_dump()["steps_per_update"] == 10.0


def test_an_imitation_file_of_ml_agents_is_valid() -> None:
    behavior = loaded(
        """
        behaviors:
          Tower:
            trainer_type: ppo
            max_steps: 1.0e7
            hyperparameters: {batch_size: 128, buffer_size: 2048, beta: 0.01}
            reward_signals:
              extrinsic: {strength: 1.0, gamma: 0.99}
              curiosity: {strength: 0.02, gamma: 0.99, encoding_size: 256}
              gail: {strength: 0.01, gamma: 0.99, encoding_size: 128, demo_path: demos/Tower.demo}
            behavioral_cloning: {demo_path: demos/Tower.demo, steps: 150000, strength: 0.5}
        """
    ).settings.behaviors["Tower"]
    assert behavior.max_steps == 10_000_000
    assert list(behavior.reward_signals.named()) == ["extrinsic", "gail", "curiosity"]


WRITTEN_BY_ML_AGENTS = """
default_settings: null
behaviors:
  Jumper:
    trainer_type: ppo
    hyperparameters:
      {batch_size: 64, buffer_size: 12000, learning_rate: 0.0003, beta: 0.001, epsilon: 0.2, lambd: 0.99, num_epoch: 3,
       shared_critic: false, learning_rate_schedule: linear, beta_schedule: constant, epsilon_schedule: linear}
    checkpoint_interval: 500000
    network_settings: &network
      {normalize: true, hidden_units: 128, num_layers: 2, vis_encode_type: simple, memory: null,
       goal_conditioning_type: hyper, deterministic: false}
    reward_signals:
      extrinsic:
        gamma: 0.99
        strength: 1.0
        network_settings: {<<: *network, normalize: false}
      rnd: {gamma: 0.99, strength: 0.1, network_settings: *network, learning_rate: 0.0001, encoding_size: null}
    init_path: null
    keep_checkpoints: 5
    even_checkpoints: false
    max_steps: 500000
    time_horizon: 1000
    summary_freq: 12000
    threaded: false
    self_play: null
    behavioral_cloning: null
env_settings:
  {env_path: null, env_args: null, base_port: 5005, num_envs: 1, num_areas: 1, timeout_wait: 60, seed: -1,
   max_lifetime_restarts: 10, restarts_rate_limit_n: 1, restarts_rate_limit_period_s: 60}
engine_settings:
  {width: 84, height: 84, quality_level: 5, time_scale: 20, target_frame_rate: -1, capture_frame_rate: 60,
   no_graphics: false, no_graphics_monitor: false}
environment_parameters:
  mass:
    curriculum:
    - value: {sampler_type: constant, sampler_parameters: {seed: 611, value: 2.5}}
      name: mass
      completion_criteria: null
  wall:
    curriculum:
    - value: {sampler_type: constant, sampler_parameters: {seed: 612, value: 0.5}}
      name: low
      completion_criteria: {behavior: Jumper, measure: reward, min_lesson_length: 100, signal_smoothing: true,
                            threshold: 0.75, require_reset: false}
    - value: {sampler_type: uniform, sampler_parameters: {seed: 613, min_value: 1.0, max_value: 4.0}}
      name: high
      completion_criteria: null
  wind: {curriculum: [{value: {sampler_type: multirangeuniform, sampler_parameters: {}}, name: wind}]}
checkpoint_settings:
  {run_id: first, initialize_from: null, load_model: false, resume: false, force: true, train_model: false,
   inference: false, results_dir: results}
torch_settings: {device: null}
debug: false
"""


def test_a_configuration_that_ml_agents_has_written_is_accepted_without_notices() -> None:
    """Its `results/RUN/configuration.yaml` has all keys with their defaults, and numbers as constant samplers."""
    result = loaded(WRITTEN_BY_ML_AGENTS)
    assert not result.notices
    assert not [line for line in without_effect(result.settings) if "extrinsic" in line]
    lessons = in_lessons(result.settings.environment_parameters)
    assert lessons["mass"] == (2.5,)
    (low, high), (wind,) = lessons["wall"], lessons["wind"]
    assert low == 0.5
    samplers = [(one.kind, one.values, one.seed) for one in (high, wind) if isinstance(one, Sampler)]
    assert samplers == [("uniform", (1.0, 4.0), 613), ("multirangeuniform", (0.0, 1.0), -1)]
    assert curricula(result.settings.environment_parameters)["wall"][0].value == "0.5"


def test_a_network_of_the_extrinsic_reward_is_reported_to_have_no_effect() -> None:
    text = WRITTEN_BY_ML_AGENTS.replace("{<<: *network, normalize: false}", "*network")
    lines = [line for line in without_effect(loaded(text).settings) if "extrinsic" in line]
    assert lines == [
        "behaviors.Jumper.reward_signals.extrinsic.network_settings: the simulator's reward needs no network"
    ]


def test_a_curriculum_file_of_ml_agents_is_valid() -> None:
    settings = loaded(
        """
        behaviors:
          Climber: {trainer_type: ppo, threaded: true}
        environment_parameters:
          height:
            curriculum:
            - Lesson0:
                completion_criteria:
                  measure: progress
                  behavior: Climber
                  signal_smoothing: true
                  min_lesson_length: 100
                  threshold: 0.1
                value:
                  sampler_type: uniform
                  sampler_parameters: {min_value: 0.0, max_value: 4.0}
            - Lesson1:
                value: 8.0
        """
    ).settings
    assert settings.overlap == 1
    assert list(settings.environment_parameters) == ["height"]


def test_settings_load_neither_torch_nor_zmq_nor_an_event_loop() -> None:
    code = "import sys, sparring.services.commands.check as _; "
    code += "print([m for m in ('torch', 'zmq', 'anyio', 'gymnasium') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
