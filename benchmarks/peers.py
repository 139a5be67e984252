"""The race: RATrain against torch's own tools and DeepSpeed, row by row (`race/rows.toml`).

    python benchmarks/peers.py --set lifecycle --repeat 3     run a set (root for rows with slow links)
    python benchmarks/peers.py --row pp2-loopback --fresh     run one row again
    python benchmarks/peers.py --trace pp2-dp2-200mbit        where RATrain's time goes in that row
    python benchmarks/peers.py --table                        tables of what has been run
    python benchmarks/peers.py --memory                       RATrain's peaks in them beside their forecasts
    python benchmarks/peers.py --bounds                       how near RATrain comes to what no schedule can beat

Results are kept per row under `runs/race`; a row that was run with as many repetitions is not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from race.arena import race
from race.bounds import measure, table
from race.chart import draw
from race.overhead import overheads
from race.profiles import with_profile
from race.ratrain_plan import plan_of, settled
from race.results import Result, load, machine
from race.rows import RATRAIN, Row, load_rows
from race.tables import markdown
from ratrain.plan.fit import with_memory
from ratrain.program.timeline import Timeline
from ratrain.report.places import Place

RUNS = Path("runs/race")
_BEGIN, _END = "<!-- race:begin -->", "<!-- race:end -->"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, run, print. Returns 1 if a bar was missed."""
    rows = load_rows()
    sets = sorted({row.set for row in rows})
    parser = argparse.ArgumentParser(description="RATrain against torch's own tools and DeepSpeed.")
    parser.add_argument("--set", action="append", default=[], choices=sets, help="rows to run")
    parser.add_argument("--row", action="append", default=[], choices=[row.name for row in rows])
    parser.add_argument("--repeat", type=int, default=3, help="windows of each contender")
    parser.add_argument("--steps", type=int, help="of a window, instead of the row's own")
    parser.add_argument("--fresh", action="store_true", help="run again what has been run")
    parser.add_argument("--table", action="store_true", help="only print what is there")
    parser.add_argument("--memory", action="store_true", help="forecast peaks beside what has been run")
    parser.add_argument("--bounds", action="store_true", help="lower bounds beside what has been run")
    parser.add_argument("--trace", metavar="ROW", choices=[row.name for row in rows])
    parser.add_argument("--chart", type=Path, help="draw what has been run into this PNG")
    parser.add_argument("--docs", type=Path, help="put the tables between the race's marks in this page")
    parser.add_argument("--out", type=Path, default=RUNS)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.memory:
        _memory(rows, args.out)
        return 0
    wanted = {row.name for row in rows if row.set in args.set or row.name in args.row}
    if args.bounds:
        settled_rows = [_settled(row, args.out) for row in rows if not wanted or row.name in wanted]
        raced = [(row, result) for row in settled_rows if (result := load(args.out, row)) is not None]
        with tempfile.TemporaryDirectory(dir=args.out) as folder:
            print(table(measure(raced, Path(folder), lambda text: print(text, file=sys.stderr))))
        return 0
    if args.trace:
        _trace(next(row for row in rows if row.name == args.trace), args.out)
        return 0
    if not wanted and not args.table:
        parser.error(f"nothing to run: give --set ({', '.join(sets)}) or --row")
    missed = False
    sections, raced = [], []
    for row in (row for row in rows if not wanted or row.name in wanted):
        row = _settled(dataclasses.replace(row, steps=args.steps or row.steps), args.out)
        result = None if args.fresh else load(args.out, row)
        if not args.table and (result is None or result.repeat < args.repeat):
            result = _run(row, args.repeat, args.out)
        if result is not None:
            raced.append((row, result))
            sections.append(markdown(row, result))
            missed = missed or "MISSED" in sections[-1]
            print(sections[-1], flush=True)
    (args.out / "race.md").write_text("\n".join(sections))
    if args.chart:
        draw(raced, args.chart)
    if args.docs:
        _publish(sections, args.docs)
    print(f"tables in {args.out / 'race.md'}")
    return int(missed)


