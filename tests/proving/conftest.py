"""No test reads or writes the user's own cache of compiler answers."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDAX_CACHE", str(tmp_path_factory.mktemp("shardax-cache")))
        yield
