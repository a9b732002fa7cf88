"""Parts of a deployment that use Flower beyond its public interface.

These parts replace the following properties of Flower's own services:

* The SuperLink serves the Control API, by which a program can run code there, the Fleet API and the Runtime API on
  one port.  The Control API needs no credentials.
* A silo's reply counts as that of the silo whose name it has.
* Executors put a task's token on a command line, which every user of the machine can read.
* A round waits some seven seconds for sleeps and starts of processes.

| file | content |
|---|---|
| `names` | table of the used names of Flower, which is checked at the start of a service |
| `front` | ASGI app before the SuperLink that checks senders, delays empty answers and hides unfinished replies |
| `presence` | last requests of silos, list of runs over restarts of the SuperLink, a coordinator's view of both |
| `silo_node` | node of a silo, in one process |
| `executor` | start and supervision of a process for each task |
| `control` | requests in Flower's wire format, which start, list and stop runs |

No code of Flower is changed while it runs.
"""

APP_PATH = "fedpriv.clients.app:app"
"""Name in a run's bundle of the only app that a silo runs."""
VERSION_HEADER, FOLLOWED_RUN_HEADER = "fedpriv-version", "fedpriv-follows"
"""Headers of a SuperNode's requests, and of a request of a command that follows a run."""
STATUS_PATH = "/v1/control/fedpriv-status"
"""Path of the status of silos and runs, which only the control socket serves."""
RESTART_REASON = "the SuperLink was started again"
"""Reason in the list of runs for one whose server ended with its SuperLink."""
