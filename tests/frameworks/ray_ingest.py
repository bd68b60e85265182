"""An ingest on a Ray cluster that waits when it has kept some slices: `ADDRESS CORPUS TOKENIZER GO URI...`.

It prints "kept", and goes on when there is a file GO. Its last line is its report, or its error.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from headrace.dataset import IngestOptions, IngestProgress, ingest
from headrace.errors import HeadraceError
from headrace.volume import Volume
from tests.dataset.test_ingest_workers import SLICE_BYTES


def main() -> None:
    address, corpus, tokenizer, go = sys.argv[1:5]
    with (
        Volume.open(sys.argv[5:], write=True) as volume,
        volume.session(run_id="test", heartbeat_s=0.2, missed_beats=5) as session,
    ):
        before = len(volume.list("a.ingest/"))
        waited = False

        def progress(now: IngestProgress) -> None:
            nonlocal waited
            if not waited and len(volume.list("a.ingest/")) > before + 8:
                waited = True
                print("kept", flush=True)
                while not Path(go).exists():
                    time.sleep(0.01)

        options = IngestOptions(tokenizer=tokenizer, slice_bytes=SLICE_BYTES, ray=address)
        try:
            report = ingest(corpus, session, "a", options, progress=progress)
        except HeadraceError as error:
            print(json.dumps({"error": str(error)}), flush=True)
            return
        print(json.dumps({"workers": report.workers, "resumed": report.resumed, "direct": report.direct}), flush=True)


if __name__ == "__main__":
    main()
