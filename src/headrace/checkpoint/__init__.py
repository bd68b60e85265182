"""Checkpoints in a volume: the parts of a save, its manifest, its commit, the list of what is committed. No torch."""

from headrace.checkpoint.listing import CheckpointInfo, latest, list_checkpoints, read_manifest
from headrace.checkpoint.manifest import Manifest, ObjectEntry, Summary, TensorEntry
from headrace.checkpoint.names import CheckpointId, is_manifest, parse_checkpoint_id
from headrace.checkpoint.retention import Retention, delete_checkpoints, keep_last, pin, unpin
from headrace.checkpoint.save import Save

__all__ = [
    "CheckpointId",
    "CheckpointInfo",
    "Manifest",
    "ObjectEntry",
    "Retention",
    "Save",
    "Summary",
    "TensorEntry",
    "delete_checkpoints",
    "is_manifest",
    "keep_last",
    "latest",
    "list_checkpoints",
    "parse_checkpoint_id",
    "pin",
    "read_manifest",
    "unpin",
]
