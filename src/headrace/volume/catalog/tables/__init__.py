"""The catalogue's immutable tables: written bottom up, looked up node by node, loaded whole, merged in small steps."""

from headrace.volume.catalog.tables.build import Builder, Space
from headrace.volume.catalog.tables.merge import Merge, merged
from headrace.volume.catalog.tables.table import NodeStore, Table, TableDamaged

__all__ = ["Builder", "Merge", "NodeStore", "Space", "Table", "TableDamaged", "merged"]
