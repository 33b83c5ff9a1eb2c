"""Packages add to this one by entry points, and what is built in is registered in the same way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sparring.pipeline import plugins
from sparring.pipeline.bridges.explain import described_with_place
from sparring.pipeline.coordination.opponents import Side, sample_opponent
from sparring.pipeline.coordination.settings import Candidate, SelfPlaySettings
from sparring.pipeline.errors import CheckpointError, ServiceError, SettingsError
from sparring.pipeline.export.checkpoints import export, load_onnx
from sparring.pipeline.export.layout import trained_policy
from sparring.pipeline.games.registry import make, names
from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.settings import Settings, explain
from sparring.pipeline.settings.load import parse_settings
from sparring.pipeline.settings.writers import unusable
from sparring.pipeline.specs import ActionSpec, BehaviorId, BehaviorSpec, ObservationSpec
from sparring.pipeline.stepping.policies import NetworkPolicy
from tests import plugin_packages

GAME = """
from sparring.pipeline.games.goal import Goal

class Corridor(Goal):
    name = "corridor"

    def __init__(self, areas: int, length: int = 3) -> None:
        super().__init__(areas)
        self.length = length
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    forget()


def forget() -> None:
    own = (plugins.names, plugins.load, plugins.modules, plugins._found, plugins._installed)
    for cached in (*own, explain.models, explain.all_keys):
        cached.cache_clear()


def install(site: Path, package: str, entries: str, code: str = GAME, group: str = "simulators") -> None:
    """Puts a package with entry points there, as an installer does."""
    plugin_packages.install(site, package, f"sparring.{group}", entries, code)
    forget()


def test_simulator_of_a_package_is_one_of_all(site: Path) -> None:
    built_in = names()
    install(site, "corridors", "corridor = corridors:Corridor")
    assert names() == (*built_in, "corridor")
    assert make("corridor", 2, length=5).length == 5  # type: ignore[attr-defined]
    with pytest.raises(SettingsError, match="option 'len' for 'corridor'; expected one of length; did you mean"):
        make("corridor", 1, len=5)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import no_such_module", r"cannot be imported \(ModuleNotFoundError: No"),
        ("raise SystemExit(3)", r"cannot be imported \(SystemExit: 3"),
        ("raise BaseException('own')", r"cannot be imported \(BaseException: own"),
        ("Wall = 5", "is 5; expected a function or a class"),
    ],
)
def test_package_that_cannot_be_used_is_named(site: Path, code: str, why: str) -> None:
    install(site, "broken", "wall = broken:Wall", code)
    sys.modules.pop("broken", None)
    expected = f"got 'wall' of the package broken 1.2, whose broken:Wall {why}"
    with pytest.raises(SettingsError, match=expected):
        make("wall", 1)
    assert make("goal", 1).behaviors()


def test_error_names_the_line_of_a_plugin_and_not_that_of_the_library_which_it_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    install(folder, "mine", "corridor = mine:fail", "import library\n\n\ndef fail():\n    library.fail()\n")
    (folder / "library.py").write_text("def fail():\n    raise KeyError('x')\n")
    try:
        with pytest.raises(KeyError) as caught:
            plugins.load(plugins.SIMULATORS, "corridor")()
        caught.value.__traceback__ = caught.tb.tb_next  # without this test
        assert described_with_place(caught.value) == f"KeyError: 'x' ({folder / 'mine.py'}:5)"
    finally:
        forget()


def test_name_of_two_packages_is_refused_with_both(site: Path) -> None:
    install(site, "first", "corridor = first:Corridor")
    install(site, "second", "corridor = second:Corridor")
    with pytest.raises(SettingsError, match=r"of the package first 1.2, the package second 1.2 in sparring.simulators"):
        make("corridor", 1)


def test_installation_without_entry_points_is_named() -> None:
    with pytest.raises(SettingsError, match=r"got an installation without sparring.none; .* install it anew"):
        plugins.names("sparring.none")


