#!/usr/bin/env python3
"""Draws the part of the floor that the layer and its best peer reach over the number of tokens, a panel a model.

    python3 bench/plot.py bench/results/RUN.csv [bench/results/RUN-peers.csv] [-o bench/results/RUN.svg]

Takes the files of bench --csv and of peers.py from the same run. The floor of a cell is bench's, for both sides. The
best peer is the least time of any row or column that is a whole MoE layer or its two grouped products: torch, gemms,
triton, cuBLAS grouped, and where bench was run with --format those of bench/targets.def. A format of weights is a file
of its own, RUN-FORMAT.svg. Needs matplotlib.
"""
import argparse
import collections
import csv
import pathlib
import re

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

INK, GRID, PAPER = "#222222", "#dddddd", "#ffffff"  # an explicit background: readable on dark pages too
OURS, PEER = "#0072b2", "#d55e00"                   # of Okabe and Ito's palette; told apart by shape and dash as well
PEER_SIDES = {"torch": "torch", "gemms": "torch 2 GEMMs", "triton": "Triton", "deepgemm": "DeepGEMM",
              "marlin": "Marlin", "triton_kernels": "triton_kernels"}


def read(paths):
    return [row for path in paths for row in csv.DictReader(open(path, newline=""))]


def format_of(row):
    return row.get("format") or row["dtype"]


def key(row):
    return row["model"], row["dtype"], format_of(row), row["routing"], int(row["tokens"])


def peer_times(rows):
    """(time, name) of every peer of a cell."""
    times = collections.defaultdict(list)
    for row in rows:
        if row["side"] in PEER_SIDES:
            times[key(row)].append((float(row["layer_us"]), PEER_SIDES[row["side"]]))
        if row.get("grouped_us"):
            times[key(row)].append((float(row["grouped_us"]), "cuBLAS grouped"))
        if row.get("peer_us"):
            times[key(row)].append((float(row["peer_us"]), row["peer"]))
    return times


def series(rows):
    """Of each model, in the order of the file: tokens, our part of the floor, the best peer's (or None)."""
    peers, models = peer_times(rows), collections.OrderedDict()
    for row in rows:
        if row["side"] != "cumoe" or row["forced"] or not row["floor_us"]:
            continue
        floor, best = float(row["floor_us"]), min(peers[key(row)], default=None)
        point = int(row["tokens"]), floor / float(row["layer_us"]), best and floor / best[0]
        models.setdefault(row["model"], []).append(point)
    return models


def panel(axes, model, points):
    tokens = [p[0] for p in points]
    axes.plot(tokens, [100 * p[1] for p in points], "o-", color=OURS, lw=2, ms=5, zorder=3)
    known = [(p[0], 100 * p[2]) for p in points if p[2]]
    axes.plot([p[0] for p in known], [p[1] for p in known], "s--", color=PEER, lw=1.5, ms=4.5, mfc=PAPER, zorder=2)
    axes.set_title(model, fontsize=10, color=INK)
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [str(t) for t in tokens], rotation=45)
    axes.minorticks_off()
    axes.set_ylim(0, 100)
    axes.set_yticks(range(0, 101, 25))
    axes.grid(color=GRID, lw=0.8)
    axes.tick_params(labelsize=8, color=GRID, labelcolor=INK)
    for spine in axes.spines.values():
        spine.set_color(GRID)


def conditions(rows):
    first = next(row for row in rows if row["side"] == "cumoe")
    names = {name for times in peer_times(rows).values() for _, name in times}
    peers = ", ".join(sorted(names, key=str.lower)) or "none in these files"
    of = "peers (bench/targets.def)" if first.get("peer_us") else "peers"
    return f"{first['gpu']}, {format_of(first)}, commit {first['commit']}, {first['date'][:10]}; {of}: {peers}"


def draw(rows, path):
    models = series(rows)
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "cumoe", "font.family": "sans-serif"})
    figure, panels = plt.subplots(1, len(models), figsize=(2.1 * len(models) + 0.6, 2.9), sharey=True, squeeze=False)
    figure.set_facecolor(PAPER)
    for axes, (model, points) in zip(panels[0], models.items()):
        panel(axes, model, points)
        axes.set_facecolor(PAPER)
    panels[0][0].set_ylabel("% of the floor", fontsize=9, color=INK)
    figure.supxlabel("tokens", fontsize=9, color=INK, y=0.09)
    lines = panels[0][0].get_lines()
    figure.legend(lines, ["cumoe, whole layer", "best peer"], loc="upper right", ncols=2, frameon=False, fontsize=9)
    floor = "floor (at rates as measured)" if rows[0].get("rates") == "measured" else "floor"
    figure.text(0.01, 0.955, f"Part of the hardware's {floor} that is reached", fontsize=10, color=INK, weight="bold")
    figure.text(0.01, 0.02, conditions(rows), fontsize=7, color=INK)
    figure.tight_layout(rect=(0, 0.05, 1, 0.95), w_pad=0.4)
    figure.savefig(path, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("-o", "--output", type=pathlib.Path, help="default: the first file's name with .svg")
    o = parser.parse_args()
    rows, path = read(o.files), str(o.output or re.sub(r"\.csv$", "", str(o.files[0])) + ".svg")
    formats = list(dict.fromkeys(format_of(row) for row in rows if row["side"] == "cumoe"))
    for name in formats:
        own = path if len(formats) == 1 else re.sub(r"\.svg$", "", path) + f"-{name}.svg"
        draw([row for row in rows if format_of(row) == name], own)


if __name__ == "__main__":
    main()
