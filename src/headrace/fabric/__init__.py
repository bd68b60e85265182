"""What an administrator does with a fabric: find subsystems, serve subsystems."""

from headrace.fabric.discovery import (
    DISCOVERY_PORT,
    Discovery,
    DiscoveryController,
    DiscoveryFailure,
    DiscoveryRecord,
    discover,
)
from headrace.fabric.endpoint import parse_endpoint
from headrace.fabric.serve import (
    FileMedia,
    ListenOptions,
    MemoryMedia,
    NamespaceOptions,
    SubsystemOptions,
    Target,
    TargetOptions,
)

__all__ = [
    "DISCOVERY_PORT",
    "Discovery",
    "DiscoveryController",
    "DiscoveryFailure",
    "DiscoveryRecord",
    "FileMedia",
    "ListenOptions",
    "MemoryMedia",
    "NamespaceOptions",
    "SubsystemOptions",
    "Target",
    "TargetOptions",
    "discover",
    "parse_endpoint",
]
