"""A reader does without torch."""

import subprocess
import sys


def test_a_subscriber_imports_no_torch() -> None:
    program = (
        "import sys, psworker\n"
        "subscriber = psworker.Subscriber('127.0.0.1:1', job='night')\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
