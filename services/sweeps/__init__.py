"""Searches settings by runs that it starts; no stage of a run knows of it.

What to try (`space.py`, `population.py`) and what was found (`results.py`, `plots.py`) are apart from the loops
(`search.py`, `generations.py`), which start and follow runs through the Python interface (`following.py`).
"""
