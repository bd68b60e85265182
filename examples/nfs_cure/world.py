"""The cloud that is stood for, and the slower one that runs here.

Everything runs `dilation` times slower than it would there: link, medium and accelerators have so much less of
everything a second, and the delay is so much longer. What counts for utilisation, how many round trips and transfers
go into the time that a step computes, stays what it is; the emulated CPUs of the guest, which do not run slower, are
not what is measured. (Gupta et al., "To Infinity and Beyond: Time-Warped Network Emulation", NSDI 2006.)
"""

from __future__ import annotations

from dataclasses import dataclass

#: MLPerf Storage v2, ResNet-50 on H100: an accelerator computes 400 samples of 114,660 bytes in 0.224 s.
SAMPLES_PER_S = 400 / 0.224
IMAGE_BYTES = 114_660
#: Beside each image, in a file of its own.
CAPTION_BYTES = 1_000
#: Llama 3 8B on H100, FP8, sequences of 8192 (NeMo 25.11); a token is an uint32.
TOKENS_PER_S = 14_451
SEQUENCE = 8192
TOKEN_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class World:
    """Rates, seconds and bytes as they are in the cloud; the properties are what they are here."""

    dilation: float = 700.0
    #: From one zone of a region to another and back.
    rtt_s: float = 0.75e-3
    #: 10 Gbit/s.
    link_bytes_per_s: float = 1.25e9
    disk_bytes_per_s: float = 1.5e9
    accelerators: int = 4
    #: Of a step, all accelerators together; sequences of a step of text.
    batch: int = 8
    text_batch: int = 4
    #: Of computing text alone; what it reads over is as slow as for images.
    text_dilation: float = 3.0
    #: Threads that read files, all accelerators together: four each.
    readers: int = 16
    #: That count, of a trial of the bench.
    bench_steps: int = 6
    #: That are read before training.
    warm_batches: int = 3
    #: That are trained before it is watched, and watched.
    first_steps: int = 2
    steps: int = 6

    @property
    def sample_bytes(self) -> int:
        return IMAGE_BYTES + CAPTION_BYTES

    @property
    def batches(self) -> int:
        """That are read over one path."""
        trained = self.warm_batches + self.first_steps + self.steps
        # The bench reads one more that does not count, and reads ahead; where data came to an end it would begin again.
        return max(trained, 1 + self.bench_steps + 6)

    @property
    def samples(self) -> int:
        return self.batch * self.batches

    @property
    def compute_s(self) -> float:
        """Of a step of images, here."""
        return self.batch / (self.accelerators * SAMPLES_PER_S) * self.dilation

    @property
    def text_compute_s(self) -> float:
        """Of a step of text. As slow as all else it would take a quarter of an hour: against this link it eats
        `dilation / text_dilation` times what it would in the cloud."""
        return self.text_batch * SEQUENCE / (self.accelerators * TOKENS_PER_S) * self.text_dilation

    @property
    def needed_bytes_per_s(self) -> float:
        """By images, in the cloud."""
        return self.accelerators * SAMPLES_PER_S * self.sample_bytes

    @property
    def window_bytes(self) -> int:
        """Of text: a sequence, and one token more."""
        return (SEQUENCE + 1) * TOKEN_BYTES

    @property
    def text_samples(self) -> int:
        return self.text_batch * self.batches

    @property
    def link_here(self) -> int:
        return round(self.link_bytes_per_s / self.dilation)

    @property
    def disk_here(self) -> int:
        return round(self.disk_bytes_per_s / self.dilation)

    @property
    def one_way_here_ms(self) -> float:
        return self.rtt_s * self.dilation / 2 * 1e3


#: Path -> what it is, in the order in which they are measured.
PATHS = {
    "nfs": "NFS 4.1, nconnect=16, rsize=1 MiB",
    "nvme": "NVMe/TCP, headrace",
    "local": "local disk, ext4",
}
#: What is trained, over what.
MEASURED = [("images", "nfs"), ("images", "nvme"), ("images", "local"), ("text", "nfs"), ("text", "nvme")]
