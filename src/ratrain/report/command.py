"""`ratrain report RUN_DIR`."""

from __future__ import annotations

import json
from pathlib import Path

from ratrain.report.account import Account, account_of, seconds, words
from ratrain.report.html import write_report
from ratrain.report.run_folder import read_run
from ratrain.report.table import render_table


def report_command(run_dir: Path, as_json: bool) -> None:
    """Writes the run's `report.html` and prints its account, as JSON if wanted. UserError if it is no run."""
    path = write_report(run_dir)
    run = read_run(run_dir)
    account = account_of(run)
    if as_json:
        print(json.dumps({"run": run.name, "report": str(path), **account.to_json()}))
        return
    print("\n".join(words(run, account)))
    if account.causes and account.step_time:
        print()
        rows = [(c, seconds(s), f"{s / account.step_time:.1%}") for c, s in account.causes.items()]
        print(render_table(("exposed on", "mean", "of the step"), rows))
    _print_misses(account, run.forecast.basis if run.forecast else "")
    print(f"\n{path}")


def _print_misses(account: Account, basis: str) -> None:
    if account.step is None or account.forecast is None:
        return
    told, took = account.forecast.time, account.step.time
    from_where = f" ({basis})" if basis else ""
    print(
        f"\nForecast{from_where} {seconds(told)} a step, measured {seconds(took)} ({took / told - 1:+.1%})."
    )
    rows = [(m.action, m.place.rank, seconds(m.forecast), seconds(m.measured)) for m in account.misses[:3]]
    print(render_table(("furthest off", "rank", "forecast", "measured"), rows))
