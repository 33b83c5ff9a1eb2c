"""`sparring status RUN`: shows the state or the outcome of a run, from the files in its folder."""

import contextlib
import json
import os
import re
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from rich.box import MINIMAL_HEAVY_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.files import Json, reading, regular
from sparring.pipeline.monitoring.console import rate, short
from sparring.pipeline.monitoring.logs import printable
from sparring.pipeline.monitoring.progress import readable
from sparring.services.commands.runs import add_json, add_run, find, print_json

OLD_S: Final = 10.0
"""A live run writes its status every second; a file older than this means that the run or its monitor has died."""

_EVERY_S: Final = 1.0
_READABLE: Final = "what this version of sparring writes", "show it with the version that wrote it, or move it away"


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_run(parser)
    parser.add_argument("--watch", action="store_true", help="show it every second until the run has ended")
    add_json(parser)


def run(args: Namespace) -> int:
    """Shows the run; returns the exit status 0.

    Raises:
        SettingsError: there is no such run, or one of its files is damaged.
    """
    if not re.fullmatch("[1-9][0-9]{0,3}", os.environ.get("COLUMNS", "80")):
        del os.environ["COLUMNS"]  # no width to show anything in
    console, folder = _Console(), find(args.run, args.results_dir)
    if args.json and args.watch:
        raise SettingsError("got --json with --watch; expected one of the two; leave one out")
    if args.json:
        print_json(read(folder))
    elif not args.watch:
        console.print(_shown(folder, read(folder)))
    else:
        on_terminal = Live(console=console, auto_refresh=False) if console.is_terminal else contextlib.nullcontext()
        with contextlib.suppress(KeyboardInterrupt), on_terminal as live:
            while True:
                report = read(folder)
                shown = _shown(folder, report)
                if live is None:
                    console.print(shown)
                else:
                    live.update(shown, refresh=True)
                if report["summary"] is not None:
                    break
                time.sleep(_EVERY_S)
    return 0


class _Console(Console):
    """A console whose reader may end first, as `head` does."""

    def on_broken_pipe(self) -> None:
        """Leaves the error to the command, whose status it is."""
        raise BrokenPipeError


def read(folder: Path) -> dict[str, Json]:
    """Reads the folder of a run.

    Returns:
        `status`: content of `status.json`, None where there is none; `summary`: that of `summary.json`, None where
        there is none or the run was resumed since; `self_play`: its state in `coordination.json`, None likewise.

    Raises:
        SettingsError: it holds nothing that this command shows, or a file is damaged.
    """
    (status, status_ns), (summary, summary_ns) = _load(folder / "status.json"), _load(folder / "summary.json")
    if status is None and summary is None:
        raise SettingsError(
            f"got {folder}, which holds neither status.json nor summary.json; expected the folder of a run; "
            f"if the run has only just started, try again in a few seconds"
        )
    if status and summary and not status.get("ended") and status_ns > summary_ns:
        summary = None
    with reading(folder / "summary.json", *_READABLE):
        for name, one in summary["behaviors"].items() if summary else ():
            written = Path(one.get("checkpoint") or "")
            if not written.exists() and (here := folder.absolute() / name / written.name).exists():
                one["checkpoint"] = str(here)  # the folder of the run was renamed
    path = folder / "coordination.json"
    with reading(path, *_READABLE):
        rules = ((_load(path)[0] or {}).get("self_play") or {}).get("rules")
        if rules and rules.get("sides"):
            _opponents(rules)
    return {"status": status, "summary": summary, "self_play": rules}


def _load(path: Path) -> tuple[Json, int]:
    """Returns the content of a file and the time of its last change in ns; None and 0 where it does not exist."""
    with reading(path, *_READABLE):
        return ({**json.loads(regular(path).read_bytes())}, path.stat().st_mtime_ns) if path.exists() else (None, 0)


def _shown(folder: Path, report: Mapping[str, Json]) -> RenderableType:
    with reading(folder, *_READABLE):
        return show(report, time.time())


# ---------------------------------------------------------------- tables


def show(report: Mapping[str, Json], time_s: float) -> RenderableType:
    """Formats the report as tables.

    Args:
        report: as `read` returns it.
        time_s: now, in seconds since the epoch.
    """
    status, summary, self_play = report["status"], report["summary"], report["self_play"] or {}
    opponents = [_opponents(self_play)] if self_play.get("matches") else []
    if summary is not None:
        ended = summary["behaviors"]
        # Outside the table the path of a checkpoint is not folded.
        saved = [_text(f"checkpoint of {name}: {one['checkpoint'] or 'none'}") for name, one in ended.items()]
        return Group(_text(_ending(summary)), _ended_behaviors(ended), *saved, *opponents)
    heading = [_age(status, time_s)]
    heading += [f"STALLED {text}" for text in status.get("stalls", ())]  # files of older versions lack it
    for name, one in status["behaviors"].items():
        lessons = one.get("lessons", {})  # files of older versions lack it
        heading += [f"{name}: lesson {number} of {parameter}" for parameter, number in lessons.items()]
    running, services = _behaviors(status["behaviors"]), _services(status["services"])
    return Group(_text("\n".join(heading)), running, *opponents, services)


def _ending(summary: Json) -> str:
    text = f"run {summary['run_id']}: {summary['status']} after {summary['wall_s']:,.0f} s"
    return f"{text}\n{summary['error']}" if summary["error"] else text


def _age(status: Json, time_s: float) -> str:
    age_s = max(0.0, time_s - status["time_s"])
    if status["ended"]:
        return f"run {status['run_id']}: its services have ended, {age_s:,.0f} s ago; there is no summary yet"
    if age_s > OLD_S:
        return (
            f"run {status['run_id']}: NOT WRITTEN for {age_s:,.0f} s: the run or its monitor has died; "
            f"what follows is its state then"
        )
    return f"run {status['run_id']}: running; data {age_s:.1f} s old"


