# SPDX-License-Identifier: Apache-2.0
"""Runs a command and ends its whole process group when whoever started this guard is gone.

`python guard.py COMMAND…`: the starter holds the write end of this process's standard input; end of file there, for
whatever reason (also SIGKILL of the starter), is the signal. The kernel's own parent-death signal would not do: it
follows the thread that forked, and reaches one process where vLLM has four. Standard library only, started by path.
"""

import os
import signal
import subprocess
import sys
import threading


def main() -> int:
    # The group's interrupts are for the command; the guard leaves after it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def default_signals() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    command = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, preexec_fn=default_signals)  # noqa: PLW1509 - no thread yet

    def watch() -> None:
        while os.read(0, 64):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    return command.wait()


if __name__ == "__main__":
    os._exit(main() & 0xFF)
