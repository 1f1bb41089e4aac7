"""The command line. The notebooks call the same functions."""

import argparse
import os
import sys
import time
from pathlib import Path

from pmlkit import campaign, paths, registry
from pmlkit.errors import PmlkitError
from pmlkit.hardware import gpus
from pmlkit.protocol import PROTOCOLS


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return the exit status: 0 done, 1 not all well, 2 bad input (message on standard error)."""
    given = _parser().parse_args(arguments)
    try:
        return given.command(given)
    except PmlkitError as error:
        print(f"pmlkit: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has seen enough
        return 0
    except KeyboardInterrupt:
        print("pmlkit: stopped; what was recorded stays", file=sys.stderr)
        return 130


def _list(given: argparse.Namespace) -> int:
    """Print the registries as tables."""
    plans = [[plan.name, str(len(plan.cases)), str(plan.planned), plan.question] for plan in campaign.CAMPAIGNS.values()]
    _print("campaigns", ["name", "cases", "processes", "question"], plans)
    _print("subjects", ["key", "version", "ops"], [[s.key, s.version, ", ".join(s.ops)] for s in registry.SUBJECTS.values()])
    _print("ops", ["key", "title", "phases"], [[o.key, o.title, ", ".join(o.phases)] for o in registry.OPS.values()])
    rows = [[p.name, p.device, f"{p.processes}-{p.most}", f"{p.blocks}", p.cache] for p in PROTOCOLS.values()]
    _print("protocols", ["name", "device", "processes", "blocks", "cache"], rows)
    _print("published sources", ["key", "title"], [[s.key, s.title] for s in registry.SOURCES.values()])
    _print("boards", ["key", "title", "peaks"], [[g.key, g.title, ", ".join(g.peaks)] for g in gpus().values()])
    _print("notebooks", ["name"], [[p.name] for p in sorted(paths.notebooks().glob("*.ipynb"))])
    _print("runs", ["name", "folder"], [[name, paths.relative(folder)] for name, folder in paths.run_folders().items()])
    return 0


def _run(given: argparse.Namespace) -> int:
    """Run a campaign and print where its records are."""
    from pmlkit.bench.runner import check_statuses, run_campaign
    from pmlkit.releases import prepare
    from pmlkit.run import read_run

    plan = prepare(given.campaign, given.protocol, given.pml)
    retry = check_statuses(given.retry)
    folder = run_campaign(plan, seed=given.seed, budget_s=_seconds(given.budget), resume=given.resume, retry=retry)
    run, lines = read_run(folder)
    ok = sum(record.status == "ok" for record in lines.records)
    print(f"{paths.relative(folder)}: {run.planned} planned, {len(lines.records)} recorded, {ok} ok")
    return 0 if ok else 1


def _report(given: argparse.Namespace) -> int:
    """Render one report, or every report that only reads, and print the page or the index."""
    from pmlkit.report.render import find_notebook, render, report_notebooks

    if given.all == bool(given.notebook):
        raise PmlkitError("report: name one notebook, or give --all")
    notebooks = report_notebooks() if given.all else [find_notebook(given.notebook)]
    if given.all and given.parameter:
        raise PmlkitError("report: -p belongs to one notebook, not to --all")
    folder = Path(given.output) if given.output else paths.reports()
    failed = 0
    for notebook in notebooks:
        begin = time.monotonic()
        try:
            page = render(notebook, given.parameter, folder, given.cell_timeout)
            print(f"{paths.relative(page)} ({time.monotonic() - begin:.0f} s)", flush=True)
        except PmlkitError as error:
            print(f"pmlkit: {error}", file=sys.stderr, flush=True)
            failed += 1
    print(f"index: {(folder / 'index.html').resolve()}")
    return 1 if failed else 0


def _plan(given: argparse.Namespace) -> int:
    """Print the memory plan of a mixture-of-experts layer."""
    from pmlkit.moe.memory import plan_memory

    names = ("tokens", "hidden", "width", "experts", "top_k", "ep", "precision", "pipeline", "mode", "capacity_factor")
    print(plan_memory(**{name: getattr(given, name) for name in names}).explain())
    return 0


def _verify(given: argparse.Namespace) -> int:
    """Rebuild a report from its records and compare."""
    from pmlkit.report.verify import verify

    print(verify(Path(given.page)))
    return 0


def _compare(given: argparse.Namespace) -> int:
    """Print the verdict table of two arms; status 1 if `--fail-on` names anything in it."""
    from pmlkit.report.gate import gate, read_margin

    found = gate(given.run, given.base, given.candidate, read_margin(given.margin), given.fail_on)
    print(found.show(given.format))
    return 1 if len(found.failing) else 0


def _doctor(given: argparse.Namespace) -> int:
    """Print what this machine can measure and why not the rest."""
    from pmlkit.bench.doctor import examine

    _print("this machine", ["thing", "", "detail"], [[f.thing, "yes" if f.able else "no", f.detail] for f in examine()])
    return 0


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _seconds(text: str | None) -> float | None:
    """Read a duration: `90`, `90s`, `20m` or `1h`. Raises PmlkitError for anything else."""
    if text is None:
        return None
    unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:], 0)
    try:
        seconds = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise PmlkitError(f"--budget {text!r} is not a duration: write 90s, 20m or 1h")
    return seconds


def _print(title: str, head: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    print(f"\n{title}")
    for row in [head, *rows]:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pmlkit", description="Measure, compare and report GPU kernels.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("list", help="registries as tables")
    command.set_defaults(command=_list)

    _run_parser(commands.add_parser("run", help="run a campaign"))

    command = commands.add_parser("report", help="execute a notebook strictly and export it as HTML")
    command.add_argument("notebook", nargs="?", help="path, file name or stem")
    command.add_argument("--all", action="store_true", help="every notebook but the campaigns")
    command.add_argument("-p", dest="parameter", action="append", default=[], metavar="NAME=VALUE", help="lists as a,b,c")
    command.add_argument("--cell-timeout", type=int, metavar="SECONDS")
    command.add_argument("--output", metavar="FOLDER", help="default data/reports")
    command.set_defaults(command=_report)

    command = commands.add_parser("plan", help="memory plan of a mixture-of-experts layer, no GPU needed")
    sizes = {"tokens": 2048, "hidden": 7168, "width": 3072, "experts": 384, "top-k": 6, "ep": 8}
    for name, size in sizes.items():
        command.add_argument(f"--{name}", type=int, default=size, help=f"default {size:,}")
    command.add_argument("--precision", default="bf16", help="bf16, mxfp8 or nvfp4 (default bf16)")
    command.add_argument("--pipeline", default="standard", help="standard, staged or mega (default standard)")
    command.add_argument("--mode", default="training", help="training or inference (default training)")
    command.add_argument("--capacity-factor", type=float, default=8.0, help="default 8")
    command.set_defaults(command=_plan)

    command = commands.add_parser("compare", help="verdict table of two arms of a run, for continuous integration")
    command.add_argument("base")
    command.add_argument("candidate")
    command.add_argument("--run", default="latest", help="default latest")
    command.add_argument("--margin", help="2%% or 0.02; default: the run's own, at least 2%%")
    command.add_argument(
        "--fail-on", type=_words, default=[], metavar="WORDS", help="verdicts, wrong, broken; separated by commas"
    )
    command.add_argument("--format", choices=("text", "markdown", "json"), default="text")
    command.set_defaults(command=_compare)

    command = commands.add_parser("doctor", help="what this machine can measure and why not the rest")
    command.set_defaults(command=_doctor)

    command = commands.add_parser("verify", help="rebuild a report from its records and compare")
    command.add_argument("page")
    command.set_defaults(command=_verify)
    return parser


def _run_parser(command: argparse.ArgumentParser) -> None:
    command.add_argument("campaign")
    command.add_argument("--seed", type=int, default=0, help="of the order of cases and arms (default 0)")
    command.add_argument("--budget", help="stop cleanly after this time: 90s, 20m, 1h")
    command.add_argument(
        "--resume", default="", metavar="RUN", help="go on with an interrupted run: its missing processes only"
    )
    command.add_argument("--retry", type=_words, default=[], metavar="STATUSES", help="when resuming: run these once more")
    command.add_argument("--protocol", default="", help="another way to measure than the campaign's own")
    command.add_argument(
        "--pml", type=_words, default=[], metavar="PLACES", help="further releases: folders, wheels, or Pythons that have one"
    )
    command.set_defaults(command=_run)


if __name__ == "__main__":
    sys.exit(main())
