"""Moves the schemas that are named, or all, and prints the page of all that were ever moved."""

import datetime
import importlib
import json
import os
import sys

from testbed import NEW, OLD, STATE
from trial import RUN_WORDS, Trial

ALL = ["postgis", "timeseries", "shop", "redmine", "mediawiki", "objects"]
# What the schemas have shown so far, and what became of it.
FOUND = """## Found and changed

| found with | before | now |
|---|---|---|
| pg_cron 1.4 to 1.6 | refused: the target has it in another schema, and accepts it only in the database that its settings name | created where the target wants it; rehearsed in a database of the real name |
| pg_cron | its jobs would run on the target too while it follows | sessions of others are read-only there until clients move; background processes start again then |
| `check --roles create` | the rehearsal refused every definition that names a role which `run` creates | these are told apart |
| `regrole` values | refused when `run` creates the role | moved |
| large objects | those that were removed on the target stayed on the source after `fallback` | removed |
| `ALTER ROLE ... SET` | settings of a role arrived in another order | in the same order |
| pg_partman, partitions made while the target follows | ended the migration: since version 17 partitions have the identity of their table | not taken for a difference; not measured again yet |
| PgQ | it fails after the switch: its tables hold transaction numbers of the source | `check` names such columns; resetting them is up to the user |

Not changed: pg_partman 4.7 and 5.2 have different tables, so `check` refuses until the source has version 5 (these runs update it first). Values
of the extension `unit` are not the same when their text is read again; the comparison before the switch ends such a migration. A scratch
database that compares changed definitions cannot be made with pg_cron. A client that ends while a pause waits for it counts as a failure.
"""
KEPT = ["objects", "rows", "checked", "refusals", "errors", "differences", "gaps", "usual", "pauses", "notes"]


def move(name):
    schema = importlib.import_module(name).SCHEMA()
    trial = Trial(schema).go()
    row = {key: getattr(trial, key, None) for key in KEPT}
    row.update(title=schema.title, explained=schema.explained, source=schema.source, day=str(datetime.date.today()))
    row["client_errors"] = [error for _, error in trial.load.errors] if trial.load else []
    row["answers"] = trial.load.count() if trial.load else 0
    (STATE / f"{name}.json").write_text(json.dumps(row, indent=1))


def page():
    rows = [json.loads((STATE / f"{name}.json").read_text()) for name in ALL if (STATE / f"{name}.json").exists()]
    print(f"# Real schemas from PostgreSQL {OLD} to {NEW} and back\n")
    words = f" with `{' '.join(RUN_WORDS)}`" if RUN_WORDS else ""
    print(f"`experiments/real-schemas`: check, `run`{words}, `fallback`, `run --hold` and `switch`, `fallback`, `run` and `finish`, under load of the\n"
          "application's own kind. After each step pg_dump's output of both sides is compared: definitions, settings, rights and roles with\n"
          "what pg_dump and psql alone make of the source on a third server of the newer version, which prints some definitions differently; rows\n"
          "in each table sorted, with sequences and large objects, of both sides while clients are quiet.\n")
    print("| schema | from | rows | answers to clients | refused at check | errors | client errors | differences |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        counts = [len(row[key]) for key in ["refusals", "errors", "client_errors", "differences"]]
        print(f"| {row['title']} | {row['source']} | {row['rows'] or '-'} | {row['answers']} | " + " | ".join(map(str, counts)) + " |")
    print("\n| schema | longest wait of a client, ms: without a migration | run | fallback | run, finish | pauses, ms |\n|---|---|---|---|---|---|")
    for row in rows:
        waits = [f"{row['gaps'].get(name, 0):.0f}" if name in row["gaps"] else "-" for name in ["there", "back", "there again"]]
        usual = f"{row['usual']:.0f}" if row.get("usual") else "-"
        print(f"| {row['title']} | {usual} | " + " | ".join(waits) + f" | {', '.join(f'{pause:.0f}' for pause in row['pauses'] or [])} |")
    print("\nA wait is from a client's request to its answer; of the applications over HTTP it holds all that a page does.\n")
    for row in rows:
        print(f"- {row['title']} ({row['day']}): {row['objects']}.")
        for text in row.get("explained", []):
            print(f"  - explained: {text}")
        for kind in ["refusals", "errors", "client_errors", "differences", "notes"]:
            for text in sorted(set(row[kind]))[:12]:
                print(f"  - {kind.replace('_', ' ')}: {text[:400]}")
    print(f"\n{FOUND}", end="")
    with open("/proc/cpuinfo") as file:
        model = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), "?")
    print(f"\nMachine: {os.cpu_count()} processors ({model}), Linux {os.uname().release}.")


for schema in sys.argv[1:] or ALL:
    move(schema)
page()