@pytest.mark.slow
def test_simulator_of_a_package_is_checked_and_tried_by_the_commands(site: Path) -> None:
    install(site, "corridors", "corridor = corridors:Corridor")
    config = site / "config.yaml"
    environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}

    def run(*words: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "sparring", *words]
        ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
        return ended.returncode, ended.stdout + ended.stderr

    config.write_text("behaviors: {Goal: {}}\nsimulators:\n  - {name: corridor, options: {len: 3}}\n")
    status, text = run("check", str(config))
    assert (status, "config.yaml:3: simulators[0].options.len" in text) == (1, True), text
    config.write_text("behaviors: {Goal: {}}\nsimulators:\n  - {name: corridor, options: {length: 3}}\n")
    assert run("check", str(config))[0] == 0
    status, text = run("try", "corridor", "--option", "length=4")
    assert status == 0, text


# ---------------------------------------------------------------- trainers

SQUASHED = """
import numpy as np
import torch
from sparring.pipeline.learning.actor_critic import ActorCritic
from sparring.pipeline.learning.algorithm import Algorithm
from sparring.pipeline.learning.settings import TrainerHyperparameters
from sparring.pipeline.networks.actor import Actor

class SquashedGaussian:
    def sample(self, head, masks, source, deterministic=False):
        means, log_sigmas = np.split(head, 2, 1)
        noise = 0.0 if deterministic else source.standard_normal(means.shape, np.float32)
        raw = np.tanh(means + noise * np.exp(log_sigmas))
        return raw, np.zeros((len(head), 0), np.int32), np.zeros(len(head), np.float32)

class SquashedActor(Actor):
    @staticmethod
    def gains(actions, settings):
        return [1.0] * 2 * actions.continuous

    def sampler(self):
        return SquashedGaussian()

    def executed(self, continuous):
        return continuous

    def continuous(self, head, *, sampled):
        means, log_sigmas = head.chunk(2, 1)
        return (means + torch.randn_like(means) * log_sigmas.exp() if sampled else means).tanh()

    def continuous_onnx(self, graph, head, *, sampled, output=""):
        count = self.actions.continuous
        means = graph.slice(head, 0, count)
        if sampled:
            sigmas = graph.add("Exp", graph.slice(head, count, 2 * count))
            means = graph.add("Add", means, graph.add("Mul", graph.add("RandomNormalLike", means), sigmas))
        return graph.add("Tanh", means, output=output)

class Untrained(Algorithm):
    def __init__(self, parts, hyper):
        actor = hyper.actor(parts.spec, parts.settings.network_settings, parts.generator)
        self.networks = ActorCritic(actor, None, parts.settings)
        self.optimizer, self.signals = parts.adam(self.networks.modules), parts.signals()

    def update(self, batch, version, trained):
        raise NotImplementedError

class Squashed(TrainerHyperparameters):
    tau: float = 0.005
    has_limited_lag = False

    def algorithm(self, parts):
        return Untrained(parts, self)

    @classmethod
    def actor(cls, spec, settings, generator=None, values=0):
        return SquashedActor(spec, settings, generator, values)

    def step_budget(self, overlap):
        return 7 + overlap
"""
SPEC = BehaviorSpec(observations=(ObservationSpec(name="seen", shape=(3,)),), actions=ActionSpec(continuous=2))
CONFIG = "behaviors: {A: {trainer_type: squashed, hyperparameters: {tau: 0.01, buffer_size: 64}}}"


