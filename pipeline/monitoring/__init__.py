"""What is made of the numbers that the services publish: lines, curves, tables, a summary.

    Metrics of all services -> Overview -> Intervals -> console line, TensorBoard events, JSON lines
                                       `-> status, Prometheus text, Figures -> summary.json

Everything is made of what it is given; only `files.py` touches a disk, and nothing waits or looks at a clock.
"""
