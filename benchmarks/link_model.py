"""The link model against what was measured between two GPUs: predicted over measured time, case by case.

    python benchmarks/link_model.py [--measured FILE] [--json benchmarks/results/link_model.json]

Needs no GPU: it plans the cases of `gpu_p2p.py` on two simulated devices, with the link's rate as it was measured in
that run, and compares with the times in its file. The costs of the host in `HostCosts` were fitted to
`results/gpu_p2p.json`: with that file this says how well five numbers describe ten cases, not how well they carry over.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import gpu_p2p
import jax

import jreshard

RESULTS = Path(__file__).parent / "results"
WITHIN = 0.1


def main() -> None:
    """Prints a line for each case, and fails if a prediction is further off than `WITHIN`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--measured", type=Path, default=RESULTS / "gpu_p2p.json")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 2)
    measured = json.loads(args.measured.read_text())
    topology = dataclasses.replace(
        jreshard.Topology.preset("h200-8"),
        nvlink=measured["copy_engine_bytes_per_s"],
        ranks_per_process=2,
        domains=(0, 0),
    )
    cases = {}
    for name, (shapes, src, dst, dtype) in gpu_p2p.cases(1).items():
        structs = {leaf: jax.ShapeDtypeStruct(shape, dtype) for leaf, shape in shapes.items()}
        src_tree, dst_tree = ({leaf: side(shape) for leaf, shape in shapes.items()} for side in (src, dst))
        figures = jreshard.plan(structs, src_tree, dst_tree, topology=topology).figures
        seconds = measured["cases"][name]["into_s"][0]
        ratio = figures.predicted.total / seconds
        cases[name] = {"predicted": dataclasses.asdict(figures.predicted), "measured_s": seconds, "ratio": ratio}
        print(
            f"{name:28} predicted {figures.predicted.total * 1e3:7.2f} ms  measured {seconds * 1e3:7.2f}  {ratio:.3f}"
        )
    if args.json:
        out = {
            "measured": args.measured.name,
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
