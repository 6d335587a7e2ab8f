"""Run the README's comparison of the four scripts, print its tables and draw its two figures.

    pip install matplotlib
    python docs/compare.py                          # tiny_llama: every run that runs/compare does not hold yet
    python docs/compare.py --model DIR --only main --folder runs/other  # another model: the four scripts, one seed

Tables and figures are made from the summary.json and metrics.jsonl of the runs alone. Figures: docs/*.svg.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
SEEDS = (0, 1, 2)
SCRIPTS = ("reward_model", "dpo", "ppo", "grpo")
LOSSES = "sigmoid robust exo_pair hinge ipo bco_pair sppo_hard nca_pair aot_pair aot apo_zero apo_down discopop".split()
FRONTIER = [("grpo", "--beta", value) for value in ("0", "0.02", "0.05", "0.2", "0.4")]
FRONTIER += [("dpo", "--beta", value) for value in ("0.02", "0.05", "0.3", "1")]
FRONTIER += [("ppo", "--kl-coef", value) for value in ("0", "0.1", "0.4", "0.8")]


def plan(args, folder):
    """The runs in stages; a stage needs what the ones before it have left: [[(name, command), ...], ...]."""

    def command(script, name, *options):
        return name, [f"{script}.py", "--model", args.model, "--out", str(folder / name), *options]

    def reward_model(seed):
        return ("--reward-model", str(folder / f"reward_model-{seed}"))

    seeds = SEEDS if args.only == "all" else SEEDS[:1]
    first, second = [], []
    for seed in seeds:
        for script in SCRIPTS:
            more = reward_model(seed) if script == "ppo" else ()
            run = command(script, f"{script}-{seed}", "--seed", str(seed), *more)
            (second if script == "ppo" else first).append(run)
    if args.only == "main":
        return [first, second]
    for seed in seeds:
        first.append(
            command("reward_model", f"reward_model-by-prompt-{seed}", "--seed", str(seed), "--batching", "by-prompt")
        )
        for loss in LOSSES:
            options = ("--seed", str(seed), "--data", str(folder / f"dpo-{seed}" / "pairs.jsonl"), "--loss-type", loss)
            smoothing = ("--label-smoothing", "0.1") if loss == "robust" else ()
            second.append(command("dpo", f"dpo-{loss}-{seed}", *options, *smoothing))
    for script, option, value in FRONTIER:
        more = reward_model(0) if script == "ppo" else ()
        run = command(script, f"{script}{option}-{value}", option, value, *more)
        (second if script == "ppo" else first).append(run)
    return [first, second]


def run_all(stages, folder, jobs):
    """Run what is missing, `jobs` at a time, each with its share of the cores."""
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    environment = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}

    def one(run):
        name, command = run
        if (folder / name / "summary.json").exists():
            return
        with (folder / f"{name}.log").open("w") as log:
            script, *options = command
            status = subprocess.run(
                [sys.executable, HERE.parent / script, *options], stdout=log, stderr=log, env=environment, check=False
            ).returncode
        print(f"{name}: {'done' if status == 0 else f'exit status {status}, see {folder / name}.log'}", flush=True)

    for stage in stages:
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, stage))


def summary(folder, name):
    path = folder / name / "summary.json"
    return json.loads(path.read_text()) if path.exists() else None


def sampled(s):
    """How many answers were sampled for training: for PPO without those of its reward model."""
    o = s["options"]
    if o.get("data"):
        return 0
    if "rankings" in o:
        return o["rankings"] * o["num_generations"]
    if "pairs" not in o:
        return s["samples"]
    prompts = math.ceil(o["pairs"] / o["pairs_per_prompt"])
    return (prompts + max(prompts // 4, 16)) * o["num_generations"]


def metrics(folder, name):
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").open()]


def shown(value, digits=3):
    """mean ± standard error."""
    return f"{value['mean']:.{digits}f} ± {value['standard_error']:.{digits}f}"


def tables(folder):
    names = sorted(path.parent.name for path in folder.glob("*/summary.json"))
    print("\n| run | happiness before | after | gain / SE | KL, nats/token | seconds | answers sampled | peak MB |")
    print("|---|---|---|---|---|---|---|---|")
    for name in names:
        s = summary(folder, name)
        if name.startswith("reward_model"):
            before, after, kl = s["happiness_after"], s["best_of_8_after"], "best of 8"
        else:
            before, after, kl = s["happiness_before"], s["happiness_after"], f"{s['kl_after']['mean']:.2f}"
        error = (before["standard_error"] ** 2 + after["standard_error"] ** 2) ** 0.5
        gain = (after["mean"] - before["mean"]) / error
        cost = f"{s['seconds']:.0f} | {sampled(s)} | {s['peak_memory_mb']:.0f}"
        print(f"| {name} | {shown(before)} | {shown(after)} | {gain:.1f} | {kl} | {cost} |")
    print("\n| reward model | held-out accuracy | random | best of 8 | rater's own best | share of the way |")
    print("|---|---|---|---|---|---|")
    for name in (name for name in names if name.startswith("reward_model")):
        s = summary(folder, name)
        low, best, top = (s[f"{k}_after"] for k in ("happiness", "best_of_8", "best_of_8_by_rater"))
        share = (best["mean"] - low["mean"]) / (top["mean"] - low["mean"])
        print(f"| {name} | {shown(s['accuracy_after'])} | {shown(low)} | {shown(best)} | {shown(top)} | {share:.0%} |")
    print("\n| DPO loss (mean of the seeds) | accuracy | margin | change of logps/chosen | happiness after | KL |")
    print("|---|---|---|---|---|---|")
    for loss in LOSSES:
        runs = [s for seed in SEEDS if (s := summary(folder, f"dpo-{loss}-{seed}"))]
        if runs:
            values = [
                [s["rewards/accuracies_after"]["mean"] for s in runs],
                [s["rewards/margins_after"]["mean"] for s in runs],
                [s["logps/chosen_after"]["mean"] - s["logps/chosen_before"]["mean"] for s in runs],
                [s["happiness_after"]["mean"] for s in runs],
                [s["kl_after"]["mean"] for s in runs],
            ]
            cells = (f"{sum(v) / len(v):.2f} ({min(v):.2f} to {max(v):.2f})" for v in values)
            print(f"| {loss} | {' | '.join(cells)} |")


def figures(folder):
    from matplotlib.figure import Figure

    colours = {"reward_model": "C3", "dpo": "C0", "ppo": "C1", "grpo": "C2"}
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for script, name in (("ppo", "happiness"), ("grpo", "reward")):
        for seed in SEEDS:
            if summary(folder, f"{script}-{seed}"):
                rows = metrics(folder, f"{script}-{seed}")
                ys = [sum(r[name] for r in rows[max(0, i - 4) : i + 1]) / min(i + 1, 5) for i in range(len(rows))]
                label = script.upper() if seed == 0 else None
                axes.plot([r["samples"] for r in rows], ys, color=colours[script], alpha=0.8, label=label)
    axes.set(xlabel="answers sampled", ylabel="happiness of the batch (mean of 5 steps)")
    axes.legend()
    figure.savefig(HERE / "learning-curves.svg")

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for script in ("dpo", "ppo", "grpo"):
        names = [f"{script}-{seed}" for seed in SEEDS] + [f"{s}{o}-{v}" for s, o, v in FRONTIER if s == script]
        points = [(s["kl_after"]["mean"], s["happiness_after"]["mean"]) for n in names if (s := summary(folder, n))]
        if points:
            axes.scatter(
                *zip(*points, strict=True), color=colours[script], label=f"{script.upper()}, at the end of a run"
            )
    if summary(folder, "ppo-0"):
        rows = metrics(folder, "ppo-0")
        part = [rows[i : i + 5] for i in range(0, len(rows), 5)]
        path = [[sum(r[k] for r in p) / len(p) for p in part] for k in ("kl", "happiness")]
        axes.plot(*path, color=colours["ppo"], alpha=0.6, label="PPO seed 0 as it trains")
    best = summary(folder, "reward_model-0")
    if best:
        axes.axhline(best["best_of_8_after"]["mean"], color=colours["reward_model"], ls="--", label="best of 8")
    axes.set(xlabel="KL to the reference, nats per token", ylabel="happiness, held-out prompts")
    axes.set_xscale("symlog", linthresh=0.2)
    ticks = [0, 0.1, 0.2, 0.5, 1, 2, 3]
    axes.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    axes.legend()
    figure.savefig(HERE / "happiness-against-kl.svg")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny_llama")
    parser.add_argument("--only", choices=["all", "main"], default="all")
    parser.add_argument("--folder", type=Path, default=Path("runs/compare"))
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    run_all(plan(args, args.folder), args.folder, args.jobs)
    tables(args.folder)
    if args.only == "all":
        figures(args.folder)
