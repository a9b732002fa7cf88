"""Parts of Flower beyond its public ones that a deployment needs.

Flower's SuperLink serves the Control API (a program that reaches it runs code there), the Fleet API and the
Runtime API on one port.  It asks no caller of the Control API for credentials, and counts a silo's reply as that
of the silo whose name it has.  Flower's executors put a task's token on a command line, which every user of the
machine can read.  A round waits some seven seconds for sleeps and starts of processes.

| file | what |
|---|---|
| `names` | table of the names of Flower that are used, checked at the start of a service |
| `front` | an ASGI app before the SuperLink: checks senders, holds empty answers, hides unfinished replies |
| `front` | behind it: the SuperLink, its doors, nodes and runs |
| `presence` | who was at the SuperLink and when, and its runs, after a restart, too; how a coordinator sees them |
| `silo_node` | a silo's node, in one process |
| `executor` | starts a process for each task, and watches it |
| `control` | requests of Flower's wire; starting and stopping runs |

No code of Flower is changed while it runs.
"""

APP_PATH = "fedpriv.clients.app:app"
"""The one app that a silo runs, by its name in a run's bundle."""
VERSION_HEADER, FOLLOWED_RUN_HEADER = "fedpriv-version", "fedpriv-follows"
"""Headers of a SuperNode's requests, and of a command's question for a run."""
STATUS_PATH = "/v1/control/fedpriv-status"
"""Answered on the control socket only: what `Presence.seen` and `KeptRuns.known` say."""
RESTART_REASON = "the SuperLink was started again"
"""Why a run ended whose server ended with its SuperLink."""
