"""The link model against what was measured between two GPUs: predicted over measured time, case by case.

    python benchmarks/link_model.py [--json benchmarks/results/link_model.json]

Needs no GPU: it plans cases of `jreshard bench` on two simulated devices, with the link's rate as it was measured with
the times in `results/gpu_p2p.json`, and compares with these. The costs of the host in `HostCosts` were fitted to the
same file: this says how well five numbers describe ten cases, not how well they carry over.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import jax

import jreshard
from jreshard.bench.cases import CASES
from jreshard.bench.shapes import DTYPE

RESULTS = Path(__file__).parent / "results"
MEASURED = RESULTS / "gpu_p2p.json"
WITHIN = 0.1
#: What the cases are called in the file.
NAMES = {
    "8 GiB, 0 -> 1": "one",
    "llama-8b, 0 -> 1": "llama-8b",
    "400 x 20 MiB, 0 -> 1": "medium",
    "2000 x 16 KiB, 0 -> 1": "small",
    "2 GiB, {0,1} rows -> 1": "one-rows-to-1",
    "2 GiB, 0 -> {0,1} cols": "one-0-to-columns",
    "2 GiB, {0,1} rows -> cols": "one-rows-to-columns",
    "llama-8b, {0,1} rows -> 1": "llama-8b-rows-to-1",
    "llama-8b, 0 -> {0,1} cols": "llama-8b-0-to-columns",
    "llama-8b, fsdp=2 -> tp=2": "llama-8b-rows-to-columns",
}


def main() -> None:
    """Prints a line for each case, and fails if a prediction is further off than `WITHIN`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 2)
    measured = json.loads(MEASURED.read_text())
    topology = dataclasses.replace(
        jreshard.Topology.preset("h200-8"),
        nvlink=measured["copy_engine_bytes_per_s"],
        ranks_per_process=2,
        domains=(0, 0),
    )
    cases = {}
    for name, times in measured["cases"].items():
        case = CASES[NAMES[name]]
        shapes = case.scaled(1)
        structs = {leaf: jax.ShapeDtypeStruct(shape, DTYPE) for leaf, shape in shapes.items()}
        src, dst = (side.shardings(jax.devices(), shapes) for side in (case.src, case.dst))
        figures = jreshard.plan(structs, src, dst, topology=topology).figures
        seconds = times["into_s"][0]
        ratio = figures.predicted.total / seconds
        cases[name] = {"predicted": dataclasses.asdict(figures.predicted), "measured_s": seconds, "ratio": ratio}
        print(
            f"{name:28} predicted {figures.predicted.total * 1e3:7.2f} ms  measured {seconds * 1e3:7.2f}  {ratio:.3f}"
        )
    if args.json:
        out = {
            "measured": MEASURED.name,
            "host": measured["host"],
            "versions": measured["versions"],
            "cases": cases,
        }
        args.json.write_text(json.dumps(out, indent=1) + "\n")
    off = {name: case["ratio"] for name, case in cases.items() if abs(case["ratio"] - 1) > WITHIN}
    if off:
        raise SystemExit(f"further off than {WITHIN:.0%}: {off}")


if __name__ == "__main__":
    main()
