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
from headrace.fabric.options import (
    AnaGroupOptions,
    FileMedia,
    HostOptions,
    ListenOptions,
    MemoryMedia,
    NamespaceOptions,
    SubsystemOptions,
    TargetOptions,
)
from headrace.fabric.serve import Target

__all__ = [
    "DISCOVERY_PORT",
    "AnaGroupOptions",
    "Discovery",
    "DiscoveryController",
    "DiscoveryFailure",
    "DiscoveryRecord",
    "FileMedia",
    "HostOptions",
    "ListenOptions",
    "MemoryMedia",
    "NamespaceOptions",
    "SubsystemOptions",
    "Target",
    "TargetOptions",
    "discover",
    "parse_endpoint",
]