def _publish(sections: Sequence[str], page: Path) -> None:
    """Replaces what stands between the marks in `page`."""
    before, _, rest = page.read_text().partition(_BEGIN)
    after = rest.partition(_END)[2]
    told = ", ".join(f"{key} {value}" for key, value in machine().items())
    page.write_text(
        "\n".join([f"{before}{_BEGIN}", f"Measured on: {told}.", "", *sections, f"{_END}{after}"])
    )


def _settled(row: Row, out: Path) -> Row:
    """The row with the planner's layouts in place of those that are left to it."""
    cases = tuple(settled(with_profile(row, case, out)) for case in row.cases)
    return dataclasses.replace(row, cases=cases)


def _run(row: Row, repeat: int, out: Path) -> Result:
    print(f"{row.name}: {', '.join(case.name for case in row.cases)}", flush=True)
    records = race(row, repeat, out, lambda text: print(text, flush=True))
    overhead = {
        case.name: max(cost.share for cost in overheads(_timelines(records[case.name].details)))
        for case in row.cases
        if case.tool == RATRAIN and records[case.name].details
    }
    result = Result(row.name, row.fingerprint, repeat, machine(), records, overhead)
    result.save(out)
    return result


def _memory(rows: Sequence[Row], out: Path) -> None:
    """Peaks of every RATrain rank that has been run beside what its plan forecasts."""
    from ratrain.report.table import render_table

    table, errors = [], []
    for row in rows:
        result = load(out, row)
        for case in row.cases if result is not None else ():
            record = result.records[case.name] if result is not None else None
            if case.tool != RATRAIN or case.options.get("planned") or record is None or not record.peak:
                continue
            plan = with_memory(plan_of(case), case.model.spec())
            assert plan.forecast is not None
            for rank, peak in enumerate(record.peak):
                told = plan.forecast.memory[case.place(rank)[0]].total
                errors.append(told / peak - 1)
                cells = (row.name, case.name, str(rank), f"{told / 1e6:.0f}", f"{peak / 1e6:.0f}")
                table.append((*cells, f"{errors[-1]:+.1%}"))
    print(render_table(("row", "contender", "rank", "forecast MB", "measured MB", "error"), table))
    mean = sum(map(abs, errors)) / len(errors)
    print(f"mean error {mean:.1%}, worst {max(errors, key=abs):+.1%}, over {len(errors)} ranks")


def _timelines(details: Sequence[dict[str, dict[str, object]]]) -> list[Timeline]:
    return [Timeline.from_json(told["timeline"]) for told in details]


def _trace(row: Row, out: Path) -> None:
    """Runs RATrain alone, writes its timeline for Perfetto and as a page, and says where the time went."""
    from ratrain.report.forecast import Forecast
    from ratrain.report.html import write_simulation
    from ratrain.report.trace import write_trace

    case = next(case for case in _settled(row, out).cases if case.tool == RATRAIN)
    record = race(dataclasses.replace(row, cases=(case,), bars=()), 1, out, print)[case.name]
    if record.error:
        sys.exit(record.error)
    timelines = _timelines(record.details)
    places = tuple(Place(rank, *case.place(rank)) for rank in range(case.ranks))
    # One machine, one clock: no offsets.
    whole = Timeline([r for t in timelines for r in t.rows], {rank: 0.0 for rank in range(case.ranks)})
    write_trace(whole, out / f"{row.name}.trace.json", places)
    page = out / f"{row.name}.html"
    write_simulation(Forecast(whole, places, tuple(record.peak)), page, row.name, "Measured.")
    for place, cost in zip(places, overheads(timelines)):
        print(
            f"{place.title}: {cost.span:.3f} s; actions {cost.busy / cost.span:.1%}, waiting "
            f"{cost.waiting / cost.span:.1%}, waking {cost.waking / cost.span:.2%}, between actions "
            f"{cost.between / cost.span:.2%} ({cost.between / cost.actions * 1e6:.0f} us each of {cost.actions})"
        )
    print(f"{out / f'{row.name}.trace.json'} and {page}")


if __name__ == "__main__":
    sys.exit(main())