def _ended_behaviors(behaviors: Json) -> Table:
    rows = behaviors.values()
    return _table(
        ("Behavior", behaviors),
        ("Steps", (f"{one['steps']:,}" for one in rows)),
        ("Steps/s", (rate(one["steps_per_s"]) for one in rows)),
        ("Updates", (f"{one['updates']:,}" for one in rows)),
        ("Episodes", (f"{one['episodes']:,}" for one in rows)),
        ("Reward (last 100)", (_number(one["reward_mean_last100"]) for one in rows)),
        ("Lag", (_lag(one["lag"]["mean"], one["lag"]["max"]) for one in rows)),
        ("Counts", (_step_counts(one["step_counts"]) for one in rows)),
    )


def _behaviors(behaviors: Json) -> Table:
    rows = behaviors.values()
    goals = (f" of {one['max_steps']:,}" if one["max_steps"] else "" for one in rows)
    spreads = ("" if one["reward_deviation"] is None else f" +- {short(one['reward_deviation'])}" for one in rows)
    return _table(
        ("Behavior", behaviors),
        ("Step", (f"{one['step']:,}{goal}" for one, goal in zip(rows, goals, strict=True))),
        ("Steps/s", (rate(one["steps_per_s"]) for one in rows)),
        ("Reward", (f"{_reward(one)}{spread}" for one, spread in zip(rows, spreads, strict=True))),
        ("Lag", (_lag(one["lag_mean"], one["lag_max"]) for one in rows)),
        ("Open episodes", (f"{one['open_episodes']:,}" for one in rows)),
        ("Oldest", (f"{one['oldest']:,} steps" for one in rows)),
        ("In flight", (f"{one['in_flight']:,} of {one['budget']:,}" for one in rows)),
        ("Step counts", (_step_counts(one["figures"]["step_counts"]) for one in rows)),
    )


def _opponents(rules: Json) -> Table:
    """Formats each learner under self-play, with its results against the opponents that it may play again."""
    sides = rules["sides"].items()
    rows = [(name, player, *record) for name, side in sides for player, record in side["records"].items()]
    elo = rules.get("ratings", rules)["elo"]  # files of older versions have no section for ratings
    ratings = {player: f"{rating:,.0f}" for player, rating in elo.items()}
    return _table(
        ("Learner", (name for name, *_ in rows)),
        ("Rating", (ratings.get(name, "-") for name, *_ in rows)),
        ("Opponent", (player for _, player, *_ in rows)),
        ("Rating", (ratings.get(player, "-") for _, player, *_ in rows)),
        ("Matches", (f"{matches:,}" for *_, matches, _ in rows)),
        ("Won", (f"{points / matches:.0%}" for *_, matches, points in rows)),
    )


def _services(services: Json) -> Table:
    rows, ages = services.values(), (one["heartbeat_age_s"] for one in services.values())
    return _table(
        ("Service", services),
        ("Answered", ("never" if age_s is None else f"{age_s:.0f} s ago" for age_s in ages)),
        ("Waits for", (one["waiting_for"] or "-" for one in rows)),
        ("Passed on", ("\n".join(_passed(one)) or "-" for one in rows)),
        ("Starts", (f"{one['starts']}" for one in rows)),
        ("Memory", (f"{one['rss_bytes'] / 2**20:.0f} MiB" for one in rows)),
        ("Queues", ("\n".join(_fills(one["queues"])) or "-" for one in rows)),
        ("p50 / p99", ("\n".join(_latencies(one["histograms"])) or "-" for one in rows)),
    )


def _passed(service: Json) -> Iterator[str]:
    for product, watermark in service.get("passed", {}).items():  # files of older versions lack it
        yield f"{readable(product)}: {watermark['count']:,.0f}, {watermark['idle_s']:.0f} s ago"


def _fills(queues: Json) -> Iterator[str]:
    for queue, ends in queues.items():
        yield f"{queue} {ends.get('messages', 0):.0f}/{ends.get('capacity', 0):.0f}"


def _latencies(histograms: Json) -> Iterator[str]:
    for what, spread in histograms.items():
        if what.endswith("_s") and spread["count"]:
            p50, p99 = spread["p50"], spread["p99"]
            known = "-" if p50 is None or p99 is None else f"{p50 * 1e3:.3g} / {p99 * 1e3:.3g} ms"
            yield f"{what.removesuffix('_s')} {known}"


def _table(*columns: tuple[str, Iterable[str]]) -> Table:
    """Makes a table that fits into 80 columns: it has no frame, and only the names in its first column never fold."""
    table = Table(box=MINIMAL_HEAVY_HEAD, show_edge=False, padding=0)
    for header, _ in columns:
        table.add_column(header, overflow="fold", no_wrap=header == columns[0][0])
    for row in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(*map(_text, row))
    return table


def _text(text: str) -> Text:
    """Returns a text for a terminal, which may hold words of a simulator."""
    return Text(printable(text))


def _reward(behavior: Json) -> str:
    per_step = behavior.get("reward_per_step") if behavior["reward"] is None else None  # older versions lack it
    return _number(behavior["reward"]) if per_step is None else f"{short(per_step)} per step"


def _number(value: float | None) -> str:
    return "-" if value is None else short(value)


def _lag(mean: float | None, highest: float | None) -> str:
    return "-" if mean is None or highest is None else f"{mean:.1f}/{highest:.0f}"


def _step_counts(step_counts: Mapping[str, int]) -> str:
    return "\n".join(f"{column} {steps:,}" for column, steps in step_counts.items() if steps or column == "produced")
