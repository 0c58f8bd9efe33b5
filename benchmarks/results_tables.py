"""Write the pages of docs/results/tables that show cells of `trust-tta bench`, from docs/results/NAME.csv.

python -m benchmarks.results_tables                        the pages
python -m benchmarks.results_tables runs/orders.sqlite     first put this store's cells into orders.csv
"""

from __future__ import annotations

import argparse
import csv
import io
import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.pages import RESULTS, read_record, table

from trust_tta.atomic import write_whole
from trust_tta.report.model import read_report
from trust_tta.results import format_gain, format_percent
from trust_tta.results.display import HELD_OUT
from trust_tta.results.export import flat_row

RIGHT = "---:"
TRUST, SIX_STEPS = "trust", "trust_naive, 6 steps"
COLUMNS = (
    "dataset", "checkpoint", "setting", "batch_size", "label", "domain", "severity", "seed", "samples", "accuracy",
    "ece", "forwards", "backwards",
)  # fmt: skip
NETWORKS = {  # by the beginning of the hash; the networks of PACS differ from domain to domain
    "16a0a9d531de": "VMamba nano (shipped), CIFAR-10-C",
    "55959f42e181": "VMamba nano (another training), CIFAR-10-C",
    "": "VMamba nano, PACS",
}
STREAMS = {  # data set, setting and batch size
    ("cifar10-c", "online", 128): "reset at each corruption",
    ("cifar10-c", "continual", 128): "in a row, never reset",
    ("cifar10-c", "continual", 32): "in a row, 256 images of each, batches of 32",
    ("cifar10-c", "sequence", 64): "100 short domains in a row",
    ("cifar10-c", "mixed", 128): "all corruptions mixed",
    ("cifar10-c", "online+correlated", 128): "runs of one class",
    ("cifar10-c", "online", 16): "batches of 16 (three corruptions)",
    ("cifar10-c", "online", 4): "batches of 4 (three corruptions)",
    ("array", "online", 128): "clean",
    ("pacs", "online", 128): "PACS",
}


@dataclass(frozen=True)
class Row:
    """One cell: a method on one domain with one seed."""

    stream: tuple[str, str, int]  # data set, setting and batch size
    checkpoint: str
    label: str
    domain: str
    seed: int
    accuracy: float
    batches: int
    passes: int  # backward ones twice


