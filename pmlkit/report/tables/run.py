"""Tables of run health and of the start page: what there is, and what became of every case."""

import pandas as pd

from pmlkit import campaign, paths, registry
from pmlkit.errors import PmlkitError
from pmlkit.report.load import RunData, digest, load_any_source, shown
from pmlkit.report.page import Table, note_data
from pmlkit.run import read_run


def table_statuses(data: RunData) -> Table:
    """Return how many processes of each arm ended how."""
    table = pd.crosstab(data.frame["label"], data.frame["status"]).reset_index().rename(columns={"label": "arm"})
    table.columns.name = None
    return Table(table, "statuses", "Processes by arm and status")


def table_failures(data: RunData) -> Table:
    """Return what is not ok or has a flag that speaks against it: processes of one case and arm in a row, and a reason.

    That the host or the device sets the pace is no fault; the page on pace says it.
    """
    faults = data.frame["flags"].str.replace(r"(, )?(host|device)_bound", "", regex=True).str.removeprefix(", ")
    bad = data.frame.assign(flags=faults)[(data.frame["status"] != "ok") | (faults != "")]
    same = bad.groupby(["case", "label", "status", "flags"], sort=False, dropna=False)
    table = same.agg(processes=("order", "size"), reason=("reason", "first")).reset_index().rename(columns={"label": "arm"})
    return Table(table, "failures", "Processes that are not ok, or flagged", {}, ("status",))


def table_control(data: RunData) -> Table:
    """Return the A/A control: one subject under two arms, whose verdicts must not be `faster` or `slower`."""
    table = data.control.assign(arms=data.control["base"] + " / " + data.control["candidate"])
    columns = {
        "arms": "arms",
        "op": "op",
        "precision": "precision",
        "N": "batch",
        "ratio": "time ratio",
        "low": "low",
        "high": "high",
    }
    shown = table[[*columns, "verdict"]].rename(columns=columns)
    formats = {"time ratio": ".3f", "low": ".3f", "high": ".3f"}
    return Table(shown, "control", f"A/A control at margin {100 * data.margin:.1f} %", formats, ("verdict",))


def table_checks(data: RunData) -> Table:
    """Return the answer check of every case and arm: the largest error against its limit."""
    grouped = data.frame.dropna(subset=["limit"]).groupby(["case", "op", "precision", "N", "label"], sort=False)
    table = grouped.agg(error=("error", "max"), limit=("limit", "max")).reset_index()
    table["share"] = table["error"] / table["limit"]
    shown = table.rename(columns={"label": "arm", "N": "batch", "share": "of limit"})
    return Table(shown, "checks", "Answers against float64, before timing", {"error": ".1e", "limit": ".0e", "of limit": ".0%"})


def table_environment(data: RunData) -> Table:
    """Return the environment record of a run as two columns."""
    facts = {k: v for k, v in data.run.environment.items() if k not in ("packages", "gpus")}
    facts |= {f"package {k}": v for k, v in data.run.environment.get("packages", {}).items()}
    facts |= {f"gpu {i}": gpu for i, gpu in enumerate(data.run.environment.get("gpus", []))}
    table = pd.DataFrame({"fact": list(facts), "value": [str(value) for value in facts.values()]})
    return Table(table, "environment", "Environment of the run", fold=5)


def table_runs() -> Table:
    """Return every run on this machine, committed ones included."""
    rows = []
    for name, folder in paths.run_folders().items():
        try:
            run, lines = read_run(folder)
        except PmlkitError as error:
            rows.append({"run": name, "campaign": None, "started": None, "records": None, "note": str(error)})
            continue
        ok = sum(record.status == "ok" for record in lines.records)
        file = folder / "records.jsonl"
        if file.is_file():
            note_data("run on this machine", run.run_id, shown(file, run.run_id), digest(file))
        rows.append(
            {
                "run": name,
                "campaign": run.campaign,
                "started": run.started_at,
                "records": f"{ok} ok of {len(lines.records)}, {run.planned} planned",
                "note": "sample data" if run.sample else None,
            }
        )
    return Table(pd.DataFrame(rows, columns=["run", "campaign", "started", "records", "note"]), "runs", "Runs on this machine")


def table_sources() -> Table:
    """Return the published sources with their record counts, method and limits."""
    rows = []
    for key, source in registry.SOURCES.items():
        records = load_any_source(key).records
        ok = sum(record.status == "ok" for record in records)
        rows.append(
            {
                "source": key,
                "title": source.title,
                "records": f"{ok} ok of {len(records)}",
                "method": source.method,
                "limits": source.limits,
            }
        )
    return Table(pd.DataFrame(rows), "sources", "Published sources")


def table_campaigns() -> Table:
    """Return the campaigns that can be started, with their size."""
    rows = [
        {
            "campaign": plan.name,
            "question": plan.question,
            "cases": len(plan.cases),
            "arms": ", ".join(plan.arms),
            "processes": plan.planned,
            "protocol": plan.protocol.name,
        }
        for plan in campaign.CAMPAIGNS.values()
    ]
    return Table(pd.DataFrame(rows), "campaigns", "Campaigns: python -m pmlkit run NAME")


def table_plan(name: str) -> Table:
    """Return the cases of one campaign."""
    plan = campaign.campaign(name)
    rows = [
        {
            "case": case.case_id,
            "op": case.op,
            "precision": case.precision,
            "arms": ", ".join(plan.arms),
            "processes": len(plan.arms) * plan.protocol.processes,
        }
        for case in plan.cases
    ]
    return Table(pd.DataFrame(rows), "plan", f"Campaign {name}: {plan.question}")


def table_subjects() -> Table:
    """Return the subjects: who computes what, at which version."""
    rows = [
        {"subject": s.key, "name": s.name, "version": s.version, "ops": ", ".join(s.ops), "precisions": ", ".join(s.precisions)}
        for s in registry.SUBJECTS.values()
    ]
    return Table(pd.DataFrame(rows), "subjects", "Subjects")
