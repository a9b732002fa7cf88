"""All names of Flower 1.41 that Flower does not promise to keep: tests/engines/test_flower_private.py tells.

What they are needed for, measured on Flower 1.41: its SuperLink serves the Control API (whoever reaches it runs
code there), the Fleet API and the Runtime API on one port, asks nobody on the Control API who he is, and hands a
task to whoever asks first; its executors put a task's token on a command line, which every user of the machine can
read; and a round waits: 3 s after a SuperNode asked in vain, up to 1 s for an object that is on its way, a second
and a half of imports for the process of each message.

| file | what |
|---|---|
| `control` | starting and stopping runs |
| `superlink` | the SuperLink |
| `supernode` | the SuperNode's loop |
| `middleware` | what every request to either goes through |
| `executor` | starting the processes of tasks |
| `serverapp` | the server's process |
| `commands` | their command lines |
"""

CONTROL, FLEET, RUNTIME = "/v1/control/", "/v1/fleet/", "/v1/runtime/"
UNIX = "unix:"

SOON = 0.02
"""Seconds until one looks again for an object that is on its way."""
