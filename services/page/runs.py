"""Finds runs below a folder, and describes each from its files; whatever these hold, a description follows."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import pydantic_core

from sparring.pipeline.evaluation.ratings import DEVIATIONS, SCALE
from sparring.pipeline.files import Json
from sparring.pipeline.monitoring import curves
from sparring.pipeline.monitoring.files import to_json
from sparring.pipeline.monitoring.intervals import REWARD_PER_STEP
from sparring.services.page.history import History, NotFound, find, number, numbers, samples, section
from sparring.services.page.league import League, lineage

_SIGNS: Final = ("run.json", "status.json", "metrics.jsonl")
"""Files of which a folder of a run has one."""
_SHOWN: Final = ("status.json", "summary.json", "metrics.jsonl")
"""Files from which an entry of the list is made."""
_DEPTH: Final = 2
"""Folders below the results: a run, and what has played it or belongs to the same sweep."""
_MOST_RUNS: Final = 500
_MOST_BYTES: Final = 2**24
"""A larger file is no description of a run."""
_HELD_BYTES: Final = 16 * 2**20
"""Memory for tables; those of the runs that were asked for least recently are dropped."""
_SPARKS: Final = 48
"""Points of the small curve in the overview."""
_SILENT_S: Final = 10.0
"""A live run writes its status every second."""
_GROWN: Final = 1.02
_MOST_TOURNAMENTS: Final = 10
_MOST_REPLAYS: Final = 500
_MOST_LEAGUES: Final = 4
"""Runs whose results are held; the one that was asked for least recently is dropped."""
_LEADING: Final = {
    "Self-play/ELO": "rating",
    "Self-play/Mu": "rating",
    "reward": "reward",
    REWARD_PER_STEP: "reward per step",
}
"""Numbers that describe a run at a glance, the most telling first."""


def load(path: Path) -> dict[str, Json]:
    """Returns the content of a JSON file; nothing where it is missing, damaged, or no object."""
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return {}
        content = pydantic_core.from_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


class Runs:
    """Knows the runs below a folder.

    Args:
        results: folder with the folders of runs, or of one run.
        clock: gives seconds since the epoch.
    """

    def __init__(self, results: Path, clock: Callable[[], float] = time.time) -> None:
        self.results = results
        self._clock = clock
        self._histories: OrderedDict[str, History] = OrderedDict()
        self._leagues: OrderedDict[str, League] = OrderedDict()
        self._entries: dict[str, tuple[list[int], bytes]] = {}
        self._sparks: dict[str, tuple[int, dict[str, Json]]] = {}

    def folders(self) -> dict[str, Path]:
        """Returns the folders of runs by id, which is the path below the results; the newest first."""
        found = [self.results] if _is_run(self.results) else list(_runs_in(self.results, _DEPTH))
        found = sorted(found, key=_written_ns, reverse=True)[:_MOST_RUNS]
        return {"." if path == self.results else path.relative_to(self.results).as_posix(): path for path in found}

    def folder(self, run: str) -> Path:
        """Returns the folder of a run.

        Raises:
            NotFound: there is none of this id.
        """
        if run == "." and _is_run(self.results):
            return self.results
        names = run.split("/")
        if (
            len(names) > _DEPTH
            or any(not name or name.startswith(".") for name in names)
            or not _is_run(self.results / run)
        ):
            raise NotFound(f"got run {run!r:.200}; expected one that the page lists; choose it there")
        return self.results / run

    def history(self, run: str, most_s: float = 0.0) -> History:
        """Returns what a run has written over time, up to now; samples of a long one that takes longer to read.

        Raises:
            NotFound: there is none of this id.
        """
        folder = self.folder(run)
        history = self._histories.setdefault(run, History(folder))
        self._histories.move_to_end(run)
        history.refresh(most_s)
        while len(self._histories) > 1 and sum(one.size for one in self._histories.values()) > _HELD_BYTES:
            self._histories.popitem(last=False)
        return history

    # ---------------------------------------------------------------- all runs

    def overview(self) -> dict[str, bytes]:
        """Returns what is shown of each run in the list of all, as JSON by id."""
        found: dict[str, bytes] = {}
        for run, folder in self.folders().items():
            marks = [_changed_ns(folder / name) for name in _SHOWN]
            known, entry = self._entries.get(run, (None, b""))
            if known == marks and b'"state":"running"' not in entry:
                found[run] = entry
                continue
            try:
                found[run] = to_json(self._entry(run, folder))
            except Exception as error:  # whatever a folder holds, the others are shown
                text = f"its files cannot be read ({error!r:.200})"
                found[run] = to_json({"state": "damaged", "error": text, "behaviors": []})
            self._entries[run] = marks, found[run]
        for run in self._entries.keys() - found.keys():  # it was removed
            del self._entries[run]
            self._sparks.pop(run, None)
        return found

    def _entry(self, run: str, folder: Path) -> dict[str, Json]:
        status, summary = load(folder / "status.json"), load(folder / "summary.json")
        state = self.state(status, summary)
        sparks, behaviors = self._spark(run, folder), []
        present, ended = section(status, "behaviors"), section(summary, "behaviors")
        for name in sorted({*present, *ended, *sparks}):
            now = section(present, name)
            step, most, rate = (number(now.get(key)) or 0.0 for key in ("step", "max_steps", "steps_per_s"))
            behaviors.append(
                {
                    "name": name,
                    "step": max(step, number(section(ended, name).get("steps")) or 0.0),
                    "max_steps": most,
                    "steps_per_s": rate if state == "running" else section(ended, name).get("steps_per_s"),
                    "eta_s": (most - step) / rate if state == "running" and rate > 0 and most > step else None,
                    "reward": now.get("reward", section(ended, name).get("reward_mean_last100")),
                    **section(sparks, name),
                }
            )
        return {
            "state": state,
            "error": summary.get("error"),
            "time_s": number(status.get("time_s")) or _written_ns(folder) / 1e9,
            "wall_s": summary.get("wall_s"),
            "stalls": status.get("stalls"),
            "behaviors": behaviors,
        }

    def state(self, status: Mapping[str, Json], summary: Mapping[str, Json]) -> str:
        """Returns how a run stands: `running`, `silent`, `ending`, `starting`, or the status of its summary."""
        if summary and (not status or status.get("ended")):
            return str(summary.get("status"))
        if not status:
            return "starting"
        age_s = self._clock() - (number(status.get("time_s")) or 0.0)
        return "ending" if status.get("ended") else "running" if age_s <= _SILENT_S else "silent"

    def _spark(self, run: str, folder: Path) -> dict[str, Json]:
        """Returns the most telling number of each behavior, the last value, and a small curve."""
        path = folder / "metrics.jsonl"
        size = sum(one.stat().st_size for one in folder.glob("metrics.jsonl*") if one.is_file())
        known, found = self._sparks.get(run, (0, {}))
        if not size or known <= size < known * _GROWN:
            return found
        by_behavior: dict[str, list[dict[str, float]]] = {}
        for line in samples(path, _SPARKS):
            if isinstance(line, dict) and isinstance(line.get("behavior"), str) and line.get("type") == "interval":
                at = {name: value for name in ("step", "time_s") if (value := number(line.get(name))) is not None}
                by_behavior.setdefault(line["behavior"], []).append(numbers(line) | at)
        found = {}
        for behavior, lines in by_behavior.items():
            name = next((one for one in _LEADING if any(one in line for line in lines)), "")
            points = [[line["step"], line[name]] for line in lines if name in line and "step" in line]
            found[behavior] = {
                "what": _LEADING.get(name, ""),
                "spark": points,
                "value": points[-1][1] if points else None,
            }
        self._sparks[run] = size, found
        return found

    # ---------------------------------------------------------------- one run

    def describe(self, run: str) -> dict[str, Json]:
        """Returns what is shown of one run beside its numbers over time.

        Raises:
            NotFound: there is none of this id.
        """
        folder, history = self.folder(run), self.history(run)
        status, summary = load(folder / "status.json"), load(folder / "summary.json")
        return {
            "run": run,
            "state": self.state(status, summary),
            "status": status,
            "summary": summary,
            "columns": {name: sorted(table.columns) for name, table in history.tables.items()},
            "events": sorted(history.events, key=lambda event: float(event["time_s"])),
            "lags": _lags(load(folder / "monitor.json")),
            "rating_intervals": _rating_intervals(load(folder / "coordination.json")),
            "panels": curves.PANELS,
            "colors": curves.COLORS,
        }

    def league(self, run: str) -> dict[str, Json]:
        """Returns what matches, snapshots and tournaments say about the strength of a run's teams.

        Raises:
            NotFound: there is none of this id.
        """
        folder = self.folder(run)
        league = self._leagues.setdefault(run, League(folder))
        self._leagues.move_to_end(run)
        league.refresh()
        while len(self._leagues) > _MOST_LEAGUES:
            self._leagues.popitem(last=False)
        elo = section(load(folder / "coordination.json"), "self_play", "rules", "ratings", "elo")
        return {**league.describe(), "lineage": lineage(folder, elo), "tournaments": _tournaments(folder)}

    def replays(self, run: str) -> list[dict[str, Json]]:
        """Returns the recorded matches and videos of a run and of its evaluations and tournaments, the oldest first.

        Raises:
            NotFound: there is none of this id.
        """
        folder, history = self.folder(run), self.history(run)
        axes = [rows for table in history.tables.values() if len(rows := table.query([], "time").axes)]
        found = []
        for path in sorted(self._recorded(folder)):
            made_s = path.stat().st_mtime
            if (stem := path.stem.removeprefix("replay-")).isdecimal():
                made_s = int(stem[:16]) / 1000
            own = path.relative_to(folder).as_posix()
            at = (
                {}
                if own.count("/") > 1 or not axes
                else {"step": float(np.interp(made_s, axes[0][:, 1], axes[0][:, 0]))}
            )
            found.append({"name": own, "time_s": made_s, **at, "of": _played(folder, own)})
        return sorted(found, key=lambda one: (str(one["of"]), float(one["time_s"])))

    def replay(self, run: str, name: str) -> Path:
        """Returns the file of a recorded match or video.

        Raises:
            NotFound: there is none of this name.
        """
        folder = self.folder(run)
        return find({path.relative_to(folder).as_posix(): path for path in self._recorded(folder)}, name)

    @staticmethod
    def _recorded(folder: Path) -> Iterator[Path]:
        """Yields the files that can be played; none outside of the results, to which a link may point."""
        for pattern in ("replays/*.jsonl", "*/replays/*.jsonl", "*.gif", "*/*.gif"):
            for path in itertools.islice(folder.glob(pattern), _MOST_REPLAYS):
                if (
                    path.is_file()
                    and path.stat().st_size <= _MOST_BYTES
                    and path.resolve().is_relative_to(folder.resolve())
                ):
                    yield path


def _played(folder: Path, name: str) -> str:
    """Returns what an evaluation has played, else the name of its folder; "" for the training itself."""
    inner, _, rest = name.partition("/")
    if "/" not in rest:
        return ""
    checkpoints = section(load(folder / inner / "run.json"), "playing", "checkpoints")
    return ", ".join(str(path).rpartition("/")[2] for path in checkpoints.values()) or inner


def _tournaments(folder: Path) -> list[dict[str, Json]]:
    """Returns the tables of the tournaments below a run, the newest first."""
    paths = sorted(folder.glob("tournament-*/tournament.json"), reverse=True)[:_MOST_TOURNAMENTS]
    return [{"name": path.parent.name, **load(path)} for path in paths]


def _rating_intervals(coordination: Mapping[str, Json]) -> dict[str, float]:
    """Returns the half width of the 95 % interval of each learner's Elo rating.

    Updates by K (S - E) make a rating fluctuate around the player's strength like a stochastic approximation with a
    constant step: its variance is K s / 2 with the scale s of the logistic curve.
    """
    found = {}
    for name, side in section(coordination, "self_play", "rules", "sides").items():
        if k := number(section(side, "settings").get("elo_k")):
            found[name] = DEVIATIONS * math.sqrt(max(0.0, k) * SCALE / 2)
    return found


def _lags(monitor: Mapping[str, Json]) -> dict[str, Json]:
    """Returns the histogram of the policy lag of each behavior, over all incarnations of its learner."""
    found: dict[str, dict[str, Json]] = {}
    for service in section(monitor, "services").values():
        for part in ("past", "latest"):
            for name, one in section(service, part, "histograms").items():
                if name.startswith("lag/") and isinstance(one, dict):
                    known = found.setdefault(name.removeprefix("lag/"), {"bounds": one["bounds"], "counts": []})
                    counts = known["counts"] or [0] * len(one["counts"])
                    known["counts"] = [a + b for a, b in zip(counts, one["counts"], strict=True)]
    return found


def _runs_in(folder: Path, depth: int) -> Iterator[Path]:
    """Yields the folders of runs in a folder, and those of evaluations, tournaments and sweeps within these."""
    try:
        with os.scandir(folder) as entries:
            inner = [Path(one.path) for one in entries if one.is_dir() and not one.name.startswith(".")]
    except OSError:
        return
    for path in inner:
        if _is_run(path):
            yield path
        if depth > 1:
            yield from _runs_in(path, depth - 1)


def _is_run(folder: Path) -> bool:
    try:
        return any((folder / name).is_file() for name in _SIGNS)
    except OSError:  # no folder has so long a name
        return False


def _written_ns(folder: Path) -> int:
    """Returns when a run last wrote its status, else its folder changed."""
    return _changed_ns(folder / "status.json") or _changed_ns(folder)


def _changed_ns(path: Path) -> int:
    """Returns when a file last changed; 0 where it does not exist."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
