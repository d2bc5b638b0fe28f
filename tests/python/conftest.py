"""Where the built package lies, and totals for .ci/run."""

import json
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, os.environ.get("RAFTER_PYTHON_PATH", str(ROOT / "build" / "python")))


def pytest_terminal_summary(terminalreporter):
    path = os.environ.get("RAFTER_TEST_TOTALS")
    if path:
        stats = terminalreporter.stats
        totals = {
            "passed": len(stats.get("passed", [])),
            "failed": len(stats.get("failed", [])) + len(stats.get("error", [])),
            "skipped": len(stats.get("skipped", [])),
        }
        pathlib.Path(path).write_text(json.dumps(totals))
