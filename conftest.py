"""The one place where simulated devices are set: eight CPU devices for every test process."""

import os

os.environ.setdefault("PYTHONHASHSEED", "0")
os.environ["JAX_PLATFORMS"] = "cpu"
flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in f]
os.environ["XLA_FLAGS"] = " ".join([*flags, "--xla_force_host_platform_device_count=8"])

from hypothesis import settings  # noqa: E402

settings.register_profile("shardax", deadline=None, print_blob=True, max_examples=60)
settings.load_profile("shardax")
