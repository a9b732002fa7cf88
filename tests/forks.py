"""Programs that need an interpreter to themselves, as forks of one that has done what they share."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
_SERVE = """
import json, os, sys, tempfile, traceback
shared, *programs = json.loads(sys.stdin.read())
sys.argv = ["-c"]
fork = os.fork  # which `shared` may take away
space = {"__name__": "__main__"}
exec(shared, space)
answers = []
for program in programs:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = fork()
        if not child:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            code = 0
            try:
                exec(program, space)
            except SystemExit as ended:
                code = ended.code or 0
                if isinstance(code, str):
                    print(code, file=sys.stderr)
                    code = 1
            except BaseException:
                traceback.print_exc()
                code = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        answers.append((code, *(file.seek(0) or file.read() for file in (out, err))))
print(json.dumps(answers))
"""


def run_in_forks(shared: str, *programs: str, folder: Path = ROOT) -> list["subprocess.CompletedProcess[str]"]:
    """What each program shows, as if `shared` and it were all that its interpreter ran: imports are paid once."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _SERVE],
        input=json.dumps([shared, *programs]),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    return [
        subprocess.CompletedProcess(program, *answer) for program, answer in zip(programs, answers, strict=True)
    ]
