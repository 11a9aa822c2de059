"""What GPUs can do, as published: memory, bandwidth, dense tensor rates, links. Every figure says where it is from.

Rates are dense (never the doubled figures for 2:4 sparsity), with float32 accumulation, at the vendor's boost clock.
`this_machine` gives the same record of the device at hand, as measured.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from muster.errors import UsageError

if TYPE_CHECKING:
    from muster.device import Device

MIB = 1 << 20
GB = 10**9
TERA = 1e12
MICRO = 1e-6


@dataclass(frozen=True)
class Link:
    """How the GPUs of one machine (or two small machines) talk.

    A collective of `n` ranks that takes `s` steps of `b` bytes each costs `start + s * (step + b / bandwidth)`; an
    all-reduce as a ring takes `2 * (n - 1)` steps of an n-th of the bytes.

    Attributes:
        name: what it is.
        bandwidth: bytes per second that one GPU sends while it receives as many.
        start: seconds before the first step of a collective.
        step: seconds per step.
        source: where the bandwidth and the latencies are from.
    """

    name: str
    bandwidth: float
    start: float
    step: float
    source: str


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        name: short, the one that this program prints.
        device: what backends match: a compute capability such as "9.0", "gfx942" on AMD, "cpu".
        memory: bytes that the driver reports; the vendor's rounder figure is in `sources`.
        unified: the CPU and its programs live in the same memory.
        reserved: bytes that no model can have: the driver's context, and with unified memory the system.
        bandwidth: bytes per second that it reads from memory, as published.
        measured_bandwidth: the same as measured by reading, where somebody has; None: not measured.
        rates: dense operations per second of the tensor cores by "bf16", "fp8", "fp4", "int8"; a kind that is
            missing is not there in hardware, or has no figure that can be trusted (`sources` says which).
        multiprocessors: streaming multiprocessors or compute units.
        shared_memory: bytes of shared memory per multiprocessor.
        link: to its peers.
        sources: by figure ("memory", "bandwidth", "rates", ...), where it is from.
        aliases: further names it goes by, besides what `gpu` does to every name.
    """

    name: str
    device: str
    memory: int
    bandwidth: float
    rates: Mapping[str, float]
    multiprocessors: int
    shared_memory: int
    link: Link
    sources: Mapping[str, str]
    unified: bool = False
    reserved: int = 1 << 30
    measured_bandwidth: float | None = None
    aliases: tuple[str, ...] = field(default=(), repr=False)

    @property
    def budget(self) -> int:
        """Bytes that weights, cache and workspace may fill together."""
        return self.memory - self.reserved

    def elsewhere(self) -> Device:
        """This GPU in no particular machine, for backends to say whether they could run there."""
        from muster.device import Device

        return Device(self.device, self.name, self.memory, self.multiprocessors, present=False)


_NCCL = "latencies: the ring, LL protocol constants of NCCL 2.28's own cost model"
_SMEM = "CUDA C++ Programming Guide, table of technical specifications per compute capability"
_SMI = "as nvidia-smi reports it"


def _nvlink(generation: int, bandwidth: float, source: str) -> Link:
    return Link(f"NVLink {generation}", bandwidth, 6.6 * MICRO, 0.6 * MICRO, f"bandwidth: {source}; {_NCCL}, NVLink")


def _pcie(generation: int, note: str = "") -> Link:
    bandwidth = {4: 32 * GB, 5: 64 * GB}[generation]
    source = f"bandwidth: PCI Express {generation}.0 x16 before protocol overhead{note}; {_NCCL}, PCI"
    return Link(f"PCIe {generation}.0 x16", bandwidth, 6.6 * MICRO, 1.0 * MICRO, source)


def _rates(**tera: float) -> Mapping[str, float]:
    return MappingProxyType({name: rate * TERA for name, rate in tera.items()})


def _sources(**figures: str) -> Mapping[str, str]:
    return MappingProxyType({"shared_memory": _SMEM, "reserved": "our allowance for the driver's context"} | figures)


_PRO_6000 = "NVIDIA RTX Blackwell PRO architecture white paper, 2025 (the datasheet's 4000 TOPS are FP4, sparse)"
_P2P = "; GeForce drivers refuse peer access, so traffic crosses host memory and gets about half"