def test_trainer_of_a_package_brings_its_section_actor_budget_and_export(site: Path, tmp_path: Path) -> None:
    install(site, "squash", "squashed = squash:Squashed", SQUASHED, "trainers")
    settings = parse_settings(CONFIG, "run.yaml").settings
    behavior = settings.behaviors["A"]
    assert settings.step_budget(settings.behaviors["A"]) == 8
    assert behavior.hyperparameters.model_dump(exclude_unset=True) == {"tau": 0.01, "buffer_size": 64}
    assert Settings.model_validate_json(json.dumps(settings.written)) == settings
    with pytest.raises(SettingsError, match=r"run.yaml:1: .*tua'; expected one of .*did you mean tau"):
        parse_settings(CONFIG.replace("tau", "tua"), "run.yaml")

    learner = Learner("A", SPEC, behavior, seed=1)
    policy = NetworkPolicy(SPEC, behavior.network_settings, np.random.default_rng(1), trainer="squashed")
    policy.load(learner.weights())
    seen = np.random.default_rng(2).standard_normal((64, 3), np.float32)
    acted = policy.act((seen,), None)
    assert np.abs(acted.executed).max() < 1
    np.testing.assert_array_equal(acted.executed, acted.continuous)
    checkpoint = learner.checkpoint()
    for kind in ("onnx", "torchscript"):
        export(checkpoint, [tmp_path / f"a.{kind}"], kind)  # compares it with the actor
    likeliest = load_onnx((tmp_path / "a.onnx").read_bytes())({"obs_0": seen})["deterministic_continuous_actions"]
    sharp = NetworkPolicy(SPEC, NetworkSettings(deterministic=True), np.random.default_rng(1), trainer="squashed")
    sharp.load(learner.weights())
    np.testing.assert_allclose(likeliest, sharp.act((seen,), None).executed, atol=1e-6)

    other = Learner("A", SPEC, parse_settings("behaviors: {A: {}}", "run.yaml").settings.behaviors["A"], seed=1)
    with pytest.raises(CheckpointError, match="got a checkpoint with trainer squashed; expected trainer ppo"):
        other.restore(checkpoint)


def test_checkpoint_of_a_trainer_that_is_not_installed_names_it(site: Path) -> None:
    install(site, "squash", "squashed = squash:Squashed", SQUASHED, "trainers")
    checkpoint = Learner("A", SPEC, parse_settings(CONFIG, "run.yaml").settings.behaviors["A"], seed=1).checkpoint()
    (site / "squash-1.2.dist-info" / "entry_points.txt").unlink()
    forget()
    with pytest.raises(SettingsError, match=r"got 'squashed'; expected one of bc, poca, ppo, sac; .*sparring.trainers"):
        trained_policy(checkpoint)


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("group", "text"),
    [
        ("trainers", "{trainer_type: bad}"),
        ("reward_signals", "{reward_signals: {bad: {}}}"),
        ("encoders", "{network_settings: {vis_encode_type: bad}}"),
        ("encoders", "{network_settings: {encoders: {eye: bad}}}"),
        ("opponents", "{self_play: {opponent_sampling: {type: bad}}}"),
    ],
)
@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("import nothing_of_this_name", "cannot be imported"),
        ("Bad = 5", "is 5; expected a subclass of sparring"),
        ("class Bad: pass", "is <class 'broken.Bad'>; expected a subclass of sparring"),
    ],
)
def test_broken_package_is_named_where_it_is_used_and_harmless_elsewhere(
    site: Path, group: str, text: str, code: str, problem: str
) -> None:
    install(site, "broken", "bad = broken:Bad", code, group)
    sys.modules.pop("broken", None)
    parse_settings("behaviors: {A: {}}", "run.yaml")
    with pytest.raises(SettingsError, match="unknown key"):
        parse_settings("behaviors: {A: {maximal_steps: 5}}", "run.yaml")
    with pytest.raises(SettingsError, match=f"run.yaml:1: .*the package broken 1.2, whose broken:Bad {problem}"):
        parse_settings(f"behaviors: {{A: {text}}}", "run.yaml")


SAMPLINGS = """
from sparring.pipeline.coordination.settings import OpponentSampling

class Short(OpponentSampling):
    def weights(self, candidates):
        return [1.0]

class Negative(OpponentSampling):
    def weights(self, candidates):
        return [-1.0 for _ in candidates]

class Raising(OpponentSampling):
    def weights(self, candidates):
        raise KeyError("x")

class Leaving(OpponentSampling):
    def weights(self, candidates):
        raise SystemExit(3)

class Huge(OpponentSampling):
    def weights(self, candidates):
        return [10**400 for _ in candidates]

class Newest(OpponentSampling):
    def weights(self, candidates):
        return [float(one is candidates[-1]) for one in candidates]
"""


