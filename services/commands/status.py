"""`sparring status RUN`: shows the state or the outcome of a run, from the files in its folder."""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO

from rich.box import MINIMAL_HEAVY_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sparring.pipeline.errors import BAD_INPUT, SettingsError
from sparring.pipeline.monitoring.console import rate, short
from sparring.pipeline.monitoring.progress import readable
from sparring.services.commands.runs import add_run, find

OLD_S: Final = 10.0
"""A live run writes its status every second; a file older than this means that the run or its monitor has died."""

_EVERY_S: Final = 1.0


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_run(parser)
    parser.add_argument("--watch", action="store_true", help="show it every second until the run has ended")
    parser.add_argument("--json", action="store_true", help="print status and summary as JSON")


def run(
    args: Namespace,
    *,
    stream: TextIO | None = None,
    wall_clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Shows the run; returns the exit status: 0, or 2 where there is no such run.

    Args:
        args: of the command.
        stream: for the output, standard output by default.
        wall_clock: gives seconds since the epoch.
        sleep: waits for a number of seconds.
    """
    stream = stream or sys.stdout
    try:
        folder = _written(find(args.run, args.results_dir))
        if args.json:
            stream.write(json.dumps(read(folder).plain(), indent=2) + "\n")
        elif args.watch:
            _watch(folder, stream, wall_clock, sleep)
        else:
            Console(file=stream).print(show(read(folder), wall_clock()))
    except SettingsError as error:
        sys.stderr.write(f"sparring status: {error}\n")
        return BAD_INPUT
    except KeyboardInterrupt:
        return 0
    return 0


def _written(folder: Path) -> Path:
    """Returns the folder if it holds a file that this command shows.

    Raises:
        SettingsError: it holds none.
    """
    if any((folder / name).is_file() for name in ("status.json", "summary.json")):
        return folder
    raise SettingsError(
        f"got {folder}, which holds neither status.json nor summary.json; expected the folder of a run; "
        f"if the run has only just started, try again in a few seconds"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The content of a run's folder.

    Attributes:
        status: content of `status.json`, None where there is none.
        summary: content of `summary.json`, None where there is none or the run was resumed since.
        self_play: state of self-play in `coordination.json`, None where there is none.
    """

    status: Mapping[str, Any] | None
    summary: Mapping[str, Any] | None
    self_play: Mapping[str, Any] | None = None

    def plain(self) -> dict[str, Any]:
        """Returns the report as plain values for JSON."""
        return {"status": self.status, "summary": self.summary, "self_play": self.self_play}


def read(folder: Path) -> Report:
    """Reads the folder of a run.

    Raises:
        SettingsError: a file is damaged.
    """
    status, summary = _load(folder / "status.json"), _load(folder / "summary.json")
    if (
        status
        and summary
        and not status["ended"]
        and _changed(folder / "status.json") > _changed(folder / "summary.json")
    ):
        summary = None
    coordination = _load(folder / "coordination.json") or {}
    self_play = coordination.get("self_play") or {}
    return Report(status=status, summary=summary, self_play=self_play.get("rules"))


def _changed(path: Path) -> int:
    return path.stat().st_mtime_ns


def _load(path: Path) -> Mapping[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise SettingsError(
            f"got {path}, which is damaged ({error}); expected JSON; remove it: a live run writes it again"
        ) from error
    if not isinstance(content, dict):
        raise SettingsError(f"got {path}, which holds no JSON object; expected one; remove it")
    return content


def _watch(folder: Path, stream: TextIO, wall_clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
    with Live(console=Console(file=stream), auto_refresh=False) as live:
        while True:
            report = read(folder)
            live.update(show(report, wall_clock()), refresh=True)
            if report.summary is not None:
                return
            sleep(_EVERY_S)


# ---------------------------------------------------------------- tables


def show(report: Report, time_s: float) -> RenderableType:
    """Formats the report as tables.

    Args:
        report: of a run.
        time_s: now, in seconds since the epoch.
    """
    opponents = [] if not (report.self_play or {}).get("sides") else [_opponents(report.self_play or {})]
    if report.summary is not None:
        ended = report.summary["behaviors"]
        return Group(Text(_ending(report.summary)), _ended_behaviors(ended), *_checkpoints(ended), *opponents)
    assert report.status is not None
    status = report.status
    stalls = [f"STALLED {text}" for text in status.get("stalls", ())]  # files of older versions lack it
    heading = "\n".join([_age(status, time_s), *stalls, *_lessons(status["behaviors"])])
    return Group(Text(heading), _behaviors(status["behaviors"]), *opponents, _services(status["services"]))


def _ending(summary: Mapping[str, Any]) -> str:
    text = f"run {summary['run_id']}: {summary['status']} after {summary['wall_s']:,.0f} s"
    return f"{text}\n{summary['error']}" if summary["error"] else text


def _age(status: Mapping[str, Any], time_s: float) -> str:
    age_s = max(0.0, time_s - status["time_s"])
    if status["ended"]:
        return f"run {status['run_id']}: its services have ended, {age_s:,.0f} s ago; there is no summary yet"
    if age_s > OLD_S:
        return (
            f"run {status['run_id']}: NOT WRITTEN for {age_s:,.0f} s: the run or its monitor has died; "
            f"what follows is its state then"
        )
    return f"run {status['run_id']}: running; data {age_s:.1f} s old"


def _lessons(behaviors: Mapping[str, Any]) -> Iterator[str]:
    """Formats the present lesson of each curriculum, by the behavior that is measured for it."""
    for name, one in behaviors.items():
        for parameter, number in one.get("lessons", {}).items():  # files of older versions lack it
            yield f"{name}: lesson {number} of {parameter}"


def _ended_behaviors(behaviors: Mapping[str, Any]) -> Table:
    table = _table("Behavior", "Steps", "Steps/s", "Updates", "Episodes", "Reward (last 100)", "Lag", "Counts")
    for name, one in behaviors.items():
        table.add_row(
            Text(name),
            f"{one['steps']:,}",
            rate(one["steps_per_s"]),
            f"{one['updates']:,}",
            f"{one['episodes']:,}",
            _number(one["reward_mean_last100"]),
            _lag(one["lag"]["mean"], one["lag"]["max"]),
            _step_counts(one["step_counts"]),
        )
    return table


def _checkpoints(behaviors: Mapping[str, Any]) -> Iterator[Text]:
    """Formats the last checkpoint of each behavior, outside the table so that its path is not folded."""
    for name, one in behaviors.items():
        yield Text(f"checkpoint of {name}: {one['checkpoint'] or 'none'}", overflow="fold", no_wrap=False)


def _behaviors(behaviors: Mapping[str, Any]) -> Table:
    table = _table(
        "Behavior", "Step", "Steps/s", "Reward", "Lag", "Open episodes", "Oldest", "In flight", "Step counts"
    )
    for name, one in behaviors.items():
        goal = f" of {one['max_steps']:,}" if one["max_steps"] else ""
        spread = f" +- {short(one['reward_deviation'])}" if one["reward_deviation"] is not None else ""
        table.add_row(
            Text(name),
            f"{one['step']:,}{goal}",
            rate(one["steps_per_s"]),
            f"{_number(one['reward'])}{spread}",
            _lag(one["lag_mean"], one["lag_max"]),
            f"{one['open_episodes']:,}",
            f"{one['oldest']:,} steps",
            f"{one['in_flight']:,} of {one['budget']:,}",
            _step_counts(one["figures"]["step_counts"]),
        )
    return table


def _opponents(rules: Mapping[str, Any]) -> Table:
    """Formats each learner under self-play, with its results against the opponents that it may play again."""
    table = _table("Learner", "Rating", "Opponent", "Rating", "Matches", "Won")
    for name, side in rules["sides"].items():
        for player, (matches, points) in side["records"].items():
            ratings = (f"{rules['elo'][one]:,.0f}" if one in rules["elo"] else "-" for one in (name, player))
            own, other = ratings
            table.add_row(Text(name), own, Text(player), other, f"{matches:,}", f"{points / matches:.0%}")
    return table


def _services(services: Mapping[str, Any]) -> Table:
    table = _table("Service", "Answered", "Waits for", "Passed on", "Starts", "Memory", "Queues", "p50 / p99")
    for name, one in services.items():
        answered = "never" if one["heartbeat_age_s"] is None else f"{one['heartbeat_age_s']:.0f} s ago"
        fills = [f"{queue} {_fill(ends)}" for queue, ends in one["queues"].items()]
        spreads = {
            what: spread for what, spread in one["histograms"].items() if what.endswith("_s") and spread["count"]
        }
        latency = [f"{what.removesuffix('_s')} {_latency(spread)}" for what, spread in spreads.items()]
        table.add_row(
            Text(name),
            answered,
            Text(one["waiting_for"] or "-"),
            Text("\n".join(_passed(one)) or "-"),
            f"{one['starts']}",
            f"{one['rss_bytes'] / 2**20:.0f} MiB",
            Text("\n".join(fills) or "-"),
            Text("\n".join(latency) or "-"),
        )
    return table


def _passed(service: Mapping[str, Any]) -> Iterator[str]:
    for product, watermark in service.get("passed", {}).items():  # files of older versions lack it
        yield f"{readable(product)}: {watermark['count']:,.0f}, {watermark['idle_s']:.0f} s ago"


def _table(*columns: str) -> Table:
    """Makes a table that fits into 80 columns: it has no frame, and only the names in its first column never fold."""
    table = Table(box=MINIMAL_HEAVY_HEAD, show_edge=False, padding=0)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == columns[0])
    return table


def _fill(ends: Mapping[str, float]) -> str:
    return f"{ends.get('messages', 0):.0f}/{ends.get('capacity', 0):.0f}"


def _latency(spread: Mapping[str, float | None]) -> str:
    p50, p99 = spread["p50"], spread["p99"]
    return "-" if p50 is None or p99 is None else f"{p50 * 1e3:.3g} / {p99 * 1e3:.3g} ms"


def _number(value: float | None) -> str:
    return "-" if value is None else short(value)


def _lag(mean: float | None, highest: float | None) -> str:
    return "-" if mean is None or highest is None else f"{mean:.1f}/{highest:.0f}"


def _step_counts(step_counts: Mapping[str, int]) -> str:
    return "\n".join(f"{column} {steps:,}" for column, steps in step_counts.items() if steps or column == "produced")
