"""The pytest front door: options, markers and fixtures for checking layouts and proofs in CI."""
