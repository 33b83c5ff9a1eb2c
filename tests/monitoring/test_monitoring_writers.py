"""Writers: what they make of events, and how these are given to them."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import structlog
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sparring.pipeline.errors import ServiceError, SettingsError
from sparring.pipeline.files import write_atomically
from sparring.pipeline.monitoring.events import Event
from sparring.pipeline.monitoring.intervals import Interval
from sparring.pipeline.monitoring.writers import RunInfo, Writer, load, settings_of, tensorboard
from sparring.pipeline.monitoring.writers.delivery import Delivery, load_state, state_path
from sparring.pipeline.monitoring.writers.jsonl import JsonLinesSettings
from sparring.pipeline.monitoring.writers.mlagents import MlAgentsWriter
from sparring.pipeline.monitoring.writers.mlagents_stats import StatsAggregationMethod, StatsSummary
from sparring.pipeline.monitoring.writers.tensorboard import TensorBoardWriter
from tests.monitoring.monitoring_fakes import EPOCH_S
from tests.plugin_packages import install

Make = Callable[..., Interval]
SETTINGS = {
    "behaviors": {"Balance": {"max_steps": 5, "self_play": {"window": 3}}, "Other": {"self_play": None}},
    "checkpoint_settings": {"results_dir": "results", "run_id": None},
}


def info(folder: Path) -> RunInfo:
    return RunInfo(id="r1", folder=folder, origin="abc", settings=SETTINGS)


def opened(name: str, folder: Path, **section: Any) -> Writer:
    kind = load(name)
    writer = kind(settings_of(kind, section))
    writer.open(info(folder))
    return writer


# ---------------------------------------------------------------- TensorBoard


def read_back(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator


def scalars_of(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(one.step, one.value) for one in read_back(folder).Scalars(tag)]


def event_files(folder: Path) -> TensorBoardWriter:
    writer = opened("tensorboard", folder)
    assert isinstance(writer, TensorBoardWriter)
    return writer


def test_tensorboard_has_the_names_of_ml_agents(folder: Path, make_interval: Make) -> None:
    means = {
        "Losses/Policy Loss": 0.25,
        "Losses/Value Loss": 0.5,
        "Policy/Beta": 0.005,
        "Policy/Entropy": 1.42,
        "Policy/Epsilon": 0.2,
        "Policy/Extrinsic Value Estimate": 3.0,
        "Policy/Learning Rate": 3e-4,
        "wait": 1.0,
    }
    writer = event_files(folder)
    writer.write(Event("interval", make_interval(means=means, group_reward=7.0).plain()))
    writer.write(Event("checkpoint", {"path": "x"}))
    tags = read_back(folder / "Balance").Tags()["scalars"]
    own = {tag for tag in tags if not tag.startswith("Pipeline/")}
    assert own == {
        "Environment/Cumulative Reward",
        "Environment/Episode Length",
        "Environment/Group Cumulative Reward",
        "Is Training",
        "Losses/Policy Loss",
        "Losses/Value Loss",
        "Policy/Beta",
        "Policy/Entropy",
        "Policy/Epsilon",
        "Policy/Extrinsic Reward",
        "Policy/Extrinsic Value Estimate",
        "Policy/Learning Rate",
    }
    assert scalars_of(folder / "Balance", "Losses/Policy Loss") == [(24_000, 0.25)]
    assert scalars_of(folder / "Balance", "Is Training") == [(24_000, 1.0)]


def test_files_of_any_behavior_stay_in_the_folder_of_the_run(folder: Path, make_interval: Make) -> None:
    event_files(folder).write(Event("interval", make_interval(behavior="..").plain()))
    assert list((folder / "%2E%2E").glob("events.out.tfevents.*"))
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_tensorboard_drops_steps_that_were_rolled_back(folder: Path) -> None:
    files = event_files(folder)
    for step, value in ((10, 1.0), (20, 2.0), (30, 3.0), (15, 1.5), (25, 2.5)):
        files.append("Balance", {"a/b": value}, step, EPOCH_S + step)
    assert scalars_of(folder / "Balance", "a/b") == [(10, 1.0), (15, 1.5), (25, 2.5)]


def test_restarted_writer_continues_in_a_new_event_file(folder: Path) -> None:
    event_files(folder).append("Balance", {"a/b": 1.0}, 10, EPOCH_S)
    event_files(folder).append("Balance", {"a/b": 2.0}, 20, EPOCH_S + 5)
    assert len(list((folder / "Balance").iterdir())) == 2
    assert scalars_of(folder / "Balance", "a/b") == [(10, 1.0), (20, 2.0)]


def test_every_record_of_an_event_file_states_its_length() -> None:
    data = tensorboard.opening(EPOCH_S)
    (length,) = struct.unpack_from("<Q", data)
    assert len(data) == 8 + 4 + length + 4


def test_tensorboard_loads_neither_torch_nor_tensorflow() -> None:
    script = """