def read(name: str) -> list[Row]:
    with (RESULTS / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return [_row(cells) for cells in csv.DictReader(file)]


def _row(cells: dict[str, str]) -> Row:
    batch_size = int(cells["batch_size"])
    return Row(
        stream=(cells["dataset"], cells["setting"], batch_size),
        checkpoint=cells["checkpoint"],
        label=cells["label"],
        domain=cells["domain"],
        seed=int(cells["seed"]),
        accuracy=float(cells["accuracy"]),
        batches=-(-int(cells["samples"]) // batch_size),
        passes=int(cells["forwards"]) + 2 * int(cells["backwards"]),
    )


def cells_of(store: Path) -> str:
    """The CSV of a store; networks that differ from domain to domain have no checkpoint."""
    rows = [{**flat_row(cell), "label": cell.label} for cell in read_report(store).cells]
    single = {row["dataset"]: len({r["checkpoint"] for r in rows if r["dataset"] == row["dataset"]}) for row in rows}
    file = io.StringIO()
    writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        known = str(row["checkpoint"])[:12]
        row["checkpoint"] = known if known in NETWORKS or single[row["dataset"]] == 1 else ""
        writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
    return file.getvalue()


def seed_means(rows: Iterable[Row]) -> dict[int, float]:
    """The mean accuracy of each seed that met all domains; seeds that did not would be easier, or harder."""
    by_seed: dict[int, list[float]] = {}
    for row in rows:
        by_seed.setdefault(row.seed, []).append(row.accuracy)
    most = max(map(len, by_seed.values()), default=0)
    return {seed: statistics.fmean(values) for seed, values in by_seed.items() if len(values) == most}


def accuracy(rows: Iterable[Row]) -> str:
    """Percent, with the sample standard deviation over the seeds where there are several."""
    means = list(seed_means(rows).values())
    if not means:
        return "–"
    spread = f" ± {100 * statistics.stdev(means):.1f}" if len(means) > 1 else ""
    return format_percent(statistics.fmean(means)) + spread


def passes_per_batch(rows: Sequence[Row]) -> str:
    return f"{sum(row.passes for row in rows) / sum(row.batches for row in rows):.3g}" if rows else "–"


def labels(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row.label for row in rows))


def orders_page() -> str:
    rows = read("orders")
    groups = {name: [row for row in rows if row.checkpoint == checkpoint] for checkpoint, name in NETWORKS.items()}
    lines = []
    for label in sorted(labels(rows), key=list(ORDER).index):
        own = {name: [row for row in group if row.label == label] for name, group in groups.items()}
        cost = passes_per_batch([row for found in own.values() for row in found])
        lines.append([ORDER[label], cost, *map(accuracy, own.values())])
    pairs = [f"{name}: {lead(group)}" for name, group in groups.items()]
    return _page(
        "What six orders buy",
        ORDERS,
        table(["", "passes per batch", *groups], lines, align=RIGHT),
        "TRUST less six updates in the default order, by network:",
        "\n".join(f"- {pair}" for pair in pairs),
        "## Beside the released code",
        AUTHORS,
        beside_authors(),
        AUTHORS_NOTES,
    )


def leads(rows: Sequence[Row]) -> list[float]:
    """TRUST less as many updates in one order, for each network, domain and seed."""
    ours, six = (
        {(row.stream, row.checkpoint, row.domain, row.seed): row.accuracy for row in rows if row.label == label}
        for label in (TRUST, SIX_STEPS)
    )
    return [value - six[key] for key, value in ours.items() if key in six]


def lead(rows: Sequence[Row]) -> str:
    found = leads(rows)
    ahead, behind = sum(value > 0 for value in found), sum(value < 0 for value in found)
    return (
        f"{100 * statistics.fmean(found):+.2f} points; ahead in {ahead}, behind in {behind} of {len(found)} pairs of "
        "domain and seed"
    )


def beside_authors() -> str:
    """The same protocol by the code released with the paper."""
    ours, theirs = map(read_record, ("six_corruptions.json", "authors_six_corruptions.json"))
    lines = []
    for name in theirs["mean"]:
        means = [ours[name]["mean"], theirs["mean"][name]]
        gains = [ours[name]["mean"] - ours["bn"]["mean"], theirs["mean"][name] - theirs["mean"]["bn"]]
        lines.append([name, *(f"{value:.2f}" for value in means), *(f"{value:+.2f}" for value in gains)])
    without = ours["trust"]["mean"] - ours["bn"]["mean"]
    lines.append(["trust", f"{ours['trust']['mean']:.2f}", "–", f"{without:+.2f}", "–"])
    return table(["", "here", "released code", "over bn, here", "over bn, released code"], lines, align=RIGHT)


def fair_page() -> str:
    rows = read("fair")
    reported, other = ([row for row in rows if (row.domain in HELD_OUT) == held] for held in (False, True))
    lines = []
    for method in dict.fromkeys(label.partition(":")[0] for label in labels(rows)):
        settings = {label.partition(": ")[2]: label for label in labels(rows) if label.partition(":")[0] == method}
        chosen = max(settings.values(), key=lambda label: _mean(other, label))
        shown = [settings.get("TRUST paper"), settings.get("own paper", settings.get("")), chosen]
        numbers = [format_percent(_mean(reported, label)) if label else "–" for label in shown]
        cost = passes_per_batch([row for row in rows if row.label == chosen])
        lines.append([method, *numbers, chosen.partition(": ")[2] or "–", cost])
    head = ["", "TRUST paper's setting", "its own paper's", "best of the sweep", "which is", "passes per batch"]
    return _page(
        "Baselines at rates of their own",
        FAIR,
        table(head, lines, align=RIGHT),
        "## These rates in other streams",
        RATES,
        _rates_table(),
    )


def _mean(rows: Iterable[Row], label: str) -> float:
    return statistics.fmean(row.accuracy for row in rows if row.label == label)


def _rates_table() -> str:
    rows = read("rates")
    lines = []
    for stream, title in STREAMS.items():
        found = [[row for row in rows if row.stream == stream and row.label == label] for label in labels(rows)]
        means = [next(iter(seed_means(own).values())) for own in found]
        lines.append([title, *(f"**{format_percent(v)}**" if v == max(means) else format_percent(v) for v in means)])
    usual = [row for row in rows if row.stream == next(iter(STREAMS))]
    costs = [passes_per_batch([row for row in usual if row.label == label]) for label in labels(rows)]
    return table(["", *labels(rows)], [*lines, ["passes per batch", *costs]], align=RIGHT)


def single_page(name: str, title: str, about: str) -> Callable[[], str]:
    """A page for one stream: the mean, the worst domain, and the gains over source and bn."""

    def page() -> str:
        rows = read(name)
        own = {label: [row for row in rows if row.label == label] for label in labels(rows)}
        whole = max(len({row.domain for row in found}) for found in own.values())
        own = {label: found for label, found in own.items() if len({row.domain for row in found}) == whole}
        means = {label: statistics.fmean(seed_means(found).values()) for label, found in own.items()}
        lines = []
        for label, found in own.items():
            domains: dict[str, list[float]] = {}
            for row in found:
                domains.setdefault(row.domain, []).append(row.accuracy)
            worst = min(domains, key=lambda domain: statistics.fmean(domains[domain]))
            gains = [format_gain(means[label] - means[base]) if label != base else "–" for base in ("source", "bn")]
            lowest = f"{format_percent(statistics.fmean(domains[worst]))} ({worst})"
            lines.append([label, accuracy(found), *gains, lowest, str(len(seed_means(found))), passes_per_batch(found)])
        head = ["", "mean", "over source", "over bn", "worst corruption", "seeds", "passes per batch"]
        return _page(title, about, table(head, lines, align=RIGHT))

    return page


def _page(title: str, *parts: str) -> str:
    """Headings, lists and tables are taken as they are; paragraphs are wrapped."""
    written = (part if part.startswith(("|", "-", "#")) else wrap(part) for part in parts)
    return "\n\n".join([f"# {title}", *written]) + "\n"


def wrap(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), width=120, break_long_words=False, break_on_hyphens=False)


