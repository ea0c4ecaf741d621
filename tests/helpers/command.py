"""Be ``python -m liger_patch``, and fork the processes that it starts: the imports are done.

The first argument is a folder, where stdout, stderr and the exit status become files.
"""

import os
import subprocess
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from liger_patch.__main__ import main
from liger_patch.cli import compare
from liger_patch.cli.run import measure


def forked(command: list[str], stdout: int, check: bool) -> subprocess.CompletedProcess:
    """Of ``subprocess.run``, what ``compare`` asks for."""
    assert command[:3] == [sys.executable, "-c", compare.CHILD]
    assert (stdout, check) == (2, False)
    child = os.fork()
    if child:
        return subprocess.CompletedProcess(command, os.waitstatus_to_exitcode(os.wait()[1]))
    os.dup2(stdout, 1)
    leave(lambda: measure(*command[3:]))


def leave(function: Any) -> Any:
    """End this process with the status with which Python would."""
    try:
        status = function()
    except SystemExit as error:
        status = error.code
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


if __name__ == "__main__":
    folder = Path(sys.argv.pop(1))
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
    compare.subprocess = SimpleNamespace(run=forked)  # type: ignore[assignment]
    try:
        returned = main(sys.argv[1:])
    except SystemExit as error:
        returned = error.code
    (folder / "status").write_text(str(returned or 0))
