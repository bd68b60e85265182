"""The shape of a training loop: tokens from a volume, and a clock that says what storage cost.

Run: python examples/train_loop.py
"""

import tempfile
from pathlib import Path

from headrace.dataset import IngestOptions, ingest
from headrace.measure import StepClock, summarise
from headrace.torch import TokenLoader
from headrace.volume import Volume

with tempfile.TemporaryDirectory() as directory:
    text = Path(directory, "corpus")
    text.mkdir()
    for number in range(200):
        (text / f"{number}.txt").write_text(f"Document {number} says: water turns the wheel. " * 40)
    with Volume.create(f"file:{directory}/disk.img?create=256MiB", name="example") as volume:
        with volume.session(run_id="example") as session:
            ingest(text, session, "corpus", IngestOptions(vocab_size=512))
        loader = TokenLoader(volume, "corpus", sequence_length=64, global_batch=4, rank=0, world=1, seed=1)
        clock, batches = StepClock(), iter(loader)
        for step in range(20):
            with clock.step(step, tokens=4 * 64):
                with clock.data_wait():
                    batch = next(batches)
                (batch.float() @ batch.float().T).softmax(-1)
        loader.close()
    print(summarise(clock.records).verdict(token_bytes=2).sentence)
