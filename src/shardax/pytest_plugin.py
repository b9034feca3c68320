"""The pytest front door: options, markers and fixtures for checking layouts and proofs in CI."""

pytest_plugins = (
    "shardax.testing.plugin",  # @pytest.mark.processes(4, devices=2)
    "shardax.testing.locks",  # the fixture sharding_lock, and pytest --shardax-update
)
