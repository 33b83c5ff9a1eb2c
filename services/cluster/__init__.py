"""Runs the parts of a run on the nodes of a Ray cluster; only this package imports ray.

Ray ends a process that has lost the head, by default after 60 s, which is sooner than a busy machine has saved the
weights of a run. It reads the limit from the environment while it is imported.
"""

import os

os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "600")
