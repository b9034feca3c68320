"""shardax: name your axes once; lay out, prove, run and feed JAX programs on any mesh.

This file is the index of public names, grouped by the file they come from.
"""

from shardax.data.mask import masked_mean as masked_mean
from shardax.data.plan import EpochPlan as EpochPlan
from shardax.data.split import RowSplit as RowSplit
from shardax.data.split import process_bounds as process_bounds
from shardax.data.split import row_split as row_split
from shardax.errors import AxisRuleError as AxisRuleError
from shardax.errors import BatchSizeError as BatchSizeError
from shardax.errors import FeedError as FeedError
from shardax.errors import FeedStateError as FeedStateError
from shardax.errors import LayoutError as LayoutError
from shardax.errors import LeafError as LeafError
from shardax.errors import MeshConflictError as MeshConflictError
from shardax.errors import MeshError as MeshError
from shardax.errors import NoMeshError as NoMeshError
from shardax.errors import Offence as Offence
from shardax.errors import PlacementError as PlacementError
from shardax.errors import ReplicaError as ReplicaError
from shardax.errors import RuleError as RuleError
from shardax.errors import ShardaxError as ShardaxError
from shardax.errors import SharderError as SharderError
from shardax.errors import SharderStateError as SharderStateError
from shardax.errors import SourceEndedError as SourceEndedError
from shardax.errors import SourceError as SourceError
from shardax.errors import SpecError as SpecError
from shardax.errors import SplitError as SplitError
from shardax.errors import TransformError as TransformError
from shardax.errors import UnknownAxisError as UnknownAxisError
from shardax.names.mesh import MeshSpec as MeshSpec
from shardax.names.mesh import current_mesh as current_mesh
from shardax.names.mesh_build import create_cpu_mesh as create_cpu_mesh
from shardax.names.mesh_build import create_mesh as create_mesh
from shardax.names.mesh_build import describe as describe
from shardax.names.mesh_build import make_mesh as make_mesh
from shardax.names.mesh_build import parse_mesh_from_string as parse_mesh_from_string
from shardax.names.mesh_queries import get_axes_size_in_mesh as get_axes_size_in_mesh
from shardax.names.mesh_queries import get_incontext_mesh as get_incontext_mesh
from shardax.names.mesh_queries import get_mesh_axis_names as get_mesh_axis_names
from shardax.names.mesh_queries import get_mesh_axis_size as get_mesh_axis_size
from shardax.names.mesh_queries import get_submesh_device_index as get_submesh_device_index
from shardax.names.mesh_queries import names_in_current_mesh as names_in_current_mesh
from shardax.names.spec import FREE as FREE
from shardax.names.spec import REPLICATED as REPLICATED
from shardax.names.spec import Correction as Correction
from shardax.names.spec import Fit as Fit
from shardax.names.spec import canonical as canonical
from shardax.names.spec import fit as fit
from shardax.names.spec import local_shape as local_shape
from shardax.names.spec import replication_factor as replication_factor
from shardax.names.spec import shard_count as shard_count
from shardax.tables import Table as Table

__version__ = "0.1.0"
