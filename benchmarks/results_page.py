"""Write docs/results/README.md and the block of results in README.md: python -m benchmarks.results_page"""

from __future__ import annotations

import statistics

from benchmarks.pages import RESULTS, ROOT, fill, read_record, table
from benchmarks.results_tables import leads, read, wrap

from trust_tta.atomic import write_whole

BEGIN, END = "<!-- results -->", "<!-- /results -->"


def main() -> None:
    write_whole(RESULTS / "README.md", page())
    fill(ROOT / "README.md", BEGIN, END, f"\n{short()}\n")


def short() -> str:
    """TRUST beside as many updates in one order, and the time of its step."""
    rows_of = {name: [row for row in read("orders") if row.stream[0] == name] for name in ("cifar10-c", "pacs")}
    cifar, pacs = map(leads, rows_of.values())
    theirs = read_record("authors_h200.json")["ms"]["128"]["TRUST K=6 sequential"]
    rows = [row for row in read_record("speed_h200.json")["rows"] if row["backend"] == "triton" and row["batch"] == 128]
    ms = {row["dtype"]: row["median_ms"] for row in rows if row["work"] == "TRUST K=6 sequential"}
    orders = (
        "TRUST less six updates in the default order, as many as its own: "
        f"{100 * statistics.fmean(cifar):+.2f} points on CIFAR-10-C with two networks, "
        f"{100 * statistics.fmean(pacs):+.2f} on PACS; ahead in {sum(lead > 0 for lead in [*cifar, *pacs])} of "
        f"{len(cifar) + len(pacs)} pairs of network, domain and seed ([in full](docs/results/tables/orders.md))."
    )
    speed = (
        f"One step of TRUST, six orders, VMamba-T at 224 pixels, batch 128, on an H200: {ms['float32']:.0f} ms in "
        f"float32 and {ms['bf16']:.0f} ms in bf16; the released code takes {theirs} ms "
        "([performance](docs/develop/performance.md)). More tables: [results](docs/results/README.md)."
    )
    return f"{wrap(orders)}\n\n{wrap(speed)}"


def page() -> str:
    return "\n\n".join([HEAD, table(["record", "page", "measured by", "machine"], RECORDS), NOTES])


GPU, CPU = "one H200", "two cores of a server CPU"
BENCH = "`trust-tta bench configs/{}.toml`, then `python -m benchmarks.results_tables STORE`"
RECORDS = (
    (
        "`worlds.csv`",
        "[Worlds](worlds.md), [which method](choose.md)",
        "`python -m benchmarks.worlds run`, `page`",
        "a CPU and one H200",
    ),
    ("`guard.json`", "[the guard](guard.md)", "`python -m benchmarks.guard run`, `page`", "a CPU"),
    ("`orders.csv`", "[six orders](tables/orders.md)", BENCH.format("results/orders"), GPU),
    ("`fair.csv`", "[rates of the baselines](tables/fair.md)", BENCH.format("results/fair"), GPU),
    ("`rates.csv`", "the same", BENCH.format("results/rates"), GPU),
    ("`camvid_c.csv`", "[CamVid-C](tables/camvid_c.md)", BENCH.format("camvid_c"), GPU),
    (
        "`cifar10c_groupmamba.csv`",
        "[GroupMamba](tables/cifar10c_groupmamba.md)",
        BENCH.format("cifar10c_groupmamba"),
        GPU,
    ),
    (
        "`method_costs_h200.json`",
        "[what a batch costs](tables/method_costs.md)",
        "`python -m benchmarks.method_costs RECORD`",
        GPU,
    ),
    (
        "`six_corruptions.json`, `authors_six_corruptions.json`",
        "[six orders](tables/orders.md#beside-the-released-code)",
        "`python -m benchmarks.six_corruptions WEIGHTS IMAGES LABELS RECORD`; the released code",
        GPU,
    ),
    (
        "`six_corruptions_kernels.json`, `six_corruptions_cpu.json`",
        "[performance](../develop/performance.md)",
        "`python -m benchmarks.six_corruptions --kernels FOLDER RECORD DTYPE BACKEND RUN`",
        f"{GPU}; {CPU}",
    ),
    ("`speed_h200.json`, `speed_cpu.json`", "the same", "`trust-tta speed`", f"{GPU}; {CPU}"),
    ("`scan_h200.json`", "the same", "the scan alone, timed as `trust-tta speed` does", GPU),
    ("`scaling_h200.json`, `scaling_cpu.json`", "the same", "`python -m benchmarks.scaling`", f"{GPU}; {CPU}"),
    ("`authors_h200.json`", "the same", "the released code", GPU),
    ("`cpu_forward.json`", "the same", "`python -m benchmarks.cpu_forward`", CPU),
    (
        "`serve_load.json`",
        "[the service](../guides/production.md#restarts-and-failures)",
        "`python -m benchmarks.serve_load`",
        CPU,
    ),
    ("`export.json`", "[export](../guides/export.md#measured)", "`python -m benchmarks.export`", CPU),
    ("`networks.json`", "[networks](../guides/networks.md#measured)", "`python -m benchmarks.networks_page`", CPU),
    (
        "`cluster_kills.json`, `cluster_speed.json`",
        "[many machines](../guides/distributed.md)",
        "`python -m benchmarks.cluster_kills`, `python -m benchmarks.cluster_speed`",
        CPU,
    ),
)
HEAD = """# Results

- [Which method](choose.md): recommendations, and what the methods gain and cost.
- [Worlds](worlds.md): their accuracies on several networks, images and kinds of stream.
- [What the guard does](guard.md): streams with and without it.
- [The paper](paper.md): the experiments of the TRUST paper, and how to run them.

Pages are written from the records below; each names its command. `--help` says how to measure anew."""
NOTES = """## Corrupted images

The images of the tables called CIFAR-10-C, CIFAR-100-C or CamVid-C are made by `trust-tta corrupt`, with the formulas
and severities of the published sets. Random numbers differ, and frost is drawn, not photographed. The published files
have not been compared. A VMamba with 91.5 % clean accuracy, on an independent set of CIFAR-10-C style images (all
10,000, severity 5) and on 1,024 of ours (standard error 1.5):

| | gauss | shot | impulse | defocus | glass | motion | zoom | snow | frost | fog |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
| `source`, independent | 29.5 | 35.5 | 31.5 | 63.5 | 52.6 | 66.4 | 69.4 | 73.7 | 66.7 | 63.8 |
| `source`, ours | 29.5 | 34.8 | 30.9 | 61.4 | 52.6 | 66.1 | 69.9 | 73.6 | 70.5 | 62.2 |
| `bn`, independent | 71.1 | 71.8 | 63.0 | 82.0 | 68.3 | 80.4 | 82.9 | 76.4 | 77.2 | 75.3 |
| `bn`, ours | 70.3 | 71.8 | 60.2 | 81.4 | 68.6 | 78.7 | 81.6 | 74.9 | 78.3 | 75.5 |

Frost is 3.8 points easier for `source`; the others are within two standard errors.

## PACS

The four networks learned from scratch on some 7,000 images each and are right on 80 to 89 % of held-out images of
their own domains.
"""


if __name__ == "__main__":
    main()
