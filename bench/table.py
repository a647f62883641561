#!/usr/bin/env python3
"""Makes the README's tables from a file of bench --format --csv, one a format of weights.

    python3 bench/table.py bench/results/RUN.csv [--format fp8,mxfp4]

First line of a layer: microseconds and the part of the floor; second line: the quickest peer's time (of another run,
bench/targets.def) over it, then bf16's time of the same run over it. Above 1 is quicker than they are. Ahead of each
table stands how it does beside the goals of targets.def.
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


def reached(rows, name):
    ratios = [r for r in (ratio(row, name) for row in rows) if r]
    return f"{sum(r >= 1 for r in ratios)} of {len(ratios)}"


def print_format(name, layers):
    tokens = list(dict.fromkeys(t for cells_of in layers.values() for t in cells_of))
    every = [row for cells_of in layers.values() for row in cells_of.values()]
    print(f"{name}: {reached(every, 'goal_us')} goals met, ahead of the peer in {reached(every, 'peer_us')} cells; "
          f"geometric means over time: goal {mean(ratio(r, 'goal_us') for r in every)}, peer "
          f"{mean(ratio(r, 'peer_us') for r in every)}, bf16 {mean(ratio(r, 'bf16_us') for r in every)}; goal by tokens "
          + ", ".join(mean(ratio(of[t], "goal_us") for of in layers.values() if t in of) for t in tokens) + "\n")
    print(line(f"{name}, tokens", map(str, tokens)))
    print("|---|" + "--:|" * len(tokens))
    for layer, cells_of in layers.items():
        rows = [cells_of.get(t) for t in tokens]
        print(line(layer, (f"{number(float(r['layer_us']))} ({100 * float(r['floor_part']):.0f} %)" if r else ""
                           for r in rows)))
        pairs = [(ratio(r, "peer_us"), ratio(r, "bf16_us")) if r else (None, None) for r in rows]
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
