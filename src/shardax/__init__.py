"""shardax: name your axes once; lay out, prove, run and feed JAX programs on any mesh.

This file is the index of public names, grouped by the file they come from.
"""

from shardax.errors import AxisRuleError as AxisRuleError
from shardax.errors import LayoutError as LayoutError
from shardax.errors import LeafError as LeafError
from shardax.errors import MeshConflictError as MeshConflictError
from shardax.errors import MeshError as MeshError
from shardax.errors import NoMeshError as NoMeshError
from shardax.errors import Offence as Offence
from shardax.errors import PlacementError as PlacementError
from shardax.errors import RuleError as RuleError
from shardax.errors import ShardaxError as ShardaxError
from shardax.errors import SpecError as SpecError
from shardax.errors import UnknownAxisError as UnknownAxisError
from shardax.tables import Table as Table

__version__ = "0.1.0"
