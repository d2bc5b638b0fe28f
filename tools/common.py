"""What the tools share: the repository's files, findings, and how a tool reports and ends."""

import argparse
import difflib
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def files(*patterns, root=ROOT):
    """Files of the work tree that match one of git's glob patterns and are not ignored, sorted."""
    command = f"git -C {root} ls-files -z --cached --others --exclude-standard --".split()
    listed = subprocess.run(
        [*command, *(f":(glob){p}" for p in patterns)], capture_output=True, check=True
    )
    names = {name for name in listed.stdout.decode().split("\0") if name}
    return sorted(root / name for name in names if (root / name).is_file())


def run(command, **options):
    """Runs a command without standard input; output is captured as text."""
    return subprocess.run(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        **options,
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
        print(f"{self.tool}: {examined}, {len(self.found)} finding(s)")
        return 1 if self.found else 0


def self_test(tool, checks):
    """Runs named checks, each a function that returns true when the tool behaves; exit code."""
    failed = [name for name, check in checks if not check()]
    for name in failed:
        print(f"{tool} self-test: FAILED {name}")
    print(f"{tool} self-test: {len(checks) - len(failed)} of {len(checks)} hold")
    return 1 if failed else 0


def parser(doc):
    """An argument parser whose help is the tool's docstring."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def fail(message, code=2):
    """Ends the tool with one line on stderr."""
    print(message, file=sys.stderr)
    sys.exit(code)


def render_blocks(text, kind, render):
    """Replaces what stands between `<!-- KIND: SPEC -->` and `<!-- /KIND -->` by render(SPEC)."""
    block = re.compile(rf"(<!-- {kind}: (.*?) -->\n).*?(<!-- /{kind} -->)", re.S)
    return block.sub(
        lambda m: m.group(1) + render(m.group(2)).rstrip("\n") + "\n" + m.group(3), text
    )


def render_documents(tool, kind, render, check, documents=None):
    """Renders the blocks of one kind in every document; with `check`, only finds what differs."""
    findings = Findings(tool)
    blocks = 0
    for path in documents or files("**/*.md"):
        text = path.read_text()
        blocks += len(re.findall(rf"<!-- {kind}: ", text))
        name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name

        def guarded(spec):
            try:
                return render(spec)
            except ValueError as problem:
                findings.add(name, f"block `{spec.strip()[:90]}`: {problem}")
                return "(could not be rendered)"

        found_before = len(findings.found)
        wanted = render_blocks(text, kind, guarded)
        if wanted == text or len(findings.found) > found_before:
            continue
        if check:
            diff = difflib.unified_diff(
                text.splitlines(), wanted.splitlines(), "is", "wanted", n=0, lineterm=""
            )
            findings.add(name, f"not as rendered (run tools/{tool})\n" + "\n".join(list(diff)[:24]))
        else:
            path.write_text(wanted)
            print(f"{name}: rewritten")
    return findings.finish(f"{blocks} blocks")
