"""Measures the page: 50 runs of 100,000 points, five windows of a browser that watch, and the training beside it.

    python scripts/bench/page.py              # first paint, panning, memory and CPU of the server; needs chromium
    python scripts/bench/page.py --training   # steps per second of a run with a page that is looked at, and without

All runs of the first part are links to the same intervals; a further one goes on meanwhile, and is watched. Beside the
training, questions are asked as a browser asks them, because a browser would need the cores of this machine itself.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from tests.page.browser import browser
from tests.page.page_runs import interval, write_league, write_run

RUNS, POINTS, WATCHED_S, FRAMES = 50, 100_000, 60, 200
VIEWS = ("#/", "#/run/live/curves", "#/run/live/pipeline", "#/run/live/league", "#/run/live/watch")
SPARRING = (sys.executable, "-P", "-m", "sparring")
MEANS = ("Policy/Entropy", "Policy/Learning Rate", "Losses/Policy Loss", "Losses/Value Loss", "Update/Approximate KL")

PAN = """new Promise((done) => {
  const group = document.querySelector("figure.chart").chart.group, [begin, end] = group.extent(), spent = [];
  const width = (end - begin) / 10;
  const frame = async () => {
    const at = begin + width * (spent.length / 25), from = performance.now();
    group.range = [at, at + width];
    group.charts.forEach((chart) => chart.scale());
    await Promise.resolve();
    spent.push(performance.now() - from);
    if (spent.length < FRAMES) requestAnimationFrame(frame); else done(spent);
  };
  requestAnimationFrame(frame);
})""".replace("FRAMES", str(FRAMES))


LOSS = "[...document.querySelectorAll('figure.chart')].find((one) => /Losses/.test(one.textContent))?.chart.lines[0]"
WHOLE = "document.querySelector('.charts')?.getAttribute('aria-busy') === 'false'"
"""Whether all intervals of a run have been read."""
LAST = f"{LOSS}.x.at(-1)"


def line(step: int) -> bytes:
    means = dict.fromkeys(MEANS, step % 977 / 977)
    return json.dumps(interval(step, means=means)).encode() + b"\n"


def write_runs(results: Path) -> Path:
    """Writes the runs; returns the folder of the one that goes on."""
    first = write_run(results / "run-00", [], is_running=False)
    with (first / "metrics.jsonl").open("wb") as file:
        file.writelines(line(step) for step in range(100, 100 * POINTS + 1, 100))
    for number in range(1, RUNS):
        folder = write_run(results / f"run-{number:02}", [], is_running=False)
        (folder / "metrics.jsonl").unlink()
        (folder / "metrics.jsonl").hardlink_to(first / "metrics.jsonl")
        (folder / "summary.json").write_text(json.dumps({"status": "completed", "wall_s": 1.0, "behaviors": {}}))
    live = write_league(results / "live")
    with (live / "metrics.jsonl").open("wb") as file, (first / "metrics.jsonl").open("rb") as known:
        shutil.copyfileobj(known, file)
    return live


def _listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def served(results: Path) -> Iterator[tuple[psutil.Process, str]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    words = [*SPARRING, "page", str(results), "--address", f"127.0.0.1:{port}"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    while not process.poll() and not _listens(port):
        time.sleep(0.05)
    try:
        yield psutil.Process(process.pid), f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def go_on(live: Path, stop: threading.Event) -> None:
    """Writes as a monitor does: an interval and the status each second."""
    step = 100 * POINTS
    while not stop.wait(1.0):
        step += 100
        with (live / "metrics.jsonl").open("ab") as file:
            file.write(line(step))
        status = json.loads((live / "status.json").read_text())
        status["time_s"], status["behaviors"]["Walk"]["step"] = time.time(), step
        (live / ".status.new").write_text(json.dumps(status))
        (live / ".status.new").replace(live / "status.json")


def look(address: str, run: str, behavior: str, stop: threading.Event) -> None:
    """Asks as an open page with curves does: the stream, and the curves every 5 s."""

    def stream() -> None:
        with urllib.request.urlopen(f"{address}/api/events?run={run}", timeout=30) as answer:
            while not stop.is_set() and answer.readline():
                pass

    threading.Thread(target=stream, daemon=True).start()
    while not stop.wait(5.0):
        for place in (f"run?run={run}", f"series?run={run}&behavior={behavior}&points=700"):
            urllib.request.urlopen(f"{address}/api/{place}", timeout=30).read()


def used_s(process: psutil.Process) -> float:
    """Returns the CPU time of a process."""
    times = process.cpu_times()
    return float(times.user + times.system)


def memory(process: psutil.Process) -> str:
    return f"memory of the server {process.memory_info().rss / 2**20:.0f} MiB"


def measure_page() -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        results = Path(folder, "results")
        live, stop = write_runs(results), threading.Event()
        size = sum(path.stat().st_size for path in (results / "run-00").glob("*"))
        print(f"{RUNS} runs of {POINTS:,} intervals, {size / 2**20:.0f} MiB each")
        writer = threading.Thread(target=go_on, args=(live, stop))
        writer.start()
        with served(results) as (server, address), browser(Path(folder, "browser")) as tab:
            tab.show(f"{address}/#/")
            tab.wait_for(f"document.querySelectorAll('.card').length === {RUNS + 1}")
            paint = tab.value("performance.getEntriesByName('first-contentful-paint')[0].startTime")
            cards = tab.value("performance.now()")
            print(f"first paint {paint:.0f} ms, all {RUNS + 1} cards within {cards:.0f} ms")
            begin = time.perf_counter()
            tab.show(f"{address}/#/run/run-07")
            tab.wait_for("document.querySelectorAll('canvas').length > 3", 60)
            print(f"curves of one run, unread before: {time.perf_counter() - begin:.2f} s")
            tab.wait_for(WHOLE, 60)
            print(f"with all its intervals: {time.perf_counter() - begin:.2f} s")
            spent = sorted(tab.value(PAN))
            print(
                f"panning: script of a frame {statistics.median(spent):.2f} ms, 99 % {spent[int(0.99 * FRAMES)]:.2f} ms"
            )
            chosen = "&".join(f"run=run-{number:02}" for number in range(RUNS))
            begin = time.perf_counter()
            tab.show(f"{address}/#/?{chosen}&name=reward")
            tab.wait_for(f"document.querySelector('figure.chart')?.chart.lines.length === {RUNS}", 300)
            print(f"comparison of all {RUNS} runs: {time.perf_counter() - begin:.1f} s")
            print(memory(server))
            tab.show(f"{address}/{VIEWS[0]}")
            windows = [tab, *(tab.window(f"{address}/{view}") for view in VIEWS[1:])]
            for window in windows:
                window.wait_for("document.getElementById('link').textContent === 'live' && !document.hidden")
            windows[1].wait_for(WHOLE, 300)
            before, steps = used_s(server), windows[1].value(LAST)
            time.sleep(WATCHED_S)
            share = (used_s(server) - before) / WATCHED_S
            assert windows[1].value(LAST) > steps
            print(f"{len(VIEWS)} windows watch a run: {share:.1%} of a core, {memory(server)}")
            stop.set()
        writer.join()


def measure_training(pairs: int, seconds: float) -> None:
    rates: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for number in range(2 * pairs):
            with_page = number % 2 == (number // 2) % 2  # each is first as often as the other
            rates[with_page].append(train(Path(folder), f"run-{number}", seconds, with_page=with_page))
            print(f"{'with' if with_page else 'without'} a page: {rates[with_page][-1]:,.0f} steps/s", flush=True)
    beside, without = (statistics.median(rates[one]) for one in (True, False))
    print(f"median with {beside:,.0f}, without {without:,.0f} steps/s: {beside / without - 1:+.1%}")


def train(folder: Path, name: str, seconds: float, *, with_page: bool) -> float:
    """Trains soccer; returns the steps per second after its first steps."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    words = ["train", "configs/soccer.yaml", "--run-id", name, "--results-dir", str(folder), "--no-export"]
    words += ["--page", f"127.0.0.1:{port}"] if with_page else []
    process = subprocess.Popen([*SPARRING, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stop = threading.Event()
    try:
        while (begun := steps(folder / name)) is None or begun[1] < 10_000:
            time.sleep(0.2)
        if with_page:
            threading.Thread(target=look, args=(f"http://127.0.0.1:{port}", name, "Soccer", stop), daemon=True).start()
        time.sleep(seconds)
        ended = steps(folder / name)
        assert ended is not None
        return (ended[1] - begun[1]) / (ended[0] - begun[0])
    finally:
        stop.set()
        process.terminate()
        process.wait()


def steps(folder: Path) -> tuple[float, int] | None:
    """Returns when the status was written, and the steps produced then."""
    try:
        status = json.loads((folder / "status.json").read_text())
        return status["time_s"], status["behaviors"]["Soccer"]["figures"]["step_counts"]["produced"]
    except (OSError, KeyError, ValueError):
        return None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    os.chdir(Path(__file__).parent.parent.parent)
    if args.training:
        measure_training(args.pairs, args.seconds)
    else:
        measure_page()