GPUS: tuple[Gpu, ...] = (
    Gpu(
        name="A100",
        device="8.0",
        memory=81_920 * MIB,
        bandwidth=2.039 * TERA,
        rates=_rates(bf16=312, int8=624),
        multiprocessors=108,
        shared_memory=164 << 10,
        link=_nvlink(3, 300 * GB, "NVIDIA A100 datasheet, 2021, half of 600 GB/s both ways"),
        sources=_sources(
            memory=f"80 GB SXM, NVIDIA A100 datasheet, 2021; {_SMI}",
            bandwidth="NVIDIA A100 datasheet, 2021",
            rates="NVIDIA A100 datasheet, 2021; it has no FP8 and no FP4 tensor cores",
        ),
        aliases=("a100 80gb", "a100 sxm4 80gb"),
    ),
    Gpu(
        name="L40S",
        device="8.9",
        memory=46_068 * MIB,
        bandwidth=0.864 * TERA,
        rates=_rates(bf16=362.05, fp8=733, int8=733),
        multiprocessors=142,
        shared_memory=100 << 10,
        link=_pcie(4),
        sources=_sources(
            memory=f"48 GB with ECC on, NVIDIA L40S datasheet, 2023; {_SMI}",
            bandwidth="NVIDIA L40S datasheet, 2023",
            rates="NVIDIA L40S datasheet, 2023; it has no FP4 tensor cores",
        ),
    ),
    Gpu(
        name="RTX 4090",
        device="8.9",
        memory=24_564 * MIB,
        bandwidth=1.008 * TERA,
        rates=_rates(bf16=165.2, fp8=330.3, int8=660.6),
        multiprocessors=128,
        shared_memory=100 << 10,
        link=_pcie(4, _P2P),
        sources=_sources(
            memory=f"24 GB, NVIDIA Ada GPU architecture white paper, 2023; {_SMI}",
            bandwidth="NVIDIA Ada GPU architecture white paper, 2023",
            rates="NVIDIA Ada GPU architecture white paper, 2023; it has no FP4 tensor cores",
        ),
    ),
    Gpu(
        name="H100",
        device="9.0",
        memory=81_559 * MIB,
        bandwidth=3.35 * TERA,
        rates=_rates(bf16=989.4, fp8=1978.9, int8=1978.9),
        multiprocessors=132,
        shared_memory=228 << 10,
        link=_nvlink(4, 450 * GB, "NVIDIA H100 datasheet, 2023, half of 900 GB/s both ways"),
        sources=_sources(
            memory=f"80 GB SXM5, NVIDIA H100 datasheet, 2023; {_SMI}",
            bandwidth="NVIDIA H100 datasheet, 2023",
            rates="NVIDIA Hopper architecture white paper, 2022; it has no FP4 tensor cores",
        ),
        aliases=("h100 sxm5 80gb", "h100 80gb"),
    ),
    Gpu(
        name="H200",
        device="9.0",
        memory=143_771 * MIB,
        bandwidth=4.8 * TERA,
        measured_bandwidth=4.54 * TERA,
        rates=_rates(bf16=989.4, fp8=1978.9, int8=1978.9),
        multiprocessors=132,
        shared_memory=228 << 10,
        link=_nvlink(4, 450 * GB, "NVIDIA H200 datasheet, 2024, half of 900 GB/s both ways"),
        sources=_sources(
            memory=f"141 GB SXM, NVIDIA H200 datasheet, 2024; {_SMI}",
            bandwidth="NVIDIA H200 datasheet, 2024",
            measured_bandwidth="measured by us on one H200 SXM, driver 580, 2026: a kernel that only reads",
            rates="NVIDIA Hopper architecture white paper, 2022; it has no FP4 tensor cores",
        ),
        aliases=("h200 141gb",),
    ),
    Gpu(
        name="B200",
        device="10.0",
        memory=183_359 * MIB,
        bandwidth=8.0 * TERA,
        rates=_rates(bf16=2250, fp8=4500, fp4=9000, int8=4500),
        multiprocessors=148,
        shared_memory=228 << 10,
        link=_nvlink(5, 900 * GB, "NVIDIA Blackwell architecture technical brief, 2024, half of 1.8 TB/s both ways"),
        sources=_sources(
            memory=f"180 GB in HGX B200, NVIDIA HGX datasheet, 2025; {_SMI}",
            bandwidth="NVIDIA Blackwell architecture technical brief, 2024",
            rates="NVIDIA Blackwell architecture technical brief, 2024, HGX B200, half of the sparse figures",
        ),
    ),
    Gpu(
        name="B300",
        device="10.3",
        memory=275_040 * MIB,
        bandwidth=8.0 * TERA,
        rates=_rates(bf16=2250, fp8=4500, fp4=13_500),
        multiprocessors=148,
        shared_memory=228 << 10,
        link=_nvlink(5, 900 * GB, "NVIDIA HGX B300 specifications, 2025, half of 1.8 TB/s both ways"),
        sources=_sources(
            memory=f"288 GB, NVIDIA HGX B300 specifications, 2025; {_SMI}",
            bandwidth="NVIDIA HGX B300 specifications, 2025",
            rates="NVIDIA HGX B300 specifications, 2025: an eighth of 108 PFLOPS dense FP4 and of half the sparse "
            "72 (FP8) and 36 (BF16); most of the INT8 rate was given up and published figures for it disagree",
            multiprocessors="as its driver reports; the full chip has 160",
        ),
        aliases=("b300 sxm6 ac",),
    ),
    Gpu(
        name="RTX 5090",
        device="12.0",
        memory=32_607 * MIB,
        bandwidth=1.792 * TERA,
        rates=_rates(bf16=209.5, fp8=419, fp4=1676, int8=838),
        multiprocessors=170,
        shared_memory=100 << 10,
        link=_pcie(5, _P2P),
        sources=_sources(
            memory=f"32 GB, NVIDIA RTX Blackwell GPU architecture white paper, 2025; {_SMI}",
            bandwidth="NVIDIA RTX Blackwell GPU architecture white paper, 2025",
            rates="NVIDIA RTX Blackwell GPU architecture white paper, 2025",
        ),
    ),
    Gpu(
        name="RTX PRO 6000",
        device="12.0",
        memory=97_887 * MIB,
        bandwidth=1.792 * TERA,
        rates=_rates(bf16=503.8, fp8=1007.6, fp4=2015.2, int8=1007.6),
        multiprocessors=188,
        shared_memory=100 << 10,
        link=_pcie(5),
        sources=_sources(
            memory=f"96 GB, NVIDIA RTX PRO 6000 Blackwell Workstation Edition datasheet, 2025; {_SMI}",
            bandwidth="NVIDIA RTX PRO 6000 Blackwell Workstation Edition datasheet, 2025",
            rates=_PRO_6000,
        ),
        aliases=("rtx pro 6000 workstation edition",),
    ),
    Gpu(
        name="RTX PRO 6000 Server",
        device="12.0",
        memory=97_887 * MIB,
        bandwidth=1.597 * TERA,
        rates=_rates(bf16=480, fp8=960, fp4=1920, int8=960),
        multiprocessors=188,
        shared_memory=100 << 10,
        link=_pcie(5),
        sources=_sources(
            memory=f"96 GB, NVIDIA RTX PRO 6000 Blackwell Server Edition datasheet, 2025; {_SMI}",
            bandwidth="NVIDIA RTX PRO 6000 Blackwell Server Edition datasheet, 2025",
            rates="from that datasheet's 120 TFLOPS of FP32 by the ratios of the Workstation Edition",
        ),
        aliases=("rtx pro 6000 server edition",),
    ),
    Gpu(
        name="GB10",
        device="12.1",
        memory=130_596_048_896,
        bandwidth=0.273 * TERA,
        rates=_rates(bf16=125, fp8=250, fp4=500),
        multiprocessors=48,
        shared_memory=100 << 10,
        link=Link(
            "2x 100 Gb Ethernet (ConnectX-7)",
            25 * GB,
            6.6 * MICRO,
            2.7 * MICRO,
            f"bandwidth: NVIDIA DGX Spark datasheet, 2025, 200 Gb/s to a second machine; {_NCCL}, network",
        ),
        sources=_sources(
            memory="128 GB shared with the CPU, NVIDIA DGX Spark datasheet, 2025; as the CUDA driver reports it",
            reserved="our allowance: 12 GiB for the system, its file cache and the driver",
            bandwidth="NVIDIA DGX Spark datasheet, 2025",
            rates="half of the 1 PFLOPS sparse FP4 of the NVIDIA DGX Spark datasheet, 2025; FP8 and BF16 are a half "
            "and a quarter of it, as on its sister chips, for want of published figures",
            multiprocessors="6144 CUDA cores of the NVIDIA DGX Spark datasheet, 2025, 128 in each",
        ),
        unified=True,
        reserved=12 << 30,
        aliases=("dgx spark", "spark"),
    ),
    Gpu(
        name="MI300X",
        device="gfx942",
        memory=196_592 * MIB,
        bandwidth=5.3 * TERA,
        rates=_rates(bf16=1307.4, fp8=2614.9, int8=2614.9),
        multiprocessors=304,
        shared_memory=64 << 10,
        link=Link(
            "Infinity Fabric",
            448 * GB,
            6.6 * MICRO,
            0.6 * MICRO,
            "bandwidth: AMD Instinct MI300X datasheet, 2023, seven links of 64 GB/s each way; latencies: taken to be "
            "NVLink's, for want of figures",
        ),
        sources=_sources(
            memory="192 GB, AMD Instinct MI300X datasheet, 2023; as rocm-smi reports it",
            bandwidth="AMD Instinct MI300X datasheet, 2023",
            rates="AMD Instinct MI300X datasheet, 2023; it has no FP4 matrix cores",
            shared_memory="AMD CDNA 3 white paper, 2023, local data share of a compute unit",
        ),
    ),
)
"""The GPUs we know, by rising compute capability."""

