"""Run one of Flower's programs, mended: see `fedpriv.engines.flower_private`."""

import sys

from fedpriv.engines.flower_private import NO_BELL, SERVERAPP


def main(program: str, words: list[str]) -> None:
    match program:
        case "superexec":
            from fedpriv.engines.flower_private.executor import run_superexec

            run_superexec(words[1:], None if words[0] == NO_BELL else int(words[0]))
        case "supernode":
            from fedpriv.engines.flower_private.supernode import run_supernode

            run_supernode(words[1:], int(words[0]))
        case _ if program == SERVERAPP:
            from fedpriv.engines.flower_private.serverapp import run_serverapp

            run_serverapp(words)
        case _:
            sys.exit(f"{program}: no such program")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
