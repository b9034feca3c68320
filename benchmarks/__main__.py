"""`python -m benchmarks [name…] [--quick]`: run all or some, print tables, write results/<name>.json and README.md.

Each benchmark gets a process of its own, so that one may want one device and another eight.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from pathlib import Path

from benchmarks import _front_page, timing

HERE = Path(__file__).parent
NOT_BENCHMARKS = {"__init__", "__main__", "timing"}

HEAD = """# Benchmarks

`make bench` (or `python -m benchmarks [name…] [--quick]`) runs these scripts, prints their tables and writes the numbers to
`results/*.json`; this page is generated from those files. Only ratios count: the floor is what a careful person would write
by hand in plain JAX or Python, measured in the same process, interleaved in random order. The range is the 10–90 % range of
the per-round ratios.
"""


def names() -> list[str]:
    return sorted(path.stem for path in HERE.glob("*.py") if path.stem not in NOT_BENCHMARKS and path.stem[0] != "_")


def run_here(name: str, quick: bool) -> None:
    results = importlib.import_module(f"benchmarks.{name}").run(quick)
    for result in results:
        print(timing.markdown(result), flush=True)
    timing.save(name, results, quick)


def run_apart(name: str, quick: bool) -> bool:
    print(f"## {name}", flush=True)
    command = [sys.executable, "-m", "benchmarks", name, "--here", *(["--quick"] if quick else [])]
    return subprocess.run(command, cwd=HERE.parent, check=False).returncode == 0


def write_readme() -> None:
    """One section a benchmark, from the saved numbers alone."""
    parts = [HEAD]
    for path in sorted(timing.RESULTS.glob("*.json")):
        record, results = timing.load(path)
        versions = ", ".join(f"{package} {version}" for package, version in dict(record["versions"]).items())  # type: ignore[call-overload]
        quick = " A quick run: rough numbers." if record["quick"] else ""
        parts.append(f"## {record['benchmark']}\n")
        parts.extend(timing.markdown(result) for result in results)
        parts.append(f"*{record['date']}, {record['cores']} cores ({record['machine']}); {versions}.{quick}*\n")
    (HERE / "README.md").write_text("\n".join(parts))
    _front_page.write()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"which (all unless named): {', '.join(names())}")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and smaller sizes: does it run at all")
    parser.add_argument("--readme", action="store_true", help="only write README.md from the saved results")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    unknown = sorted(set(asked.names) - set(names()))
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(names())}")
    if asked.here:
        for name in asked.names:
            run_here(name, asked.quick)
        return 0
    failed = [] if asked.readme else [name for name in asked.names or names() if not run_apart(name, asked.quick)]
    write_readme()
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    raise SystemExit(main())
