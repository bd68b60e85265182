"""Everything that a job may say of itself: each key once, with its unit, bounds, default, and where that is from.

A default is an assumption, printed as one, and never a claim of a provider or a figure of a blog.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.plan import units
from headrace.plan.units import Unit

OPTIMIZER_STATE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0}
SHARDINGS = ("zero3", "zero1", "none")


@dataclass(frozen=True, kw_only=True)
class Field:
    """`kind`: of `units.KINDS`, or "whole" (a number of things), "choice", "choices", "flag", "text", "file"."""

    key: str
    kind: str
    about: str
    unit: Unit = units.COUNT
    low: float = 0.0
    high: float = 0.0
    #: As it may be written; a figure, or "low..likely..high".
    default: str | None = None
    #: On whose word the default stands.
    source: str = ""
    choices: tuple[str, ...] = ()
    #: A figure in the job's file is multiplied by this.
    factor: float = 1.0


_LLAMA3 = (
    "Llama 3 405B, 54 days on 16,384 H100: 466 interruptions, of them 419 unexpected, of them 78 % of hardware; "
    "another cluster fails more or less often"
)
_NFS = "one NFS mount over one TCP connection, untuned to plain (fio 1.2 GB/s; about 2 GB/s read, 1.2 GB/s written)"


def _rate(key: str, unit: Unit, about: str, default: str | None = None, source: str = "") -> Field:
    return Field(key=key, kind="rate", unit=unit, low=1e3, high=1e16, about=about, default=default, source=source)


FIELDS: tuple[Field, ...] = (
    Field(key="gpus", kind="whole", unit=units.GPUS, low=1, high=10_000_000, about="accelerators of the whole job"),
    Field(
        key="gpus_per_node", kind="whole", unit=units.GPUS_PER_NODE, low=1, high=1024, default="8",
        about="accelerators of a node", source="what most nodes have",
    ),
    # ---- the model
    Field(
        key="model.parameters", kind="count", unit=units.PARAMETERS, low=1e3, high=1e16,
        about="number of parameters; or a config, or layers, hidden, ffn, heads and vocab",
    ),
    Field(
        key="model.active_parameters", kind="count", unit=units.PARAMETERS, low=1e3, high=1e16,
        about="of a mixture of experts: those that one token goes through",
    ),
    Field(key="model.config", kind="file", about="a config.json as it is published with a model"),
    Field(key="model.layers", kind="whole", low=1, high=100_000, about="transformer layers"),
    Field(key="model.hidden", kind="whole", low=1, high=10_000_000, about="width of the model"),
    Field(key="model.ffn", kind="whole", low=1, high=100_000_000, about="width of the gated feed-forward part"),
    Field(key="model.heads", kind="whole", low=1, high=100_000, about="attention heads"),
    Field(key="model.kv_heads", kind="whole", low=1, high=100_000, about="heads of keys and values; as many as heads"),
    Field(key="model.vocab", kind="whole", low=1, high=100_000_000, about="size of the vocabulary"),
    Field(key="model.tied", kind="flag", about="input and output embedding are one"),
    Field(
        key="model.weights", kind="choice", choices=tuple(OPTIMIZER_STATE_BYTES), default="bf16",
        about="type of the weights in a checkpoint", source="MLPerf Storage's checkpoints",
    ),
    Field(
        key="model.states", kind="choices", choices=tuple(OPTIMIZER_STATE_BYTES), default="fp32 fp32 fp32",
        about="types of the optimizer's states of a parameter in a checkpoint",
        source="Adam in mixed precision: master weight and two moments, as MLPerf Storage's checkpoints",
    ),
    # ---- how it is split
    Field(key="parallel.tp", kind="whole", low=1, high=100_000, default="1", about="tensor parallel ranks"),
    Field(key="parallel.pp", kind="whole", low=1, high=100_000, default="1", about="pipeline stages"),
    Field(
        key="parallel.sharding", kind="choice", choices=SHARDINGS, default="zero3",
        about="over data parallel ranks: zero3 (FSDP: all of it), zero1 (optimizer states), none",
    ),
    # ---- what it eats
    Field(
        key="feed.tokens_per_s", kind="count", unit=units.TOKEN_RATE, low=1e-6, high=1e12,
        about="tokens a second, of one GPU; else computed from feed.achieved",
    ),
    Field(
        key="feed.achieved", kind="flops", unit=units.FLOP_RATE, low=1e6, high=1e19,
        default="376TFLOP/s..400TFLOP/s..711TFLOP/s", about="what a GPU gets done, 6 FLOP a parameter and token",
        source="H100: BF16 at 38 to 43 % of its peak (Llama 3), up to the rates published for FP8 (NeMo 25.11)",
    ),
    Field(
        key="feed.token_bytes", kind="bytes", unit=units.BYTES_PER_TOKEN, low=0.1, high=1e6, default="4",
        about="bytes of a token as it is stored", source="uint32: vocabularies above 65,536 need it",
    ),
    Field(
        key="feed.sequence", kind="whole", unit=Unit.of("token/read"), low=1, high=1e9, default="8192",
        about="tokens of one read", source="sequences of the published rates",
    ),
    Field(
        key="feed.samples_per_s", kind="number", unit=units.SAMPLE_RATE, low=1e-9, high=1e12,
        about="samples a second, of one GPU (images, clips, volumes): in place of tokens, or beside tokens_per_s",
    ),
    Field(
        key="feed.sample_bytes", kind="bytes", unit=units.BYTES_PER_SAMPLE, low=1, high=1e15,
        about="bytes of a sample as it is stored",
    ),
    Field(
        key="feed.tokens", kind="count", unit=units.TOKENS, low=1, high=1e18,
        about="tokens of the dataset; else its size is not counted",
    ),
    Field(key="feed.dataset", kind="bytes", unit=units.BYTES, low=1, high=1e21, about="size of the dataset"),
    # ---- how it is saved
    Field(
        key="checkpoint.interval", kind="duration", unit=units.SECONDS, low=1, high=1e9,
        about="from one save to the next; else the best one (Daly)",
    ),
    Field(key="checkpoint.synchronous", kind="flag", about="training stands until a save is written"),
    Field(
        key="checkpoint.copy", kind="rate", unit=units.RATE_PER_GPU, low=1e6, high=1e15,
        default="2GB/s..10GB/s..25GB/s", about="an asynchronous save copies out of one GPU at",
        source="PCIe 4.0 x16 carries 31.5 GB/s; less where GPUs share it or memory is not pinned",
    ),
    Field(
        key="checkpoint.part", kind="share", unit=units.SHARE, low=0.001, high=1, default="0.5",
        about="part of the interval after which a save is to be committed", source="half of it is kept for bad days",
    ),
    Field(key="checkpoint.keep", kind="whole", low=1, high=100_000, default="3", about="checkpoints that are kept"),
    # ---- how it fails
    Field(
        key="failures.gpu_hours", kind="number", unit=units.GPU_TIME, low=1, high=1e12,
        default="45600..50700..65000", about="GPU hours from one failure of the job to the next",
        source=_LLAMA3, factor=3600.0,
    ),
    Field(
        key="failures.mtbf", kind="duration", unit=units.SECONDS, low=1, high=1e12,
        about="mean time between failures of the whole job, in place of gpu_hours",
    ),
    Field(
        key="failures.restart", kind="duration", unit=units.SECONDS, low=0.1, high=1e8,
        about="a restart is to load its checkpoint in this time; else in what goals.lost allows",
    ),
    Field(
        key="failures.other", kind="duration", unit=units.SECONDS, low=0, high=1e8, default="0",
        about="what a restart takes besides (finding out, new nodes, starting up)", source="not counted",
    ),
    # ---- what is good enough
    Field(
        key="goals.lost", kind="share", unit=units.SHARE, low=1e-6, high=0.5, default="1%",
        about="share of the time that each of feeding, saves and restarts may cost", source="what nobody notices",
    ),
    # ---- what is there
    _rate("storage.read", units.RATE, "what storage delivers to all nodes together", "0.5GB/s..1.2GB/s..2GB/s",
          f"nothing was said: {_NFS}, and one server for all nodes"),
    _rate("storage.write", units.RATE, "what storage takes from all nodes together", "0.5GB/s..1.2GB/s..1.2GB/s",
          f"nothing was said: {_NFS}, and one server for all nodes"),
    _rate("storage.read_per_node", units.RATE_PER_NODE, "what storage delivers to one node"),
    _rate("storage.write_per_node", units.RATE_PER_NODE, "what storage takes from one node"),
    Field(
        key="storage.capacity", kind="bytes", unit=units.BYTES, low=1e6, high=1e21,
        about="size of what is rented, where a provider's rate goes by it",
    ),
    # ---- the network
    Field(
        key="network.nic_gbit", kind="number", unit=units.LINK, low=0.01, high=100_000, factor=1e9 / 8,
        about="speed of a storage NIC of a node, Gbit/s",
    ),
    Field(key="network.nics", kind="whole", low=1, high=64, default="1", about="storage NICs of a node"),
    Field(
        key="network.efficiency", kind="share", unit=units.SHARE, low=0.01, high=1, default="0.8..0.9..0.92",
        about="part of a link that data get",
        source="0.92: one client of NVMe-oF in MLPerf Storage v3.0; headers alone take 0.05 at an MTU of 1500",
    ),
    _rate("network.target_read", units.RATE, "what one storage target delivers"),
    _rate("network.target_write", units.RATE, "what one storage target takes"),
    # ---- money
    Field(
        key="price.gpu_hour", kind="number", unit=units.PRICE_PER_GPU_HOUR, low=0, high=1e6, factor=1 / 3600,
        about="price of a GPU hour, in any currency; without it no money is shown",
    ),
    Field(
        key="price.gb_month", kind="number", unit=Unit.of("price/B"), low=0, high=1e6, factor=1e-9,
        about="price of a gigabyte (10^9 bytes) of storage a month",
    ),
)  # fmt: skip

BY_KEY = {field.key: field for field in FIELDS}
