"""Configurations that several tests share."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.settings.load import LoadedSettings, Overrides, parse_settings

NAME = "run.yaml"

EVERY_KEY = """\
default_settings:
  time_horizon: 96
behaviors:
  Ball:
    trainer_type: ppo
    hyperparameters:
      batch_size: 64
      buffer_size: 12000
      learning_rate: 5.0e-4
      beta: 1.0e-3
      epsilon: 0.25
      lambd: 0.99
      num_epoch: 4
      shared_critic: true
      learning_rate_schedule: constant
      beta_schedule: linear
      epsilon_schedule: constant
      clip_value_loss: true
      decoupled_objective: false
      ratio: joint
      max_grad_norm: 0.5
      adam_epsilon: 1.0e-5
    network_settings:
      normalize: true
      hidden_units: 256
      num_layers: 3
      vis_encode_type: resnet
      encoders:
        camera:
          type: nature_cnn
      memory:
        sequence_length: 32
        memory_size: 64
      goal_conditioning_type: none
      deterministic: true
      previous_action: true
      activation: tanh
      initialization: orthogonal
      action_limit: 1.5
    reward_signals:
      extrinsic:
        gamma: 0.9
        strength: 2.0
        normalize: true
        network_settings:
          hidden_units: 16
      gail:
        gamma: 0.8
        strength: 0.01
        network_settings:
          normalize: true
          hidden_units: 32
          num_layers: 1
          vis_encode_type: simple
          encoders:
            camera:
              type: match3
          memory:
            sequence_length: 16
            memory_size: 32
          goal_conditioning_type: hyper
          previous_action: true
          deterministic: false
          activation: silu
          initialization: he_normal
          action_limit: 2.5
        learning_rate: 1.0e-3
        encoding_size: 128
        demo_path: demos/expert.demo
        demo_actions: previous
        use_actions: true
        use_vail: true
        gradient_penalty: 1.0
        reward: airl
      curiosity:
        gamma: 0.7
        strength: 0.02
        network_settings:
          hidden_units: 64
        learning_rate: 2.0e-3
        encoding_size: 256
      rnd:
        gamma: 0.6
        strength: 0.03
        network_settings:
          num_layers: 1
        learning_rate: 4.0e-3
        encoding_size: 512
    behavioral_cloning:
      demo_path: demos/expert.demo
      demo_actions: own
      steps: 150000
      strength: 0.5
      samples_per_update: 512
      num_epoch: 2
      batch_size: 128
    offline:
      demo_path: demos/steps
      demo_actions: own
      objective: iq_learn
      weight: 0.5
    init_path: results/earlier/Ball
    keep_checkpoints: 7
    checkpoint_interval: 20000
    even_checkpoints: true
    max_steps: 4.0e5
    time_horizon: 128
    summary_freq: 12000
    threaded: true
    self_play:
      save_steps: 50000
      team_change: 200000
      swap_steps: 1000
      window: 12
      play_against_latest_model_ratio: 0.4
      initial_elo: 1300.0
      elo_k: 8.0
      opponent_sampling:
        type: prioritized
        power: 3.0
      keep_all_snapshots: true
      opponents:
        - checkpoint: results/old/A
          weight: 0.5
        - scripted: keeper
env_settings:
  env_path: builds/ball.x86_64
  env_args:
    - --quality
  base_port: 5006
  num_envs: 2
  num_areas: 3
  seed: 7
  timeout_wait: 30
  max_lifetime_restarts: 5
  restarts_rate_limit_n: 2
  restarts_rate_limit_period_s: 90
engine_settings:
  width: 100
  height: 200
  quality_level: 3
  time_scale: 10.0
  target_frame_rate: 60
  capture_frame_rate: 30
  no_graphics: true
  no_graphics_monitor: true
environment_parameters:
  mass: 2.5
  gravity:
    sampler_type: uniform
    sampler_parameters:
      min_value: 8.0
      max_value: 11.0
      seed: 5
  wind:
    sampler_type: gaussian
    sampler_parameters:
      mean: 0.5
      st_dev: 0.25
  friction:
    sampler_type: constant
    sampler_parameters:
      value: 0.75
      seed: 6
  size:
    sampler_type: multirangeuniform
    sampler_parameters:
      intervals:
        - [0.5, 1.0]
        - [2.0, 3.0]
  wall:
    curriculum:
      - name: low
        completion_criteria:
          measure: progress
          behavior: Ball
          signal_smoothing: false
          min_lesson_length: 100
          threshold: 0.3
          require_reset: true
        value: 1.5
      - name: high
        value:
          sampler_type: uniform
          sampler_parameters:
            min_value: 4.0
            max_value: 7.0
