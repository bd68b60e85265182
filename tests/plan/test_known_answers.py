"""What published figures say, and what the arithmetic of `headrace.plan` makes of the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.plan import Job, Plan, make_plan, read_job
from headrace.plan.architecture import read_config
from headrace.plan.checkpoint import BEST, LONGEST, WRITE_ASYNCHRONOUS, WRITE_SYNCHRONOUS
from headrace.plan.feeding import UTILISATION
from headrace.plan.goodput import Situation, goodput
from headrace.plan.model import Model
from headrace.plan.money import IDLE

GIB = 2.0**30
HOUR = 3600.0

#: MLPerf Storage v2 and v3: hidden, ffn, layers, heads, kv heads; tp, pp, dp, sharding; GiB of weights, of optimizer,
#: of all, of the optimizer's file of a rank.
LLAMAS: dict[str, tuple[tuple[int, ...], tuple[int, int, int, str], tuple[float, float, float, float]]] = {
    "8B": ((4096, 14336, 32, 32, 8), (1, 1, 8, "zero3"), (15.0, 89.7, 104.7, 11.218)),
    "70B": ((8192, 28672, 80, 128, 8), (8, 1, 8, "zero3"), (130.2, 781.0, 911.2, 12.204)),
    "405B": ((16384, 53248, 126, 128, 8), (8, 32, 2, "zero1"), (756.0, 4536.2, 5292.2, 8.860)),
    "1T": ((25872, 98304, 128, 192, 32), (8, 64, 2, "zero1"), (2203.7, 13222.9, 15426.6, 12.913)),
}


def job(**options: Any) -> Job:
    return read_job(None, {key.replace("__", "."): value for key, value in options.items()})


def plan(**options: Any) -> Plan:
    return make_plan(job(**options))


def answer(made: Plan, question: str, result: str) -> float:
    every = [a for q in made.questions if q.name == question for a in q.answers]
    (found,) = [a for a in every if a.formula.result == result]
    return found.value.likely


def llama(name: str) -> tuple[Model, tuple[float, float, float, float]]:
    (hidden, ffn, layers, heads, kv), (tp, pp, dp, sharding), sizes = LLAMAS[name]
    said = job(
        gpus=tp * pp * dp, parallel__tp=tp, parallel__pp=pp, parallel__sharding=sharding, model__hidden=hidden,
        model__ffn=ffn, model__layers=layers, model__heads=heads, model__kv_heads=kv, model__vocab=128256,
    )  # fmt: skip
    return Model.of(said), sizes


@pytest.mark.parametrize("name", LLAMAS)
def test_checkpoints_of_mlperf_to_the_last_digit(name: str) -> None:
    model, (weights_gib, optimizer_gib, all_gib, rank_gib) = llama(name)
    size, weights = model.size().value.likely, model.weights().value.likely
    assert size / model.parameters.likely == 14.0
    # DLIO writes two things that are no parameters: every tensor parallel rank its own norms (two a layer), and every
    # rank's optimizer file a tail of five times the width, in each of its three states.
    assert model.shape is not None
    hidden = model.shape.hidden
    norms = 2.0 * (model.tp - 1) * model.shape.layers * 2 * hidden
    tail = 12.0 * model.gpus * 5 * hidden
    assert round((weights + norms) / GIB, 1) == weights_gib
    assert round((size - weights + tail) / GIB, 1) == optimizer_gib
    assert round((size + norms + tail) / GIB, 1) == all_gib
    assert round((size - weights + tail) / model.gpus / GIB, 3) == rank_gib
    # Both together are less than the last digit that anybody would plan by.
    assert (size + norms + tail) / size < 1.0003


@pytest.mark.parametrize(("name", "most_gib"), [("405B", 3.458), ("1T", 5.05)])
def test_the_weights_of_the_fullest_stage(name: str, most_gib: float) -> None:
    assert llama(name)[0].stage_weights().likely / GIB == pytest.approx(most_gib, abs=0.005)


@pytest.mark.parametrize(("name", "decimal_tb"), [("8B", 0.112), ("70B", 0.978), ("405B", 5.68), ("1T", 16.56)])
def test_decimal_sizes(name: str, decimal_tb: float) -> None:
    assert llama(name)[0].size().value.likely / 1e12 == pytest.approx(decimal_tb, rel=0.005)


CONFIGS: dict[str, tuple[dict[str, Any], int, int]] = {
    "Llama 3 8B": (
        {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False},
        8_030_261_248, 8_030_261_248,
    ),
    "Mistral 7B": (
        {"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000},
        7_241_732_096, 7_241_732_096,
    ),
    "Mixtral 8x7B": (
        {"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8,
         "num_experts_per_tok": 2},
        46_702_792_704, 12_879_925_248,
    ),
    "Qwen2.5 7B": (
        {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
         "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
        7_615_616_512, 7_615_616_512,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_of_published_models_to_the_last_one(name: str, tmp_path: Path) -> None:
    config, parameters, active = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_config(str(tmp_path / "config.json"))
    assert (found.parameters, found.active_parameters) == (parameters, active)


@pytest.mark.parametrize(("tokens", "kilobytes", "reads"), [(14_451, 57.8, 1.8), (1_602, 6.4, 0.20), (292, 1.2, 0.036)])
def test_token_rates_of_the_published_runs(tokens: int, kilobytes: float, reads: float) -> None:
    made = plan(gpus=8, model__parameters="8B", feed__tokens_per_s=tokens)
    assert round(answer(made, "feeding", "tokens, for a GPU") / 1e3, 1) == kilobytes
    assert answer(made, "feeding", "reads a second, of a GPU") == pytest.approx(reads, rel=0.03)


@pytest.mark.parametrize(("size", "tokens"), [("8.03B", 8_300), ("70.55B", 940), ("405.85B", 164)])
def test_token_rates_at_400_tflops(size: str, tokens: float) -> None:
    made = plan(gpus=8, model__parameters=size, feed__achieved="400TFLOP/s")
    assert answer(made, "feeding", "tokens a second, of a GPU") == pytest.approx(tokens, rel=0.01)


def test_the_whole_run_of_llama_3_read_13_megabytes_a_second() -> None:
    rate = 15.6e12 / (54 * 86_400) / 16_384
    made = plan(gpus=16_384, model__parameters="405B", feed__tokens_per_s=rate, feed__tokens="15.6T")
    assert answer(made, "feeding", "needed to read, in all") == pytest.approx(13.4e6, rel=0.01)
    assert answer(made, "money", "size of the dataset") == pytest.approx(62.4e12)


@pytest.mark.parametrize(
    ("batch", "record", "compute_s", "gigabytes"),
    [(7, 146_600_628, 0.323, 3.18), (7, 146_600_628, 0.162, 6.33), (400, 114_660, 0.224, 0.205),
     (24, 322_957, 0.04755, 0.163), (48, 2_164_832, 1.35, 0.077)],
)  # fmt: skip
def test_demands_of_mlperf_workloads(batch: int, record: int, compute_s: float, gigabytes: float) -> None:
    made = plan(gpus=1, model__parameters="1B", feed__samples_per_s=batch / compute_s, feed__sample_bytes=record)
    assert answer(made, "feeding", "samples, for a GPU") / 1e9 == pytest.approx(gigabytes, rel=0.01)


@pytest.mark.parametrize(
    ("size_tb", "mtbf_h", "lost", "gigabytes"),
    [(0.112424, 6335, 0.01, 0.1), (0.978, 792, 0.01, 6.9), (0.978, 792, 0.02, 1.7), (0.978, 792, 0.05, 0.3),
     (5.683, 99, 0.01, 319), (5.683, 99, 0.02, 80), (5.683, 99, 0.05, 12.8), (5.683, 49.5, 0.01, 638),
     (5.683, 49.5, 0.02, 160), (5.683, 49.5, 0.05, 25), (5.683, 3.1, 0.01, 10_200), (5.683, 3.1, 0.02, 2_550),
     (5.683, 3.1, 0.05, 408)],
)  # fmt: skip
def test_synchronous_writes_by_young(size_tb: float, mtbf_h: float, lost: float, gigabytes: float) -> None:
    rate = WRITE_SYNCHRONOUS.function(size_tb * 1e12, lost, mtbf_h * HOUR) / 1e9
    # The table gives 0.1 and 0.3 with one digit.
    assert rate == pytest.approx(gigabytes, rel=0.03 if gigabytes > 1 else 0.2)


@pytest.mark.parametrize(("gpus", "hours"), [(8, 6335), (64, 792), (512, 99), (1024, 49.5), (16_384, 3.1)])
def test_failures_scaled_from_llama_3(gpus: int, hours: float) -> None:
    made = plan(gpus=gpus, model__parameters="8B")
    assert answer(made, "saves", "a failure of the job every") / HOUR == pytest.approx(hours, rel=0.005)


def test_asynchronous_writes_by_hand() -> None:
    # A failure every 1e5 s may lose 1000 s: half an interval of 1250 s, and 375 s until the save is committed.
    assert LONGEST.function(0.01, 1e5, 0.3) == pytest.approx(1250)
    assert WRITE_ASYNCHRONOUS.function(1e12, 0.3, 0.01, 1e5) == pytest.approx(1e12 / 375)


def test_daly_by_hand() -> None:
    # sqrt(2 * 60 * 86400) = 3219.94, times 1 + 0.0186339 / 3 + 0.000347222 / 9; then the save itself.
    best = BEST.function(60.0, 60.0, 86_400.0)
    assert best == pytest.approx(3219.94 * (1 + 0.0186339 / 3 + 0.000347222 / 9), rel=1e-5)


def test_a_restart_of_405b_in_a_minute() -> None:
    made = plan(gpus=1024, model__parameters="405.85B", failures__restart="60s")
    rate = answer(made, "restarts", "needed to read in a restart, in all")
    assert rate / 1024 / 1e9 == pytest.approx(0.092, rel=0.01)


def test_goodput_by_hand() -> None:
    here = Situation(
        feed_needed=2e9, read=1e9, write=1e10, size=1e12, share=1e10, copy=1e9, mtbf_s=1e5, restart_bytes=1e12,
        other_s=500.0, synchronous=False, interval_s=2000.0,
    )  # fmt: skip
    # Half of the data come; 10 s of 2000 stand; a failure every 1e5 s loses 1000 + 100, loads for 1000, and 500.
    shares = here.shares()
    assert shares.trains == pytest.approx(0.5 * (1 - 10 / 2000) * (1 - 2600 / 1e5))
    assert (shares.rework, shares.restarts) == (pytest.approx(0.011), pytest.approx(0.015))
    # Storage that takes no time: 1000 s are lost to a failure, and 500; the copy stays.
    assert goodput(here.over_ideal_storage()) == pytest.approx((1 - 10 / 2000) * (1 - 1500 / 1e5))


def test_a_claim_that_does_not_fit_itself() -> None:
    """Eight GPUs that take 2.5 GB/s each over 0.5 GB/s are busy for 2.5 % of the time, not for 65 %."""
    assert UTILISATION.function(0.5e9, 8 * 2.5e9) == pytest.approx(0.025)


def test_idle_gpus_in_money() -> None:
    """35 % of eight GPUs at 25 an hour each: 70 an hour."""
    assert IDLE.function(0.35, 8, 25 / HOUR) * HOUR == pytest.approx(70)


@pytest.mark.parametrize(("rate", "hours"), [("0.5GB/s", 27.8), ("2GB/s", 6.9), ("10GB/s", 1.4)])
def test_fifty_terabytes(rate: str, hours: float) -> None:
    made = plan(gpus=8, model__parameters=50e12 / 14, storage__read=rate)
    assert answer(made, "restarts", "a restart loads for") / HOUR == pytest.approx(hours, rel=0.02)


def test_a_whole_plan_by_hand() -> None:
    """405B on 1024 GPUs as MLPerf splits it, with four replicas: every figure again, without a formula of the plan."""
    made = plan(
        gpus=1024, model__parameters="405.85B", parallel__tp=8, parallel__pp=32, parallel__sharding="zero1",
        failures__restart="60s", storage__read="50GB/s", storage__write="40GB/s", checkpoint__interval="30min",
        price__gpu_hour=3, price__gb_month=0.07, feed__tokens_per_s=292, network__nic_gbit=100,
    )  # fmt: skip
    size, mtbf = 14 * 405.85e9, 50_700 * 3600 / 1024
    # Of the first replica a rank has the weights of its stage, and every rank its share of the optimizer.
    share = 2 * 405.85e9 / (8 * 32) + 12 * 405.85e9 / 1024
    blocked, committed, load = share / 10e9, size / 40e9, size / 50e9
    stands, fails = 1 - blocked / 1800, (900 + committed + load) / mtbf
    trains, ideal = stands * (1 - fails), stands * (1 - 900 / mtbf)
    by_hand = {
        ("model", "size of a checkpoint"): size,
        ("model", "largest share of a rank"): share,
        ("saves", "a failure of the job every"): mtbf,
        ("saves", "a save is committed after"): 142.05,
        ("saves", "needed to write, in all"): size / 900,
        ("restarts", "a restart loads for"): 113.64,
        ("restarts", "needed to read in a restart, per node"): size / 60 / 128,
        ("feeding", "needed to read, in all"): 292 * 4 * 1024,
        # 0.74 GB/s of 11.25.
        ("network", "storage NICs of a node"): 1,
        ("goodput", "share of the time that trains"): trains,
        ("goodput", "what storage costs of it"): ideal - trains,
        ("money", "room"): 4 * size,
        ("money", "storage costs a month"): 4 * size / 1e9 * 0.07,
        ("money", "GPUs that storage keeps waiting cost"): (ideal - trains) * 1024 * 3 / 3600,
        ("money", "loading of one restart costs"): load / 3600 * 1024 * 3,
    }
    for (question, result), value in by_hand.items():
        assert answer(made, question, result) == pytest.approx(value, rel=1e-4), result