MADE = "*Written by `python -m benchmarks.results_tables`"
SPREAD = "± is the sample standard deviation over the seeds"
COST = "passes per batch count a backward pass twice"
ORDER = {  # labels, as a reader would call them
    "bn": "`bn`",
    "trust_naive": "`trust_naive`: one update in the default order",
    "trust_naive, 6 steps": "`trust_naive`, six updates in the default order",
    "repetition": "`repetition`: the default order six times, averaged",
    "trust": "`trust`: six orders, averaged",
    "trust, mirrored views": '`trust`, `views="mirror"`',
    "trust_naive, class confusion": '`trust_naive`, `loss="confusion"`',
    "trust_naive, class confusion, lr 3e-4, before": '`trust_naive`, `loss="confusion"`, `lr=3e-4`, `predict="before"`',
    "trust_naive, 6 steps, class confusion": '`trust_naive`, `loss="confusion"`, six updates',
    "trust, class confusion": '`trust`, `loss="confusion"`',
}
ORDERS = f"""{MADE} from `orders.csv`, `six_corruptions.json` and `authors_six_corruptions.json`.* Accuracy in percent:
1,000 images of each of 15 corruptions at severity 5, batches of 128, reset at each corruption; PACS: all images of the
domain that a network was not trained on. Three seeds; {SPREAD}; {COST}. Measured by `trust-tta bench
configs/results/orders.toml` on an H200 in float32."""
AUTHORS = """A VMamba nano of 91.5 % clean accuracy on CIFAR-10, the same weights and images for both, six corruptions
at severity 5 (each side's own making), the first 4,096 test images, batches of 128, reset at each corruption, one
seed. Measured by `python -m benchmarks.six_corruptions WEIGHTS IMAGES LABELS RECORD`; the released code on an H200."""
AUTHORS_NOTES = """The released code keeps stochastic depth on while it adapts. The last row is the default here,
without stochastic depth: it saves a forward pass for each order and gains less. One seed gives no ranking of rows that
differ by a few tenths."""
FAIR = f"""{MADE} from `fair.csv` and `rates.csv`.* What another learning rate than its default is worth to a baseline,
on the shipped VMamba nano: accuracy in percent, severity 5, batches of 128, reset at each corruption, 2,000 images
each of gaussian_noise, glass_blur and snow, one seed. The best rate is chosen on speckle_noise, gaussian_blur, spatter
and saturate; {COST}. Measured by `trust-tta bench configs/results/fair.toml` on an H200."""
RATES = """Rates at or near the best of the table above, in other streams; `source` and `bn` are on the same images,
the best of each line is bold. 15 corruptions with 1,000 images each unless the line says otherwise; one seed;
`trust-tta bench configs/results/rates.toml`. These images are not those of [Worlds](../worlds.md)."""
CAMVID = f"""{MADE} from `camvid_c.csv`.* Mean IoU in percent of `upernet_vmamba_nano_camvid` on the 233 test images of
CamVid under 15 corruptions at severity 5, batches of 8, reset at each corruption; {SPREAD}; {COST}. Measured by
`trust-tta bench configs/camvid_c.toml` on an H200 in float32."""
GROUPMAMBA = f"""{MADE} from `cifar10c_groupmamba.csv`.* Accuracy in percent of a small GroupMamba
(`recipes/groupmamba_cifar10.toml`) on 2,000 images of each of 15 corruptions at severity 5, batches of 128, reset at
each corruption, one seed; {COST}. Measured by `trust-tta bench configs/cifar10c_groupmamba.toml` on an H200 in
float32."""
PAGES: dict[str, Callable[[], str]] = {
    "orders": orders_page,
    "fair": fair_page,
    "camvid_c": single_page("camvid_c", "CamVid-C: segmentation", CAMVID),
    "cifar10c_groupmamba": single_page("cifar10c_groupmamba", "CIFAR-10-C on GroupMamba", GROUPMAMBA),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stores", type=Path, nargs="*", metavar="STORE")
    for store in parser.parse_args(argv).stores:
        write_whole(RESULTS / f"{store.stem}.csv", cells_of(store))
    for name, page in PAGES.items():
        write_whole(RESULTS / "tables" / f"{name}.md", page())


if __name__ == "__main__":
    main()
