"""`JaxProcessSharderModule`: this process's part of the data, by process index, and the way onto a mesh.

For batches whose rows must follow from a mesh use `Feed`: a split by process index alone is wrong on many meshes
(docs/feeding.md).
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from shardax.data.columns import is_stream
from shardax.data.logical import physical_spec
from shardax.data.place import place_batch
from shardax.data.sharder_config import JaxProcessSharderConfig
from shardax.data.sharder_state import check_state, copied, load_rngs, save_rngs
from shardax.data.shardings import bound_sharding
from shardax.data.slicing import rows_of_process
from shardax.data.split import process_bounds
from shardax.data.topology import LiveField
from shardax.data.transform import sharded_transform
from shardax.errors import SharderError, plural
from shardax.names.decision import warn_outside
from shardax.names.mesh import MeshLike, current_mesh, required_mesh
from shardax.names.spec import known_spec

logger = logging.getLogger(__name__)

_INDEX, _COUNT = LiveField("process_index", least=0), LiveField("process_count", least=1)

CACHED = 32
"""Shards kept by `cacheable=True`, with the data they came from; the least recently asked for goes first."""


class JaxProcessSharderModule:
    """Takes this process's rows of what every process holds.

    `process_index`, `process_count` and `local_device_count` are read from JAX at every use and are in no
    checkpoint; assign one to simulate another process, None to return.

    >>> sharder = JaxProcessSharderModule(JaxProcessSharderConfig(drop_remainder=False))
    >>> sharder.process_count = 4
    >>> sharder.shard_data(list(range(10)))
    [0, 1, 2]
    >>> sharder.process_index = 3
    >>> sharder.shard_data(list(range(10)))
    [8, 9]
    """

    process_index = _INDEX
    process_count = _COUNT
    local_device_count = LiveField("local_device_count", least=0)

    def __init__(
        self, config: JaxProcessSharderConfig | None = None, *, rngs: Any = None, name: str | None = None
    ) -> None:
        self.config = JaxProcessSharderConfig() if config is None else _checked(config)
        self.rngs = rngs
        self.name = name
        self._overrides: dict[str, int] = {}
        self._applied = 0
        self._skipped = 0
        self._statistics: dict[str, Any] | None = None
        self._statistics_reset = False
        self._cache: OrderedDict[int, tuple[Any, tuple[Any, ...], Any]] = OrderedDict()

    # ---- rows -----------------------------------------------------------------------------------------------------

    def shard_data(self, data: Any) -> Any:
        """This process's rows: `n // P` each under `drop_remainder`, else the first `n % P` processes one more.

        Arrays are sliced, never copied; trees are sliced column by column; iterators are taken in strides; random
        access sources are viewed. What has no rows is an error.
        """
        config = self.config
        index, count = _INDEX.plain(self), _COUNT.plain(self)
        if index >= count:
            raise SharderError(
                f"there is no process {index} among {plural(count, 'process', 'processes')}",
                remedy="override process_index and process_count together",
            )
        if config.cacheable and not is_stream(data):
            return self._cached(data, (index, count, config.drop_remainder))
        part = rows_of_process(data, index, count, config.drop_remainder, self._warn)
        self._applied += 1
        return part

    def _cached(self, data: Any, place: tuple[int, int, bool]) -> Any:
        key = (*place, len(data) if hasattr(data, "__len__") else None)
        held = self._cache.get(id(data))
        if held is not None and held[0] is data and held[1] == key:  # an id is only taken while its object is held
            self._cache.move_to_end(id(data))
            self._skipped += 1
            return held[2]
        part = rows_of_process(data, *place, self._warn)
        self._applied += 1
        self._cache[id(data)] = (data, key, part)
        if len(self._cache) > CACHED:
            self._cache.popitem(last=False)
        return part

    def _shard_bounds(self, total_size: int) -> tuple[int, int]:
        return process_bounds(total_size, self.process_index, self.process_count, self.config.drop_remainder)

    def _warn(self, message: str) -> None:
        logger.warning(message)
        warn_outside(message)

    def reset_cache(self) -> None:
        """Forget the shards kept by `cacheable=True`."""
        self._cache.clear()

    # ---- counters and statistics ----------------------------------------------------------------------------------

    def get_operation_stats(self) -> dict[str, int]:
        """How many operations were done, and how many were answered from the cache."""
        return {"applied_count": self._applied, "skipped_count": self._skipped}

    def reset_operation_stats(self) -> None:
        """Count from zero again."""
        self._applied = self._skipped = 0

    def compute_statistics(self, data: Any) -> dict[str, Any] | None:
        """What `batch_stats_fn` says of the data, kept for `get_statistics`; None without such a function."""
        if self.config.batch_stats_fn is None:
            return None
        self.set_statistics(self.config.batch_stats_fn(data))
        return self.get_statistics()

    def get_statistics(self) -> dict[str, Any] | None:
        """Set or computed statistics, else the precomputed ones unless they were reset, else None."""
        if self._statistics is not None:
            return copied(self._statistics)
        if self._statistics_reset or self.config.precomputed_stats is None:
            return None
        return copied(dict(self.config.precomputed_stats))

    def set_statistics(self, stats: Mapping[str, Any]) -> None:
        """Use these statistics, whatever was computed or precomputed."""
        if not isinstance(stats, Mapping):
            raise SharderError(f"statistics are a mapping, not {type(stats).__name__}")
        self._statistics = copied(dict(stats))
        self._statistics_reset = False

    def reset_statistics(self) -> None:
        """Have no statistics, also no precomputed ones, until some are set or computed."""
        self._statistics = None
        self._statistics_reset = True

    # ---- copies and checkpoints -----------------------------------------------------------------------------------

    def copy(
        self, *, config: JaxProcessSharderConfig | None = None, rngs: Any = None, name: str | None = None
    ) -> JaxProcessSharderModule:
        """The same sharder with other parts; what is not replaced is kept, statistics and counters included."""
        fresh = copy.copy(self)  # also what a subclass has added
        fresh.config = self.config if config is None else _checked(config)
        fresh.rngs = self.rngs if rngs is None else rngs
        fresh.name = self.name if name is None else name
        fresh._overrides = dict(self._overrides)
        fresh._statistics = copied(self._statistics)
        fresh._cache = OrderedDict(self._cache if fresh.config.cacheable else ())
        return fresh

    def clone(self) -> JaxProcessSharderModule:
        """A copy that shares nothing mutable with this one."""
        fresh = copy.copy(self)
        fresh._cache = OrderedDict()  # not to copy the data that it holds
        config = fresh.config = self.config.unshared()
        return copy.deepcopy(fresh, {id(config): config})

    def get_state(self) -> dict[str, Any]:
        """What a checkpoint keeps: counters, statistics, rules, random streams. No process topology."""
        rules = self.config.sharding_rules
        return {
            **self.get_operation_stats(),
            "statistics": copied(self._statistics),
            "statistics_reset": self._statistics_reset,
            "sharding_rules": None if rules is None else list(rules),
            "rngs": save_rngs(self.rngs),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a `get_state`, wholly or, with an error that says why, not at all."""
        found = check_state(state)
        rngs = load_rngs(self.rngs, found.get("rngs"))
        rules = found.get("sharding_rules")
        config = self.config if rules is None else replace(self.config, sharding_rules=rules)
        self.rngs, self.config = rngs, config
        self._applied, self._skipped = found["applied_count"], found["skipped_count"]
        self._statistics, self._statistics_reset = copied(found["statistics"]), found["statistics_reset"]

    # ---- random streams ---------------------------------------------------------------------------------------------

    def requires_rng_streams(self) -> list[str] | None:
        """The random streams that this module needs: none, unless a subclass says otherwise."""
        return None

    def ensure_rng_streams(self, stream_names: list[str]) -> None:
        """An error that names the streams that are missing and those that there are."""
        missing = [name for name in self.requires_rng_streams() or () if name not in stream_names]
        if missing:
            raise SharderError(
                f"RNG {'streams' if len(missing) > 1 else 'stream'} {', '.join(map(repr, missing))} required but not "
                f"available. Available streams: {list(stream_names)}"
            )

    # ---- onto a mesh ------------------------------------------------------------------------------------------------

    def get_partition_spec(self, logical_spec: Any) -> PartitionSpec:
        """A PartitionSpec as it is; logical names by `sharding_rules`, first match; a typo is an error."""
        mesh = current_mesh()
        return physical_spec(logical_spec, self._rules(), None if mesh is None else mesh.axis_names)

    def get_named_sharding(self, mesh: MeshLike | None, logical_spec: Any) -> NamedSharding:
        """The same, on a mesh (None: the one in force); every name must lead to one of its axes."""
        found = required_mesh(mesh, need="a named sharding")
        return NamedSharding(found, known_spec(physical_spec(logical_spec, self._rules(), found.axis_names), found))

    def _rules(self) -> Any:
        return self.config.sharding_rules

    def shard(self, batch: Any, sharding: Any, *, whole_rows: bool | None = None) -> Any:
        """The batch on devices: host leaves are placed, jax leaves resharded, text stays where it is.

        With several processes a host leaf is this process's rows. If the sharding also cuts other dimensions over
        processes, `whole_rows` says whether the leaf holds its rows whole (True) or only this process's block.
        """
        placed = place_batch(batch, sharding, whole_rows)
        self._applied += 1
        return placed

    def parallel_transform(
        self, batch: Any, transform_fn: Callable[[Any], Any], mesh: MeshLike | None, in_spec: Any, out_spec: Any = None
    ) -> Any:
        """`transform_fn` on every device's part of the batch; compiled once per function, mesh and specs.

        `out_spec` defaults to `in_spec`; `P()` means replicated.
        """
        inputs = bound_sharding(self.get_named_sharding(mesh, in_spec))
        outputs = inputs if out_spec is None else self.get_named_sharding(inputs.mesh, out_spec)
        mapped = sharded_transform(transform_fn, inputs.mesh, inputs.spec, outputs.spec)
        result = mapped(place_batch(batch, inputs, True))
        self._applied += 1
        return result

    def __repr__(self) -> str:
        parts = [f"name={self.name!r}"] if self.name else []
        parts += ["cacheable=True"] if self.config.cacheable else []
        return f"{type(self).__name__}({', '.join(parts)})"


def _checked(config: Any) -> JaxProcessSharderConfig:
    if not isinstance(config, JaxProcessSharderConfig):
        raise SharderError(f"config is of type {type(config).__name__}, not a JaxProcessSharderConfig")
    return config
