"""The examination itself, which the `doctor` command supervises."""

import sys

from jreshard.doctor import examine

if __name__ == "__main__":
    report, ok = examine(json="--json" in sys.argv[1:])
    print(report)
    sys.exit(0 if ok else 1)
