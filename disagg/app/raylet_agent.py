"""Stands in for an agent of a local Ray's raylet, none of whose work `disagg serve` needs.

    python raylet_agent.py NAME ... --session-dir=DIRECTORY ... --node-id=ID ...

A raylet waits for the ports of two agents, and ends when one of them does. The dashboard's agent
collects Ray's metrics for a dashboard that is not there, and the other one prepares runtime
environments, which no actor of ours has. Each takes seconds of CPU time to start, 100 MB, and
listens. This script says that it listens nowhere (port -1, as Ray's own agent does when packages of
the dashboard are missing), and waits for the raylet to end.

It uses the standard library only, so that it starts fast.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

PORTS = {
    "dashboard_agent": ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port"),
    "runtime_env_agent": ("runtime_env_agent_port",),
}
PERIOD_S = 1.0


def main() -> None:
    flags = dict(word.split("=", 1) for word in sys.argv if word.startswith("--") and "=" in word)
    for name in PORTS[sys.argv[1]]:
        file = Path(flags["--session-dir"], f"{name}_{flags['--node-id']}")
        whole = file.with_suffix(".new")  # the raylet reads the file as soon as it is there
        whole.write_text("-1")
        whole.rename(file)
    raylet = int(os.environ["RAY_RAYLET_PID"])
    while os.getppid() == raylet:
        time.sleep(PERIOD_S)


if __name__ == "__main__":
    main()