_NOISE = re.compile(r"nvidia|geforce|amd|instinct|blackwell|tensor|core|gpu|rtx|sxm\d?|hbm\de?|[^a-z0-9]")


def _key(name: str) -> str:
    return _NOISE.sub("", name.lower())


def _find(name: str) -> Gpu | None:
    known = ((entry, alias) for entry in GPUS for alias in (entry.name, *entry.aliases))
    return next((entry for entry, alias in known if _key(alias) == _key(name)), None)


def gpu(name: str) -> Gpu:
    """The GPU of that name, written in any usual way: `h200`, `rtx-pro-6000`, `NVIDIA GeForce RTX 5090`.

    Raises:
        UsageError: none that we know; the message lists all.
    """
    found = _find(name)
    if found is None:
        names = ", ".join(entry.name for entry in GPUS)
        raise UsageError("GPU", found=repr(name), expected=f"one of {names}", hint="for another one give its memory")
    return found


def this_machine() -> Gpu:
    """The first GPU of this machine, or its processor where there is none, as measured here and kept in MUSTER_HOME.

    What is not measured here, a link and the rates of FP4 and INT8, is the published figure of its kind if that is
    known. A processor has no link, and computes every format at its float32 rate.
    """
    import torch

    return _this_gpu() if torch.cuda.is_available() else _this_processor()


