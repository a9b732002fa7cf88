"""A zygote: fork per request from a process that has already imported torch (saves 1.5 s a task).

the executor ── words, a file ──▶ the server, which does nothing else ── fork ──▶ the program, which ends
"""

import atexit
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn, Self

Program = Callable[[list[str], int], None]
"""(words, descriptor of the request's file); what it returns or raises ends its process as it would end any."""

_LONGEST = 2**16  # bytes of a request
_END_SECONDS = 2.0


class _Request(NamedTuple):
    words: list[str]
    quiet: bool
    file: int


class ForkServer:
    """The asking side; gone, with all that was forked, when it is closed or its process ends, however it ends.

    Guarantee: a program starts from the memory of a process that has handled no request: whatever one program
    reads, writes or imports, another never sees.  It has the environment, user, umask and folder of the process
    that started the server, no open file but the standard ones and its own, and random numbers of its own.
    """

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self._pid, self._connection = pid, connection

    @classmethod
    def start(cls, program: Program) -> Self:
        """Fork the server; what is imported until now is what programs need not import.

        Returns in the asking process only.  RuntimeError if this process has threads: a fork copies their locks.
        """
        if threading.active_count() > 1:
            raise RuntimeError("a process with threads cannot become a fork server")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid:
            theirs.close()
            return cls(pid, ours)
        ours.close()
        request = _serve(theirs)
        if request is None:
            os._exit(0)
        return _run(program, request)

    def launch(self, words: Sequence[str], file: int, *, quiet: bool) -> None:
        """Ask for a program with these words and a copy of the descriptor `file`; `quiet`: it prints to nowhere.

        OSError if the server is gone.
        """
        request = json.dumps({"words": list(words), "quiet": quiet}).encode()
        socket.send_fds(self._connection, [request], [file])

    def close(self) -> None:
        """End the server and all programs, hard after some seconds."""
        self._connection.close()
        os.waitpid(self._pid, 0)


def _run(program: Program, request: _Request) -> NoReturn:
    """Run it to its end as an interpreter would, less the taking apart of every module: 0.3 s of a processor."""
    code: object = 0
    try:
        program(request.words, request.file)
    except SystemExit as ending:
        code = ending.code
    except BaseException:
        traceback.print_exc()
        code = 1
    for thread in threading.enumerate():
        if not (thread.daemon or thread is threading.current_thread()):
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _serve(connection: socket.socket) -> _Request | None:
    """Fork for every request; the request in a forked process, None in the server once its clients are gone."""
    noticed, notice = socket.socketpair()
    notice.setblocking(False)
    noticed.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # so that the next line hears of it
    signal.set_wakeup_fd(notice.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the asking process, which closes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    running: set[int] = set()
    gc.freeze()  # what is here stays in pages that all processes share
    try:
        while True:
            ready, _, _ = select.select([connection, noticed], [], [])
            if noticed in ready:
                noticed.recv(4096)
                _forget_ended(running)
            if connection in ready:
                request = _next_request(connection)
                if request is None:
                    break
                pid = os.fork()
                if pid == 0:
                    running.clear()
                    for inherited in (connection, noticed, notice):
                        inherited.close()
                    _become_a_process_of_its_own(request)
                    return request
                os.close(request.file)
                running.add(pid)
    finally:
        _end(running)
    return None


def _next_request(connection: socket.socket) -> _Request | None:
    content, files, _, _ = socket.recv_fds(connection, _LONGEST, 1)
    if not content or not files:
        return None
    fields = json.loads(content)
    return _Request(fields["words"], fields["quiet"], files[0])


def _become_a_process_of_its_own(request: _Request) -> None:
    """Undo in a forked process what the server is: its signals, its descriptors, its random numbers."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.set_inheritable(request.file, True)
    os.closerange(3, request.file)
    os.closerange(request.file + 1, os.sysconf("SC_OPEN_MAX"))
    if request.quiet:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        os.close(nowhere)
    if (random := sys.modules.get("numpy.random")) is not None:  # Python's own is seeded anew by every fork
        random.seed()


def _forget_ended(running: set[int]) -> None:
    while running:
        pid, _ = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        running.discard(pid)


def _end(running: set[int]) -> None:
    for pid in running:
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _END_SECONDS
    while running and time.monotonic() < deadline:
        time.sleep(0.02)
        _forget_ended(running)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
