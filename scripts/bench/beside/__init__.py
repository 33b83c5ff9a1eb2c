"""The parts of `beside_mlagents.py`; `games`, `player` and `actor` run in ML-Agents' own environment, Python 3.10."""