_READ = "measured here with a loop that only reads"
_PRODUCT = "measured here with torch's product of two large matrices"


def _this_processor() -> Gpu:
    from muster import env
    from muster.device import cpu, free_memory
    from muster.lab.measure.peaks import peaks

    device = cpu()
    best = peaks(device, env.read().home)
    return Gpu(
        name=device.name,
        device=device.key,
        memory=device.memory,
        bandwidth=best.read_bandwidth,
        measured_bandwidth=best.read_bandwidth,
        rates=MappingProxyType({"bf16": best.operations["f32"]}),
        multiprocessors=device.cores,
        shared_memory=0,
        link=Link("no link", float("inf"), 0.0, 0.0, "one processor"),
        sources=MappingProxyType(
            {
                "memory": "as the system reports it",
                "reserved": "what other programs use now",
                "bandwidth": _READ,
                "measured_bandwidth": _READ,
                "rates": f"{_PRODUCT} in float32, in which every format is computed",
            }
        ),
        unified=True,
        reserved=max(device.memory - free_memory(), 0),
    )


def _this_gpu() -> Gpu:
    import torch

    from muster import env
    from muster.device import cuda
    from muster.lab.measure.peaks import peaks

    device = cuda()
    best = peaks(device, env.read().home)
    kind = _find(device.name) or _unknown(device)
    rates = {name: rate for name, rate in best.operations.items() if name in ("bf16", "fp8")}
    published = {name: rate for name, rate in kind.rates.items() if name not in rates}
    words = f"; {', '.join(published)} as published for {kind.name}" if published else ""
    return replace(
        kind,
        name=device.name,
        memory=device.memory,
        bandwidth=best.read_bandwidth,
        measured_bandwidth=best.read_bandwidth,
        rates=MappingProxyType(rates | published),
        multiprocessors=device.cores,
        shared_memory=torch.cuda.get_device_properties(0).shared_memory_per_multiprocessor,
        sources=MappingProxyType(
            {**kind.sources, "bandwidth": _READ, "measured_bandwidth": _READ, "rates": f"{_PRODUCT}{words}"}
        ),
    )


def _unknown(device: Device) -> Gpu:
    """What to assume of a GPU that is not in the table, before it is measured."""
    memory = "as the driver reports it"
    return Gpu(device.name, device.key, device.memory, 0.0, {}, device.cores, 0, _pcie(4), _sources(memory=memory))