checkpoint_settings:
  run_id: first
  initialize_from: earlier
  load_model: false
  resume: false
  force: true
  train_model: true
  inference: true
  results_dir: runs
torch_settings:
  device: cpu
  acting_device: cpu
  matmul_precision: high
debug: true
simulators:
  - name: goal
    count: 2
    areas: 12
    options:
      discrete: true
    seed: 3
  - command:
      - ./game
      - "{address}"
    count: 3
writers:
  tensorboard: false
  jsonl:
    path: lines.jsonl
pipeline:
  mode: overlap
  max_policy_lag: 4
  step_budget: 50000
  address: tcp://127.0.0.1:5005
  websocket_address: tcp://127.0.0.1:5010
  websocket_origins: ["http://localhost:8000"]
  player_host: "::1"
  stepping_processes: 2
  max_agents: 1000
  heartbeat_s: 2.0
  simulator_timeout_s: 20.0
  credentials: token
  encrypt: false
  limits:
    connections: 100
    connections_per_host: 50
    handshakes: 20
    handshake_timeout_s: 5.0
    message_bytes: 1000000
    arrays: 100
    steps_per_s: 1000.0
    asides_per_s: 10.0
    bytes_per_s: 1000000.0
    receiving_bytes: 1000000
    sending_bytes: 100000
    agents: 1000
    behaviors: 4
    unnamed_behaviors: 2
    observation_bytes: 10000
    actions: 100
    statistics: 10
  transport: tcp
  recovery_interval: 15.0
  capacities:
    step_batches: 32
    segments: 16
  stall_timeout_s: 100.0
  stalls:
    budget: 5
    period_s: 900.0
  logs:
    size_mb: 2.5
    kept: 7
  restarts:
    budget: 3
    period_s: 60.0
    backoff_s: 0.25
    backoff_max_s: 5.0
  writer_limits:
    timeout_s: 30.0
    backlog: 100
    failures: 2
  assembly: per stepping
  ranks: 2
  torch_threads:
    learning: 2
    stepping: 3
  leave_cores_to_learners: false
  stop_timeout_s: 10.0
  export: false
  metrics_address: tcp://127.0.0.1:9400
  training_analytics: true
  placement:
    stepping:
      num_cpus: 2.0
      num_gpus: 0.25
      resources:
        near: 1.0
      per: node
    assembly:
      num_cpus: 1.5
      num_gpus: 0.125
      resources:
        wide: 1.0
    learning:
      num_cpus: 4.0
      num_gpus: 1.0
      resources:
        fast: 1.0
    simulators:
      num_cpus: 0.5
      num_gpus: 0.5
      resources:
        unity: 1.0
    strategy: SPREAD
    wait_s: 30.0
    timeout_s: 90.0
  interface: eth1
  keys: keys
  python_path: [environments]
"""


EVERY_KEY_OF_SAC = """\
behaviors:
  Pole:
    trainer_type: sac
    hyperparameters:
      batch_size: 256
      buffer_size: 200000
      learning_rate: 5.0e-4
      learning_rate_schedule: linear
      buffer_init_steps: 1000
      tau: 0.01
      steps_per_update: 10.0
      save_replay_buffer: true
      init_entcoef: 0.5
      reward_signal_steps_per_update: 20.0
      discrete_target_entropy: 0.6
      n_step: 3
"""


def loaded(text: str, overrides: Overrides | None = None) -> LoadedSettings:
    """Returns the settings of an indented text."""
    return parse_settings(textwrap.dedent(text), NAME, overrides)


def problems(text: str, overrides: Overrides | None = None) -> Sequence[str]:
    """Returns the problems of an indented text, one line each, without the count."""
    try:
        accepted = loaded(text, overrides)
    except SettingsError as error:
        head, *lines = str(error).splitlines()
        assert head == f"{len(lines)} problem{'s' * (len(lines) > 1)} in {NAME}"
        return lines
    raise AssertionError(f"accepted: {accepted}")


def only_problem(text: str, overrides: Overrides | None = None) -> str:
    """Returns the only problem of an indented text."""
    (line,) = problems(text, overrides)
    return line
