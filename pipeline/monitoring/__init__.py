"""Turns the numbers that the services publish into lines, curves, tables and a summary.

    Metrics of all services -> Overview -> Intervals -> console line, JSON lines -> Event -> Writer
                                       `-> status, Prometheus text, BehaviorSummary -> summary.json

All of it is computed from arguments; only `files.py`, `events.py` and `writers/` touch a disk, and only `writing.py`
waits.
"""