import sys
from sparring.pipeline.monitoring.writers import tensorboard
tensorboard.opening(0.0) + tensorboard.event({"a/b": 1.0}, 1, 0.0) + tensorboard.restart(1, 0.0)
print([name for name in ("torch", "tensorflow", "matplotlib", "zmq") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=50)
    assert done.stdout.strip() == "[]"


# ---------------------------------------------------------------- others that are built in


def test_json_lines_are_appended_to_the_file_of_the_user(folder: Path, make_interval: Make) -> None:
    path = folder.parent / "shipped" / "lines.jsonl"
    for target in (str(path), "own/lines.jsonl"):
        for _ in range(2):
            writer = opened("jsonl", folder, path=target)
            writer.write(Event("interval", make_interval().plain()))
    for found in (path, folder / "own" / "lines.jsonl"):
        lines = [json.loads(line) for line in found.read_text().splitlines()]
        assert [(line["run_id"], line["kind"], line["step"]) for line in lines] == [("r1", "interval", 24_000)] * 2


def test_callbacks_get_each_event_also_where_another_one_raises(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_calls.py").write_text(
        "seen = []\nclass Bad:\n    def fail(event):\n        raise KeyError(event)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    writer = opened("callbacks", folder, functions=["own_calls:Bad.fail", "own_calls:seen.append"])
    with pytest.raises(KeyError):
        writer.write(event := Event("match", {}))
    writer = opened("callbacks", folder, functions=["own_calls:Bad.fail", "own_calls:Bad.fail"])
    with pytest.raises(ExceptionGroup, match="several calls failed"):
        writer.write(event)
    assert sys.modules["own_calls"].seen == [event]
    for name, expected in (
        ("no_such:f", "ModuleNotFoundError"),
        ("own_calls:Bad.no", "no"),
        ("own_calls:seen", "func"),
    ):
        with pytest.raises(SettingsError, match=rf"got the callback {name}, .*{expected}"):
            opened("callbacks", folder, functions=[name])


# ---------------------------------------------------------------- delivery


class Collector(Writer):
    """Keeps the steps of intervals; raises or ends the process at some of them."""

    def __init__(self, fails: Callable[[int], BaseException | None] = lambda _: None) -> None:
        super().__init__(None)
        self.steps: list[int] = []
        self.closed = False
        self._fails = fails

    def write(self, event: Event) -> None:
        if event.kind == "interval":
            if (failure := self._fails(event.values["step"])) is not None:
                raise failure
            self.steps.append(event.values["step"])

    def close(self) -> None:
        self.closed = True


class World:
    """A run whose metrics grow, and a clock."""

    def __init__(self, folder: Path, make_interval: Make) -> None:
        self.folder, self._make = folder, make_interval
        self.now_s, self.notes = 0.0, list[str]()

    def train(self, *steps: int) -> None:
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps(self._make(step=step).plain()) + "\n" for step in steps)

    def delivery(self, writer: Writer, *, backlog: int = 100, failures: int = 3, late: bool = False) -> Delivery:
        delivery = Delivery(
            "own",
            writer,
            info(self.folder),
            structlog.get_logger(),
            lambda: self.now_s,
            self.notes.append,
            backlog=backlog,
            failures=failures,
            pause_s=60.0,
            late=late,
        )
        delivery.open()
        return delivery

    @property
    def counts(self) -> Mapping[str, int]:
        state = load_state(state_path(self.folder, "own"))
        assert state is not None
        return dict(state.counts)


@pytest.fixture
def world(folder: Path, make_interval: Make) -> World:
    return World(folder, make_interval)


def drain(delivery: Delivery, *, last: bool = False) -> None:
    while delivery.deliver(last=last):
        pass


def test_restarted_delivery_goes_on_where_the_one_before_has_ended(world: World) -> None:
    for step in (1, 2, 3):
        world.train(step)
        writer = Collector()
        drain(world.delivery(writer))
        assert writer.steps == [step]
    assert world.counts == {"delivered": 3}


def test_process_that_dies_within_an_event_loses_this_one_and_doubles_none(world: World) -> None:
    """A KeyboardInterrupt stands for whatever ends the process."""
    world.train(1, 2, 3, 4)
    writer = Collector(lambda step: KeyboardInterrupt() if step == 2 else None)
    with pytest.raises(KeyboardInterrupt):
        drain(world.delivery(writer))
    after = Collector()
    drain(world.delivery(after))
    assert (writer.steps, after.steps) == ([1], [3, 4])
    assert world.counts == {"delivered": 3, "interrupted": 1}


def test_writer_that_raises_loses_the_event_and_is_left_alone_after_several(world: World) -> None:
    world.train(*range(1, 10))
    writer = Collector(lambda step: ValueError("no") if step in (2, 4, 5, 6) else None)
    delivery = world.delivery(writer)
    drain(delivery)
    assert writer.steps == [1, 3]
    assert world.notes == [
        "ValueError('no'); this interval is lost",
        "ValueError('no'); this interval is lost",
        "raised 3 times in a row; tried again in 60 s",
    ]
    assert not delivery.deliver()
    world.now_s = 61.0
    drain(delivery)
    assert writer.steps == [1, 3, 7, 8, 9]
    assert world.counts == {"delivered": 5, "raised": 4}


def test_at_the_end_all_that_is_left_is_tried_also_after_a_failure(world: World) -> None:
    world.train(1, 2, 3, 4)
    writer = Collector(lambda step: SystemExit(0) if step < 4 else None)
    delivery = world.delivery(writer)
    drain(delivery)
    drain(delivery, last=True)
    delivery.end(Event("end", {"status": "completed", "error": ""}))
    assert (writer.steps, writer.closed) == ([4], True)
    assert world.counts == {"delivered": 2, "raised": 3}


def test_writer_that_is_too_slow_gets_the_newest_events_and_the_others_are_counted(world: World) -> None:
    world.train(*range(1, 8))
    writer = Collector()
    delivery = world.delivery(writer, backlog=5)
    drain(delivery)
    assert writer.steps == [3, 4, 5, 6, 7]
    assert world.counts == {"delivered": 5, "skipped": 2}


def test_writer_that_a_resumed_run_adds_gets_what_follows(world: World) -> None:
    world.train(1, 2)
    writer = Collector()
    delivery = world.delivery(writer, late=True)
    world.train(3)
    drain(delivery)
    assert writer.steps == [3]
    world.train(4)
    after = Collector()
    drain(world.delivery(after, late=True))
    assert after.steps == [4]


def test_full_disk_keeps_no_event_from_the_writer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    world.train(1, 2)
    delivery = world.delivery(writer := Collector())
    monkeypatch.setattr("sparring.pipeline.monitoring.writers.delivery.write_atomically", full)
    drain(delivery)
    monkeypatch.setattr("sparring.pipeline.monitoring.writers.delivery.write_atomically", write_atomically)
    world.train(3)
    drain(delivery)
    assert writer.steps == [1, 2, 3]
    assert world.counts == {"delivered": 3}


# ---------------------------------------------------------------- ML-Agents

STATS_WRITER = """
from typing import Dict, List
from mlagents.trainers.settings import RunOptions
from mlagents.trainers.stats import StatsAggregationMethod, StatsPropertyType, StatsSummary, StatsWriter
from mlagents_envs.logging_util import get_logger

seen = []

class Own(StatsWriter):
    def write_stats(self, category: str, values: Dict[str, StatsSummary], step: int) -> None:
        get_logger(__name__).info("a line")
        entropy = values["Policy/Entropy"]
        seen.append((category, step, entropy.mean, entropy.num, entropy.aggregated_value))

    def add_property(self, category: str, property_type: StatsPropertyType, value) -> None:
        seen.append((category, property_type.name, value))

def get_own(run_options: RunOptions) -> List[StatsWriter]:
    assert isinstance(run_options, RunOptions)
    seen.append((run_options.checkpoint_settings.write_path, run_options.behaviors["Balance"].max_steps))
    assert run_options.as_dict()["checkpoint_settings"]["run_id"] == "r1"
    return [Own()]
"""


@pytest.fixture
def stats_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    site.mkdir()
    install(site, "own_stats", "mlagents.stats_writer", "own = own_stats:get_own", STATS_WRITER)
    install(site, "bad_stats", "mlagents.stats_writer", "bad = bad_stats:get", "import no_such_module")
    monkeypatch.syspath_prepend(str(site))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a writer puts into `sys.modules` is removed after the test."""
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


@pytest.mark.usefixtures("stats_package")
def test_writer_that_was_made_for_ml_agents_runs_as_it_is(tmp_path: Path) -> None:
    """In a process of its own, because its modules stay."""
    script = """
import json, sys
from pathlib import Path
from sparring.pipeline.monitoring.events import Event
from tests.monitoring.test_monitoring_writers import opened
assert "mlagents" not in sys.modules
line = json.loads(Path(sys.argv[1]).read_text())
writer = opened("mlagents", Path(sys.argv[1]).parent, names=["own"])
for event in (Event("interval", line), Event("match", {})):
    writer.write(event)
writer.close()
print(sys.modules["own_stats"].seen)
assert sys.modules["mlagents.trainers.stats"].__doc__.startswith("Stands in")
assert "torch" not in sys.modules
"""
    line = {"behavior": "Balance", "reward": None, "trained": 1, "step": 7, "steps_per_s": 1.0, "lag_mean": None}
    line |= {"lag_max": None, "episodes": 0, "open_episodes": 0, "oldest": 0, "step_counts": {}, "gauges": {}}
    path = tmp_path / "line.json"
    path.write_text(json.dumps({**line, "means": {"Policy/Entropy": 1.5}, "simulators": {}}))
    paths = f"{tmp_path / 'site'}:{Path(__file__).parents[2]}"
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        capture_output=True, text=True, timeout=60, env={"PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(
        [
            ("results/r1", 5),
            ("Balance", "HYPERPARAMETERS", SETTINGS["behaviors"]["Balance"]),
            ("Balance", "SELF_PLAY", True),
            ("Other", "HYPERPARAMETERS", SETTINGS["behaviors"]["Other"]),
            ("Balance", 7, 1.5, 1, 1.5),
        ]
    )


@pytest.mark.usefixtures("stats_package", "stand_in")
def test_package_for_ml_agents_that_cannot_be_imported_is_named(folder: Path) -> None:
    with pytest.raises(SettingsError, match=r"got 'bad' of the package bad_stats, whose bad_stats:get cannot be used"):
        opened("mlagents", folder, names=["bad"])


@pytest.mark.usefixtures("stats_package")
def test_unknown_writer_of_ml_agents_is_refused_with_those_that_are_there() -> None:
    with pytest.raises(ValueError, match=r"got the name 'owm'; expected one in .* \(bad, own\)"):
        settings_of(MlAgentsWriter, {"names": ["owm"]})


def test_summary_of_ml_agents_has_the_numbers_of_its_values() -> None:
    summary = StatsSummary([1.0, 2.0, 6.0], StatsAggregationMethod.AVERAGE)
    assert (summary.mean, summary.num, summary.sum, summary.aggregated_value) == (3.0, 3, 9.0, 3.0)
    assert summary.std == pytest.approx(2.160246899)
    assert StatsSummary([1.0, 2.0], StatsAggregationMethod.SUM).aggregated_value == 3.0
    assert StatsSummary([1.0, 2.0], StatsAggregationMethod.MOST_RECENT).aggregated_value == 2.0
    assert (StatsSummary.empty().mean, StatsSummary.empty().std) == (0.0, 0.0)


def test_modules_of_ml_agents_exist_only_where_a_writer_has_put_them() -> None:
    assert "mlagents" not in sys.modules
    with pytest.raises(ModuleNotFoundError):
        __import__("mlagents.trainers.stats")


@pytest.mark.parametrize(
    ("path", "refused"),
    [
        ("metrics.jsonl", True),
        ("matches.jsonl.1", True),
        ("logs/mine.jsonl", True),
        ("below/../summary.json", True),
        ("writers/jsonl.json", True),
        ("events.jsonl", False),
        ("below/metrics.jsonl", False),
        ("../metrics.jsonl", False),
    ],
)
def test_json_lines_are_not_added_to_files_of_the_run(tmp_path: Path, path: str, refused: bool) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with pytest.raises(ServiceError, match="a file that the run itself writes") if refused else nullcontext():
        opened("jsonl", folder, path=path)


@pytest.mark.parametrize("path", [".", "..", "~nobody-of-this-name/x.jsonl", "a\0b"])
def test_json_lines_need_the_name_of_a_file(path: str) -> None:
    with pytest.raises(ValueError, match="expected the name of a file"):
        JsonLinesSettings(path=path)
