"""What the tools share: the repository's files, findings, and how a tool reports and ends."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def files(*patterns, root=ROOT):
    """Files of the work tree that git does not ignore and that match one of the glob patterns, sorted.

    `**/*.h` style patterns are matched by git itself.
    """
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--"]
    listed = subprocess.run([*command, *(f":(glob){p}" for p in patterns)], capture_output=True, check=True)
    names = {name for name in listed.stdout.decode().split("\0") if name}
    return sorted(root / name for name in names if (root / name).is_file())


def run(command, **options):
    """Runs a command without standard input; output is captured as text."""
    return subprocess.run(
        [str(part) for part in command], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False, **options,
    )


class Findings:
    """Collects what a check finds; `finish` prints all of it and gives the exit code."""

    def __init__(self, tool):
        self.tool = tool
        self.found = []

    def add(self, where, what):
        self.found.append(f"{where}: {what}")

    def finish(self, examined):
        for line in self.found:
            print(line)
        print(f"{self.tool}: {examined}, {len(self.found)} finding{'' if len(self.found) == 1 else 's'}")
        return 1 if self.found else 0


def self_test(tool, checks):
    """Runs named checks, each a function that returns true when the tool behaves; exit code."""
    failed = [name for name, check in checks if not check()]
    for name in failed:
        print(f"{tool} self-test: FAILED {name}")
    print(f"{tool} self-test: {len(checks) - len(failed)} of {len(checks)} hold")
    return 1 if failed else 0


def fail(message, code=2):
    """Ends the tool with one line on stderr."""
    print(message, file=sys.stderr)
    sys.exit(code)