KINDS = ("Short", "Negative", "Raising", "Leaving", "Huge", "Newest")


def test_sampling_of_a_package_decides_and_a_failing_one_is_named(site: Path) -> None:
    entries = "\n".join(f"{name.lower()} = samplings:{name}" for name in KINDS)
    install(site, "samplings", entries, SAMPLINGS, "opponents")
    behavior_id = BehaviorId(name="A", team=1)

    def sampled(kind: str) -> int:
        rules = SelfPlaySettings.model_validate({"opponent_sampling": kind, "play_against_latest_model_ratio": 0.0})
        side = Side(rules, max_steps=100, version=9, window=[2, 4, 6])
        return sample_opponent((1, 2), behavior_id, side, lambda version: Candidate(version, 0.5, 1))

    assert sampled("newest") == 6
    refused = {"short": r"\[1.0\]", "negative": "-1.0", "raising": "KeyError: 'x'"}
    for kind, got in {**refused, "leaving": "SystemExit: 3", "huge": "OverflowError: "}.items():
        with pytest.raises(
            ServiceError, match=rf"got .*{got}.* from opponent_sampling {kind} of the package samplings"
        ):
            sampled(kind)


WRITERS = """
from sparring.pipeline.monitoring.writers import Writer

class Unlicensed(Writer):
    @classmethod
    def missing(cls):
        raise RuntimeError("no licence")

class Odd(Writer):
    settings_model = 5
"""


def test_writer_that_cannot_say_what_it_needs_is_named_and_ends_no_run(site: Path) -> None:
    install(site, "odd_writers", "unlicensed = odd_writers:Unlicensed\nodd = odd_writers:Odd", WRITERS, "writers")
    parse_settings("behaviors: {A: {}}\nwriters: {unlicensed: {}, odd: {}}", "run.yaml")
    assert [*unusable("unlicensed")] == ["RuntimeError: no licence; without it, the run goes on without this writer"]
    (line,) = unusable("odd")
    assert "got 'odd' of the package odd_writers 1.2 with settings_model 5; expected a subclass of pydantic" in line


BARE = """
from sparring.pipeline.learning.settings import TrainerHyperparameters

class Bare(TrainerHyperparameters):
    pass
"""


def test_trainer_without_an_algorithm_is_named(site: Path) -> None:
    install(site, "bare", "bare = bare:Bare", BARE, "trainers")
    settings = parse_settings("behaviors: {A: {trainer_type: bare}}", "run.yaml").settings.behaviors["A"]
    with pytest.raises(ServiceError, match=r"got Bare without algorithm\(\); expected one; define it"):
        Learner("A", SPEC, settings, seed=1)


VALIDATORS = """
from pydantic import model_validator
from sparring.pipeline.networks.settings import EncoderSettings
from sparring.pipeline.monitoring.writers import Writer, WriterSettings

class Eye(EncoderSettings):
    @model_validator(mode="after")
    def _fits(self):
        raise KeyError("pixels")

class Section(WriterSettings):
    @model_validator(mode="after")
    def _fits(self):
        raise KeyError("pixels")

class Pen(Writer):
    settings_model = Section
"""


@pytest.mark.parametrize(
    ("group", "entry", "text"),
    [
        ("encoders", "eye = checks:Eye", "behaviors: {A: {network_settings: {encoders: {view: eye}}}}"),
        ("writers", "pen = checks:Pen", "behaviors: {A: }\nwriters: {pen: {}}"),
    ],
)
def test_section_whose_validators_fail_is_refused_with_its_line(site: Path, group: str, entry: str, text: str) -> None:
    install(site, "checks", entry, VALIDATORS, group)
    with pytest.raises(SettingsError, match=r"run.yaml:\d: .*got KeyError: 'pixels' from .*; mend its validators"):
        parse_settings(text, "run.yaml")
