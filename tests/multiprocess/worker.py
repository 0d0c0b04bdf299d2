"""One process of some scenarios.

worker.py SCENARIO[,SCENARIO…] PROCESS PROCESSES PORT PLATFORM DEVICES [LOCAL_DEVICE_IDS]
"""

import faulthandler
import os
import sys
import traceback
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]


def main() -> None:
    names, process, processes, port, platform, devices, *own = sys.argv[1:]
    faulthandler.dump_traceback_later(0.8 * float(os.environ["JRESHARD_TEST_PATIENCE"]), exit=True)
    import jax

    if platform == "cpu":
        jax.config.update("jax_num_cpu_devices", int(devices))
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        int(processes),
        int(process),
        local_device_ids=[int(i) for i in own[0].split(",")] if own else None,
        initialization_timeout=60,
    )
    import scenarios

    for name in names.split(","):
        try:
            getattr(scenarios, name)()
        except BaseException:
            traceback.print_exc()
            leave(1)
        print("passed", name, flush=True)
    if name in scenarios.LEAVES_AT_ONCE:
        leave(0)
    jax.distributed.shutdown()


def leave(status: int) -> None:
    """Ends at once: jax.distributed would wait for, or be shot down with, processes that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
