#!/usr/bin/env python3
"""Makes the README's tables from a file of bench --format --csv, one a format of weights.

    python3 bench/table.py bench/results/RUN.csv [--format fp8,mxfp4]

First line of a layer: microseconds and the part of the floor; second line: the goal (bench/targets.def) over the time,
then bf16's time of the same run over it. Above 1 is quicker than asked, or than bf16.
"""
import argparse
import csv
import math


def number(us):
    return f"{us:.1f}" if us < 99.95 else f"{us:.0f}"


def cells(rows):
    """By format, layer and tokens, all in the file's order."""
    table = {}
    for row in rows:
        if row["side"] == "cumoe" and not row["forced"]:
            of_layer = table.setdefault(row["format"], {}).setdefault(row["model"], {})
            of_layer[int(row["tokens"])] = row
    return table


def ratio(row, name):
    return float(row[name]) / float(row["layer_us"]) if row.get(name) else None


def line(name, texts):
    return f"| {name} | " + " | ".join(texts) + " |"


def mean(values):
    known = [math.log(v) for v in values if v]
    return f"{math.exp(sum(known) / len(known)):.2f}" if known else "-"


def print_format(name, layers):
    tokens = list(dict.fromkeys(t for cells_of in layers.values() for t in cells_of))
    every = [row for cells_of in layers.values() for row in cells_of.values()]
    goals = [ratio(row, "goal_us") for row in every]
    print(f"{name}: {sum(g is not None and g >= 1 for g in goals)} of {sum(g is not None for g in goals)} goals met; "
          f"geometric means: goal over time {mean(goals)}, bf16 over time {mean(ratio(r, 'bf16_us') for r in every)}\n")
    print(line(f"{name}, tokens", map(str, tokens)))
    print("|---|" + "--:|" * len(tokens))
    for layer, cells_of in layers.items():
        rows = [cells_of.get(t) for t in tokens]
        print(line(layer, (f"{number(float(r['layer_us']))} ({100 * float(r['floor_part']):.0f} %)" if r else ""
                           for r in rows)))
        pairs = [(ratio(r, "goal_us"), ratio(r, "bf16_us")) if r else (None, None) for r in rows]
        print(line("", (", ".join(f"{v:.2f}" for v in pair if v) for pair in pairs)))
    wrong = [f"{r['model']} {r['tokens']}" for r in every if r["check"] != "ok"]
    print(f"\nWRONG: {', '.join(wrong)}\n" if wrong else "")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--format", type=lambda text: text.split(","), help="only these")
    o = parser.parse_args()
    with open(o.file, newline="") as file:
        table = cells(csv.DictReader(file))
    for name, layers in table.items():
        if not o.format or name in o.format:
            print_format(name, layers)


if __name__ == "__main__":
    main()
