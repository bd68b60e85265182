"""Every metric: name, unit, meaning. What Prometheus gets, and `docs/guides/metrics.md`, are made of this table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: What one sample of a metric is of.
Of = Literal["rank", "feed", "staging", "watch", "path", "node"]


@dataclass(frozen=True, kw_only=True)
class Metric:
    #: Without `headrace_`; ends in the unit, and a counter in `total`.
    name: str
    kind: Literal["counter", "gauge"]
    #: A rank; a loader of a rank; what stages behind it; a watch of its training loop; a path of a device, for one
    #: rank; the same for all ranks of the node.
    of: Of
    #: Key in the dictionary that it is taken from.
    key: str
    help: str

    @property
    def labels(self) -> tuple[str, ...]:
        more = {"latency": ("quantile",), "spent": ("cause",)}.get(self.key, ())
        return {
            "rank": ("rank",),
            "feed": ("rank", "feed"),
            "staging": ("rank", "staging"),
            "watch": ("rank", "watch"),
            "path": ("rank", "device", "path"),
            "node": ("device", "path"),
        }[self.of] + more


def _feed(name: str, key: str, help: str) -> Metric:
    return Metric(name=f"feed_{name}", kind=_kind(name), of="feed", key=key, help=help)


def _staging(name: str, key: str, help: str) -> Metric:
    return Metric(name=f"staging_{name}", kind=_kind(name), of="staging", key=key, help=help)


def _watch(name: str, key: str, help: str) -> Metric:
    return Metric(name=f"watch_{name}", kind=_kind(name), of="watch", key=key, help=help)


def _path(name: str, key: str, help: str) -> Metric:
    return Metric(name=f"path_{name}", kind=_kind(name), of="path", key=key, help=help)


def _kind(name: str) -> Literal["counter", "gauge"]:
    return "counter" if name.endswith("_total") else "gauge"


_LATENCY = "from sending a command to its answer, since the device was opened, to 6 %; quantiles 0.5, 0.99 and 1"

METRICS = (
    Metric(name="rank_up", kind="gauge", of="rank", key="up", help="1: the rank answered, 0: it is there and did not"),
    _feed("batches_total", "batches", "batches handed out"),
    _feed("samples_total", "samples", "samples handed out to this rank"),
    _feed("bytes_total", "token_bytes", "bytes of tokens handed out, without padding, or of records"),
    _feed("wait_seconds_total", "wait_s", "time that steps waited for batches"),
    _feed("fetch_wait_seconds_total", "fetch_wait_s", "of that the time for reads; the rest is for who decodes"),
    _feed("last_wait_seconds", "last_wait_s", "what the last step waited"),
    _feed("longest_wait_seconds", "longest_wait_s", "what a step has waited at most"),
    _feed("ready_batches", "ready", "depth: batches that lie ready"),
    _feed("in_flight_batches", "in_flight", "batches being read, ready ones included"),
    _feed("ring_bytes", "ring_bytes", "memory held for batches"),
    _feed("stage_bytes_total", "stage_bytes", "bytes that came from a stage, and not from the volume"),
    _staging("copied_bytes_total", "copied_bytes", "bytes copied to the stage by this process"),
    _staging("there_bytes", "there_bytes", "bytes that are in the stage"),
    _staging("wanted_bytes", "wanted_bytes", "bytes that are to be in the stage in the end"),
    _watch("steps_total", "steps", "steps that ended"),
    _watch("seconds_total", "spent", "seconds of these steps, by what they went to; all causes are all the time"),
    _watch("compute_marked", "compute_marked", "0: no step said what computes, all in no other part counts as that"),
    _watch("last_step_seconds", "last_step_s", "what the last step took"),
    _watch("under_way_seconds", "under_way_s", "since the step began that is under way; 0: between steps"),
    _watch("batch_bytes_total", "bytes", "bytes of batches, where the loader says"),
    _watch("sm_activity_ratio", "sm_activity", "multiprocessors of the GPU that were busy; absent: not measured"),
    _path("read_bytes_total", "read_bytes", "bytes read"),
    _path("written_bytes_total", "written_bytes", "bytes written"),
    _path("reads_total", "reads", "read commands that succeeded"),
    _path("writes_total", "writes", "write commands that succeeded"),
    _path("errors_total", "errors", "commands that failed on this path; most succeeded on another one, or later"),
    _path("under_way_commands", "under_way", "depth: commands sent and not answered yet"),
    _path("usable", "usable", "1: commands may go this way"),
    _path("slow", "slow", "1: slow beside another path, and avoided"),
    _path("slowdowns_total", "slow_times", "how often it became slow"),
    _path("losses_total", "losses", "associations lost"),
    _path("reconnects_total", "reconnects", "associations that came back"),
    _path("latency_seconds", "latency", _LATENCY),
    Metric(name="node_path_latency_seconds", kind="gauge", of="node", key="latency", help=f"of all ranks: {_LATENCY}"),
    Metric(name="node_path_read_bytes_total", kind="counter", of="node", key="read_bytes", help="of all ranks"),
)  # fmt: skip
