"""What `import sparring` offers in Python: runs (`runs.py`) and trained policies (`policies.py`)."""
