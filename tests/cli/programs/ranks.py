"""A script for `shardax launch`: who it is, and an end as asked."""

import os
import sys

if __name__ == "__main__":
    rank = os.environ["SHARDAX_RANK"]
    print("hello from", rank, *sys.argv[1:], "with", os.environ.get("JAX_NUM_CPU_DEVICES"))
    sys.exit(7 if "fail" in sys.argv and rank == "1" else 0)
